"""Weighted draws: against plain Python, in distribution, and of giants part by part."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels import weighted as k
from tests.graphs import Csc, hold, make_csc
from tests.reference import weigh_edges

NONE32 = np.empty(0, np.uint32)
NO_ITEMS = np.empty(0, np.int64)


def draw(held, weights, columns, fanout, key, batch=1000):
    """Sources, edge ids and counts of columns drawn over a packed graph."""
    nodes, blocks = held.nodes(columns), held.block_of(columns)
    num = len(columns)
    starts = np.arange(num, dtype=np.int64) * fanout
    draws, edges = np.zeros(num * fanout, held.id_dtype), np.zeros(num * fanout, np.uint32)
    counts = np.zeros(num, np.uint32)
    giants, degrees = np.zeros(num, np.uint32), np.zeros(num, np.int64)
    arena32, arena_f = held.arena.view(np.uint32), held.arena.view(np.float32)
    shared = (held.slot_bytes, held.ids().itemsize, 4, held.capacity, fanout, key)
    count = k.sample_weighted(
        arena32, held.ids(), arena32, arena_f, nodes, NONE32, 0, num, blocks, held.first_node,
        held.slot_of_block, *shared, starts, draws, starts, edges, NO_ITEMS, counts, giants,
        degrees, 0,
    )  # fmt: skip
    keys, places = np.empty((count, max(1, fanout))), np.empty((count, max(1, fanout)), np.int64)
    found = np.zeros(count, np.int64)
    marks = np.zeros(len(held.blocks), np.uint8)
    k.mark_whole_giants(giants, degrees, count, blocks, held.capacity, marks)
    for block in np.flatnonzero(marks)[::-1]:  # one at a time, from the last
        only = np.full(len(held.blocks), -1, np.int32)
        only[block] = held.slot_of_block[block]
        k.weigh_giants(
            arena32, arena_f, giants, degrees, count, nodes, blocks, only, *shared, keys, places,
            found,
        )  # fmt: skip
    for row, size in zip(places, found, strict=True):
        row[:size].sort()
    picked = np.zeros(len(held.blocks), np.uint8)
    k.mark_picked_giants(giants, count, blocks, held.capacity, places, found, picked)
    assert not (picked & ~marks).any()
    k.fetch_giants(
        arena32, held.ids(), arena32, giants, count, blocks, held.slot_of_block, *shared[:4],
        places, found, starts, draws, starts, edges, NO_ITEMS, counts,
    )  # fmt: skip
    return draws.reshape(num, -1), edges.reshape(num, -1), counts


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.integers(0, 3000),
    st.integers(1, 80),
    st.integers(0, 2**63),
    st.sampled_from(["uint32", "uint64"]),
)
def test_draws_are_the_references(degrees, giant, fanout, key, id_dtype):
    graph = make_csc([*degrees, giant, 3], 1, id_dtype, "uint32")
    held = hold(graph, 4096, id_dtype, "uint32", beside=(True, False))
    columns = list(range(graph.num_nodes))
    draws, edges, counts = draw(held, graph.weights, columns, fanout, np.uint64(key))
    for column in columns:
        expected = weigh_edges(graph.indptr, graph.weights, column, fanout, key)
        n = counts[column]
        assert n == len(expected)
        assert draws[column, :n].tolist() == graph.indices[expected].tolist()
        assert edges[column, :n].tolist() == graph.edge_ids[expected].tolist()


def test_edges_are_drawn_in_proportion_to_their_weights():
    graph = make_csc([40], 3, "uint32", "uint32")
    held = hold(graph, 4096, "uint32", "uint32", beside=(True, False))
    first = np.zeros(40)
    for key in range(6000):
        _, edges, counts = draw(held, graph.weights, [0], 1, np.uint64(key * 7919))
        assert counts[0] == 1
        first[np.flatnonzero(graph.edge_ids == edges[0, 0])] += 1
    share = graph.weights / graph.weights.sum()
    chi = ((first - 6000 * share) ** 2 / (6000 * share)).sum()
    assert chi < 39 + 5 * np.sqrt(2 * 39)


class FewWeights(Csc):
    """Weights that are zero but for one of 97, of very different sizes."""

    __slots__ = ()

    @property
    def weights(self) -> Any:
        """float32 (num_edges,)"""
        places = np.arange(self.indices.size)
        sizes = np.array([1e-30, 1, 1e30], np.float32)[places % 3]
        return np.where(places % 97 == 5, sizes, np.float32(0))


@pytest.mark.parametrize("fanout", [1, 4, 20, 1000])
@pytest.mark.parametrize("degree", [1, 5, 6, 200, 3000])
def test_edges_of_weight_zero_are_never_drawn(degree, fanout):
    """Also where fewer edges have a weight than are wanted, in a block or in several."""
    graph = FewWeights(*make_csc([degree, 2], 1, "uint32", "uint32"))
    held = hold(graph, 4096, "uint32", "uint32", beside=(True, False))
    for key in (3, 2**63):
        _, edges, counts = draw(held, graph.weights, [0, 1], fanout, np.uint64(key))
        for column in (0, 1):
            expected = weigh_edges(graph.indptr, graph.weights, column, fanout, key)
            assert counts[column] == len(expected)
            assert edges[column, : counts[column]].tolist() == graph.edge_ids[expected].tolist()


class NoWeights(Csc):
    """Weights that are all zero."""

    __slots__ = ()

    @property
    def weights(self) -> Any:
        """float32 (num_edges,)"""
        return np.zeros(self.indices.size, np.float32)


@pytest.mark.parametrize("degree", [7, 3000])
def test_nothing_is_drawn_where_all_weights_are_zero(degree):
    graph = NoWeights(*make_csc([degree], 1, "uint32", "uint32"))
    held = hold(graph, 4096, "uint32", "uint32", beside=(True, False))
    _, _, counts = draw(held, graph.weights, [0], 5, np.uint64(1))
    assert counts.tolist() == [0]
