"""A cooperative scheduler in place of `blockstore.concurrency`, as loom and shuttle are for Rust.

Threads are real, but only one of them runs at a time.  Whenever it takes a lock or gives one back,
waits, puts, gets, reads, starts or joins, a generator of random numbers decides who goes on; equal
seeds give equal schedules.  Half of the seeds draw the next thread from all that can run, the
others follow random priorities that change now and then (PCT: Burckhardt and others, A randomized
scheduler with probabilistic guarantees of finding bugs, ASPLOS 2010).

Time is virtual: a wait with a timeout ends when no thread can run, a short one now and then before.
"""

import heapq
import itertools
import operator
import queue
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from blockstore import concurrency
from blockstore.io import reader
from tests.reads import one_by_one

SHORT_NS = 300_000_000  # a wait of at most so long may end while other threads can run
MAX_STEPS = 400_000  # of a schedule: a thread waits for something that does not come
_TURNS = 100  # for threads that are about to end
MAX_NS = 600 * 10**9  # likewise, of virtual time


_PRIORITY = operator.attrgetter("priority")


class Failed(Exception):
    """A schedule met a deadlock, or an error that no thread handles."""


class _Ended(BaseException):
    """Unwinds a thread of a schedule that is over."""


class _Carrier:
    """A real thread: runs one thread of a schedule after another."""

    def __init__(self) -> None:
        self.gate = threading.Lock()  # open when it is its turn
        self.gate.acquire()
        self.task: _Task
        self.real = threading.current_thread()


class _Task:
    """One thread of a schedule."""

    def __init__(self, number: int, name: str, priority: float) -> None:
        self.number, self.name, self.priority = number, name, priority
        self.carrier: _Carrier
        self.thread: Any = None  # its `Thread`
        self.until = 0  # virtual ns at which its wait ends; 0: it has no timeout
        self.queue: deque[_Task] | None = None  # that it waits in
        self.what = ""  # that it waits for
        self.expired = self.done = False
        self.joining: deque[_Task] = deque()


class Scheduler:
    """Runs one schedule."""

    def __init__(self, seed: int) -> None:
        self.seed, self._rng = seed, random.Random(seed)
        self._draw = self._rng.random
        self._stay = self._rng.choice((0.0, 0.5, 0.9))  # that a thread just goes on
        self._by_priority = self._rng.random() < 0.5
        self._change = self._rng.choice((0.002, 0.01, 0.05))  # that its priority falls
        self.now, self.steps = 10**9, 0
        self.trace = 0  # of all decisions: equal for equal schedules
        self.over, self.error = False, ""
        self._numbers = itertools.count()
        self._timed: list[_Task] = []
        self._carriers: list[_Carrier] = []
        self._idle: list[_Carrier] = []
        self.main = self.current = self._new("main")
        self.main.carrier = _Carrier()
        self.tasks: list[_Task] = [self.main]
        self._ready = [self.main]

    def _new(self, name: str) -> _Task:
        return _Task(next(self._numbers), name, self._rng.random())

    # -- decisions --------------------------------------------------------------------------------

    def switch(self) -> None:
        """Another thread may go on here."""
        if self.over:
            raise _Ended
        self.steps += 1
        self.now += 1000
        if len(self._ready) == 1 and not self._timed:
            return  # nobody else can run
        if self._by_priority:
            if self._draw() < self._change:
                self.current.priority = -self._draw() - self.steps
        elif self._stay and self._draw() < self._stay:
            return
        self._pass()

    def wait(self, waiting: "deque[_Task]", what: str, timeout: float | None = None) -> bool:
        """Wait in a queue; False: until the time was over."""
        if self.over:
            raise _Ended
        me = self.current
        me.queue, me.what, me.expired = waiting, what, False
        waiting.append(me)
        self._ready.remove(me)
        if timeout is not None:
            me.until = self.now + max(1, int(timeout * 1e9))
            self._timed.append(me)
        self._pass()
        return not me.expired

    def wake(self, waiting: "deque[_Task]", count: int = 1 << 30) -> None:
        """Those who wait there may go on, the first ones first."""
        while waiting and count:
            self._resume(waiting[0], expired=False)
            count -= 1

    def _resume(self, task: _Task, expired: bool) -> None:
        assert task.queue is not None
        task.queue.remove(task)
        if task.until:
            self._timed.remove(task)
        task.queue, task.what, task.until, task.expired = None, "", 0, expired
        self._ready.append(task)

    def _pick(self) -> _Task | None:
        """Who goes on; None: nobody can."""
        self.steps += 1
        ready = self._ready
        if self._timed and (not ready or self._draw() < 0.02):
            soonest = min(self._timed, key=lambda t: (t.until, t.number))
            if not ready or soonest.until - self.now <= SHORT_NS:
                self.now = max(self.now, soonest.until)
                for task in [t for t in self._timed if t.until <= self.now]:
                    self._resume(task, expired=True)
        if not ready or self.steps > MAX_STEPS or self.now > MAX_NS:
            return None
        if len(ready) == 1:
            return ready[0]
        if self._by_priority:
            return max(ready, key=_PRIORITY)
        return ready[int(self._draw() * len(ready))]

    def _pass(self) -> None:
        """Hand over to whoever is next."""
        me, task = self.current, self._next()
        if task is not me:
            task.carrier.gate.release()
            me.carrier.gate.acquire()
        if me is self.main and self.error:
            raise Failed(self.error)
        if self.over:
            raise _Ended

    def _next(self) -> _Task:
        task = self._pick() if not self.error else self.main
        if task is None:
            waits = [t for t in self.tasks if not t.done]
            kind = "a deadlock" if not self._ready else "no end"
            self.fail(f"{kind}: {self.steps} steps, {self.now / 1e9:.1f} s\n{self._stacks(waits)}")
            task = self.main
        self.trace = (self.trace * 31 + task.number) & 0xFFFFFFFFFFFF
        self.current = task
        return task

    def fail(self, error: str) -> None:
        """The schedule ends here; its first error counts."""
        self.error = self.error or f"seed {self.seed}: {error}"

    def _stacks(self, tasks: list[_Task]) -> str:
        frames, parts = sys._current_frames(), []
        for task in tasks:
            lines = [
                f"    {f.filename.rsplit('/', 3)[-1]}:{f.lineno} {f.name}: {f.line}"
                for f in traceback.extract_stack(frames.get(task.carrier.real.ident or 0))
                if f.filename != __file__
            ]
            parts.append(f"  {task.name} waits for {task.what or 'its turn'}\n" + "\n".join(lines))
        return "\n".join(parts)

    # -- threads ----------------------------------------------------------------------------------

    def start(self, thread: "Thread") -> _Task:
        """A new thread, which may run from now on."""
        task = self._new(thread.name)
        task.thread = thread
        if self._idle:
            task.carrier = self._idle.pop()
        else:
            carrier = task.carrier = _Carrier()
            carrier.real = threading.Thread(target=self._serve, args=(carrier,), daemon=True)
            carrier.real.start()
            self._carriers.append(carrier)
        task.carrier.task = task
        self.tasks.append(task)
        self._ready.append(task)
        self.switch()
        return task

    def _serve(self, carrier: _Carrier) -> None:
        carrier.gate.acquire()
        while not self.over:
            task = carrier.task
            try:
                task.thread.run()
            except _Ended:
                return
            except BaseException:
                self.fail(f"{task.name} ends with\n{traceback.format_exc()}")
            task.done = True
            self._ready.remove(task)
            self.wake(task.joining)
            self._idle.append(carrier)
            self._next().carrier.gate.release()
            carrier.gate.acquire()

    def end(self) -> list[str]:
        """Unwind all threads; returns the names of those that had not ended."""
        left = self._left()
        self.over = True
        for carrier in self._carriers:
            carrier.gate.release()
            carrier.real.join()
        return left

    def settle(self) -> None:
        """Let threads end that are about to."""
        for _ in range(_TURNS):
            if self._left():
                sleep(0.0)

    def _left(self) -> list[str]:
        return [t.name for t in self.tasks[1:] if not t.done and t.name != "timer"]


_now: Scheduler  # of the schedule that runs


class Lock:
    """`threading.Lock`."""

    _again = False  # whether its owner may take it once more

    def __init__(self) -> None:
        self._owner: _Task | None = None
        self._count = 0
        self._waiting: deque[_Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        assert timeout == -1
        if self._again and self._owner is _now.current:
            self._count += 1
            return True
        _now.switch()
        if self._owner is None:
            self._owner, self._count = _now.current, 1
            return True
        return self._take(blocking)

    def _take(self, blocking: bool = True) -> bool:
        while self._owner is not None:
            if not blocking:
                return False
            _now.wait(self._waiting, f"a lock that {self._owner.name} has")
        self._owner, self._count = _now.current, 1
        return True

    def release(self) -> None:
        if _now.over:
            raise _Ended
        if self._owner is None or (self._again and self._owner is not _now.current):
            raise RuntimeError("a lock that is not held is released")
        self._count -= 1
        if self._count == 0:
            self._owner = None
            if self._waiting:
                _now.wake(self._waiting)
            _now.switch()

    def locked(self) -> bool:
        return self._owner is not None

    def _is_owned(self) -> bool:
        return self._owner is _now.current

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()


class RLock(Lock):
    """`threading.RLock`."""

    _again = True


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[_Task] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()

    def _check(self) -> None:
        if not _now.over and not self._is_owned():
            raise RuntimeError("a condition is used without its lock")

    def wait(self, timeout: float | None = None) -> bool:
        self._check()
        count, self._lock._owner = self._lock._count, None
        _now.wake(self._lock._waiting)
        notified = _now.wait(self._waiting, "a condition", timeout)
        self._lock._take()
        self._lock._count = count
        return notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else _now.now + int(timeout * 1e9)
        while not (result := predicate()):
            left = None if end is None else (end - _now.now) / 1e9
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        self._check()
        _now.wake(self._waiting, n)

    def notify_all(self) -> None:
        self._check()
        _now.wake(self._waiting)


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[_Task] = deque()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        _now.switch()
        self._set = True
        _now.wake(self._waiting)
        _now.switch()

    def clear(self) -> None:
        _now.switch()
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        _now.switch()
        if not self._set:
            _now.wait(self._waiting, "an event", timeout)
        return self._set


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: Any = deque()
        self._waiting: deque[_Task] = deque()

    def put(self, item: Any) -> None:
        self._add(item)
        _now.wake(self._waiting, 1)
        _now.switch()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        _now.switch()
        while not self._items:
            if not block or not _now.wait(self._waiting, "a queue", timeout):
                raise queue.Empty
        return self._remove()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def _add(self, item: Any) -> None:
        self._items.append(item)

    def _remove(self) -> Any:
        return self._items.popleft()


class PriorityQueue(SimpleQueue):
    """`queue.PriorityQueue`."""

    def __init__(self) -> None:
        super().__init__()
        self._items = []

    def _add(self, item: Any) -> None:
        heapq.heappush(self._items, item)

    def _remove(self) -> Any:
        return heapq.heappop(self._items)


class Barrier:
    """`threading.Barrier`."""

    def __init__(self, parties: int) -> None:
        self._missing = parties
        self._waiting: deque[_Task] = deque()

    def wait(self) -> None:
        _now.switch()
        self._missing -= 1
        if self._missing:
            _now.wait(self._waiting, "a barrier")
        else:
            _now.wake(self._waiting)


class Thread:
    """`threading.Thread`."""

    def __init__(
        self, target: Any = None, name: str = "", args: Any = (), daemon: bool = False
    ) -> None:
        self._target, self._args, self.daemon = target, args, daemon
        self.name = name or getattr(target, "__name__", "thread")
        self._task: _Task | None = None

    def start(self) -> None:
        self._task = _now.start(self)

    def run(self) -> None:
        self._target(*self._args)

    def join(self) -> None:
        assert self._task is not None
        assert self._task is not _now.current
        _now.switch()
        if not self._task.done:
            _now.wait(self._task.joining, f"the end of {self.name}")

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number


class Timer(Thread):
    """`threading.Timer`."""

    def __init__(self, interval: float, function: Any, args: Any = ()) -> None:
        super().__init__(function, "timer", args)
        self._interval = interval

    def run(self) -> None:
        sleep(self._interval)
        super().run()


class Future:
    """`concurrent.futures.Future`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._done = work, Event()
        self._result, self._error = None, None

    def run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        self._done.set()

    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class ThreadPoolExecutor:
    """`concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        self._tasks, self._threads = SimpleQueue(), list[Thread]()
        self._maximum, self._name = max_workers, thread_name_prefix

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, function: Any, *arguments: Any) -> Future:
        future = Future(lambda: function(*arguments))
        self._tasks.put(future)
        if len(self._threads) < self._maximum:
            self._threads.append(thread := Thread(self._serve, self._name))
            thread.start()
        return future

    def _serve(self) -> None:
        while (future := self._tasks.get()) is not None:
            future.run()


def current_thread() -> Any:
    """The `Thread` that runs."""
    return _now.current.thread


def perf_counter_ns() -> int:
    """Virtual."""
    return _now.now


def monotonic() -> float:
    """Virtual."""
    return _now.now / 1e9


def sleep(seconds: float) -> None:
    """Virtual."""
    _now.wait(deque(), "time", seconds)


def _meet(_fd: int, _offset: int) -> None:
    """Others may go on before a read."""
    _now.switch()


_READ = reader.read_pieces
_REPLACED = {
    name: globals()[name]
    for name in (
        "Barrier", "Condition", "Event", "Future", "Lock", "PriorityQueue", "RLock", "SimpleQueue",
        "Thread", "ThreadPoolExecutor", "Timer", "current_thread", "monotonic", "perf_counter_ns",
        "sleep",
    )
}  # fmt: skip


@contextmanager
def schedule(seed: int) -> Iterator[Scheduler]:
    """Inside, threads that are made run one at a time, as the seed decides.

    Raises Failed: no thread can go on, one ended by an error, or has not ended at the end.
    """
    global _now
    kept = {name: getattr(concurrency, name) for name in _REPLACED}
    scheduler = _now = Scheduler(seed)
    for name, value in _REPLACED.items():
        setattr(concurrency, name, value)
    reader.read_pieces = one_by_one(_meet, _READ)
    left: list[str] = []
    try:
        yield scheduler
        scheduler.settle()
    finally:
        left = scheduler.end()
        for name, value in kept.items():
            setattr(concurrency, name, value)
        reader.read_pieces = _READ
    if scheduler.error or left:
        raise Failed(scheduler.error or f"seed {seed}: threads that did not end: {left}")
