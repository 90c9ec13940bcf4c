"""Whatever a store holds comes out again: any graph, against the source that it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import BudgetTooSmall
from blockstore.store import open_store, read_rows
from preprocess.export import export as export_module
from preprocess.export.export import export
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.progress import Progress
from preprocess.sources.layouts import open_source
from preprocess.sources.source import Source
from tests.effort import tries
from tests.preprocess import naive
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
)
from tests.preprocess.test_csc import POLICIES
from tests.preprocess.test_hetero import all_rows, graphs

OPTIONS = IngestOptions(block_bytes=4096, edge_ids=True, mem_bytes=64 << 20)
EDGES = 4000
RENAMES = st.sampled_from(["bfs", "random", "source"])


def expected_of(source: Source, options: IngestOptions) -> ExpectedGraph:
    """What an export of the source's store should hold, by the definition."""
    types = {}
    for name, num_nodes in source.num_nodes.items():
        label = source.label(name)
        types[name] = ExpectedType(
            num_nodes,
            {r.name: all_rows(source, r) for r in source.features(name)},
            None if label is None else all_rows(source, label),
            {r.name: all_rows(source, r) for r in source.splits(name)},
        )
    relations = {}
    for r in source.relations:
        held = naive.stored_relation(source, r, options)
        if options.edge_ids:
            kept = sorted(i for _, _, i in held if i < r.num_edges)
        else:
            kept = [i for _, _, i in sorted(held)]  # by target, source, id
        origin = np.array([i % max(1, r.num_edges) for i in kept], np.int64)
        place = {i: at for at, i in enumerate(kept)}
        pairs = np.concatenate([np.empty((2, 0), np.int64), *map(np.stack, source.edges(r, 7))], 1)
        edges = pairs[:, origin]
        swapped = np.array([i >= r.num_edges for i in kept], bool)
        edges[:, swapped] = edges[::-1, swapped]
        arrays = {a.name: all_rows(source, a)[origin] for a in source.edge_rows(r)}
        if "weight" in arrays:
            arrays["weight"] = arrays["weight"].astype(np.float32)
        splits = {}
        for split in source.edge_splits(r):
            rows = all_rows(source, split)
            if not split.row_shape:
                rows = np.array([place[i] for i in rows.tolist() if i in place], np.int64)
            if split.row_shape or options.edge_ids:
                splits[split.name] = rows
        relations[(r.src, r.name, r.dst)] = ExpectedRelation(edges, arrays, splits)
    return ExpectedGraph(types, relations)


def in_order(source: Source, graph: ExpectedGraph) -> ExpectedGraph:
    """Arrays by name as the source lists them: a layout has its own order."""

    def sort(found: dict[str, Any], listed: Any) -> dict[str, Any]:
        assert {r.name for r in listed} == set(found)
        return {r.name: found[r.name] for r in listed}

    for name, kind in graph.types.items():
        kind.features = sort(kind.features, source.features(name))
        kind.splits = sort(kind.splits, source.splits(name))
    for r in source.relations:
        relation = graph.relations[(r.src, r.name, r.dst)]
        relation.arrays = sort(relation.arrays, source.edge_rows(r))
        relation.splits = sort(relation.splits, source.edge_splits(r))
    return graph


def check_export(
    source: Source, folder: Path, options: IngestOptions, mem: int = 1 << 30
) -> Source:
    """Ingest, export, and compare; returns the source that came out."""
    ingest(source, folder / "store", options, QUIET)
    export(open_store(folder / "store"), folder / "back", QUIET, mem)
    back = open_source(folder / "back", None if open_files(folder) else "plain-hetero").source
    check_source(back, in_order(back, expected_of(source, options)))
    return back


def open_files(folder: Path) -> bool:
    """Whether anything but a schema came out."""
    return any((folder / "back").glob("*.npy"))


@settings(max_examples=tries(6, 12))
@given(source=graphs(), options=POLICIES, order=RENAMES)
def test_any_graph_comes_out_as_it_went_in(tmp_path_factory, source, options, order):
    options = replace(options, order=order, block_bytes=4096)
    if options.undirected and any(r.src != r.dst for r in source.relations):
        options = replace(options, undirected=False)
    check_export(source, tmp_path_factory.mktemp("export"), options)


def larger(seed: int) -> Graph:
    """Two types, parallel edges, a multi-block column; arrays of every kind."""
    rng = np.random.default_rng(seed)
    pairs = np.stack([rng.integers(0, 700, EDGES), (300 * rng.random(EDGES) ** 3).astype(int)], 1)
    source = Graph()
    source.add_type("user_", 700, x=rng.random((700, 9)).astype(np.float32), train=np.arange(5))
    source.add_type(
        "item__a|b", 300, year=rng.integers(0, 99, 300).astype("i2"), data=np.arange(300) / 4,
        y=rng.integers(0, 2, (300, 5)).astype(np.uint8), extra=np.arange(600).reshape(300, 2, 1),
    )  # fmt: skip
    source.add_relation(
        "user_", "_to__", "item__a|b", pairs,
        {"train": rng.permutation(EDGES)[:99], "other": pairs[:7]},
        weight=rng.random(EDGES).astype(np.float32), time=rng.integers(-(2**60), 2**60, EDGES),
        attr=rng.random((EDGES, 3)).astype(np.float32),
    )  # fmt: skip
    loops = np.repeat(rng.integers(0, 300, 100), 2).reshape(100, 2)
    return source.add_relation("item__a|b", "near", "item__a|b", loops, indptr=np.arange(100))


@pytest.mark.parametrize("edge_ids", [False, True])
def test_memory_does_not_show_in_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge_ids: bool
):
    options = replace(OPTIONS, edge_ids=edge_ids)
    check_export(larger(1), tmp_path, options)
    store = open_store(tmp_path / "store")
    with pytest.raises(BudgetTooSmall, match="expected at least --mem"):
        export(store, tmp_path / "small", QUIET, 1 << 20)
    monkeypatch.setattr(export_module, "_plan_memory", lambda *_: 17 * EDGES)  # buckets in files
    export(store, tmp_path / "small", QUIET, 1 << 20)
    same_files(tmp_path / "back", tmp_path / "small")
    monkeypatch.setattr(export_module, "_plan_memory", lambda *_: EDGES)
    if not edge_ids:
        with pytest.raises(BudgetTooSmall, match="the in-edges of one node"):
            export(store, tmp_path / "less", QUIET, 1 << 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "small", "store"]


def test_an_export_makes_the_same_store(tmp_path: Path):
    back = check_export(larger(2), tmp_path, OPTIONS)
    ingest(back, tmp_path / "again", OPTIONS, QUIET)
    export(open_store(tmp_path / "again"), tmp_path / "twice", QUIET)
    same_files(tmp_path / "back", tmp_path / "twice")
    third = open_source(tmp_path / "twice").source
    ingest(third, tmp_path / "third", OPTIONS, QUIET)
    same_files(tmp_path / "again", tmp_path / "third")


def same_files(left: Path, right: Path) -> None:
    """Two folders hold the same bytes."""
    names = {p.relative_to(left) for p in left.rglob("*") if p.is_file()}
    assert names == {p.relative_to(right) for p in right.rglob("*") if p.is_file()}
    for name in names:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


def test_int8_comes_out_as_the_numbers_that_it_stands_for(tmp_path: Path):
    x = np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32)
    plain = np.arange(50, dtype=np.int8)
    source = Graph().add_type("node", 50, x=x, small=plain)
    source.add_relation("node", "to", "node", [(0, 49)])
    ingest(source, tmp_path / "store", replace(OPTIONS, dtype="int8"), QUIET)
    export(open_store(tmp_path / "store"), tmp_path / "back", QUIET)
    back = np.load(tmp_path / "back" / "node_feat.npy")
    scale = np.abs(x).max(axis=0) / np.float32(127)
    assert back.dtype == np.float32
    assert np.array_equal(back, np.rint(x / scale).astype(np.int8) * scale)
    small = np.load(tmp_path / "back" / "node_small.npy")
    assert small.dtype == np.int8
    assert np.array_equal(small, plain)


def test_added_relations_stay_behind(tmp_path: Path):
    source = Graph().add_type("a", 2).add_type("b", 3)
    source.add_relation("a", "r", "b", [(1, 2), (0, 1)], time=np.array([7, 8]))
    options = replace(OPTIONS, undirected=True)
    ingest(source, tmp_path / "store", options, QUIET)
    assert len(open_store(tmp_path / "store").manifest.relations) == 2
    export(open_store(tmp_path / "store"), tmp_path / "back", QUIET)
    back = open_source(tmp_path / "back").source
    check_source(back, expected_of(source, options))
    ingest(back, tmp_path / "again", options, QUIET)
    same_files(tmp_path / "store", tmp_path / "again")


def test_positions_in_a_store_without_edge_ids_are_left_out_and_said(tmp_path: Path):
    source = Graph().add_type("node", 3)
    source.add_relation("node", "to", "node", [(0, 1), (2, 1)], {"train": np.array([1])})
    ingest(source, tmp_path / "store", replace(OPTIONS, edge_ids=False), QUIET)
    with (tmp_path / "said").open("w") as stream:
        export(open_store(tmp_path / "store"), tmp_path / "back", Progress(stream))
    said = (tmp_path / "said").read_text()
    assert "splits/train: left out: positions of edges mean nothing" in said
    assert [p.name for p in (tmp_path / "back").iterdir()] == ["edge_index.npy"]


def test_nodes_that_nothing_else_counts(tmp_path: Path):
    source = Graph().add_type("node", 9, train=np.array([8]))
    source.add_relation("node", "to", "node", [(0, 3)])
    back = check_export(source, tmp_path, OPTIONS)
    assert back.layout == "plain"
    assert (tmp_path / "back" / "meta.json").read_bytes() == b'{\n "num_nodes": 9\n}'


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.add_type("other", 0),
        lambda s: s.add_relation("node", "too", "node", [(1, 1)]),
    ],
)
def test_more_than_one_of_anything_needs_names(tmp_path: Path, change: Callable[[Graph], Graph]):
    source = Graph().add_type("node", 2, x=np.ones((2, 1), np.float32))
    change(source.add_relation("node", "to", "node", [(0, 1)]))
    assert check_export(source, tmp_path, OPTIONS).layout == "plain-hetero"


NAMES = ["feat", "label", "index", "x_data", "indptr", "csr", "a__b", "_", "ä/b", "node_", "%41"]


def test_names_that_mean_something_else_on_disk(tmp_path: Path):
    rows = {name: np.full(4, i) for i, name in enumerate(NAMES)}
    edges = {name: np.full(2, i) for i, name in enumerate(NAMES)}
    lists = {name: np.array([i % 2]) for i, name in enumerate(["node_a", "edge_b", "train"])}
    for layout in ("node", "type_"):
        source = Graph().add_type(layout, 4, x=np.ones((4, 2), np.float32), **rows)
        source.add_relation(layout, "to", layout, [(0, 1), (3, 2)], lists, **edges)
        folder = tmp_path / layout
        folder.mkdir()
        check_export(source, folder, OPTIONS)


def test_labels_of_floats_and_weights_survive(tmp_path: Path):
    y = np.array([0.25, np.nan, 3.5], np.float32)
    source = Graph().add_type("node", 3, y=y)
    source.add_relation("node", "to", "node", [(0, 1)], weight=np.array([2.5]))
    check_export(source, tmp_path, OPTIONS)
    label = open_store(tmp_path / "store").manifest.types[0].label
    assert label is not None
    assert read_rows(open_store(tmp_path / "store"), label).dtype == np.float32
