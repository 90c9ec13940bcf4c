"""External sorting of edges against sorting them all, whatever the memory."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.ingest.options import IngestOptions
from preprocess.kernels.edges import NO_RANKS, Ends, cut_ranges
from preprocess.stages.csc import (
    COLUMN_BYTES,
    ColumnSorter,
    WholeColumns,
    Widths,
    _sort_wide,
    cut_buckets,
    sorted_columns,
    source_edges,
)
from preprocess.stages.scan import count_edges
from tests.preprocess.naive import ArraySource, stored_edges
from tests.preprocess.quiet import QUIET

POLICIES = st.builds(
    IngestOptions,
    undirected=st.booleans(),
    duplicates=st.sampled_from(["keep", "drop"]),
    self_loops=st.sampled_from(["keep", "drop"]),
    edge_ids=st.booleans(),
    ids=st.sampled_from(["auto", "uint64"]),
)


@st.composite
def edge_lists(draw, max_nodes=40):
    """(nodes, edges): self-loops, duplicates, isolated nodes and hubs come of themselves."""
    num_nodes = draw(st.integers(1, max_nodes))
    node = st.integers(0, num_nodes - 1)
    hub = st.integers(0, min(2, num_nodes - 1))
    edge = st.tuples(node, node) | st.tuples(node, hub)
    return num_nodes, draw(st.lists(edge, max_size=150))


def flat(columns: list[WholeColumns]) -> list[tuple[int, int, int]]:
    """(target, source, edge id) of each edge; columns follow one another."""
    found, following = [], 0
    for part in columns:
        assert part.first == following
        following += part.degrees.size
        dst = np.repeat(np.arange(part.first, following), part.degrees).tolist()
        ids = [-1] * len(dst) if part.edge_ids is None else part.edge_ids.tolist()
        found += zip(dst, part.sources.tolist(), ids, strict=True)
    return found


def keep(columns: WholeColumns) -> WholeColumns:
    """A copy: what a sorter gives is valid until the next ones are made."""
    ids = columns.edge_ids
    return columns._replace(
        sources=columns.sources.copy(), edge_ids=None if ids is None else ids.copy()
    )


def sort_all(num_nodes, edges, options, share, work, rank=None):
    """The stage with `share` bytes, or what the longest column needs."""
    source = ArraySource(num_nodes, edges)
    (relation,) = source.relations
    counts = count_edges(
        source, relation, options.undirected, options.self_loops == "keep", share, QUIET
    )
    if rank is not None:
        moved = np.empty_like(counts)
        moved[rank] = counts
        counts = moved
    edge = "uint32" if options.edge_ids else None
    widths = Widths.of(options.node_dtype(num_nodes), num_nodes, edge, len(edges))
    minimum = int(counts.max()) * widths.sort_bytes + COLUMN_BYTES
    share = max(share, 4 * (minimum // 3 + 1))
    ranks = NO_RANKS if rank is None else rank
    ends = Ends(options.undirected, options.self_loops == "keep", ranks, ranks)
    records = source_edges(source, relation, ends, bool(edge), share // 4, QUIET)
    columns = [
        keep(c)
        for c in sorted_columns(records, counts, widths, options.drop_equal, share, work, QUIET)
    ]
    assert list(work.iterdir()) == []
    return columns


@settings(max_examples=30)
@given(graph=edge_lists(), options=POLICIES, share=st.sampled_from([64, 2000, 1 << 20]))
def test_columns_are_the_sorted_edges(tmp_path_factory, graph, options, share):
    num_nodes, edges = graph
    work = tmp_path_factory.mktemp("work")
    columns = sort_all(num_nodes, edges, options, share, work)
    expected = stored_edges(edges, options)
    if not options.edge_ids:
        expected = [(dst, src, -1) for dst, src, _ in expected]
    assert flat(columns) == expected
    assert {c.sources.dtype for c in columns} == {np.dtype(options.node_dtype(num_nodes))}


@settings(max_examples=30)
@given(graph=edge_lists(), options=POLICIES, seed=st.integers(0, 1000))
def test_renamed_columns_are_the_renamed_graph(tmp_path_factory, graph, options, seed):
    num_nodes, edges = graph
    rank = np.random.default_rng(seed).permutation(num_nodes).astype(np.uint32)
    renamed = [(int(rank[u]), int(rank[v])) for u, v in edges]
    a, b = (tmp_path_factory.mktemp(name) for name in "ab")
    got = flat(sort_all(num_nodes, edges, options, 500, a, rank))
    assert got == flat(sort_all(num_nodes, renamed, options, 1 << 20, b))


def test_small_memory_makes_many_buckets(tmp_path: Path):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 300, (5000, 2)).tolist()
    columns = sort_all(300, edges, IngestOptions(), 6000, tmp_path)
    assert len(columns) > 12


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    maximum=st.integers(9 * 7 + 3, 200),
)
def test_ranges_are_as_long_as_they_can_be(counts, maximum):
    counts = np.array(counts, np.uint32)
    bounds, sizes = cut_ranges(counts, 7, 3, maximum)
    assert bounds[0] == 0
    assert bounds[-1] == counts.size
    taken = [7 * int(counts[a:b].sum()) + 3 * (b - a) for a, b in pairwise(bounds.tolist())]
    assert max(taken) <= maximum
    for i in range(sizes.size - 1):
        assert taken[i] + 7 * counts[bounds[i + 1]] + 3 > maximum
    assert sizes.tolist() == [int(counts[a:b].sum()) for a, b in pairwise(bounds.tolist())]


def test_a_bucket_is_never_smaller_than_the_longest_column():
    counts = np.array([1, 50, 1], np.uint32)
    widths = Widths.of("uint32", 3, None, 52)
    bounds, sizes = cut_buckets(counts, widths, 50 * widths.sort_bytes + COLUMN_BYTES)
    assert bounds.tolist() == [0, 1, 2, 3]
    assert sizes.tolist() == [1, 50, 1]


@given(graph=edge_lists(), drop=st.booleans())
def test_ids_that_do_not_fit_a_word_are_sorted_the_same(graph, drop):
    num_nodes, edges = graph
    narrow = Widths.of("uint64", num_nodes, "uint64", len(edges))
    wide = Widths("uint64", "uint64", narrow.node_bits, 64)
    assert wide.too_wide
    keys = np.array([v << wide.node_bits | u for u, v in edges], np.uint64)
    ids = np.random.default_rng(1).permutation(len(edges)).astype(np.uint64)
    got = flat([ColumnSorter(wide, drop).from_bucket(keys.copy(), ids, 0, num_nodes)])
    assert got == flat([ColumnSorter(narrow, drop).from_bucket(keys, ids, 0, num_nodes)])


@given(graph=edge_lists(), drop=st.booleans(), spare=st.integers(0, 4))
def test_groups_of_columns_change_nothing(graph, drop, spare):
    """A word that has few bits left for the column: every 2**spare columns are sorted alone."""
    num_nodes, edges = graph
    enough = Widths.of("uint32", num_nodes, "uint64", len(edges))
    tight = Widths("uint32", "uint64", enough.node_bits, 64 - enough.node_bits - spare)
    assert tight.column_bits == spare
    keys = np.array([v << enough.node_bits | u for u, v in edges], np.uint64)
    ids = np.random.default_rng(1).permutation(len(edges)).astype(np.uint64)
    got = flat([keep(ColumnSorter(tight, drop).from_bucket(keys.copy(), ids, 0, num_nodes))])
    assert got == flat([ColumnSorter(enough, drop).from_bucket(keys, ids, 0, num_nodes)])


def test_long_columns_are_sorted_too(tmp_path: Path):
    rng = np.random.default_rng(5)
    edges = [(int(u), 1) for u in rng.integers(0, 5000, 3000)] + [(3, 4), (2, 4)]
    options = IngestOptions(edge_ids=True)
    assert flat(sort_all(5000, edges, options, 1 << 20, tmp_path)) == stored_edges(edges, options)


@pytest.mark.parametrize(("nodes", "edges", "wide"), [(10, 10, False), (2**40, 2**30, True)])
def test_widths(nodes, edges, wide):
    assert Widths.of("uint64", nodes, "uint64", edges).too_wide is wide


@pytest.mark.parametrize("drop_equal", [False, True])
def test_wide_edges_are_sorted_and_columns_without_any_are_there(drop_equal):
    """Source and edge id do not fit one word; the last columns of a bucket are empty."""
    widths = SimpleNamespace(node_bits=3, node="uint64")
    keys = np.array([2 << 3 | 5, 1 << 3 | 7, 2 << 3 | 5, 1 << 3 | 1], np.uint64)
    found = _sort_wide(keys, np.array([9, 8, 4, 6]), 10, 16, widths, drop_equal)
    assert found.degrees.tolist() == [0, 2, 1 if drop_equal else 2, 0, 0, 0]
    assert found.sources.tolist() == [1, 7, 5] + [5] * (not drop_equal)
    assert found.edge_ids.tolist() == [6, 8, 4] + [9] * (not drop_equal)
