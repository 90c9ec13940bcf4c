"""How large hyperbatches are, and what stays in memory beside them."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loaderd.monitoring.devicecost import FLASH
from loaderd.plans.hyperbatch import RegionCurve, RowMemory, choose_size

WIDTH = 512


def make_curve(*points: list[int], rows: int = 100) -> RegionCurve:
    """Regions of `rows` rows; `points`: what 1, 2, 4, ... minibatches want of each."""
    wanted = np.array(points, np.int64)
    return RegionCurve(
        np.full(wanted.shape[1], rows),
        np.full(wanted.shape[1], WIDTH),
        np.full((1, wanted.shape[1]), WIDTH),
        wanted,
        np.zeros(wanted.shape[1], np.bool_),
    )


def memory_of(room: int) -> RowMemory:
    """A minibatch takes 1000 bytes; pages count, however they lie."""
    return RowMemory(
        lambda size: room - 1000 * size, 17, 2, lambda pages, _runs: int(pages.argmin()), 1.25
    )


def test_wanted_rows_lie_between_the_points_and_go_on_as_a_power():
    curve = make_curve([40, 9, 0], [60, 9, 0], [90, 9, 1])
    assert [curve.grown(n).tolist() for n in (1, 2, 3, 4)] == [
        [40, 9, 0], [60, 9, 0], [75, 9, 0.5], [90, 9, 1]
    ]  # fmt: skip
    assert curve.grown(8).tolist() == [100, 9, 2]  # a region has no more rows than that
    assert make_curve([40, 3]).grown(2).tolist() == [80, 6]


curves = st.lists(st.tuples(*[st.integers(0, 100)] * 3).map(sorted), min_size=1, max_size=6).map(
    lambda regions: make_curve(*(list(point) for point in zip(*regions, strict=True)))
)


def pages_of(rows: int, share: float, gap: int) -> float:
    """Of pages of eight rows, those of gaps that are read over with them."""
    p = 1 - (1 - share) ** 8
    return rows / 8 * (1 - (1 - p) ** (gap + 1) * (1 + gap * p))


def takes(
    curve: RegionCurve, memory: RowMemory, size: int, past: float, stay: set[int], num_steps: int
) -> tuple[float, float]:
    """Bytes of memory, and pages read for a minibatch: the rules in words."""
    room, passing, others, read, fill = 0.0, 0.0, 0.0, 0.0, 0.0
    lists = [curve.grown(batches).tolist() for batches in (size, past, past + size)]
    for region, (own, there, after) in enumerate(zip(*lists, strict=True)):
        rows = int(curve.rows[region])
        if region in stay:
            paid = 1 / memory.alike if memory.alike > 1 else float(not curve.kept[region])
            room += rows * WIDTH * paid
            fill += rows * WIDTH / 4096 * paid
            continue
        once = (after - there) / size * past  # wanted by one of the minibatches before
        again = max(0.0, there - once)
        held = max(memory.spare * own, again + after - there)
        passing += held * (WIDTH + memory.entry_bytes)
        others += rows * (WIDTH + memory.entry_bytes)
        read += pages_of(rows, (after - there) / rows, memory.gap_pages)
        fill += pages_of(rows, again / rows, memory.gap_pages)
    room += max(passing, min(others, memory.room(size) / 64))
    return room, read / size + fill / num_steps


_SELDOM = make_curve([0, 0, 0], [3, 0, 0], [5, 2, 1])  # reading region 1 costs less than keeping it
sparing = st.sampled_from([1.0, 1.25])


@example(_SELDOM, 120_745, 448, 27, 1.25)
@example(make_curve([10, 4], [37, 80], [94, 100]), 65_537, 1330, 22, 1.25)  # room for few pasts
@given(curves, st.integers(0, 400_000), st.integers(1, 20_000), st.integers(1, 30), sparing)
def test_what_is_chosen_has_room_for_any_curve(curve, room, batch_bytes, num_steps, spare):
    memory = memory_of(room)._replace(room=lambda size: room - size * batch_bytes, spare=spare)
    check_choice(curve, memory, num_steps, is_likely=False)


def check_choice(
    curve: RegionCurve, memory: RowMemory, num_steps: int, is_likely: bool = True
) -> None:
    found = choose_size(curve, memory, num_steps)
    order = np.argsort(np.where(curve.kept, -200, -curve.wanted[-1]), kind="stable").tolist()
    useful = int(np.count_nonzero(curve.wanted[-1] + curve.kept))

    def minimum(size: int, count: int, pasts: Sequence[float] = ()) -> float:
        costs = [math.inf]
        for past in (*np.arange(size, max(size + 1, num_steps), 0.5), *pasts):
            needs, cost = takes(curve, memory, size, past, set(order[:count]), num_steps)
            costs += [cost] if needs <= memory.room(size) else []
        return min(costs)

    best = min(minimum(size, n) for size in range(1, num_steps + 1) for n in range(useful + 1))
    if best == math.inf:
        assert found.batches == 1
        assert not found.stay.size
        return
    assert found.stay.tolist() == order[: found.stay.size]
    assert found.passing[found.stay].sum() == 0
    # not every size is tried, nor every number of minibatches whose rows are there: these are
    ends = [found.batches * 1.25**i for i in range(24)]
    tried = np.concatenate([np.linspace(low, high, 17) for low, high in pairwise(ends)])
    tried = tried[tried <= 1.25 * num_steps]
    cost = minimum(found.batches, found.stay.size, tried.tolist())
    assert cost <= 1.4 * best if is_likely else cost < math.inf


@st.composite
def likely_curves(draw: st.DrawFn) -> RegionCurve:
    """Twice as many minibatches want no more than twice the rows."""
    regions = []
    for _ in range(draw(st.integers(1, 6))):
        points = [draw(st.integers(0, 100))]
        for _ in range(2):
            points.append(draw(st.integers(points[-1], min(100, 2 * points[-1]))))
        regions.append(points)
    return make_curve(*map(list, zip(*regions, strict=True)))


@example(_SELDOM, 69_545, 448, 27, 1.25, 2, {0, 1, 2})
@example(_SELDOM, 120_745, 448, 27, 1.25, 1, set())
@given(
    likely_curves(),
    st.integers(0, 400_000),
    st.integers(1, 20_000),
    st.integers(1, 30),
    sparing,
    st.sampled_from([1, 2, 4]),
    st.sets(st.integers(0, 5)),
)
def test_the_fewest_bytes_are_read_that_the_room_allows(
    curve, room, batch_bytes, num_steps, spare, alike, kept
):
    """`alike`: sessions that keep regions for one another, each of which pays for a part of them.

    kept   regions that are there

    Twice as many minibatches want at most twice the rows, on average.  Where they want more, larger
    hyperbatches read more, and the search, which goes up from small ones, may end too early.
    """
    memory = memory_of(room)._replace(
        room=lambda size: room - size * batch_bytes, spare=spare, alike=alike
    )
    curve = curve._replace(kept=np.isin(np.arange(curve.rows.size), list(kept)))
    check_choice(curve, memory, num_steps)


@pytest.mark.parametrize(("width", "stay"), [(64, True), (4096, False)])
def test_regions_stay_where_pages_have_many_rows(width, stay):
    """Of rows that fill pages those stay that are wanted, one by one."""
    points = [30] * 20 + [1] * 20, [50] * 20 + [2] * 20, [75] * 20 + [4] * 20
    curve = make_curve(*points)._replace(
        row_bytes=np.full(40, width), widths=np.full((1, 40), width)
    )
    memory = memory_of(0)._replace(room=lambda size: (1600 - size) * width, entry_bytes=0)
    found = choose_size(curve, memory, 1000)
    assert bool(found.stay.size) == stay
    assert stay or found.passing.sum() > 3 * curve.grown(found.batches).sum()


def test_more_minibatches_are_together_where_that_saves_reading():
    half = make_curve(*([min(100, n)] * 50 for n in (10, 20, 40)))
    tight, roomy = (memory_of(room) for room in (60 * 100 * WIDTH, 10**9))
    assert choose_size(half, tight, 100).batches > 1
    everything = choose_size(half, roomy, 100)
    assert everything.stay.size == 50
    assert everything.batches <= 8  # nothing is saved by more


@pytest.mark.parametrize("asked", [1, 3, 7])
def test_the_size_that_is_asked_for_is_taken_as_far_as_it_has_room(asked):
    curve = make_curve([1, 5, 50], [2, 9, 60], [4, 15, 80])
    found = choose_size(curve, memory_of(10**6), 100, asked)
    assert (found.batches, found.stay.tolist()) == (asked, [2, 1, 0])
    tight = memory_of(100 * WIDTH + 4000)  # the warmest region and the structures of three
    found = choose_size(curve, tight, 100, asked)
    assert found.batches <= min(asked, 3)
    assert choose_size(curve, memory_of(1), 100, asked).batches == 1


def test_no_more_are_built_together_than_saves_reading():
    """If nothing is read, the disk has no pause that larger hyperbatches would save."""
    curve = make_curve([6000, 1000, 0], [9000, 1900, 0], [10_000, 3500, 0], rows=10_000)

    def batches(room: int, idle_runs: int) -> int:
        memory = memory_of(0)._replace(
            room=lambda size: room - 1000 * size, best=FLASH.best_of, idle_runs=idle_runs
        )
        return choose_size(curve, memory, 1000).batches

    assert batches(10_000_000, 256) > batches(10_000_000, 0)
    assert batches(20_000_000, 256) == batches(20_000_000, 0) <= 8
