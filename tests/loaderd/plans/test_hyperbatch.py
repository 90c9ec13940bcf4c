"""How large hyperbatches are, and what stays in memory beside them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.plans.hyperbatch import RegionCurve, RowMemory, choose_size

WIDTH = 512


def make_curve(*points: list[int], rows: int = 100) -> RegionCurve:
    """Regions of `rows` rows; `points`: what 1, 2, 4, ... minibatches want of each."""
    wanted = np.array(points, np.int64)
    return RegionCurve(np.full(wanted.shape[1], rows), np.full(wanted.shape[1], WIDTH), wanted)


def memory_of(room: int) -> RowMemory:
    """A minibatch takes 1000 bytes."""
    return RowMemory(lambda size: room - 1000 * size, 17, 2, 1.25)


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


def takes(curve: RegionCurve, memory: RowMemory, size: int, stay: set[int]) -> tuple[float, float]:
    """Bytes of memory, and bytes read for a hyperbatch: the rules in words."""
    room, passing, others, read = 0.0, 0.0, 0.0, 0.0
    for region, wanted in enumerate(curve.grown(size).tolist()):
        rows = int(curve.rows[region])
        if region in stay:
            room += rows * WIDTH
            continue
        passing += memory.spare * wanted * (WIDTH + memory.entry_bytes)
        others += rows * (WIDTH + memory.entry_bytes)
        page = 1 - (1 - wanted / rows) ** (4096 / WIDTH)
        read += rows * WIDTH * (1 - (1 - page) ** (memory.gap_pages + 1))
    return room + max(passing, min(others, memory.room(size) / 64)), read


@given(
    curves,
    st.integers(0, 400_000),
    st.integers(1, 20_000),
    st.integers(1, 30),
    st.sampled_from([1.0, 1.25]),
)
def test_the_fewest_bytes_are_read_that_the_room_allows(curve, room, batch_bytes, num_steps, spare):
    memory = RowMemory(lambda size: room - size * batch_bytes, 17, 2, spare)
    found = choose_size(curve, memory, num_steps)
    order = np.argsort(-curve.wanted[-1], kind="stable").tolist()
    useful = int(np.count_nonzero(curve.wanted[-1]))
    best = math.inf
    for size in range(1, num_steps + 1):
        for count in range(useful + 1):
            needs, read = takes(curve, memory, size, set(order[:count]))
            if needs <= memory.room(size):
                best = min(best, read / size + count * 100 * WIDTH / num_steps)
    if best == math.inf:
        assert found.batches == 1
        assert not found.stay.size
        return
    assert found.stay.tolist() == order[: found.stay.size]
    stay = set(found.stay.tolist())
    assert found.passing[found.stay].sum() == 0
    needs, read = takes(curve, memory, found.batches, stay)
    assert needs <= memory.room(found.batches) + 1e-6
    # as many regions stay as can, and not every size is tried
    assert read / found.batches + len(stay) * 100 * WIDTH / num_steps <= 1.3 * best + len(stay) * (
        100 * WIDTH / num_steps
    )


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
