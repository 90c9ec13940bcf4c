"""Orders of nodes against plain Python, in memory and streamed, and their properties."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.ingest.options import IngestOptions
from preprocess.stages import order as stage
from preprocess.stages.columns import ColumnFile
from preprocess.stages.csc import WholeColumns
from preprocess.stages.order import breadth_first, by_degree_class
from tests.preprocess import naive
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_csc import edge_lists


def order_of(
    num_nodes, edges, work: Path, in_memory: bool, share: int = 1 << 20, find=breadth_first
) -> list[int]:
    """The order of a graph given as sorted (target, source, id)."""
    path = work / "columns"
    with ColumnFile(None if in_memory else path, num_nodes, len(edges)) as file:
        degrees = np.bincount([e[0] for e in edges], minlength=num_nodes).astype(np.int64)
        ends = np.cumsum(degrees)
        sources = np.array([e[1] for e in edges], np.uint32)
        for first in range(0, num_nodes, 7):
            last = min(first + 7, num_nodes)
            low = ends[first] - degrees[first]
            part = sources[low : ends[last - 1]]
            file.append(WholeColumns(first, degrees[first:last], part, None))
        file.finish()
        order = find(file, share, QUIET)
    path.unlink(missing_ok=True)
    return order.tolist()


@settings(max_examples=20)
@given(
    graph=edge_lists(),
    levels=st.sampled_from([1, 3, 4096]),
    gap=st.sampled_from([0, 3, 1 << 14]),
    few=st.sampled_from([1, 4, 1 << 30]),
)
def test_the_order_is_that_of_the_definition(tmp_path_factory, graph, levels, gap, few):
    num_nodes, pairs = graph
    edges = naive.stored_edges(pairs, IngestOptions())
    expected = naive.breadth_first(num_nodes, edges, levels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "MAX_LEVELS", levels)
        patch.setattr(stage, "_GAP_EDGES", gap)
        patch.setattr(stage, "_FEW", few)
        work = tmp_path_factory.mktemp("work")
        assert order_of(num_nodes, edges, work, in_memory=True) == expected
        assert order_of(num_nodes, edges, work, in_memory=False, share=64) == expected
        assert order_of(num_nodes, edges, work, in_memory=False) == expected


@settings(max_examples=20)
@given(graph=edge_lists(), heavy=st.integers(1, 9))
def test_classes_of_out_degree_come_first_and_breadth_first_inside(tmp_path_factory, graph, heavy):
    num_nodes, pairs = graph
    pairs = pairs + pairs[:heavy] * heavy  # some nodes have many equal out-edges
    edges = naive.stored_edges(pairs, IngestOptions())
    degrees = np.bincount([src for src, _ in pairs], minlength=num_nodes).tolist()
    expected = sorted(
        naive.breadth_first(num_nodes, edges, 4096),
        key=lambda v: -len(f"{degrees[v]:b}") * (degrees[v] > 0),
    )
    work = tmp_path_factory.mktemp("work")
    for in_memory, share in ((True, 1 << 20), (False, 64), (False, 1 << 20)):
        assert order_of(num_nodes, edges, work, in_memory, share, by_degree_class) == expected


def test_out_degrees_count_not_in_degrees(tmp_path: Path):
    edges = [(0, v, v - 1) for v in range(1, 6)] + [(v, 5, v + 5) for v in range(6, 9)]
    order = order_of(10, sorted(edges), tmp_path, in_memory=True, find=by_degree_class)
    assert order == [5, 1, 2, 3, 4, 0, 6, 7, 8, 9]  # 0 has the most in-edges, and no out-edge


def test_a_path_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage, "MAX_LEVELS", 10)
    edges = [(v, v + 1, v) for v in range(99)]
    order = order_of(102, edges, tmp_path, in_memory=False)
    assert order == [*range(102)]  # 9 levels, the rest by id, two isolated nodes last


def test_isolated_nodes_are_last_and_by_id(tmp_path: Path):
    edges = [(4, 1, 0), (4, 6, 1), (6, 4, 2)]
    assert order_of(8, edges, tmp_path, in_memory=True) == [4, 1, 6, 0, 2, 3, 5, 7]


def test_many_components_take_few_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """4,000 pairs: roots in numbers 1, 2, 4, ... reach all of them in 2 * 12 levels."""
    monkeypatch.setattr(stage, "MAX_LEVELS", 26)
    edges = [(2 * i, 2 * i + 1, i) for i in range(4000)]
    order = order_of(8000, edges, tmp_path, in_memory=False)
    assert order[:8] == [0, 1, 2, 4, 3, 5, 6, 8]
    assert sorted(order) == list(range(8000))
    assert order[-1] % 2 == 1  # the last level, not what is left by id
