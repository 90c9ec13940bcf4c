"""Hyperbatches of one session: order, runs that end, errors, and areas that come back."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loaderd.memory.blob import joined
from loaderd.plans.base import Unit, Wanted
from loaderd.sampling.hyperbatch.areas import Sampled, StructureArea
from loaderd.sampling.hyperbatch.session import Hyper, HyperMemory
from loaderd.sampling.structure import StructureArrays

WAIT_S = 10


def _arrays(unit: Unit) -> StructureArrays:
    return StructureArrays((np.array([unit.step]),), *[joined([np.empty(0, np.uint32)])] * 7)


class Sampler:
    """Samples at most `maximum` batches an area; `before` is called first, and may raise."""

    def __init__(self, maximum: int = 3) -> None:
        self.maximum, self.before = maximum, lambda _units: None

    def sample(self, units: Any, first: int, area: StructureArea, cancelled: Any) -> list[Sampled]:
        self.before(units)
        return [
            Sampled(first + i, unit, None, _arrays(unit), area)  # type: ignore[arg-type]
            for i, unit in enumerate(units[: self.maximum])
        ]


class Hand:
    """Takes what is admitted; refuses batches of runs in `ended`."""

    def __init__(self) -> None:
        self.got: queue.Queue[tuple[int, list[Sampled]]] = queue.Queue()
        self.errors: queue.Queue[tuple[int, str]] = queue.Queue()
        self.ended: set[int] = set()
        self.refused = threading.Event()
        self.lock = threading.Lock()
        self.wanted: list[Wanted] = []
        self.run = 0

    def ask(self, run: int, count: int) -> list[Wanted]:
        with self.lock:
            if run != self.run:
                return []
            found, self.wanted = self.wanted[:count], self.wanted[count:]
            return found

    def admit(self, run: int, batches: Any, cached: bool) -> bool:
        if run in self.ended:
            self.refused.set()
            return False
        self.got.put((run, list(batches)))
        return True

    def failed(self, run: int, wanted: Wanted, error: BaseException) -> None:
        self.errors.put((run, str(error)))

    def thread_failed(self, error: Exception) -> None:
        self.errors.put((-1, str(error)))


class Cache:
    """Room for the rows of three batches, or of so many; notes what it brings."""

    def __init__(self, room: int = 3) -> None:
        self.room = room
        self.groups: list[list[int]] = []
        self.oldest: list[int] = []
        self.runs = 0

    def begin_run(self) -> None:
        self.runs += 1

    def age(self) -> None:
        pass

    def count_fitting(self, batches: Any) -> int:
        return min(self.room, len(batches))

    def bring(self, group: Any, later: Any, oldest: Any) -> None:
        self.groups.append([needs.batch for needs in group])
        if group[0].batch:
            self.oldest.append(oldest(group[0].batch - 1))


class Parts:
    """A session, its fakes, and how a client takes batches."""

    def __init__(
        self, steps: int, areas: int, cache: Cache | None, size: int = 3, ahead: int = 0
    ) -> None:
        """`ahead`: batches of epoch 0 that are sampled already."""
        self.steps = steps
        plan: Any = SimpleNamespace(unit=lambda e, s: Unit(e, s, s, s + 1))
        self.sampler, self.hand, self.cache = Sampler(), Hand(), cache
        places = [StructureArea(np.zeros(1024, np.uint8)) for _ in range(areas)]
        self.areas = places
        sizing: Any = SimpleNamespace(size=size, chunk=3)
        units = [Unit(0, step, step, step + 1) for step in range(ahead)]
        sampled = [
            Sampled(i, unit, None, _arrays(unit), places[-1])  # type: ignore[arg-type]
            for i, unit in enumerate(units)
        ]
        places[-1].take(np.uint8, len(sampled))
        memory = HyperMemory(sizing, places, None, cache, sampled)  # type: ignore[arg-type]
        self.hyper = Hyper(plan, self.sampler, memory, self.hand)

    def want(self, run: int, epoch: int, step: int = 0, stride: int = 1) -> None:
        with self.hand.lock:
            self.hand.wanted += [Wanted(run, epoch, s) for s in range(step, self.steps, stride)]

    def begin(self, run: int, epoch: int, step: int = 0, stride: int = 1) -> None:
        with self.hand.lock:
            self.hand.run, self.hand.wanted = run, []
        self.want(run, epoch, step, stride)
        self.hyper.begin(run)

    def take(self, count: int) -> list[tuple[int, int, int]]:
        """(run, epoch, step) of so many batches or a few more, each given back at once."""
        found: list[tuple[int, int, int]] = []
        while len(found) < count:
            run, batches = self.hand.got.get(timeout=WAIT_S)
            for sampled in batches:
                found.append((sampled.run, sampled.unit.epoch, sampled.unit.step))
                self.hyper.handed_out(sampled)
                self.hyper.released(run, sampled.batch)
        return found


@contextmanager
def session(
    steps: int = 10, areas: int = 2, cache: Cache | None = None, size: int = 3, ahead: int = 0
) -> Iterator[Parts]:
    parts = Parts(steps, areas, cache, size, ahead)
    try:
        yield parts
    finally:
        parts.hyper.close()


@pytest.mark.parametrize("areas", [1, 2])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("first", "stride"), [(0, 1), (1, 3), (4, 2), (9, 1)])
def test_steps_come_in_order_by_their_stride(areas, cached, first, stride):
    with session(areas=areas, cache=Cache() if cached else None) as parts:
        for run in (1, 2):
            parts.begin(run, 5 + run, first, stride)
            steps = range(first, 10, stride)
            assert parts.take(len(steps)) == [(run, 5 + run, step) for step in steps]
        assert parts.hand.got.empty()


@pytest.mark.parametrize("areas", [1, 2])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("epoch", "first", "stride", "taken"),
    [(0, 0, 1, 4), (0, 0, 2, 1), (0, 1, 1, 0), (1, 0, 1, 0), (0, 9, 1, 0)],
)
def test_what_was_sampled_ahead_is_not_sampled_again(areas, cached, epoch, first, stride, taken):
    """As many of these batches as are wanted first; else their area is free."""
    steps, asked = [*range(first, 10, stride)], list[int]()

    def note(units: Any) -> None:
        asked.extend(unit.step for unit in units)
        assert asked[0] != steps[0] or parts.areas[-1].used == 0

    with session(areas=areas, cache=Cache() if cached else None, ahead=4) as parts:
        parts.sampler.before = note
        parts.sampler.maximum = 10
        parts.begin(1, epoch, first, stride)
        assert parts.take(len(steps)) == [(1, epoch, step) for step in steps]
        assert asked == steps[taken:]
        parts.begin(2, 0)
        assert parts.take(10) == [(2, 0, step) for step in range(10)]  # sampled by now
        assert asked[len(steps) - taken :] == [*range(10)]


def test_what_was_sampled_ahead_waits_until_something_is_wanted():
    with session(areas=1, ahead=4) as parts:
        with parts.hand.lock:
            parts.hand.run = 1
        parts.hyper.begin(1)
        with parts.hyper._changed:
            assert parts.hyper._changed.wait_for(lambda: not parts.hyper._more, WAIT_S)
        parts.hyper.wake()
        asked: list[int] = []
        parts.sampler.before = lambda units: asked.extend(unit.step for unit in units)
        parts.want(1, 0)
        parts.hyper.wake()
        assert parts.take(10) == [(1, 0, step) for step in range(10)]
        assert asked == [4, 5, 6, 7, 8, 9]


def test_a_run_goes_on_elsewhere_with_the_rows_it_has():
    with session(cache=(cache := Cache())) as parts:
        parts.begin(1, 0, 7)
        parts.take(3)
        parts.want(2, 1)
        parts.hyper.wake()
        assert parts.take(10) == [(2, 1, step) for step in range(10)]
        assert cache.runs == 1
        assert cache.groups[:2] == [[0], [1, 2]]  # a client waits for the first
        parts.begin(3, 2, 9)
        parts.take(1)
        assert cache.runs == 2


def test_rows_are_brought_in_when_batches_before_are_released():
    with session(cache=(cache := Cache())) as parts:
        parts.begin(1, 0, 0)
        _, batches = parts.hand.got.get(timeout=WAIT_S)
        assert [s.batch for s in batches] == [0]
        parts.hyper.handed_out(batches[0])
        parts.hyper.released(1, 0)
        _, batches = parts.hand.got.get(timeout=WAIT_S)
        assert [s.batch for s in batches] == [1, 2, 3]
        for sampled in (batches[1], batches[0]):  # out of order
            parts.hyper.handed_out(sampled)
            parts.hyper.released(1, sampled.batch)
        parts.hyper.handed_out(batches[2])
        assert parts.hand.got.empty()
        parts.hyper.released(1, 3)
        parts.take(6)
        assert cache.oldest[:2] == [1, 4]


def wait_sampled(hyper: Hyper, batches: int) -> None:
    with hyper._changed:
        assert hyper._changed.wait_for(lambda: hyper.counters["hyper_sampled"] >= batches, WAIT_S)


def test_a_hyperbatch_waits_for_areas_that_are_to_become_free():
    """Fewer batches together would read the same pages for less."""
    with session(steps=21, areas=3, cache=(cache := Cache(9)), size=6) as parts:
        parts.begin(1, 0, 0)
        taken = len(parts.take(1))
        while taken < 21:
            # what is free is sampled into while a group is in use
            wait_sampled(parts.hyper, min(21, taken + 9))
            taken += len(parts.take(1))
        sizes = [len(group) for group in cache.groups]
        assert (sum(sizes), sizes[:2], set(sizes[2:-1])) == (21, [1, 3], {6})


def test_an_error_of_a_run_that_has_ended_is_nobodys():
    asked, go = threading.Event(), threading.Event()

    def fail_late(units: Any) -> None:
        if units[0].epoch == 1:
            asked.set()
            assert go.wait(WAIT_S)
            raise OSError("too late")

    with session() as parts:
        parts.sampler.before = fail_late
        parts.begin(1, 1, 0)
        assert asked.wait(WAIT_S)
        parts.begin(2, 2, 0)
        go.set()
        assert parts.take(10) == [(2, 2, step) for step in range(10)]
        assert parts.hand.errors.empty()


def test_an_error_ends_its_run_and_the_next_one_works():
    def fail(units: Any) -> None:
        if units[0].epoch == 1:
            raise OSError("cannot read")

    with session() as parts:
        parts.sampler.before = fail
        parts.begin(1, 1, 0)
        assert parts.hand.errors.get(timeout=WAIT_S) == (1, "cannot read")
        parts.begin(2, 2, 0)
        assert len(parts.take(10)) == 10
        assert parts.hand.errors.empty()


@pytest.mark.parametrize("step", ["_ask", "_group_size"])
def test_a_defect_that_ends_a_thread_is_told(step, monkeypatch):
    def fail(*_arguments: Any) -> None:
        raise ArithmeticError("nobody foresaw this")

    with session(cache=Cache()) as parts:
        monkeypatch.setattr(parts.hyper, step, fail)
        parts.begin(1, 0, 0)
        assert parts.hand.errors.get(timeout=WAIT_S) == (-1, "nobody foresaw this")
    assert parts.hand.errors.empty()
    assert parts.hand.got.empty()


def test_a_batch_without_room_is_an_error():
    with session() as parts:
        parts.sampler.maximum = 0
        parts.begin(1, 0, 0)
        _, text = parts.hand.errors.get(timeout=WAIT_S)
        assert "more than there is room for" in text


@pytest.mark.parametrize("areas", [1, 2])
def test_areas_of_batches_that_came_too_late_are_free_again(areas):
    with session(areas=areas) as parts:
        for run in (1, 3, 5):
            parts.hand.ended.add(run)
            parts.hand.refused.clear()
            parts.begin(run, 0, 0)
            assert parts.hand.refused.wait(WAIT_S)
            parts.begin(run + 1, 1, 0)
            assert len(parts.take(10)) == 10


def test_areas_of_what_was_not_brought_in_are_free_again():
    with session(areas=1, cache=Cache()) as parts:
        for run in range(1, 6):
            parts.begin(run, run, 0)
        assert parts.take(10)[-1] == (5, 5, 9)
        parts.hyper.stop()
    assert [area.left for area in parts.areas] == [0]
