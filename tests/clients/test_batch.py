"""Batches copied and gathered out of an arena laid out at random, in one row group or several."""

import numpy as np
import pytest

from clients import batch as gather_module
from clients.batch import BatchReader
from clients.connection.buffers import BufferPool
from clients.connection.session import Session, views
from loaderd.api.protocol import Attach, Blob, BlobArray, Release
from tests.clients.fake import POISON, fake_daemon, make_batch


def expected_edges(made):
    """Sources as stored; the targets of hop h are its frontier nodes, each as often as counted."""
    firsts = np.concatenate([[0], np.cumsum(made.nodes_per_hop)])
    targets = [np.repeat(firsts[h] + np.arange(c.size), c) for h, c in enumerate(made.counts)]
    return np.stack([made.src, np.concatenate(targets)])


def check(arrays, made):
    np.testing.assert_array_equal(arrays.n_id, made.n_id)
    np.testing.assert_array_equal(arrays.input_id, made.input_id)
    np.testing.assert_array_equal(arrays.edges.reshape(2, -1), expected_edges(made))
    assert arrays.nodes_per_hop == [list(made.nodes_per_hop)]
    assert arrays.edges_per_hop == [[c.sum() for c in made.counts]]
    for array in (arrays.n_id, arrays.input_id, arrays.edges):
        assert array.dtype == np.int64
        assert array.flags.writeable
    for name, rows in made.rows.items():
        np.testing.assert_array_equal(arrays.rows[name], rows, strict=True)
        assert arrays.rows[name].flags.writeable


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_batches_are_what_the_daemon_laid_out(tmp_path, monkeypatch, groups, threads):
    monkeypatch.setattr(gather_module, "SPLIT_BYTES", 16)
    with fake_daemon(tmp_path, groups=groups) as daemon:
        session = Session(daemon.endpoint, Attach(token=0, request=0))
        reader = BatchReader(session, BufferPool(), threads)
        session.start(2, 0)
        held = [reader.read(step) for step in range(5)]
        reader.close()
        session.close()
    # released slots were overwritten by now: the arrays must be copies
    for step, arrays in enumerate(held):
        check(arrays, make_batch(2, step, 8))
    released = [(m.step, m.group) for m in daemon.received(Release)]
    assert released == [(step, group) for step in range(5) for group in range(groups)]
    assert (daemon.arena == POISON).any()


def test_edge_ids_come_where_asked_for(tmp_path):
    with fake_daemon(tmp_path, edge_ids=True) as daemon:
        session = Session(daemon.endpoint, Attach(token=0, request=0, return_e_id=True))
        session.start(0, 0)
        arrays = BatchReader(session, BufferPool()).read(0)
        session.close()
    assert arrays.e_id.dtype == np.int64
    np.testing.assert_array_equal(arrays.e_id, 2**40 + np.arange(arrays.edges.size // 2))


@pytest.mark.parametrize(
    ("slots", "pieces"),
    [
        ((3, 4, 5), [(0, 300)]),
        ((3, 5, 6), [(0, 32), (32, 268)]),
        ((5, 4, 3), [(0, 32), (32, 256), (288, 12)]),
    ],
)
def test_views_are_cut_where_slots_are_apart(slots, pieces):
    slot_bytes = 1024
    arena = np.arange(8 * slot_bytes // 4, dtype=np.uint32)
    array = BlobArray("a", "uint32", 896, 300)
    found = list(views(arena.view(np.uint8), slot_bytes, Blob(slots, (array,)), array))
    assert [(start, view.size) for start, view in found] == pieces
    flat = np.concatenate([arena.reshape(8, -1)[slot] for slot in slots])
    np.testing.assert_array_equal(np.concatenate([v for _, v in found]), flat[224:524])


def test_an_empty_array_has_no_views():
    array = BlobArray("a", "uint64", 0, 0)
    assert list(views(np.zeros(64, np.uint8), 64, Blob((), (array,)), array)) == []
