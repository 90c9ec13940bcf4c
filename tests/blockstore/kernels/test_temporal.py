"""Draws up to a time against plain Python: boundaries, equal times, columns over several blocks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.kernels.links import find_ends
from blockstore.kernels.picks import LATEST, UNTIL, Rule
from blockstore.pack import unpack_block
from tests.blockstore.kernels.sampling import draw_present
from tests.graphs import Csc, Held, hold, make_csc
from tests.reference import pick_until


class FewTimes(Csc):
    """Five different times, so that many edges are of the limit itself, or of one time."""

    __slots__ = ()

    @property
    def times(self) -> Any:
        """int64 (num_edges,)"""
        return (np.arange(self.indices.size, dtype=np.int64) * 7 % 5) - 2


def draw(held: Held, limits: Any, roots: Any, fanout: int, last: bool, key: int) -> list[list[int]]:
    """Edge ids drawn of each column of a graph, each the root of a tree of its own."""
    num = held.graph.num_nodes
    kind = LATEST if last else UNTIL
    rule = Rule(fanout, False, kind, np.uint64(key), np.arange(num, dtype="u4"), limits, roots)
    found = draw_present(held, range(num), rule)
    assert found.edge_ids is not None
    for sources, edges in zip(found.sources, found.edge_ids, strict=True):
        places = [int(np.flatnonzero(held.graph.edge_ids == e)[0]) for e in edges]
        assert sources == held.graph.indices[places].tolist()
    return found.edge_ids


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.sampled_from([0, 300, 1000]),
    st.integers(1, 40),
    st.integers(-3, 3),
    st.booleans(),
    st.integers(0, 2**63),
    st.booleans(),
)
def test_draws_are_the_references(degrees, long_degree, fanout, limit, last, key, weights):
    plain = make_csc([*degrees, long_degree, 3], 1, "uint32", "uint32")
    graph = FewTimes(*plain)
    held = hold(graph, 4096, "uint32", "uint32", beside=(weights, True))
    assert long_degree < 300 or len(held.blocks) > 1
    limits = np.full(graph.num_nodes, limit, np.int64) + np.arange(graph.num_nodes) % 2
    roots = np.arange(graph.num_nodes, dtype=np.uint64) << np.uint64(20)
    for column, found in enumerate(draw(held, limits, roots, fanout, last, key)):
        expected = pick_until(
            graph.indptr, graph.times, column, int(limits[column]), fanout, key,
            int(roots[column]), last,
        )  # fmt: skip
        assert found == graph.edge_ids[expected].tolist(), f"column {column}"


@pytest.mark.parametrize("degree", [4, 1000])
@pytest.mark.parametrize("last", [False, True])
def test_edges_of_the_limit_count_and_later_ones_do_not(degree, last):
    graph = FewTimes(*make_csc([degree], 1, "uint32", "uint32"))
    held = hold(graph, 4096, "uint32", "uint32", beside=(False, True))
    for limit in range(-4, 4):
        (found,) = draw(held, np.array([limit]), np.zeros(1, np.uint64), degree, last, 5)
        assert found == graph.edge_ids[graph.times <= limit].tolist()


def test_times_of_edges_are_found_by_their_places():
    graph = FewTimes(*make_csc([5, 400, 3], 2, "uint32", "uint32"))
    held = hold(graph, 4096, "uint32", "uint32", beside=(True, True))
    first_edge = edges_before(held)
    places = np.arange(graph.indices.size, dtype=np.int64)[::-1].copy()
    blocks = (np.searchsorted(first_edge, places.astype(np.uint64), "right") - 1).astype(np.int32)
    out = np.zeros(places.size, np.int64)
    entries = np.arange(places.size, dtype=np.uint32)
    src, dst = np.empty(places.size, np.uint32), np.empty(places.size, np.uint32)
    find_ends(held.view(), entries, blocks, first_edge, src, dst, places, out)
    assert out.tolist() == graph.times[::-1].tolist()


def edges_before(held: Held) -> Any:
    """uint64 (blocks + 1,) edges before each block."""
    sizes = [unpack_block(block, "here").header.num_edges for block in held.blocks]
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64)
