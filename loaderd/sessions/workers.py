"""The worker threads: steps that clients wait for come first, least served owners first.

Source of the order: start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996.
"""

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from blockstore import concurrency
from loaderd.sampling.steps import Steps

log = logging.getLogger(__name__)
_SOON, _LATER, _LAST = range(3)  # what a client waits for, what is sampled ahead, the end


class SerialExecutor:
    """A thread that does what it is given, in order, until it is closed."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self._steps: concurrency.SimpleQueue[Callable[[], None] | None] = concurrency.SimpleQueue()
        self._thread = concurrency.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, step: Callable[[], None]) -> None:
        """Queue a step after those that were put before."""
        self._steps.put(step)

    def put_later(self, step: Callable[[], None], delay_s: float) -> None:
        timer = concurrency.Timer(delay_s, self._steps.put, [step])
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """End the thread after the steps that were put before."""
        self.closed = True
        self._steps.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while self._serve_once():  # while it waits for the next step it holds nothing of the last
            pass

    def _serve_once(self) -> bool:
        if (step := self._steps.get()) is None:
            return False
        try:
            step()
        except Exception:  # a defect in one session's step: the others still need this thread
            log.exception("a step failed")
        return True


class _QueuedStep(NamedTuple):
    """A step for a worker: the lowest priority first, of these the earliest start."""

    priority: int
    start: int  # ns of work done for its owner before
    number: int
    step: Callable[[], None] | None
    owner: int


class WorkerPool:
    """Workers of all stores.  Ends with `close`."""

    def __init__(self, workers: int) -> None:
        self._tasks: concurrency.PriorityQueue[_QueuedStep] = concurrency.PriorityQueue()
        self._number = itertools.count()
        self._worked: dict[int, int] = {}  # ns of work that each owner has had, or could have
        self._now = 0  # start of the latest step that was begun: newcomers begin there
        self.idle = 0  # workers that wait for a step
        self._lock = concurrency.Lock()
        self._threads = [
            concurrency.Thread(target=self._work, name=f"build-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def soon(self, owner: int, step: Callable[[], None]) -> None:
        """Have a worker do what a client waits for; owners get equal times."""
        with self._lock:
            start = self._worked[owner] = max(self._worked.get(owner, 0), self._now)
        self._put(_SOON, step, start, owner)

    def forget(self, owner: int) -> None:
        """Drop an owner that asks for nothing any more."""
        with self._lock:
            self._worked.pop(owner, None)

    def later(self, step: Callable[[], None]) -> None:
        """Have a worker do what no client waits for yet."""
        self._put(_LATER, step)

    def share(self, count: int, do: Callable[[int], object], then: Callable[[int], object]) -> None:
        """As `Helpers` says.  The caller waits only for what is being done: it may be a worker."""
        steps = Steps(count)
        for _ in range(min(self.idle, count - 1)):
            self.later(partial(self._help, steps, do))
        try:
            for step in range(count):
                while not steps.is_done(step) and steps.do_next(do):
                    pass
                steps.wait(step)
                then(step)
        finally:
            steps.end()

    def _help(self, steps: Steps, do: Callable[[int], object]) -> None:
        """Do steps that another worker shares, until there is something more urgent."""
        while steps.do_next(do):
            if self._tasks.qsize():
                self.later(partial(self._help, steps, do))
                return

    def settle(self) -> None:
        """Return when everything that was asked for has been done."""
        idle = concurrency.Barrier(len(self._threads) + 1)
        for _ in self._threads:
            self._put(_LAST, lambda: _pause(idle))
        idle.wait()

    def close(self) -> None:
        """End the threads, after what was asked for."""
        for _ in self._threads:
            self._put(_LAST, None)
        for thread in self._threads:
            thread.join()

    def _put(
        self, priority: int, step: Callable[[], None] | None, start: int = 0, owner: int = -1
    ) -> None:
        self._tasks.put(_QueuedStep(priority, start, next(self._number), step, owner))

    def _work(self) -> None:
        while self._work_once():  # while it waits for the next step it holds nothing of the last
            pass

    def _work_once(self) -> bool:
        """One step; False at the end."""
        with self._lock:
            self.idle += 1
        task = self._tasks.get()
        with self._lock:
            self.idle -= 1
        if task.step is None:
            return False
        begun = concurrency.perf_counter_ns()
        with self._lock:
            self._now = max(self._now, task.start)
        try:
            task.step()
        except Exception:  # a defect in one session's step: the others still need this worker
            log.exception("a worker's step failed")
        with self._lock:
            if task.owner in self._worked:
                self._worked[task.owner] += concurrency.perf_counter_ns() - begun
        return True


def _pause(idle: concurrency.Barrier) -> None:
    idle.wait()
