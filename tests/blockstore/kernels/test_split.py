"""Pieces of batches, by the kernel, against tests/split_reference.py."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from clients.connection.buffers import BufferPool  # noqa: E402
from clients.split import BatchStructure, split_structure  # noqa: E402
from clients.torch import Batch  # noqa: E402
from tests import split_reference  # noqa: E402


def random_structure(rng: np.random.Generator, num_owners: int, layers: bool) -> BatchStructure:
    """Two or three hops from some seeds; nodes are numbered as edges find them."""
    per_hop, src, counts = [int(rng.integers(1, 7))], list[int](), []
    for _ in range(rng.integers(2, 4)):
        known = sum(per_hop)
        edges = rng.integers(0, 4, known if layers else per_hop[-1])
        counts.append(edges.astype(np.uint32))
        for _ in range(edges.sum()):
            fresh = rng.random() < 0.4
            src.append(known if fresh else int(rng.integers(known)))
            known += fresh
        per_hop.append(known - sum(per_hop))
    owner = rng.integers(0, num_owners, sum(per_hop))
    dtype = np.uint8 if num_owners <= 256 else np.uint16
    return BatchStructure(owner.astype(dtype), per_hop, np.array(src, np.uint32), counts, layers)


def as_batch(whole: BatchStructure) -> Batch:
    """The same for the reference: nodes are called by their places."""
    starts = [0, *accumulate(whole.nodes_per_hop)]
    targets = [
        np.repeat(np.arange(c.size) + (0 if whole.layers else start), c)
        for c, start in zip(whole.counts, starts, strict=False)
    ]
    edges = np.stack([whole.src.astype(np.int64), np.concatenate(targets)])
    ids = torch.arange(whole.owner.size)
    return Batch(
        x=None, y=None, edge_index=torch.from_numpy(edges), n_id=ids, e_id=None,
        input_id=ids[: starts[1]], batch_size=starts[1],
        num_sampled_nodes=list(whole.nodes_per_hop),
        num_sampled_edges=[int(c.sum()) for c in whole.counts], epoch=0, step=0,
        frontier="layer" if whole.layers else "new",
    )  # fmt: skip


@given(st.integers(0, 10**9), st.sampled_from([1, 2, 3, 4, 8, 70]), st.booleans(), st.booleans())
@example(1, 300, False, False)
@example(2, 4, True, True)
def test_a_piece_is_that_of_the_reference(seed, num_owners, layers, one_has_all):
    whole = random_structure(np.random.default_rng(seed), num_owners, layers)
    if one_has_all:
        whole.owner[:] = num_owners - 1
    batch, memory = as_batch(whole), BufferPool()
    pieces = split_reference.split(batch, whole.owner.tolist(), num_owners)
    for mine in {*whole.owner.tolist(), 0, num_owners - 1}:
        piece, expected = split_structure(whole, mine, num_owners, memory, memory), pieces[mine]
        assert piece.own.tolist() == expected.n_id.tolist()
        assert piece.edges.tolist() == expected.edge_index.tolist()
        assert piece.nodes_per_hop == expected.num_sampled_nodes
        assert piece.remote_per_hop == expected.num_remote_nodes
        assert piece.edges_per_hop == expected.num_sampled_edges
        for found, exchange in zip(piece.exchanges, expected.exchanges, strict=True):
            assert found.numpy()["send"].tolist() == exchange.send.tolist()
            assert found.numpy()["recv"].tolist() == exchange.recv.tolist()
            assert found.send_counts == exchange.send_counts
            assert found.recv_counts == exchange.recv_counts
        here = np.concatenate([piece.own, piece.remote])
        assert piece.local[here].tolist() == list(range(here.size))
        assert (np.delete(piece.local, here) == -1).all()
