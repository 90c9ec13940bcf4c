"""LABOR's draws: against plain Python, unbiased over keys, and agreeing between columns."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockstore.kernels.jit import leaf
from blockstore.kernels.packed import PackedIds
from blockstore.kernels.picks import BY_SOURCE, Column, Rule
from blockstore.kernels.ranked import Heap, rank_edges
from tests.blockstore.kernels.sampling import NO_TREES, Found, draw_present, uniform
from tests.graphs import Csc, Held, hold, make_csc
from tests.reference import rank_sources

KEYS = 2000  # of a test in distribution
NOTHING, ZERO = np.zeros(8, np.uint8), np.uint64(0)


def draw(held: Held, columns: Any, fanout: int, key: int) -> Found:
    """Sources and edge ids of columns drawn over a packed graph."""
    return draw_present(held, columns, Rule(fanout, False, BY_SOURCE, np.uint64(key), *NO_TREES))


def ascending(graph: Csc, sources: int) -> Csc:
    """The same columns with sources below a bound, ascending as a store's are."""
    indices = graph.indices % sources
    for start, stop in zip(graph.indptr[:-1], graph.indptr[1:], strict=True):
        indices[start:stop].sort()
    return Csc(graph.indptr, indices, graph.edge_ids)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.sampled_from([0, 900, 1020, 3000]),
    st.integers(1, 80),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["uint32", "uint64"]),
    st.sampled_from([2, 30, 10**6]),
)
def test_draws_are_the_references(degrees, long_degree, fanout, key, id_dtype, sources):
    """With few sources many edges are parallel, also where a column goes on in the next block."""
    # ids of edges as wide as those of nodes: each pair of widths is compiled for itself
    graph = ascending(make_csc([*degrees, long_degree, 3], 1, id_dtype, id_dtype), sources)
    held = hold(graph, 4096, id_dtype, id_dtype)
    columns = list(range(graph.num_nodes))
    found = draw(held, columns, fanout, key)
    for column in columns:
        expected = rank_sources(graph.indptr, graph.indices, column, fanout, key)
        assert found.sources[column] == graph.indices[expected].tolist()
        assert found.edge_ids[column] == graph.edge_ids[expected].tolist()


def test_a_draw_does_not_depend_on_the_size_of_blocks():
    graph = ascending(make_csc([9000, 5, 2500], 1, "uint32", "uint32"), 40)
    by_size = [
        draw(hold(graph, size, "uint32", "uint32"), [0, 1, 2], 50, 11).edge_ids
        for size in (4096, 8192, 65536)
    ]
    assert by_size[0] == by_size[1] == by_size[2]


@example([1, 0, 2, 0], 1, 2)
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 6), st.integers(0, 40))
def test_parts_of_a_column_may_come_in_any_order(sources, fanout, cut):
    """Also where edges of one source lie apart, and so have equal ranks."""
    ids = PackedIds(np.append(np.array(sources, np.uint64).view(np.uint8), NOTHING), 64, ZERO)
    rule = Rule(fanout, False, BY_SOURCE, np.uint64(5), *NO_TREES)
    column = Column(np.zeros(1, np.uint32), 0, np.zeros(1, np.uint32), rule)
    cut = min(cut, len(sources))
    parts = [(0, cut), (cut, len(sources) - cut)]
    ranks = rank_parts(ids, column, parts)
    assert ranks == rank_parts(ids, column, parts[::-1])


@leaf
def rank_part(ids, floats, longs, part, column, heap, found):
    first, count = part
    return rank_edges(ids, floats, longs, 64 * first, first, count, column, 0, heap, found)


def rank_parts(ids: PackedIds, column: Column, parts: Any) -> list[tuple[int, int]]:
    """(rank, position) of what is picked of a column whose parts come in this order."""
    fanout, unused = column.rule.fanout, np.empty(0, np.int64)
    heap, found = Heap(np.empty(fanout, np.int64), np.empty(fanout, np.int64)), 0
    for part in parts:
        found = rank_part(ids, unused.view(np.float64), unused, part, column, heap, found)
    return sorted(zip(heap.ranks[:found].tolist(), heap.positions[:found].tolist(), strict=True))


@pytest.mark.parametrize("sources", [7, 10**6])
def test_each_edge_of_a_column_is_picked_equally_often(sources):
    """Singles and pairs, parallel edges too: chi-square, five deviations off its mean."""
    degree, fanout = 20, 6
    graph = ascending(make_csc([degree], 3, "uint32", "uint32"), sources)
    graph = graph if sources < degree else Csc(graph.indptr, np.arange(20, dtype="u4"), graph[2])
    assert (np.diff(graph.indices) == 0).any() == (sources < degree)
    held = hold(graph, 4096, "uint32", "uint32")
    place = {int(edge): k for k, edge in enumerate(graph.edge_ids)}
    together = np.zeros((degree, degree))
    for key in range(KEYS):
        ((*edges,),) = draw(held, [0], fanout, key * 7919).edge_ids
        mine = [place[e] for e in edges]
        together[np.ix_(mine, mine)] += 1
    singles = np.diag(together)
    share = KEYS * fanout / degree
    # counts of edges of one draw are tied: their variance is a hypergeometric draw's
    chi = ((singles - share) ** 2).sum() / (share * (1 - fanout / degree)) * (degree - 1) / degree
    assert chi < degree - 1 + 5 * np.sqrt(2 * (degree - 1))
    pairs = together[np.triu_indices(degree, 1)]
    share = KEYS * fanout * (fanout - 1) / (degree * (degree - 1))
    assert (abs(pairs - share) < 5 * np.sqrt(share)).all()


def test_the_mean_of_neighbors_features_is_unbiased():
    """Of every column, within five standard errors of the mean over keys."""
    fanout = 4
    degrees = [5, 9, 30, 60, 1500]
    graph = ascending(make_csc(degrees, 5, "uint32", "uint32"), 50)
    held = hold(graph, 4096, "uint32", "uint32")
    features = np.random.default_rng(2).exponential(1.0, 50)
    keys = 750
    means = np.array(
        [
            [features[s].mean() for s in draw(held, range(len(degrees)), fanout, key).sources]
            for key in np.random.default_rng(3).integers(0, 2**63, keys)
        ]
    )
    for column, degree in enumerate(degrees):
        edges = features[graph.indices[graph.indptr[column] :][:degree]]
        error = means[:, column].std() / np.sqrt(keys)
        assert abs(means[:, column].mean() - edges.mean()) < 5 * error, f"column {column}"


def test_columns_of_equal_sources_agree_and_together_find_fewer():
    """Two columns over the same sources pick the same; one key a column, as uniform, many more."""
    sources = np.arange(0, 120, 3, dtype=np.uint32)
    indices = np.tile(sources, 30)
    indptr = np.arange(0, indices.size + 1, sources.size, dtype=np.int64)
    graph = Csc(indptr, indices, np.arange(indices.size, dtype=np.uint32))
    held = hold(graph, 4096, "uint32", "uint32")
    found = draw(held, range(30), 5, 77).sources
    assert all(picks == found[0] for picks in found)
    apart = draw_present(held, range(30), uniform(5, 77)).sources
    assert len({s for picks in apart for s in picks}) > 30
