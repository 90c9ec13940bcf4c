"""Several types, relations and edge arrays, against plain Python, for any memory."""

from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.format import Relation
from blockstore.pack import unpack_block
from blockstore.store import Store, open_store, read_rows, scan_blocks
from blockstore.verify import verify_store
from preprocess.errors import BadInput
from preprocess.ingest import plan
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.source import SourceRows
from tests.effort import tries
from tests.preprocess import naive
from tests.preprocess.ingest.test_plan import plan_ingest
from tests.preprocess.naive import Graph
from tests.preprocess.partitions import ingest_parts
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_csc import POLICIES
from tests.preprocess.test_stores import minimum

ARRAYS = ("weight", "time", "attr", "kind")
ORDERS = st.sampled_from(["bfs", "degree", "random", "source"])


def edge_arrays(names: set[str], num_edges: int) -> dict[str, np.ndarray]:
    """Arrays that say by each value which edge it is of."""
    i = np.arange(num_edges)
    every = {
        "weight": (i + 0.5).astype(np.float64),
        "time": (i << 33) - 5,
        "attr": np.stack([i, -i, i * 0.25], 1).astype(np.float32),
        "kind": i.astype(np.int16),
    }
    return {name: every[name] for name in ARRAYS if name in names}


@st.composite
def graphs(draw: Any) -> Graph:
    """Up to three types, up to four relations; types and relations may be empty."""
    graph = Graph()
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(sum))
    for t, size in enumerate(sizes):
        rng = np.random.default_rng(size + t)
        every = {
            "x": rng.standard_normal((size, 3)).astype(np.float32),
            "year": rng.integers(0, 9, size).astype(np.int16),
            "y": rng.integers(-1, 4, size),
        }
        names = draw(st.sets(st.sampled_from(sorted(every))))
        graph.add_type(f"t{t}", size, **{n: a for n, a in every.items() if n in names})
    ends = st.sampled_from([t for t, size in enumerate(sizes) if size])
    for r in range(draw(st.integers(0, 4))):
        src, dst = draw(ends), draw(ends)
        node = st.tuples(st.integers(0, sizes[src] - 1), st.integers(0, sizes[dst] - 1))
        pairs = draw(st.lists(node, max_size=40))
        arrays = edge_arrays(draw(st.sets(st.sampled_from(ARRAYS))), len(pairs))
        splits = {"train": np.arange(len(pairs))[::-2]} if draw(st.booleans()) else {}
        graph.add_relation(f"t{src}", f"r{r}", f"t{dst}", pairs, splits, **arrays)
    return graph


def stored_blocks(store: Store, relation: Relation) -> dict[str, list[Any]]:
    """Targets, sources, edge ids, weights and times in the order of the blocks."""
    found: dict[str, list[Any]] = {n: [] for n in ("dst", "src", "id", "weight", "time")}
    last = -1
    for _, blocks in scan_blocks(store.graph(relation)):
        for raw in blocks:
            block = unpack_block(raw, "here")
            header = block.header
            here = np.arange(header.first_node, header.first_node + header.num_nodes)
            found["dst"] += [last] * header.num_carried
            found["dst"] += np.repeat(here, block.degrees_here()).tolist()
            last = int(here[-1]) if here.size else last
            found["src"] += block.sources.tolist()
            for name, held in (
                ("id", block.edge_ids), ("weight", block.weights), ("time", block.times)
            ):  # fmt: skip
                found[name] += [] if held is None else held.tolist()
    return found


def all_rows(source: Any, rows: SourceRows) -> np.ndarray:
    """An array of a source in one piece."""
    pieces = [piece.copy() for piece in source.rows(rows, 9)]
    return np.concatenate([*pieces, np.empty((0, *rows.row_shape), rows.dtype)])


def check_relation(store: Store, source: Any, number: int, options: IngestOptions) -> None:
    """Edges and arrays of a relation are those of the definition."""
    relation, listed = store.manifest.relations[number], source.relations[number]
    types = {t.name: t for t in store.manifest.types}
    rank = {name: read_rows(store, t.store_id).tolist() for name, t in types.items()}
    edges = naive.stored_relation(source, listed, options)
    expected = sorted((rank[listed.dst][v], rank[listed.src][u], i) for v, u, i in edges)
    found = stored_blocks(store, relation)
    assert found["dst"] == [v for v, _, _ in expected]
    assert found["src"] == [u for _, u, _ in expected]
    assert found["id"] == ([i for _, _, i in expected] if options.edge_ids else [])
    assert (relation.num_edges, relation.num_source_edges) == (len(expected), listed.num_edges)
    origin = [i % max(1, listed.num_edges) for _, _, i in expected]
    for rows in source.edge_rows(listed):
        held = all_rows(source, rows)
        if rows.name in ("weight", "time"):
            assert found[rows.name] == held[origin].tolist()
        else:
            array = relation.features[rows.name]
            assert np.array_equal(read_rows(store, array), held[origin])
            assert array.dtype == rows.dtype.name
    for rows in source.edge_splits(listed):
        found_rows = read_rows(store, relation.splits[rows.name])
        assert found_rows.tolist() == all_rows(source, rows).tolist()


def check_types(store: Store, source: Any) -> list[int]:
    """Ids undo each other, rows stand in their order; returns the order, through all types."""
    order: list[int] = []
    for t in store.manifest.types:
        assert t.first == len(order)
        original = read_rows(store, t.original_id).astype(np.int64)
        assert sorted(original.tolist()) == list(range(t.num_nodes))
        for rows in [*source.features(t.name), source.label(t.name)]:
            if rows is not None:
                array = t.label if rows.name == "y" else t.features[rows.name]
                assert np.array_equal(read_rows(store, array), source.arrays[rows.where][original])
        order += (original + t.first).tolist()
    return order


@settings(max_examples=tries(6, 12))
@given(source=graphs(), options=POLICIES, order=ORDERS)
def test_stores_hold_what_the_definition_says(tmp_path_factory, source, options, order):
    options = replace(options, order=order, block_bytes=4096)
    path = tmp_path_factory.mktemp("hetero") / "store"
    manifest = ingest(source, path, options, QUIET).manifest
    store, told = open_store(path), source.with_reverses(options.undirected)
    verify_store(path)
    assert [t.num_nodes for t in manifest.types] == list(source.num_nodes.values())
    found = check_types(store, source)
    if order != "random":
        assert found == naive.node_order(told, options, 4096)
    assert len(manifest.relations) == len(told.relations)
    for number, r in enumerate(told.relations):
        check_relation(store, told, number, options)
        assert manifest.relations[number].reverse_of == r.name.removeprefix("rev_") * (
            r.name.startswith("rev_")
        )


def citations(relations: Container[str] = ("cites", "writes", "appears", "knows")) -> Graph:
    """Papers, authors and venues: 4,000 nodes, four relations, hubs, every kind of array.

    Of fewer relations, and of the types that these join, if so asked.
    """
    rng = np.random.default_rng(5)
    sizes = {"paper": 2500, "author": 1490, "venue": 10}
    graph = Graph()
    x = rng.standard_normal((2500, 40)).astype(np.float32)
    graph.add_type("paper", 2500, x=x, year=rng.integers(0, 50, 2500), y=rng.random(2500))
    graph.add_type("author", 1490)
    if "appears" in relations or "knows" in relations:
        graph.add_type("venue", 10, x=rng.random((10, 7)))
    for src, name, dst, count, names in (
        ("paper", "cites", "paper", 30_000, {"weight", "attr"}),
        ("author", "writes", "paper", 20_000, {"time", "weight", "kind"}),
        ("paper", "appears", "venue", 2500, {"attr"}),
        ("venue", "knows", "venue", 0, {"weight", "attr"}),
    ):
        if name not in relations:
            continue
        pairs = rng.random((count, 2)) ** 2 * (sizes[src], sizes[dst])
        arrays = edge_arrays(names, count)
        arrays = {n: a.astype(np.int32) if n == "kind" else a for n, a in arrays.items()}
        graph.add_relation(src, name, dst, pairs.astype(np.int64), **arrays)
    return graph


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch):
    """So little memory that buckets, columns and rows go to disk."""
    monkeypatch.setattr(plan, "_MIN_SHARE", 1 << 10)
    monkeypatch.setattr(plan, "_FIXED_BYTES", 0)


@pytest.mark.parametrize(
    ("order", "undirected"),
    [
        ("bfs", True),
        pytest.param("source", False, marks=pytest.mark.long),
        pytest.param("degree", True, marks=pytest.mark.long),
        pytest.param("random", False, marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("tight")
def test_memory_does_not_show(tmp_path: Path, order: str, undirected: bool):
    source = citations()
    options = IngestOptions(block_bytes=4096, order=order, undirected=undirected, seed=3)
    smallest = minimum(source, tmp_path / "least", options)
    assert smallest <= 3 << 20
    fingerprints = {open_store(tmp_path / "least").manifest.fingerprint}
    roomy = replace(options, mem_bytes=1 << 30)
    fingerprints.add(ingest(source, tmp_path / "roomy", roomy, QUIET).manifest.fingerprint)
    assert len(fingerprints) == 1
    verify_store(tmp_path / "least")
    store, told = open_store(tmp_path / "least"), source.with_reverses(options.undirected)
    for number in range(len(told.relations)):
        check_relation(store, told, number, options)


@pytest.mark.parametrize(
    ("order", "mem"),
    [
        ("bfs", 16),
        pytest.param("bfs", 1024, marks=pytest.mark.long),
        pytest.param("degree", 16, marks=pytest.mark.long),
        ("random", 1024),
        ("source", 16),
    ],
)
@pytest.mark.usefixtures("tight")
def test_the_plan_names_the_stages_that_are_run(tmp_path: Path, order: str, mem: int):
    source, split = citations({"cites", "writes"}), (0.5, 0.25, 0.25)
    options = IngestOptions(
        mem_bytes=mem << 20,
        block_bytes=4096,
        order=order,
        undirected=True,
        dtype="int8",
        split=split,
    )
    result = ingest(source, tmp_path / "store", options, QUIET)
    planned = plan_ingest(source, options)
    assert [s.name for s in result.stages] == [s.name for s in planned.stages]
    size = sum(p.stat().st_size for p in (tmp_path / "store").rglob("*"))
    assert planned.store_bytes * 0.7 < size < planned.store_bytes * 1.3 + (1 << 20)


def test_a_partition_comes_first_and_the_order_inside_it(tmp_path: Path):
    source = citations({"cites", "appears"})
    partition = np.random.default_rng(0).integers(0, 5, 4000).astype(np.uint32)
    options = IngestOptions(block_bytes=4096, order="degree")
    manifest = ingest_parts(partition, source, tmp_path / "store", options)
    plain = naive.node_order(source, options, 4096)
    store, found = open_store(tmp_path / "store"), []
    for t in manifest.types:
        order = (read_rows(store, t.original_id).astype(np.int64) + t.first).tolist()
        expected = [v for v in plain if t.first <= v < t.first + t.num_nodes]
        expected.sort(key=lambda v: partition[v])
        assert order == expected
        offsets = store.side(t.partition_offsets_path, np.uint64, t.num_partitions + 1).tolist()
        parts = [partition[v] for v in order]
        assert offsets == [t.first + np.searchsorted(parts, p) for p in range(6)]
        found += order
    assert sorted(found) == list(range(4000))
    verify_store(tmp_path / "store")


def test_the_random_order_follows_the_seed(tmp_path: Path):
    found = []
    for i, seed in enumerate((1, 1, 2)):
        options = IngestOptions(order="random", seed=seed)
        path = tmp_path / str(i)
        ingest(citations({"cites"}), path, options, QUIET)
        store = open_store(path)
        found.append(read_rows(store, store.manifest.types[0].original_id).tolist())
    assert found[0] == found[1] != found[2]
    assert abs(np.corrcoef(found[0], np.arange(2500))[0, 1]) < 0.1  # 5 deviations of 1/sqrt(2500)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"weight": np.array([1.0, np.nan])}, r"weight\[1\]: found weight nan"),
        ({"weight": np.array([1.0, -1.0])}, r"weight\[1\]: found weight -1"),
        ({"weight": np.ones((2, 3))}, "found float64 of shape"),
        ({"time": np.ones(2)}, "found float64"),
        ({"attr": np.ones(3)}, "found 3 rows, expected 2"),
        ({"attr": np.ones((2, 0))}, "rows of shape"),
        ({"attr": np.ones(2, np.complex64)}, "complex64"),
    ],
)
def test_edge_arrays_that_no_store_can_hold(tmp_path: Path, arrays, words):
    graph = Graph().add_type("a", 3).add_relation("a", "to", "a", [(0, 1), (1, 2)], **arrays)
    with pytest.raises(BadInput, match=words):
        ingest(graph, tmp_path / "store", IngestOptions(), QUIET)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("split", [np.array([2]), np.array([-1]), np.array([[0, 3]])])
def test_edge_splits_out_of_range(tmp_path: Path, split: np.ndarray):
    graph = Graph().add_type("a", 3)
    graph.add_relation("a", "to", "a", [(0, 1), (1, 2)], {"train": split})
    with pytest.raises(BadInput, match=r"a\.to\.a/train\[0\]"):
        ingest(graph, tmp_path / "store", IngestOptions(), QUIET)


def test_names_that_no_folder_can_have(tmp_path: Path):
    graph = Graph().add_type("a/b", 2, **{"..": np.ones((2, 1), np.float32)})
    graph.add_relation("a/b", "/film/by", "a/b", [(0, 1)])
    result = ingest(graph, tmp_path / "store", IngestOptions(), QUIET)
    verify_store(tmp_path / "store")
    assert result.manifest.types[0].features[".."].path == "nodes/a%2Fb/features/%2E%2E"
    assert result.manifest.relations[0].name == "/film/by"


def test_a_reverse_that_is_there_already(tmp_path: Path):
    graph = Graph().add_type("a", 2).add_type("b", 2)
    graph.add_relation("a", "to", "b", [(0, 1)]).add_relation("b", "rev_to", "a", [(1, 0)])
    with pytest.raises(BadInput, match="leave --undirected out"):
        ingest(graph, tmp_path / "store", IngestOptions(undirected=True), QUIET)
