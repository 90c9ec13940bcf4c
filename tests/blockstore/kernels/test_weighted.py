"""Weighted draws: against plain Python, in distribution, and of long columns part by part."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.picks import BY_WEIGHT, Rule
from tests.blockstore.kernels.sampling import NO_TREES, draw_present
from tests.graphs import Csc, hold, make_csc
from tests.reference import weigh_edges


def draw(held, columns, fanout, key, replace=False):
    """Sources and edge ids of columns drawn over a packed graph."""
    return draw_present(held, columns, Rule(fanout, replace, BY_WEIGHT, np.uint64(key), *NO_TREES))


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.integers(0, 3000),
    st.integers(1, 80),
    st.integers(0, 2**63),
    st.sampled_from(["uint32", "uint64"]),
    st.booleans(),
)
def test_draws_are_the_references(degrees, long_degree, fanout, key, id_dtype, replace):
    # ids of edges as wide as those of nodes: each pair of widths is compiled for itself
    graph = make_csc([*degrees, long_degree, 3], 1, id_dtype, id_dtype)
    held = hold(graph, 4096, id_dtype, id_dtype, beside=(True, False))
    columns = list(range(graph.num_nodes))
    found = draw(held, columns, fanout, key, replace)
    for column in columns:
        expected = weigh_edges(graph.indptr, graph.weights, column, fanout, key, replace)
        assert found.sources[column] == graph.indices[expected].tolist()
        assert found.edge_ids[column] == graph.edge_ids[expected].tolist()


def test_edges_are_drawn_in_proportion_to_their_weights():
    graph = make_csc([40], 3, "uint32", "uint32")
    held = hold(graph, 4096, "uint32", "uint32", beside=(True, False))
    first, count = np.zeros(40), 3000
    for key in range(count):
        ((edge,),) = draw(held, [0], 1, key * 7919).edge_ids
        first[np.flatnonzero(graph.edge_ids == edge)] += 1
    share = graph.weights / graph.weights.sum()
    chi = ((first - count * share) ** 2 / (count * share)).sum()
    assert chi < 39 + 5 * np.sqrt(2 * 39)


def test_draws_with_replacement_are_independent():
    """Of 40 edges 8 draws: each edge in proportion to its weight, pairs of edges as often as two
    independent draws have them, the same edge twice included."""
    graph = make_csc([40], 3, "uint32", "uint32")
    held = hold(graph, 4096, "uint32", "uint32", beside=(True, False))
    place = {int(edge): k for k, edge in enumerate(graph.edge_ids)}
    count, fanout = 2000, 8
    drawn = np.array(
        [
            [place[edge] for edge in draw(held, [0], fanout, key * 7919, True).edge_ids[0]]
            for key in range(count)
        ]
    )
    share = graph.weights / graph.weights.sum()
    expected = count * fanout * share
    chi = ((np.bincount(drawn.ravel(), minlength=40) - expected) ** 2 / expected).sum()
    assert chi < 39 + 5 * np.sqrt(2 * 39)
    # equal pairs among the 28 of a column: each with probability sum(share ** 2)
    pairs = fanout * (fanout - 1) / 2
    equal = sum((np.bincount(row) * (np.bincount(row) - 1)).sum() / 2 for row in drawn)
    wanted = count * pairs * (share**2).sum()
    assert abs(equal - wanted) < 5 * np.sqrt(count * pairs * (share**2).sum() * 2)


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
        found = draw(held, [0, 1], fanout, key)
        for column in (0, 1):
            expected = weigh_edges(graph.indptr, graph.weights, column, fanout, key)
            assert found.edge_ids[column] == graph.edge_ids[expected].tolist()


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
    assert draw(held, [0], 5, 1).sources == [[]]
