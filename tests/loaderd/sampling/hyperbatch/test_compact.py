"""Structures come back from an area as they were, whatever room they took there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.plans.base import Unit
from loaderd.sampling.hyperbatch.areas import AreaFull, StructureArea
from loaderd.sampling.hyperbatch.compact import (
    compact,
    expand,
    keep_counts,
    keep_sources,
    kept_sources,
    move_sources,
)
from tests.loaderd.sampling.hyperbatch.test_single import STRUCTURE, make_work


@st.composite
def found(draw):
    """(local sources, first new node, nodes after): nodes are numbered as edges find them."""
    new = first = draw(st.integers(1, 9) | st.integers((1 << 16) - 3, (1 << 16) + 3))
    local = []
    for is_new in draw(st.lists(st.booleans(), max_size=300)):
        local.append(new if is_new else draw(st.integers(0, new - 1)))
        new += is_new
    return np.array(local, np.uint32), first, new


@given(found(), st.data())
def test_local_sources_come_back_in_any_pieces(case, data):
    local, first, num_nodes = case
    area, other = (StructureArea(np.zeros(1 << 14, np.uint8)) for _ in range(2))
    first_kept = keep_sources(local, first, num_nodes, area)
    moved = move_sources(first_kept, other)
    for array in first_kept[1:]:
        array[:] = 0  # what was moved does not lie there any more
    kept = kept_sources(moved, local.size)
    assert kept.size == local.size
    low = data.draw(st.integers(0, local.size))
    high = data.draw(st.integers(low, local.size))
    out = np.full(high - low, 99, np.uint32)
    kept.write(low, out)
    assert out.tolist() == local[low:high].tolist()


def test_a_batch_of_more_nodes_than_three_bytes_number():
    new = (1 << 24) - 2
    local = np.array([new, 5, new + 1, new + 2, new + 2, new + 3, 0], np.uint32)
    kept = keep_sources(local, new, new + 4, StructureArea(np.zeros(1024, np.uint8)))
    out = np.empty(7, np.uint32)
    kept_sources(kept, 7).write(0, out)
    assert out.tolist() == local.tolist()


def test_an_edge_takes_a_bit_or_three_bytes():
    """10,000 edges, of which 6,000 find a node: 1,250 bytes and 12,003, 40,000 before."""
    rng = np.random.default_rng(1)
    is_new = rng.permutation(np.arange(10_000) < 6000)
    after = 100 + np.cumsum(is_new)
    local = np.where(is_new, after - 1, rng.integers(0, 100, 10_000)).astype(np.uint32)
    area = StructureArea(np.zeros(1 << 20, np.uint8))
    kept = keep_sources(local, 100, 6100, area)
    out = np.empty(10_000, np.uint32)
    kept_sources(kept, 10_000).write(0, out)
    assert out.tolist() == local.tolist()
    assert area.used <= 1250 + 12_003 + 3 * 64


def test_what_no_order_of_discovery_explains_is_noticed():
    area = StructureArea(np.zeros(1024, np.uint8))
    with pytest.raises(AssertionError, match="found by one edge"):
        keep_sources(np.array([3, 2, 0], np.uint32), 2, 4, area)
    with pytest.raises(AreaFull):
        keep_counts(np.zeros(100_000, np.uint32), area)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("local", [[2, 3, 0, 4], [1, 2, 3, 4], [2, 2, 3, 4]])
@pytest.mark.parametrize("maximum", [3, 255, 256, 1 << 20])
def test_a_batch_comes_back_from_an_area_as_it_was(trees, local, maximum):
    """Two seeds, and three nodes that four edges find."""
    work, again = make_work(20, trees=trees), make_work(20, trees=trees)
    rng = np.random.default_rng(1)
    names = ("n_id", "counts", "local", "records", "index", "ends", "trees", "times")
    for name in names:
        values = getattr(work, name)
        values[:] = rng.integers(1, 200, values.shape)
    work.local[:4] = local
    work.counts[:2] = [maximum, 1]
    structure = STRUCTURE._replace(num_ends=3)
    area = StructureArea(np.zeros(4096, np.uint8))
    sampled = compact(7, Unit(0, 1, 3, 5), structure, work, area)
    assert sampled is not None
    expand(sampled, again)
    used = (5, 2, 4, 4, 2, 3, 5 * trees, 2 * trees)
    for name, count in zip(names, used, strict=True):
        assert getattr(again, name)[:count].tolist() == getattr(work, name)[:count].tolist(), name
    assert (
        compact(
            8, Unit(0, 1, 3, 5), structure, work, StructureArea(np.zeros(area.used - 64, np.uint8))
        )
        is None
    )
