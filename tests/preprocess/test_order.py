"""Breadth-first order against a naive queue of levels, in memory and from disk."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.progress import Progress
from preprocess.stages import order as stage
from preprocess.stages.csc import Columns
from preprocess.stages.order import ColumnFile, breadth_first


def naive_order(sources: list[list[int]], max_levels: int) -> list[int]:
    """The order as its definition says it; sources[v] are the in-neighbors of v."""
    num_nodes = len(sources)
    roots = sorted((v for v in range(num_nodes) if sources[v]), key=lambda v: (-len(sources[v]), v))
    order: list[int] = []
    seen: set[int] = set()
    frontier: list[int] = []
    wanted = 1
    for _ in range(max_levels):
        if not frontier:
            level = [v for v in roots if v not in seen][:wanted]
            wanted *= 2
            if not level:
                break
        else:
            found: dict[int, int] = {}
            for place, v in enumerate(frontier):
                for u in sources[v]:
                    if u not in seen:
                        found.setdefault(u, place)
            level = sorted(found, key=lambda u: (found[u], u))
        order += level
        seen |= set(level)
        frontier = level
    rest = [v for v in range(num_nodes) if v not in seen]
    return order + sorted(rest, key=lambda v: (not sources[v], v))


graphs = st.integers(1, 25).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, n - 1), max_size=5).map(sorted), min_size=n, max_size=n
    )
)


def find_order(folder: Path, sources: list[list[int]], mem_bytes: int):
    """Order and rank by the stage."""
    edges = np.array([u for row in sources for u in row], np.uint32)
    degrees = np.array([len(row) for row in sources], np.int64)
    held = ColumnFile(folder / "columns", degrees.size, edges.size, mem_bytes)
    cut = degrees.size // 2
    split = int(degrees[:cut].sum())
    try:
        held.append(Columns(0, degrees[:cut], edges[:split], None))
        held.append(Columns(cut, degrees[cut:], edges[split:], None))
        held.finish()
        with (folder / "log").open("w") as log:
            return breadth_first(held, Progress(log))
    finally:
        held.close()


@settings(deadline=None, max_examples=100)
@given(sources=graphs, levels=st.sampled_from([1, 2, 3, 4096]), few=st.sampled_from([0, 3, 100]))
def test_the_order_is_the_one_defined(tmp_path_factory, sources, levels, few):
    folder = tmp_path_factory.mktemp("order")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "MAX_LEVELS", levels)
        patch.setattr(stage, "_FEW", few)
        expected = naive_order(sources, levels)
        for mem_bytes in (1 << 30, 1):
            order, rank = find_order(folder, sources, mem_bytes)
            assert sorted(order.tolist()) == list(range(len(sources)))
            assert rank[order].tolist() == list(range(len(sources)))
            if levels == 4096:
                assert order.tolist() == expected
            placed = len([v for v in expected if sources[v]])
            assert order.tolist()[:1] == expected[:1] or not placed


def test_a_path_graph_ends(tmp_path: Path):
    sources = [[v - 1] if v else [] for v in range(6000)]
    order, _ = find_order(tmp_path, sources, 1 << 30)
    assert sorted(order.tolist()) == list(range(6000))


def test_isolated_nodes_come_last(tmp_path: Path):
    sources = [[], [3], [], [1], [], [1, 3]]
    order, _ = find_order(tmp_path, sources, 1 << 30)
    assert order.tolist() == [5, 1, 3, 0, 2, 4]
