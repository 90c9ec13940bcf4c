"""Batches copied and gathered out of an arena laid out at random, in one row group or several."""

import numpy as np
import pytest
import torch

from clients import batch as gather_module
from clients.batch import BatchReader
from clients.connection.buffers import BufferPool
from clients.connection.session import Session, views
from clients.torch import only_type
from loaderd.api.protocol import Attach, Blob, BlobArray, Release
from tests.clients.fake import POISON, fake_daemon, make_batch


def expected_edges(made):
    """Sources as stored; the targets of hop h are its frontier nodes, each as often as counted."""
    firsts = np.concatenate([[0], np.cumsum(made.nodes_per_hop)])
    targets = [np.repeat(firsts[h] + np.arange(c.size), c) for h, c in enumerate(made.counts)]
    return np.stack([made.src, np.concatenate(targets)])


def check(fields, made):
    batch = only_type(fields)
    np.testing.assert_array_equal(batch["n_id"], made.n_id)
    np.testing.assert_array_equal(batch["input_id"], made.input_id)
    np.testing.assert_array_equal(batch["edge_index"], expected_edges(made))
    assert batch["num_sampled_nodes"] == list(made.nodes_per_hop)
    assert batch["num_sampled_edges"] == [c.sum() for c in made.counts]
    for name in ("n_id", "input_id", "edge_index"):
        assert batch[name].dtype == torch.int64
        assert batch[name].numpy().flags.writeable
    rows = {"x": batch["x"], "y": batch["y"], **batch["features"]}
    rows["half"] = rows["half"].view(torch.int16)
    for name, values in made.rows.items():
        expected = values.astype(np.int64) if name == "y" else values
        found = rows[name].numpy().view(expected.dtype)
        np.testing.assert_array_equal(found, expected, strict=True)
        assert found.flags.writeable


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
    for step, fields in enumerate(held):
        check(fields, make_batch(2, step, 8))
    released = [(m.step, m.group) for m in daemon.received(Release)]
    assert released == [(step, group) for step in range(5) for group in range(groups)]
    assert (daemon.arena == POISON).any()


def test_edge_ids_come_where_asked_for(tmp_path):
    with fake_daemon(tmp_path, edge_ids=True) as daemon:
        session = Session(daemon.endpoint, Attach(token=0, request=0, return_e_id=True))
        session.start(0, 0)
        batch = only_type(BatchReader(session, BufferPool()).read(0))
        session.close()
    assert batch["e_id"].dtype == torch.int64
    num_edges = batch["edge_index"].size(1)
    np.testing.assert_array_equal(batch["e_id"], 2**40 + np.arange(num_edges))


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
