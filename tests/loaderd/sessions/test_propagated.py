"""Buffers and order of hop-wise batches: errors, new runs and releases give every buffer back."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from loaderd.api.protocol import ChunkReady, ErrorReply, Release
from loaderd.plans.base import Unit, Wanted
from loaderd.sampling.propagated.sizing import HopSizing
from loaderd.sampling.propagated.source import Answer, PendingRead
from loaderd.sessions.propagated import PropagatedSession

STEPS, WINDOW, WAIT_S = 9, 3, 10


class Source:
    """Answers at once, or waits for `go`; steps in `bad` cannot be read."""

    def __init__(self) -> None:
        self.bad: set[int] = set()
        self.half: set[int] = set()  # some of whose reads are begun before the error
        self.begun = Late()
        self.late: set[int] = set()  # of these, those that fail while they are on their way
        self.go = threading.Event()
        self.go.set()
        self.asked = threading.Event()
        self.buffers: list[int] = []

    def ask(self, unit: Unit, buffer: int, arrival: PendingRead) -> Answer:
        self.asked.set()
        assert self.go.wait(WAIT_S)
        self.buffers.append(buffer)
        if unit.step in self.bad - self.late:
            raise OSError(f"step {unit.step}: cannot read")
        if unit.step in self.half:
            arrival.readings.append(self.begun)  # type: ignore[arg-type]
            raise MemoryError
        if unit.step in self.late:
            arrival.readings.append(Failing())  # type: ignore[arg-type]
        return Answer("rows", (unit.step,), (), ((0,),), -1)


class Late:
    """A read that ends when it is told to."""

    def __init__(self) -> None:
        self.waited, self.end = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.waited.set()
        assert self.end.wait(WAIT_S)


class Failing:
    """A read that fails."""

    def wait(self) -> None:
        raise OSError("cannot read")


@pytest.fixture
def parts():
    out: queue.Queue[Any] = queue.Queue()
    ended: list[Any] = []
    plan: Any = SimpleNamespace(
        num_steps=STEPS, name="chunks", resolved=SimpleNamespace(seeds="split:train"),
        unit=lambda epoch, step: Unit(epoch, step, step, step + 2),
    )  # fmt: skip
    resources: Any = SimpleNamespace(
        lock=threading.RLock(), ended=ended.append,
        closer=SimpleNamespace(put=lambda step: threading.Thread(target=step).start()),
        budget=SimpleNamespace(slot_bytes=4096),
    )  # fmt: skip
    sizing = HopSizing(True, False, 0, 1, WINDOW, 0, 0, 2)
    memory: Any = SimpleNamespace(sizing=sizing, allocation=[], free=lambda: None)
    source = Source()
    session = PropagatedSession(resources, 4, plan, [], memory, source, threading.Event())
    yield session, source, out
    source.go.set()
    session.detach()
    session.join()
    assert ended == [session]


def take(out: Any, count: int, run: int) -> list[int]:
    """Steps of so many batches."""
    found = [out.get(timeout=WAIT_S) for _ in range(count)]
    assert all(isinstance(m, ChunkReady) and m.run == run for m in found)
    return [m.step for m in found]


class Consumer:
    """Wants the steps of runs, one after the other."""

    def __init__(self, out: queue.Queue[Any]) -> None:
        self.wanted: list[Wanted] = []
        self.deliver = out.put

    def next(self) -> Wanted | None:
        return self.wanted.pop(0) if self.wanted else None

    def add(self, run: int, step: int = 0, stride: int = 1) -> None:
        self.wanted += [Wanted(run, run, s) for s in range(step, STEPS, stride)]


def start(session: PropagatedSession, out: Any, run: int, step: int = 0, stride: int = 1) -> Any:
    """Earlier runs end."""
    consumer = Consumer(out)
    consumer.add(run, step, stride)
    session.start(run, consumer)
    return consumer


def release(session: PropagatedSession, run: int, *steps: int) -> None:
    for step in steps:
        session.release(Release(session=4, run=run, step=step, group=0))


def epoch(session: PropagatedSession, out: Any, run: int) -> None:
    """A whole run, batch by batch."""
    start(session, out, run)
    for step in range(STEPS):
        assert take(out, 1, run) == [step]
        release(session, run, step)
    assert not session._leased


def test_as_many_are_lent_as_there_are_buffers(parts):
    session, source, out = parts
    start(session, out, 1, 1, 2)
    assert take(out, WINDOW, 1) == [1, 3, 5]
    assert session.waits()
    assert sorted(source.buffers) == [0, 1, 2]
    release(session, 1, 3)
    assert take(out, 1, 1) == [7]
    assert session.counters()["batches"] == 1
    release(session, 1, 3)  # again: nothing
    release(session, 2, 1)  # of another run
    session.release(Release(session=4, run=1, step=1, group=1))
    assert len(session._leased) == WINDOW
    assert out.empty()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_an_error_ends_the_run_and_no_buffer_is_lost(parts, bad, late):
    session, source, out = parts
    source.bad, source.late = {bad}, {bad} if late else set()
    for run in range(1, 2 * WINDOW, 2):
        start(session, out, run)
        for step in range(bad):
            assert take(out, 1, run) == [step]
            release(session, run, step)
        error = out.get(timeout=WAIT_S)
        assert isinstance(error, ErrorReply)
        assert (error.run, error.step) == (run, bad)
        assert "cannot read" in error.message
        source.bad, kept = set(), source.bad
        source.late, kept_late = set(), source.late
        epoch(session, out, run + 1)
        source.bad, source.late = kept, kept_late
    assert out.empty()


def test_a_new_run_takes_back_what_was_lent_and_drops_what_is_coming(parts):
    session, source, out = parts
    start(session, out, 1)
    take(out, WINDOW, 1)
    source.asked.clear()
    source.go.clear()
    release(session, 1, 0)
    assert source.asked.wait(WAIT_S)
    start(session, out, 2)
    source.go.set()
    assert take(out, WINDOW, 2) == [0, 1, 2]
    assert len(session._leased) == WINDOW
    release(session, 2, 0, 1, 2)
    assert take(out, WINDOW, 2) == [3, 4, 5]


def test_a_run_that_proceeds_keeps_its_leases(parts):
    session, _, out = parts
    consumer = start(session, out, 1, STEPS - 1)
    take(out, 1, 1)
    consumer.add(2)
    session.wake()
    assert take(out, WINDOW - 1, 2) == [0, 1]
    release(session, 1, STEPS - 1)
    assert take(out, 1, 2) == [2]


def test_a_buffer_that_is_still_read_into_is_not_used_again(parts):
    session, source, out = parts
    source.half = {1}
    start(session, out, 1)
    assert take(out, 1, 1) == [0]
    assert source.begun.waited.wait(WAIT_S)  # the error is there, a read of its batch is not over
    source.half, used = set(), source.buffers[1]
    start(session, out, 2)
    assert out.empty()
    assert used not in source.buffers[2:]
    source.begun.end.set()
    assert sorted(take(out, WINDOW, 2)) == [0, 1, 2]
