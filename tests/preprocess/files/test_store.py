"""Reading a store in bounded pieces gives what reading it whole does."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import CorruptBlock
from blockstore.store import open_store
from preprocess.files.store import rows_ahead, stored_edges
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from tests.graphs import csc_graphs
from tests.preprocess.naive import Graph
from tests.preprocess.quiet import QUIET
from tests.stores import write_store


@settings(max_examples=12)
@given(graph=csc_graphs(max_multi_block=2), maximum=st.sampled_from([1, 7, 500, 10**6]))
def test_edges_in_pieces(tmp_path_factory, graph, maximum: int):
    path = tmp_path_factory.mktemp("stored") / "store"
    manifest = write_store(path, graph, [0])
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    pieces = [
        (t.copy(), s.copy())
        for t, s in stored_edges(open_store(path), manifest.relations[0], maximum, 8192)
    ]
    assert all(0 < t.size <= maximum for t, _ in pieces)
    assert [t for piece, _ in pieces for t in piece.tolist()] == targets.tolist()
    assert [s for _, piece in pieces for s in piece.tolist()] == graph.indices.tolist()


@pytest.mark.parametrize("shape", [(), (3,), (2, 600)])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_rows_in_pieces(tmp_path: Path, shape: tuple[int, ...], lanes: int):
    rows = np.random.default_rng(0).random((2222, *shape)).astype(np.float32)
    if len(shape) > 1:
        rows = rows[:30]
    graph = Graph().add_type("node", len(rows), x=rows)
    ingest(graph, tmp_path / "store", IngestOptions(block_bytes=4096, order="source"), QUIET)
    store = open_store(tmp_path / "store")
    array = store.manifest.types[0].features["x"]
    with closing(rows_ahead(store, array, 2 * 4096, lanes, lambda rows: rows * 2)) as ahead:
        pieces = [p.copy() for p in ahead]
    assert len(pieces) > 1
    assert np.array_equal(np.concatenate(pieces).reshape(rows.shape), rows * 2)


def test_a_bad_page_is_found_by_whatever_thread_reads_it(tmp_path: Path):
    graph = Graph().add_type("node", 9000, x=np.ones((9000, 2), np.float32))
    ingest(graph, tmp_path / "store", IngestOptions(block_bytes=4096), QUIET)
    shard = tmp_path / "store/nodes/node/features/x/c/0/0"
    raw = bytearray(shard.read_bytes())
    raw[4096 * 7 + 5] ^= 1
    shard.write_bytes(raw)
    store = open_store(tmp_path / "store")
    array = store.manifest.types[0].features["x"]
    with closing(rows_ahead(store, array, 4096, 2, lambda rows: rows)) as ahead:
        for _ in range(7):
            next(ahead)
        with pytest.raises(CorruptBlock, match=r"x/c/0/0\+28672: crc32c"):
            next(ahead)
