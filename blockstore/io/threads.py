"""Threads that read, each through a queue of its own."""

from collections.abc import Callable

from blockstore import concurrency
from blockstore.io.ring import QueueOwner
from blockstore.kernels.reads import ReadQueue

Task = Callable[[ReadQueue], None]


class ReadThreads:
    """Threads that any number of readers share.  Ends with `close`.

    refusal   why they read one run at a time each, not many by io_uring; or ""
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._tasks: concurrency.SimpleQueue[Task | None] = concurrency.SimpleQueue()
        self._queues = [QueueOwner() for _ in range(count)]
        self.refusal = self._queues[-1].refusal
        self._threads = [
            concurrency.Thread(target=self._serve, name=f"read-{i}", args=(q,), daemon=True)
            for i, q in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task) -> None:
        """Have one of them run this task, which raises nothing."""
        self._tasks.put(task)

    def close(self) -> None:
        """End them, after all tasks that were put."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread, queue in zip(self._threads, self._queues, strict=True):
            thread.join()
            queue.close()

    def _serve(self, owner: QueueOwner) -> None:
        while (task := self._tasks.get()) is not None:
            task(owner.queue)


class CallingThreads:
    """In place of `ReadThreads`: a thread runs its own tasks, and calls `close` at its end."""

    count, refusal = 1, ""

    def __init__(self) -> None:
        self._own = concurrency.local()

    def put(self, task: Task) -> None:
        """Run this task at once, through the queue of this thread."""
        if not hasattr(self._own, "queue"):
            self._own.queue = QueueOwner()
        task(self._own.queue.queue)

    def close(self) -> None:
        """Give back the queue of this thread."""
        if hasattr(self._own, "queue"):
            self._own.queue.close()
            del self._own.queue
