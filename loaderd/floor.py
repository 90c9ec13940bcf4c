"""The worker threads: one task after the other, what clients wait for first."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger(__name__)
_SOON, _LATER, _LAST = range(3)  # what a client waits for, what is sampled ahead, the end


class _Task(NamedTuple):
    """A step for a worker; equal priorities in the order of their numbers."""

    priority: int
    number: int
    step: Callable[[], None] | None


class Floor:
    """Workers of all stores.  Ends with `close`."""

    def __init__(self, workers: int) -> None:
        self._tasks: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._number = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"build-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def soon(self, step: Callable[[], None]) -> None:
        """Have a worker do what a client waits for."""
        self._put(_SOON, step)

    def later(self, step: Callable[[], None]) -> None:
        """Have a worker do what no client waits for yet."""
        self._put(_LATER, step)

    def settle(self) -> None:
        """Return when everything that was asked for has been done."""
        idle = threading.Barrier(len(self._threads) + 1)
        for _ in self._threads:
            self._put(_LAST, lambda: _pause(idle))
        idle.wait()

    def close(self) -> None:
        """End the threads, after what was asked for."""
        for _ in self._threads:
            self._put(_LAST, None)
        for thread in self._threads:
            thread.join()

    def _put(self, priority: int, step: Callable[[], None] | None) -> None:
        self._tasks.put(_Task(priority, next(self._number), step))

    def _work(self) -> None:
        while (step := self._tasks.get().step) is not None:
            try:
                step()
            except Exception:  # a defect in one session's step: the others still need this worker
                log.exception("a worker's step failed")


def _pause(idle: threading.Barrier) -> None:
    idle.wait()
