"""The external sort of edges against plain sorting, for any number of buckets and chunks."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockstore.errors import BudgetTooSmall
from preprocess.options import IngestOptions
from preprocess.progress import Progress
from preprocess.source import SourceRelation
from preprocess.stages import csc
from preprocess.stages.csc import Dtypes, count_edges, cut_buckets, sorted_columns


class Edges:
    """A source of edges that are given, in chunks."""

    def __init__(self, num_nodes: int, edges: NDArray[np.int64], chunk: int) -> None:
        self.num_nodes = {"node": num_nodes}
        self._edges, self._chunk = edges, chunk

    def edges(self, relation: SourceRelation, count: int) -> Iterator[tuple[Any, Any]]:
        for first in range(0, self._edges.shape[1], self._chunk):
            src, dst = self._edges[:, first : first + self._chunk]
            yield src.copy(), dst.copy()


def naive_columns(num_nodes: int, edges: NDArray[np.int64], options: IngestOptions, rank: Any):
    """(dst, src, edge id) of every edge kept, sorted: what the stage must give."""
    rows, total = [], edges.shape[1]
    for i, (src, dst) in enumerate(edges.T.tolist()):
        if src == dst and options.self_loops == "drop":
            continue
        rows.append((rank[dst], rank[src], i))
        if options.undirected and src != dst:
            rows.append((rank[src], rank[dst], total + i))
    rows.sort()
    if options.drop_equal:
        rows = [r for i, r in enumerate(rows) if i == 0 or r[:2] != rows[i - 1][:2]]
    return rows


@st.composite
def cases(draw: st.DrawFn):
    num_nodes = draw(st.integers(1, 12))
    ends = st.integers(0, num_nodes - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=60))
    options = IngestOptions(
        undirected=draw(st.booleans()),
        edge_ids=draw(st.booleans()),
        duplicates=draw(st.sampled_from(["keep", "drop"])),
        self_loops=draw(st.sampled_from(["keep", "drop"])),
    )
    edges = np.array(pairs, np.int64).reshape(-1, 2).T
    rank = np.array(draw(st.permutations(range(num_nodes))), np.uint32)
    return num_nodes, edges, options, rank, draw(st.integers(1, 9)), draw(st.integers(40, 200))


@settings(deadline=None, max_examples=150)
@given(case=cases(), wide=st.booleans())
def test_columns_equal_plain_sorting(case: Any, wide: bool):
    num_nodes, edges, options, rank, chunk, room = case
    source = Edges(num_nodes, edges, chunk)
    relation = SourceRelation("node", "to", "node", edges.shape[1], "edges")
    dtypes = Dtypes("uint64" if wide else "uint32", "uint32" if options.edge_ids else "")
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w") as log:
        progress = Progress(log)
        counts = count_edges(source, relation, options, progress)
        moved = np.empty_like(counts)
        moved[rank] = counts
        longest = int(counts.max(initial=1)) * (csc.SORT_BYTES + 24)
        found = list(
            sorted_columns(
                source, relation, moved, rank.astype(dtypes.node), options, dtypes,
                2 * max(longest, room), Path(name), progress,
            )
        )  # fmt: skip
        assert [p.name for p in Path(name).iterdir()] == ["log"]
    rows, at = [], 0
    for columns in found:
        assert columns.first == at
        at += columns.degrees.size
        dst = np.repeat(np.arange(columns.first, at), columns.degrees)
        ids = columns.edge_ids if options.edge_ids else np.zeros(dst.size, np.int64)
        rows += list(zip(dst.tolist(), columns.sources.tolist(), ids.tolist(), strict=True))
    expected = naive_columns(num_nodes, edges, options, rank.tolist())
    if not options.edge_ids:
        expected = [(dst, src, 0) for dst, src, _ in expected]
    assert at == num_nodes
    assert rows == expected


def test_buckets_hold_what_memory_holds():
    counts = np.array([5, 0, 7, 3, 3, 0, 10], np.uint32)
    bounds = cut_buckets(counts, 10 * csc.SORT_BYTES, with_ids=False)
    assert bounds.tolist() == [0, 2, 4, 6, 7]


def test_a_column_longer_than_memory_says_what_would_do():
    counts = np.array([1, 1000], np.uint32)
    with pytest.raises(BudgetTooSmall, match=r"node 1 has 1,000 in-edges.*at least --mem"):
        cut_buckets(counts, 100 * csc.SORT_BYTES, with_ids=False)
