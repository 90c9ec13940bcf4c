"""Everything that a source gives, whole, for comparison with plain arrays."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from preprocess.files.tables import Table
from preprocess.ingest.prepare import keys_of, prepared
from preprocess.sources.source import Source, SourceRelation, SourceRows
from preprocess.sources.sourcefiles import SourceFiles
from preprocess.stages.scan import check_edge_splits, check_splits
from tests.preprocess.quiet import QUIET

MEM = 32 << 20
COUNTS = (1, 3, 1000)  # rows at a time


@contextmanager
def ready(source: Source, folder: Path) -> Iterator[Path]:
    """A source that is prepared; gives the folder of its owner's texts."""
    target = folder / "ready"
    with prepared(source, target, MEM, QUIET, False, SourceFiles(source.files)):
        yield keys_of(target)
    assert not list(folder.glob(".ready*"))


def edges_of(source: Source, relation: SourceRelation) -> list[tuple[int, int]]:
    """All (src, dst), the same for any number at a time."""
    found = []
    for count in COUNTS:
        pieces = [np.stack([s, d], 1) for s, d in source.edges(relation, count)]
        assert all(0 < p.shape[0] <= count for p in pieces)
        found.append([(int(s), int(d)) for p in pieces for s, d in p])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == relation.num_edges
    return found[0]


def rows_of(source: Source, rows: SourceRows) -> np.ndarray:
    """All rows, the same for any number at a time; shape and dtype are as promised."""
    empty = np.empty((0, *rows.row_shape), rows.dtype)
    found = []
    for count in COUNTS:
        pieces = [piece.copy() for piece in source.rows(rows, count)]
        assert all(p.shape[0] <= count for p in pieces)
        assert all(p.dtype == rows.dtype for p in pieces)
        found.append(np.concatenate([*pieces, empty]))
        assert found[-1].shape == (rows.num_rows, *rows.row_shape)
        assert np.array_equal(found[0], found[-1], equal_nan=rows.dtype.kind == "f")
    return found[0]


def arrays_of(source: Source, listed: Any) -> dict[str, list[Any]]:
    """Name to values of each array, NaN as None."""
    return {r.name: _plain(rows_of(source, r).tolist()) for r in listed if r is not None}


def _plain(value: Any) -> Any:
    """NaN as None, in lists of any depth."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if value != value else value


def read_all(source: Source) -> dict[str, Any]:
    """All of a source, as plain values."""
    found: dict[str, Any] = {}
    for name, num_nodes in source.num_nodes.items():
        check_splits(source, name)
        found[name] = {
            "nodes": num_nodes,
            "features": arrays_of(source, source.features(name)),
            "label": arrays_of(source, [source.label(name)]),
            "splits": arrays_of(source, source.splits(name)),
        }
    for r in source.relations:
        check_edge_splits(source, r)
        found[f"{r.src} {r.name} {r.dst}"] = {
            "edges": edges_of(source, r),
            "arrays": arrays_of(source, source.edge_rows(r)),
            "splits": arrays_of(source, source.edge_splits(r)),
        }
    return found


def texts_of(path: Path) -> list[str]:
    """The texts beside a store."""
    return [piece.at(i) for piece in Table(path).texts("key", 5) for i in range(len(piece))]
