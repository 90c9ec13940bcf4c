"""One allocation, read, thread or take of slots fails: nothing leaks, nobody else notices.

As SQLite is tested: an operation is done with its first call failing, then its second, until there
is none left to fail.  ONE_FAILS_POINTS=0 in the environment takes all of them instead of some.
"""

import errno
import os
import sys
import threading
import traceback
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockstore.errors import CorruptBlock
from blockstore.io import reader as reader_module
from loaderd.errors import Refused
from loaderd.protocol import BatchReady, ChunkReady, ErrorReply, Release, Start
from tests.graphs import Csc
from tests.hopstores import make_hops, write_hop_store
from tests.loaderd.sessions import PLANS, Opened, Sessions, content, serve, sessions_of
from tests.stores import write_store

NODES, STEPS = 6000, 4
MEM = 3 << 19
POINTS = int(os.environ.get("ONE_FAILS_POINTS", "20"))  # of each plan; 0: all
ALLOCATORS = ("empty", "zeros", "full", "concatenate")
WITH_NUMPY = ("loaderd.engine", "loaderd.hyper", "loaderd.macro", "loaderd.hopwise",
              "loaderd.batch", "loaderd.memory", "blockstore.pool")  # fmt: skip
WITH_THREADS = ("loaderd.hyper.session", "loaderd.macro.job", "loaderd.hopwise.session",
                "loaderd.engine.engine", "loaderd.hopwise.desk")  # fmt: skip


class Injector:
    """Counts calls of what may fail, and has one of them fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.disarm()

    def arm(self, number: int) -> None:
        """The call of this number fails; 0: none does, they are counted."""
        with self._lock:
            self.count, self.number, self.where = 0, number, ""
            self._read: Any = None
            self._on = True

    def disarm(self) -> int:
        """Nothing fails any more; returns the calls that there were."""
        with self._lock:
            self._on, self.number, self._read = False, 0, None
            return getattr(self, "count", 0)

    def hit(self, error: BaseException, read: Any = None) -> None:
        """One call.  Raises the error where it is this one's turn.

        read   what is read: it fails again when it is tried again
        """
        with self._lock:
            if not self._on:
                return
            self.count += 1
            if self.count != self.number and (read is None or read != self._read):
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


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Injector:
    """In the modules of the engine, and in block reads."""
    injector = Injector()
    numpy = failing_numpy(injector)
    for name, module in list(sys.modules.items()):
        if name.startswith(WITH_NUMPY) and getattr(module, "np", None) is np:
            monkeypatch.setattr(module, "np", numpy)

    class FailingThread(threading.Thread):
        def start(self) -> None:
            injector.hit(RuntimeError("can't start new thread: injected"))
            super().start()

    threads = SimpleNamespace(**vars(threading) | {"Thread": FailingThread})
    for name in WITH_THREADS:
        monkeypatch.setattr(sys.modules[name], "threading", threads)
    real = reader_module.read_exact

    def read(fd: int, buffers: Any, offset: int, where: str) -> None:
        short = injector.number % 2
        error = CorruptBlock(f"{where}+{offset}: ends, injected")
        injector.hit(
            error if short else OSError(errno.EIO, "Input/output error", where), (fd, offset)
        )
        real(fd, buffers, offset, where)

    monkeypatch.setattr(reader_module, "read_exact", read)
    return injector


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a graph larger than its pool, and of propagated features."""
    rng = np.random.default_rng(3)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 30, NODES))])
    indices = rng.integers(0, NODES, indptr[-1])
    graph = Csc(indptr.astype(np.int64), indices, np.arange(indices.size))
    folder = tmp_path_factory.mktemp("one-fails")
    write_store(folder / "graph", graph, np.arange(NODES), offsets=range(0, NODES + 1, NODES // 8))
    write_hop_store(folder / "hops", {"train": make_hops(NODES, 40, {"sym": 3}, 4)})
    return folder


def settled(sessions: Sessions) -> Any:
    """What is taken and pinned."""
    ledger, _, counters = sessions.engine.status()
    pinned = dict(sessions.engine.graph.reservation.pinned)
    return ledger, counters["slots_in_pools"], counters["slots_pinned"], pinned


def operate(sessions: Sessions, plan: str, expected: list[str]) -> None:
    """Attach, some steps, detach.  What fails is said; what is delivered is right."""
    try:
        opened = sessions.attach(plan)
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
    changed = sessions.engine._production.ended
    for _ in range(200):
        if settled(sessions) == before:
            return
        with changed:
            changed.wait(0.05)
    assert settled(sessions) == before


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", PLANS)
def test_whatever_fails_others_go_on_and_nothing_is_left(plan, stores, injector):
    hops = plan in ("chunks", "rows")
    store, other = stores / ("hops" if hops else "graph"), "rows" if hops else "minibatch"
    expected: dict[str, list[str]] = {}
    with sessions_of(store, 16 << 20) as calm:
        for each in {plan, other}:
            expected[each] = []
            assert serve(calm.attach(each), 1, STEPS, expected[each]) is None
    with sessions_of(store, MEM) as sessions:
        neighbor = sessions.attach(other)
        lent = take_window(neighbor, 1, 0, expected[other])
        before = settled(sessions)
        for _ in range(2):  # the first time more is read
            injector.arm(0)
            operate(sessions, plan, expected[plan])
            total = injector.disarm()
            wait_settled(sessions, before)
        step = 1 if POINTS == 0 else max(1, total // POINTS)
        number, reached = 1, 0
        while number <= 2 * total:
            injector.arm(number)
            try:
                operate(sessions, plan, expected[plan])
                where = injector.where
                injector.disarm()
                if not where and number > total:
                    break
                reached += bool(where)
                wait_settled(sessions, before)
                for place, message in enumerate(lent):  # what others read stays as it was
                    assert content(neighbor, message) == expected[other][place]
                again: list[str] = []
                fresh = sessions.attach(plan)
                error = serve(fresh, 1, 2, again)
                assert not isinstance(error, ErrorReply), error
                assert again == expected[plan][:2]
                sessions.engine.detach(fresh.session)
                wait_settled(sessions, before)
            except BaseException as error:
                error.add_note(f"call {number} of {plan} failed at:\n{injector.where}")
                raise
            number += step
        injector.disarm()
        assert reached >= min(POINTS or total, total) // 2
        sys.stderr.write(f"{plan}: {reached} points reached, of {total} calls\n")
        for message in lent:
            sessions.engine.release(
                Release(session=neighbor.session, run=1, step=message.step, group=0)
            )
        assert take_window(neighbor, 2, 2, expected[other])
