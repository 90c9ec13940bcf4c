"""Whole ingests against plain Python: the same store for any memory, and back out again."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import BudgetTooSmall, OutOfSpace, StoreExists
from blockstore.format import Manifest
from blockstore.store import Store, open_store, read_rows
from blockstore.verify import verify_store
from preprocess.errors import BadInput
from preprocess.export import export as export_module
from preprocess.export.export import export
from preprocess.files.store import stored_blocks
from preprocess.ingest import plan
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from tests.effort import tries
from tests.preprocess import naive
from tests.preprocess.naive import ArraySource
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_csc import POLICIES, edge_lists

ORDERS = st.sampled_from(["bfs", "source"])


def rows_for(num_nodes: int, seed: int) -> dict[str, np.ndarray]:
    """Features, labels and splits of a graph; the last nodes are in no split."""
    rng = np.random.default_rng(seed)
    nodes = rng.permutation(num_nodes)
    third = num_nodes // 3
    return {
        "x": rng.standard_normal((num_nodes, 3)).astype(np.float32),
        "y": rng.integers(-1, 5, num_nodes),
        "train": nodes[:third],
        "test": nodes[third : 2 * third],
    }


def stored(store: Store) -> list[naive.Edge]:
    """(target, source, edge id) by store id, in the order of the store."""
    found: list[naive.Edge] = []
    for dst, block in stored_blocks(store, store.manifest.relations[0]):
        numbers = [-1] * dst.size if block.edge_ids is None else block.edge_ids.tolist()
        found += zip(dst.tolist(), block.sources.tolist(), numbers, strict=True)
    return found


@settings(max_examples=tries(6, 15))
@given(graph=edge_lists(), options=POLICIES, order=ORDERS, seed=st.integers(0, 99))
def test_a_store_holds_what_the_definition_says(tmp_path_factory, graph, options, order, seed):
    num_nodes, pairs = graph
    options = replace(options, order=order, block_bytes=4096)
    rows = rows_for(num_nodes, seed)
    path = tmp_path_factory.mktemp("stores") / "store"
    manifest = ingest(ArraySource(num_nodes, pairs, rows), path, options, QUIET).manifest
    store, node = open_store(path), manifest.types[0]
    edges = naive.stored_edges(pairs, options)
    nodes = list(range(num_nodes))
    if order == "bfs":
        nodes = naive.breadth_first(num_nodes, edges, 4096)
    assert read_rows(store, node.original_id).tolist() == nodes
    rank = read_rows(store, node.store_id).tolist()
    assert [nodes[r] for r in rank] == list(range(num_nodes))
    renamed = sorted((rank[v], rank[u], i) for v, u, i in edges)
    if not options.edge_ids:
        renamed = [(v, u, -1) for v, u, _ in renamed]
    assert stored(store) == renamed
    assert np.array_equal(read_rows(store, node.features["x"]), rows["x"][nodes])
    assert np.array_equal(read_rows(store, node.label), rows["y"][nodes])
    assert read_rows(store, node.splits["train"]).tolist() == rows["train"].tolist()


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch):
    """Small graphs with so little memory that buckets and columns go to disk."""
    monkeypatch.setattr(plan, "_MIN_SHARE", 1 << 10)
    monkeypatch.setattr(plan, "_FIXED_BYTES", 0)
    monkeypatch.setattr(export_module, "_FIXED_BYTES", 0)


def minimum(source: ArraySource, path: Path, options: IngestOptions) -> int:
    """The least memory that an ingest names, asked until it has no more to say."""
    mem = 1
    while True:
        try:
            ingest(source, path, replace(options, mem_bytes=mem), QUIET)
        except BudgetTooSmall as error:
            more = int(str(error).split("at least --mem ")[1].split("M ")[0]) << 20
            assert more > mem
            mem = more
        else:
            return mem


@pytest.mark.parametrize(  # every pair of them
    ("edge_ids", "undirected", "order"),
    [(False, False, "bfs"), (True, True, "bfs"), (True, False, "source"), (False, True, "source")],
)
@pytest.mark.usefixtures("tight")
def test_memory_does_not_show(tmp_path: Path, edge_ids: bool, undirected: bool, order: str):
    rng = np.random.default_rng(1)
    pairs = (5000 * rng.random((150_000, 2)) ** 2).astype(np.int64)
    options = IngestOptions(block_bytes=4096, edge_ids=edge_ids, undirected=undirected, order=order)
    source = ArraySource(5000, pairs, rows_for(5000, 2) | {"x": rng.random((5000, 99))})
    smallest = minimum(source, tmp_path / "least", options)
    assert smallest <= 2 << 20
    fingerprints = {open_store(tmp_path / "least").manifest.fingerprint}
    options = replace(options, mem_bytes=1 << 30)
    fingerprints.add(ingest(source, tmp_path / "roomy", options, QUIET).manifest.fingerprint)
    assert len(fingerprints) == 1
    verify_store(tmp_path / "least")


def undone(pairs: np.ndarray, manifest: Manifest) -> np.ndarray:
    """The edges that an export gives, (2, E)."""
    if manifest.relations[0].edge_id_dtype:
        return pairs.T
    return pairs.T[:, np.lexsort((pairs[:, 0], pairs[:, 1]))]


@pytest.mark.parametrize("edge_ids", [False, True])
@pytest.mark.usefixtures("tight")
def test_export_gives_back_what_came_in_whatever_the_memory(tmp_path: Path, edge_ids: bool):
    rng = np.random.default_rng(3)
    pairs = (3000 * rng.random((60_000, 2)) ** 2).astype(np.int64)
    rows = rows_for(3000, 4) | {"x": rng.random((3000, 33)).astype(np.float32)}
    source = ArraySource(3000, pairs, rows)
    options = IngestOptions(block_bytes=4096, edge_ids=edge_ids)
    manifest = ingest(source, tmp_path / "store", options, QUIET).manifest
    store = open_store(tmp_path / "store")
    for name, mem in (("small", 17 << 20), ("large", 1 << 30)):
        folder = tmp_path / name
        export(store, folder, QUIET, mem)
        assert np.array_equal(np.load(folder / "edge_index.npy"), undone(pairs, manifest))
        assert np.array_equal(np.load(folder / "node_feat.npy"), rows["x"])
        assert np.array_equal(np.load(folder / "node_label.npy"), rows["y"])
        assert np.array_equal(np.load(folder / "train_idx.npy"), rows["train"])
    with pytest.raises(BudgetTooSmall, match="at least --mem"):
        export(store, tmp_path / "none", QUIET, 1 << 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large", "small", "store"]


def test_what_ingest_dropped_is_not_exported(tmp_path: Path):
    pairs = [(0, 1), (2, 2), (0, 1), (1, 0), (3, 1)]
    options = IngestOptions(edge_ids=True, duplicates="drop", self_loops="drop")
    ingest(ArraySource(4, pairs), tmp_path / "store", options, QUIET)
    export(open_store(tmp_path / "store"), tmp_path / "back", QUIET)
    edges = np.load(tmp_path / "back" / "edge_index.npy").T
    assert edges.tolist() == [[0, 1], [1, 0], [3, 1]]
    assert [p.name for p in (tmp_path / "back").iterdir()] == ["edge_index.npy"]


def test_bfloat16_features_are_exported_as_the_same_numbers(tmp_path: Path):
    x = np.array([[1.0, -2.5], [3.0e38, 0.0]], np.float32)
    ingest(
        ArraySource(2, [(0, 1)], {"x": x}), tmp_path / "s", IngestOptions(dtype="bfloat16"), QUIET
    )
    export(open_store(tmp_path / "s"), tmp_path / "back", QUIET)
    back = np.load(tmp_path / "back" / "node_feat.npy")
    assert back.dtype == np.float32
    assert np.allclose(back, x, rtol=2**-8)
    assert back[0].tolist() == [1.0, -2.5]


class FullDisk:
    """os.pwrite that fails from the n-th write on."""

    def __init__(self, writes: int) -> None:
        self.left, self._pwrite = writes, os.pwrite

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._pwrite(fd, data, offset)


def there_and_back(source: ArraySource, store: Path, folder: Path, options: IngestOptions) -> None:
    """Ingest, then export."""
    ingest(source, store, options, QUIET)
    export(open_store(store), folder, QUIET)


@pytest.mark.usefixtures("tight")
def test_a_disk_that_fills_up_at_any_write_leaves_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rng = np.random.default_rng(1)
    rows = {name: rows_for(500, 2)[name] for name in ("x", "train")}
    source = ArraySource(500, rng.integers(0, 500, (9000, 2)), rows)
    options = IngestOptions(block_bytes=4096, edge_ids=True, mem_bytes=1 << 20)
    counter = FullDisk(10**9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", counter)
        there_and_back(source, tmp_path / "store", tmp_path / "back", options)
    total = 10**9 - counter.left
    fingerprint = open_store(tmp_path / "store").manifest.fingerprint
    kept = sorted(tmp_path.iterdir())
    for writes in sorted({*range(0, total, max(1, total // tries(6, 12))), total - 1}):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", FullDisk(writes))
            with pytest.raises(OutOfSpace, match=r"No space left") as caught:
                there_and_back(source, tmp_path / "deep" / "er", tmp_path / "out", options)
        assert not (tmp_path / "out").exists()
        if (tmp_path / "deep").exists():
            (left,) = (tmp_path / "deep").iterdir()
            if left.name == "er":  # the export failed
                if (tmp_path / ".out.work").exists():
                    assert "the same command goes on" in str(caught.value)
                export(open_store(left), tmp_path / "out", QUIET)
                for path in (tmp_path / "back").iterdir():
                    assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
                shutil.rmtree(tmp_path / "out")
            else:
                assert left.name == ".er.work"
                assert "the same command goes on" in str(caught.value)
                assert not list(left.glob("edges")) + list(left.glob("rows"))
                again = ingest(source, tmp_path / "deep" / "er", options, QUIET)
                assert again.manifest.fingerprint == fingerprint
                assert any(s.resumed for s in again.stages)
            shutil.rmtree(tmp_path / "deep")
        assert sorted(tmp_path.iterdir()) == kept


def test_targets_that_exist_are_left_alone(tmp_path: Path):
    (tmp_path / "store").write_text("mine")
    with pytest.raises(StoreExists):
        ingest(ArraySource(2, [(0, 1)]), tmp_path / "store", IngestOptions(), QUIET)
    assert (tmp_path / "store").read_text() == "mine"


def test_bad_rows_found_late_leave_nothing(tmp_path: Path):
    x = np.full((2, 2), np.nan, np.float32)
    with pytest.raises(BadInput):
        ingest(ArraySource(2, [(0, 1)], {"x": x}), tmp_path / "store", IngestOptions(), QUIET)
    assert list(tmp_path.iterdir()) == []
