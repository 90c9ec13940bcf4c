"""Edges into sorted columns, step by step, against plain Python."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.kernels import edges as k

NODES = 8
EDGES = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=30)


def arrays(edges: Any) -> tuple[Any, Any]:
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def naive(edges: Any, first: int, num_edges: int, undirected: bool, loops: bool) -> list[Any]:
    """(target, source, id) of each edge that is stored."""
    found = []
    for i, (u, v) in enumerate(edges):
        if u == v and not loops:
            continue
        found.append((v, u, first + i))
        if undirected and u != v:
            found.append((u, v, first + i + num_edges))
    return found


@settings(deadline=None)
@given(EDGES, st.integers(0, 50), st.booleans(), st.booleans(), st.booleans())
def test_edges_are_expanded_and_counted(edges, first, undirected, loops, ranked):
    src, dst = arrays(edges)
    num_edges, rank = 100, np.arange(NODES, dtype=np.uint32)[::-1].copy()
    out = [np.zeros(2 * len(edges), np.int64) for _ in range(3)]
    none = np.empty(0, np.uint32)
    ranks = (rank, rank) if ranked else (none, none)
    ends = k.Ends(undirected, loops, *ranks, 10, 20, 3)
    count = k.expand_edges(src, dst, first, num_edges, ends, k.Records(*out))
    expected = [
        (int(rank[v]) - 3, int(rank[u]), e) if ranked else
        (v + 20 - 3, u + 10, e) if e < num_edges else (v + 10 - 3, u + 20, e)
        for v, u, e in naive(edges, first, num_edges, undirected, loops)
    ]  # fmt: skip
    assert list(zip(*(o[:count].tolist() for o in out), strict=True)) == expected
    counts = np.zeros(NODES, np.uint32)
    k.count_targets(src, dst, undirected, loops, counts)
    targets = [v for v, _, _ in naive(edges, first, num_edges, undirected, loops)]
    assert counts.tolist() == np.bincount(targets or [0], minlength=NODES).tolist() or not targets
    assert counts.sum() == len(targets)


def columns_of(records: Any, column_bits: int, drop_equal: bool) -> list[Any]:
    """Kept (column, source, id) in order, of (column, source, id) records, by the kernels."""
    src_bits, id_bits = 3, 6
    keys = np.array([c << src_bits | s for c, s, _ in records], np.uint64)
    ids = np.array([e for _, _, e in records], np.uint32)
    groups = -(-NODES >> column_bits)
    starts, values = np.zeros(groups + 1, np.int64), np.empty(len(records), np.uint64)
    k.group_columns(keys, ids, src_bits, id_bits, column_bits, starts, values)
    assert starts[-1] == len(records)
    for g in range(groups):
        values[starts[g] : starts[g + 1]].sort()
    degrees, sources = np.zeros(NODES, np.int64), np.zeros(len(records), np.uint32)
    edge_ids = np.zeros(len(records), np.uint32)
    kept = k.split_values(
        values, starts, src_bits, id_bits, column_bits, drop_equal, degrees, sources, edge_ids
    )
    assert degrees.sum() == kept
    columns = np.repeat(np.arange(NODES), degrees).tolist()
    return list(zip(columns, sources[:kept].tolist(), edge_ids[:kept].tolist(), strict=True))


@settings(deadline=None)
@given(EDGES, st.integers(0, 3), st.booleans())
def test_columns_are_sorted_and_of_equal_edges_the_first_stays(edges, column_bits, drop_equal):
    records = [(c, s, i) for i, (c, s) in enumerate(edges)]
    expected = sorted(records)
    if drop_equal:
        seen: set[Any] = set()
        expected = [r for r in expected if not (r[:2] in seen or seen.add(r[:2]))]
    assert columns_of(records, column_bits, drop_equal) == expected


@pytest.mark.parametrize("column_bits", [0, 1, 2])
def test_equal_sources_of_columns_in_two_groups_are_not_equal_edges(column_bits):
    """The last edge of a group and the first of the next look alike but for their group."""
    records = [(c, 5, c) for c in range(NODES)]
    assert columns_of(records, column_bits, drop_equal=True) == records


@given(st.lists(st.integers(-2, 12), max_size=20), st.integers(0, 11))
def test_the_first_id_outside_is_told(ids, limit):
    outside = [i for i, v in enumerate(ids) if not 0 <= v < limit]
    assert k.first_outside(np.array(ids, np.int64), limit) == (outside or [-1])[0]


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(30, 90))
def test_ranges_of_columns_are_cut_as_late_as_they_can_be(counts, maximum):
    bounds, sizes = k.cut_ranges(np.array(counts, np.uint32), 3, 2, maximum)
    assert (bounds[0], bounds[-1]) == (0, len(counts))
    for r in range(sizes.size):
        low, high = int(bounds[r]), int(bounds[r + 1])
        assert sizes[r] == sum(counts[low:high])
        taken = sum(3 * c + 2 for c in counts[low:high])
        assert taken <= maximum
        assert high == len(counts) or taken + 3 * counts[high] + 2 > maximum
