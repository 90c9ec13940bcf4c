"""Threads that read, each through a queue of its own."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from blockstore import concurrency
from blockstore.io.ring import QueueOwner
from blockstore.kernels.reads import ReadQueue

Task = Callable[[ReadQueue], None]


_URGENT, _NORMAL, _LAST = range(3)


class _QueuedTask(NamedTuple):
    """A task for a thread: the lowest priority first, of these in order."""

    priority: int
    number: int
    task: Task | None  # None: the thread ends


class ReadThreads:
    """Threads that any number of readers share.  Ends with `close`.

    refusal   why they read one run at a time each, not many by io_uring; or ""
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._tasks: concurrency.PriorityQueue[_QueuedTask] = concurrency.PriorityQueue()
        self._numbers = itertools.count()
        self._queues = [QueueOwner() for _ in range(count)]
        self.refusal = self._queues[-1].refusal
        self._threads = [
            concurrency.Thread(target=self._serve, name=f"read-{i}", args=(q,), daemon=True)
            for i, q in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task, urgent: bool = False) -> None:
        """Have one of them run this task, which raises nothing; urgent ones before all others."""
        self._put(_URGENT if urgent else _NORMAL, task)

    def _put(self, priority: int, task: Task | None) -> None:
        self._tasks.put(_QueuedTask(priority, next(self._numbers), task))

    def close(self) -> None:
        """End them, after all tasks that were put."""
        for _ in self._threads:
            self._put(_LAST, None)
        for thread, queue in zip(self._threads, self._queues, strict=True):
            thread.join()
            queue.close()

    def _serve(self, owner: QueueOwner) -> None:
        while (task := self._tasks.get().task) is not None:
            task(owner.queue)


class CallingThreads:
    """In place of `ReadThreads`: a thread runs its own tasks, and calls `close` at its end."""

    count, refusal = 1, ""

    def __init__(self) -> None:
        self._own = concurrency.local()

    def put(self, task: Task, urgent: bool = False) -> None:
        """Run this task at once, through the queue of this thread."""
        del urgent
        if not hasattr(self._own, "queue"):
            self._own.queue = QueueOwner()
        task(self._own.queue.queue)

    def close(self) -> None:
        """Give back the queue of this thread."""
        if hasattr(self._own, "queue"):
            self._own.queue.close()
            del self._own.queue
