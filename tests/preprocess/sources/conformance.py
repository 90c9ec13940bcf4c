"""What every source must give: a graph as plain arrays, and checks of a source and of its store."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blockstore.format import Relation, RowArray
from blockstore.pack import unpack_block
from blockstore.store import Store, open_store, read_rows, scan_blocks
from blockstore.verify import verify_store
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.source import Source, SourceRelation, SourceRows
from preprocess.stages.scan import check_edge_splits, check_splits
from tests.preprocess.quiet import QUIET

COUNTS = (1, 3, 1 << 14)  # rows at a time
LARGE = 5000  # rows: beyond, only large pieces are read


@dataclass
class ExpectedType:
    """A node type: rows in the source's order."""

    num_nodes: int
    features: dict[str, Any] = field(default_factory=dict)
    label: Any = None
    splits: dict[str, Any] = field(default_factory=dict)


@dataclass
class ExpectedRelation:
    """A relation: (2, E), sources and targets; rows in the order of the edges."""

    edges: Any
    arrays: dict[str, Any] = field(default_factory=dict)
    splits: dict[str, Any] = field(default_factory=dict)


@dataclass
class ExpectedGraph:
    """A whole graph; an array that is None may be anything."""

    types: dict[str, ExpectedType]
    relations: dict[tuple[str, str, str], ExpectedRelation]


def check_source(source: Source, expected: ExpectedGraph) -> None:
    """A source gives exactly what is expected, whatever is asked for at a time."""
    assert all(p.is_file() for p in source.files)
    assert len(set(source.files)) == len(source.files) > 0
    found = {name: expected.types[name].num_nodes for name in expected.types}
    assert list(source.num_nodes.items()) == list(found.items())
    for name, kind in expected.types.items():
        label = source.label(name)
        _check_rows(source, source.features(name), kind.features, name)
        _check_rows(source, source.splits(name), kind.splits, name)
        assert (label is None) == (kind.label is None), name
        if label is not None:
            _same(rows_of(source, label), kind.label, f"label of {name}")
        check_splits(source, name)
    assert [(r.src, r.name, r.dst) for r in source.relations] == list(expected.relations)
    for listed, relation in zip(source.relations, expected.relations.values(), strict=True):
        _same(edges_of(source, listed), relation.edges, f"edges of {listed.name}")
        _check_rows(source, source.edge_rows(listed), relation.arrays, listed.name)
        _check_rows(source, source.edge_splits(listed), relation.splits, listed.name)
        check_edge_splits(source, listed)


def round_trip(
    source: Source, expected: ExpectedGraph, folder: Path, options: IngestOptions | None = None
) -> Store:
    """A source becomes a store that holds exactly what is expected; options keep edge ids."""
    options = options or IngestOptions(mem_bytes=256 << 20, edge_ids=True, block_bytes=1 << 16)
    path = folder / "store"
    ingest(source, path, options, QUIET)
    verify_store(path)
    store = open_store(path)
    held = {t.name: t for t in store.manifest.types}
    assert list(held) == list(expected.types)
    originals = []
    for name, kind in expected.types.items():
        original = read_rows(store, held[name].original_id)
        originals.append(original)
        assert np.array_equal(np.sort(original), np.arange(kind.num_nodes))
        assert set(held[name].features) == set(kind.features)
        for array_name, rows in kind.features.items():
            _check_stored(store, held[name].features[array_name], rows, original)
        label = held[name].label
        assert (label is None) == (kind.label is None)
        if label is not None:
            _check_stored(store, label, kind.label, original)
        _check_lists(store, held[name].splits, kind.splits)
    relations = {(r.src, r.name, r.dst): r for r in store.manifest.relations}
    assert list(relations) == list(expected.relations)
    every = np.concatenate(originals)  # by store id
    for key, relation in expected.relations.items():
        _check_relation(store, relations[key], relation, every)
    return store


def edges_of(source: Source, relation: SourceRelation) -> np.ndarray:
    """All edges, int64 (2, E), the same for any number at a time."""
    found = []
    for count in counts_for(relation.num_edges):
        parts = [np.empty((2, 0), np.int64)]
        for src, dst in source.edges(relation, count):
            assert 0 < src.size == dst.size <= count
            parts.append(np.stack([src, dst]).astype(np.int64))
        found.append(np.concatenate(parts, axis=1))
        assert np.array_equal(found[0], found[-1])
    assert found[0].shape[1] == relation.num_edges
    return found[0]


def rows_of(source: Source, rows: SourceRows) -> np.ndarray:
    """All rows, the same for any number at a time; shape and dtype are as promised."""
    found = []
    for count in counts_for(rows.num_rows):
        at_once = count if rows.row_bytes < 1 << 12 else max(1, (1 << 25) // rows.row_bytes)
        pieces = [np.empty((0, *rows.row_shape), rows.dtype)]
        for piece in source.rows(rows, at_once):
            assert 0 < piece.shape[0] <= at_once
            assert piece.dtype == rows.dtype
            pieces.append(piece.copy())
        found.append(np.concatenate(pieces))
        assert found[-1].shape == (rows.num_rows, *rows.row_shape)
        assert np.array_equal(found[0], found[-1], equal_nan=rows.dtype.kind == "f")
    return found[0]


def counts_for(num_rows: int) -> Sequence[int]:
    """Numbers at a time that are worth a try."""
    return COUNTS if num_rows <= LARGE else COUNTS[-1:]


def _check_rows(
    source: Source, listed: Sequence[SourceRows], expected: dict[str, Any], owner: str
) -> None:
    assert [r.name for r in listed] == list(expected), owner
    for rows in listed:
        _same(rows_of(source, rows), expected[rows.name], f"{rows.name} of {owner}")


def _same(found: np.ndarray, expected: Any, what: str) -> None:
    expected = np.asarray(expected)
    assert found.shape == expected.shape, what
    assert (found.dtype.kind == "f") == (expected.dtype.kind == "f"), what
    assert np.array_equal(found, expected, equal_nan=found.dtype.kind == "f"), what


def _check_stored(store: Store, array: RowArray, expected: Any, original: np.ndarray) -> None:
    """Rows in store order are those of the source; NaN labels became -1, other floats float32."""
    found, wanted = read_rows(store, array), np.asarray(expected)[original]
    if wanted.dtype.kind == "f" and found.dtype.kind == "i":
        wanted = np.where(np.isnan(wanted), -1, wanted)
    wanted = wanted.astype(found.dtype)
    assert np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f"), array.path


def _check_lists(store: Store, held: dict[str, RowArray], expected: dict[str, Any]) -> None:
    assert set(held) == set(expected)
    for name, array in held.items():
        assert np.array_equal(read_rows(store, array), expected[name]), array.path


def _check_relation(
    store: Store, held: Relation, expected: ExpectedRelation, original: np.ndarray
) -> None:
    """Edges and their arrays, brought into the source's order by edge ids."""
    parts: dict[str, list[np.ndarray]] = {n: [] for n in ("dst", "src", "id", "weight", "time")}
    last = -1
    for _, blocks in scan_blocks(store.graph(held)):
        for raw in blocks:
            block = unpack_block(raw, held.path)
            header = block.header
            here = np.arange(header.first_node, header.first_node + header.num_nodes)
            parts["dst"].append(np.full(header.num_carried, last))
            parts["dst"].append(np.repeat(here, block.degrees_here()))
            last = int(here[-1]) if here.size else last
            inline = {"weight": block.weights, "time": block.times, "id": block.edge_ids}
            for name, values in {"src": block.sources, **inline}.items():
                if values is not None:
                    parts[name].append(values.copy())
    found = {name: np.concatenate([*p, np.empty(0, np.int64)]) for name, p in parts.items()}
    edges = np.asarray(expected.edges)
    ids = found["id"].astype(np.int64)
    assert np.array_equal(np.sort(ids), np.arange(edges.shape[1]))
    for row, name in ((0, "src"), (1, "dst")):
        assert np.array_equal(original[found[name].astype(np.int64)], edges[row, ids]), name
    assert (held.has_weights, held.has_times) == tuple(
        n in expected.arrays for n in ("weight", "time")
    )
    assert set(held.features) == set(expected.arrays) - {"weight", "time"}
    for name, values in expected.arrays.items():
        if name in held.features:
            _check_stored(store, held.features[name], values, ids)
        else:
            kind = np.float32 if name == "weight" else np.int64
            wanted = np.asarray(values).reshape(-1)[ids].astype(kind)
            assert np.array_equal(found[name].astype(kind), wanted), name
    _check_lists(store, held.splits, expected.splits)
