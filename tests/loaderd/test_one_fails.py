"""One allocation, read, thread or take of slots fails: nothing leaks, nobody else notices.

As SQLite is tested: an operation is done once for each call in it that may fail, which fails then.
Calls from the same place of the code, such as the reads of an epoch, are hundreds: of each place
some are taken, the first and the last among them.  ONE_FAILS_POINTS=0 in the environment takes all
of these, without it some of each plan.
"""

import errno
import os
import sys
import threading
import time
import traceback
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from blockstore import concurrency
from blockstore.errors import CorruptBlock
from loaderd.api.errors import Refused, Shortage
from loaderd.api.protocol import BatchReady, ChunkReady, ErrorReply, Release, Start
from loaderd.memory.slots import SlotBroker
from tests.graphs import make_csc
from tests.hopstores import make_hops, write_hop_store
from tests.loaderd.opened import PLANS, Opened, Sessions, content, serve, sessions_of
from tests.reads import watch_reads
from tests.stores import write_store

NODES, BATCH, STEPS = 6000, 10, 4
MEM = 3 << 19
POINTS = int(os.environ.get("ONE_FAILS_POINTS", "8"))  # of each plan; 0: all
FROM_PLACE = 12  # calls from one place of the code that are made to fail, at most
FRAMES = 3  # of the stack that tell one place from another
Place = tuple[tuple[str, int], ...]
ALLOCATORS = ("empty", "zeros", "full", "concatenate", "flatnonzero", "unique", "diff", "cumsum",
              "argsort", "split", "repeat", "stack")  # fmt: skip
WITH_NUMPY = ("loaderd.sessions", "loaderd.sampling", "loaderd.memory", "loaderd.plans",
              "blockstore.io.reader")  # fmt: skip


class Injector:
    """Counts calls of what may fail, and has one of them fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on = False

    def arm(self, place: Place = (), number: int = 0) -> None:
        """The call of this number from this place fails; 0: none does, they are counted."""
        with self._lock:
            self.counts: Counter[Place] = Counter()
            self.place, self.number, self.where = place, number, ""
            self._read: Any = None
            self._on = True

    def disarm(self) -> None:
        """Nothing fails any more."""
        with self._lock:
            self._on, self._read = False, None

    def hit(self, error: BaseException, read: Any = None) -> None:
        """One call.  Raises the error where it is this one's turn.

        read   what is read: it fails again when it is tried again
        """
        with self._lock:
            if not self._on:
                return
            frame, place = sys._getframe(2), []
            while frame is not None and len(place) < FRAMES:
                place.append((frame.f_code.co_qualname, frame.f_lineno))
                frame = frame.f_back
            at = tuple(place)
            self.counts[at] += 1
            turn = at == self.place and self.counts[at] == self.number
            if not turn and (read is None or read != self._read):
                return
            self._read = read
            self.where = self.where or "".join(traceback.format_stack(limit=9)[:-1])
        raise error


def failing_numpy(injector: Injector) -> Any:
    """numpy, whose arrays are sometimes not to be had."""

    def wrap(name: str) -> Any:
        real = getattr(np, name)

        def allocate(*arguments: Any, **options: Any) -> Any:
            injector.hit(MemoryError(f"{name}: injected"))
            return real(*arguments, **options)

        return allocate

    module = ModuleType("numpy")
    vars(module).update(vars(np) | {name: wrap(name) for name in ALLOCATORS})
    return module


def failing_take(injector: Injector, real: Any) -> Any:
    """A take of slots that now and then is refused, or finds no memory."""

    def take(*arguments: Any, **options: Any) -> Any:
        even = injector.number % 2 == 0
        injector.hit(Shortage("slots: injected") if even else MemoryError("slots: injected"))
        return real(*arguments, **options)

    return take


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Injector:
    """In the modules of the engine, and in block reads."""
    injector = Injector()
    injector.arm()
    injector.disarm()
    numpy = failing_numpy(injector)
    for name, module in list(sys.modules.items()):
        if name.startswith(WITH_NUMPY) and getattr(module, "np", None) is np:
            monkeypatch.setattr(module, "np", numpy)

    class FailingThread(threading.Thread):
        def start(self) -> None:
            injector.hit(RuntimeError("can't start new thread: injected"))
            super().start()

    monkeypatch.setattr(concurrency, "Thread", FailingThread)
    for name in ("take", "take_run"):
        monkeypatch.setattr(SlotBroker, name, failing_take(injector, getattr(SlotBroker, name)))

    def meet(fd: int, offset: int) -> None:
        short = injector.number % 2
        error = CorruptBlock(f"{fd}+{offset}: ends, injected")
        injector.hit(error if short else OSError(errno.EIO, "Input/output error"), (fd, offset))

    watch_reads(monkeypatch, meet)
    return injector


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a graph larger than its pool, and of propagated features."""
    graph = make_csc(np.random.default_rng(3).integers(0, 30, NODES), 3)
    folder = tmp_path_factory.mktemp("one-fails")
    write_store(folder / "graph", graph, np.arange(NODES), offsets=range(0, NODES + 1, NODES // 8))
    write_hop_store(folder / "hops", {"train": make_hops(NODES, 40, {"sym": 3}, 4)})
    return folder


def settled(sessions: Sessions) -> Any:
    """What is taken and pinned."""
    ledger, _, counters = sessions.engine.status()
    pinned = dict(sessions.engine.graph.pool.on_account)
    return ledger, counters["slots_in_pools"], counters["slots_pinned"], pinned


def operate(sessions: Sessions, plan: str, expected: list[str]) -> None:
    """Attach, some steps, detach.  What fails is said; what is delivered is right."""
    try:
        opened = sessions.attach(plan, batch_size=BATCH)
    except (Refused, MemoryError, OSError, CorruptBlock, RuntimeError):
        return
    seen: list[str] = []
    try:
        for run in (1, 2):
            seen.clear()
            serve(opened, run, STEPS, seen)
            assert seen == expected[: len(seen)]
    finally:
        sessions.engine.detach(opened.session)


def points_of(counts: Counter[Place]) -> list[tuple[Place, int]]:
    """Which calls are to fail, of those that an operation made."""
    found = []
    for place, count in sorted(counts.items()):
        numbers = np.linspace(1, count, min(count, FROM_PLACE)).round().astype(int).tolist()
        found += [(place, number) for number in numbers]
    return found[:: max(1, len(found) // POINTS) if POINTS else 1]


def take_window(neighbor: Opened, run: int, step: int, expected: list[str]) -> list[Any]:
    """Start at a step; the two batches in flight, which stay lent."""
    neighbor.engine.start(Start(session=neighbor.session, run=run, epoch=0, step=step))
    messages = [neighbor.take(step), neighbor.take(step + 1)]
    for place, message in enumerate(messages):
        assert isinstance(message, BatchReady | ChunkReady), message
        assert content(neighbor, message) == expected[step + place]
    return messages


def wait_settled(sessions: Sessions, before: Any) -> None:
    """What is pinned and taken is again what it was."""
    changed = sessions.engine._changed
    for _ in range(200):
        if settled(sessions) == before:
            return
        with changed:
            changed.wait(0.05)
    assert settled(sessions) == before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", PLANS)
def test_whatever_fails_others_go_on_and_nothing_is_left(plan, stores, injector):
    hops = plan in ("chunks", "rows")
    store, other = stores / ("hops" if hops else "graph"), "rows" if hops else "minibatch"
    expected: dict[str, list[str]] = {}
    with sessions_of(store, 16 << 20) as calm:
        for each in {plan, other}:
            expected[each] = []
            assert serve(calm.attach(each, batch_size=BATCH), 1, STEPS, expected[each]) is None
    with sessions_of(store, MEM) as sessions:
        neighbor = sessions.attach(other, batch_size=BATCH)
        lent = take_window(neighbor, 1, 0, expected[other])
        before = settled(sessions)
        for _ in range(2):  # the first time more is read
            injector.arm()
            operate(sessions, plan, expected[plan])
            injector.disarm()
            wait_settled(sessions, before)
        points, begun, reached = points_of(injector.counts), time.monotonic(), 0
        for place, number in points:
            injector.arm(place, number)
            try:
                operate(sessions, plan, expected[plan])
                injector.disarm()
                reached += bool(injector.where)
                wait_settled(sessions, before)
                for step, message in enumerate(lent):  # what others read stays as it was
                    assert content(neighbor, message) == expected[other][step]
                again: list[str] = []
                fresh = sessions.attach(plan, batch_size=BATCH)
                error = serve(fresh, 1, 2, again)
                assert not isinstance(error, ErrorReply), error
                assert again == expected[plan][:2]
                sessions.engine.detach(fresh.session)
                wait_settled(sessions, before)
            except BaseException as error:
                error.add_note(f"call {number} of {plan} failed at:\n{injector.where}")
                raise
        assert reached >= len(points) // 2  # threads of another order do not come by some of them
        took = time.monotonic() - begun
        sys.stderr.write(f"{plan}: {reached} of {len(points)} points failed, {took:.0f} s\n")
        for message in lent:
            sessions.engine.release(
                Release(session=neighbor.session, run=1, step=message.step, group=0)
            )
        assert take_window(neighbor, 2, 2, expected[other])
