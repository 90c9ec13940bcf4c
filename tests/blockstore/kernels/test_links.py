"""Seed edges: their ends, negatives and exclusions, against plain Python."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.kernels.links import draw_negatives, drop_excluded, find_ends, group_excluded
from tests import reference
from tests.graphs import held_graphs


@settings(max_examples=40)
@given(held=held_graphs(), seed=st.integers(0, 2**16))
def test_every_edge_has_the_ends_of_its_place(held, seed):
    num = held.graph.indices.size
    places = np.random.default_rng(seed).permutation(num)
    counts = [int(block[28:32].view(np.uint32)[0]) for block in held.blocks]
    first_edge = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    blocks = (np.searchsorted(first_edge, places.astype(np.uint64), "right") - 1).astype(np.int32)
    src, dst = np.zeros(num, held.id_dtype), np.zeros(num, held.id_dtype)
    index = places.astype(np.int64)
    entries, no_times = np.arange(num, dtype=np.uint32), np.empty(0, np.int64)
    find_ends(held.view(), entries, blocks, first_edge, src, dst, index, no_times)
    degrees = np.diff(held.graph.indptr)
    targets = held.nodes(np.repeat(np.arange(degrees.size), degrees))
    assert src.tolist() == held.graph.indices[places].tolist()
    assert dst.tolist() == targets[places].tolist()
    expected = held.graph.edge_ids.astype(np.int64)[places] if held.edge_id_dtype else places
    assert index.tolist() == expected.tolist()


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 50), st.integers(1, 100))
def test_negatives_are_the_references(num, count, start, num_nodes):
    out = np.empty(count, np.uint32)
    key = reference.make_key(3, 2, 1, reference.NEGATIVE, 1)
    draw_negatives(np.uint64(key), start, num, 7, num_nodes, out)
    nodes = range(7, 7 + num_nodes)
    assert out.tolist() == reference.draw_negatives(3, 2, 1, start, num, count, 1, nodes)


def test_negatives_are_uniform():
    """20,000 of 20 nodes: 1,000 each, within 5 standard deviations (154)."""
    out = np.empty(20_000, np.uint32)
    draw_negatives(np.uint64(9), 0, 100, 0, 20, out)
    assert all(abs(n - 1_000) < 154 for n in Counter(out.tolist()).values())


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=30),
    st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=9),
)
def test_what_is_excluded_goes_and_nothing_else(excluded, columns):
    places = np.array([p for p, _ in excluded], np.uint32)
    sources = np.array([s for _, s in excluded], np.uint32)
    starts, grouped = np.empty(7, np.uint32), np.empty_like(sources)
    group_excluded(places, sources, starts, grouped)
    counts = np.array([len(c) for c in columns], np.uint32)
    at = np.cumsum([0, *counts[:-1]]) + 3  # ids of edges stand elsewhere than their sources
    draws = np.zeros(int(counts.sum()) + 3, np.uint32)
    edges = np.zeros((draws.size, 1), np.uint32)
    for i, column in enumerate(columns):
        draws[at[i] : at[i] + len(column)] = column
        edges[at[i] - 3 : at[i] - 3 + len(column), 0] = 100 * i + np.arange(len(column))
    drop_excluded(starts, grouped, at, draws, at - 3, edges, counts, len(columns))
    for i, column in enumerate(columns):
        kept = [(s, 100 * i + k) for k, s in enumerate(column) if (i, s) not in set(excluded)]
        assert draws[at[i] : at[i] + counts[i]].tolist() == [s for s, _ in kept]
        assert edges[at[i] - 3 : at[i] - 3 + counts[i], 0].tolist() == [e for _, e in kept]
