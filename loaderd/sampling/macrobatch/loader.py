"""Macro-batches and their memories: a thread reads the next one while one is served.

    wanted   (epoch 0, macro 3)   (epoch 0, macro 4)   ...   (epoch 1, first)
                     |                    |
    memories    is served           is read meanwhile

A macro-batch stays while a batch of it is built or leased, and while it is needed now or next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blockstore import concurrency
from loaderd.memory.guarded import Lock
from loaderd.plans.macrobatch import MacrobatchPlan
from loaderd.sampling.failures import run_guarded
from loaderd.sampling.macrobatch.graph import MacroGraph

Key = tuple[int, int]  # epoch, and number of the macro-batch in it
Span = tuple[int, int]  # ns of a steady clock; (0, 0): nothing was done


@dataclass(slots=True, eq=False)
class MacroMemory:
    """Room for one macro-batch."""

    graph: MacroGraph
    key: Key | None = None  # of what is in it, or is being read into it
    loading: bool = False
    users: int = 0  # batches that are being built, or whose rows a client may read
    first_use: int = 0  # ns of a steady clock; 0 before it
    last_use: int = 0


class MacroOwner(Protocol):
    """The session that wants macro-batches; called by the thread that reads them, unlocked."""

    def macro_read(self, served: Span, read: Span) -> None:
        """A macro-batch is there, or could not be read.

        served   when the memory was in use before
        read     when it was filled again
        """

    def thread_failed(self, error: Exception) -> None:
        """The thread has ended by an error that nobody foresaw: nothing more is read."""


class MacroLoader:
    """The memories of one session, and the thread that fills them.

    Its owner calls it under `lock`.
    """

    def __init__(
        self, plan: MacrobatchPlan, memories: Sequence[MacroMemory], lock: Lock, owner: MacroOwner
    ) -> None:
        """With two memories one is read while the other is served.

        Raises RuntimeError: the system has no more threads.
        """
        self._plan, self._memories, self._owner = plan, memories, owner
        self._changed = concurrency.Condition(lock)
        self._wanted: list[Key] = []  # in the order of need
        self._errors: dict[Key, BaseException] = {}  # of what could not be read
        self._begun = 0  # number of runs: what fails for one is tried again for the next
        self._closed = False
        self.counters = dict.fromkeys(
            ("macro_loaded", "macro_members", "macro_read_ns", "macro_wait_ns"), 0
        )
        self._thread = concurrency.Thread(
            target=run_guarded, args=(self._run, owner.thread_failed), name="macro-read",
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    def begin(self) -> None:
        """A run begins: what could not be read is tried again when it is needed."""
        self._errors.clear()
        self._begun += 1
        self._changed.notify_all()  # what is wanted may be the same as before

    def want(self, wanted: list[Key]) -> None:
        """Set what is needed from now on, in this order; what is not there is read."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.notify_all()

    def acquire(self, key: Key) -> MacroMemory | None:
        """Keep a macro-batch for one batch, until `release`; None: it is not there yet.

        Raises the error of reading it.
        """
        if key in self._errors:
            raise self._errors[key]
        memory = self._find(key)
        if memory is None or memory.loading:
            return None
        memory.users += 1
        memory.first_use = memory.first_use or concurrency.perf_counter_ns()
        return memory

    def release(self, memory: MacroMemory) -> None:
        """One batch of it is gone."""
        memory.users -= 1
        assert memory.users >= 0
        if memory.users == 0:
            memory.last_use = concurrency.perf_counter_ns()
            self._changed.notify_all()

    def is_next_ready(self, key: Key) -> bool:
        """Whether this one is needed now, and the one after it has been read."""
        if len(self._wanted) < 2 or self._wanted[0] != key:
            return False
        memory = self._find(self._wanted[1])
        return memory is not None and not memory.loading

    def is_held_up(self, key: Key) -> bool:
        """Whether this one cannot be read before batches of others are released."""
        return self._find(key) is None and key not in self._errors and self._next() is None

    def stop(self) -> None:
        """Read nothing more, except what is under way."""
        self._closed = True
        self._changed.notify_all()

    def join(self) -> None:
        """Wait until the thread has ended.  Call it after `stop`, without the lock."""
        self._thread.join()
        del self._owner  # it refers to this loader: a cycle

    def _find(self, key: Key) -> MacroMemory | None:
        return next((m for m in self._memories if m.key == key), None)

    def _next(self) -> tuple[MacroMemory, Key] | None:
        """The memory to read to, and the macro-batch to read; None while nothing can be read."""
        near = self._wanted[: len(self._memories)]
        free = [m for m in self._memories if not (m.users or m.loading or m.key in near)]
        missing = [key for key in near if self._find(key) is None and key not in self._errors]
        if not free or not missing:
            return None
        return min(free, key=lambda m: m.key or (-1, -1)), missing[0]

    def _run(self) -> None:
        while self._load_next():  # while it waits for the next it holds nothing of the last
            pass

    def _load_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next() is not None)
            chosen = self._next()
            if self._closed or chosen is None:
                return False
            memory, key = chosen
            begun, served = self._begun, (memory.first_use, memory.last_use)
            memory.key, memory.loading, memory.first_use = key, True, 0
        start, error = concurrency.perf_counter_ns(), None
        try:
            memory.graph.load(self._plan.epoch_layout(key[0]).members[key[1]])
        except BaseException as found:
            error = found
        end = concurrency.perf_counter_ns()
        with self._changed:
            memory.loading = False
            if error is None:
                self.counters["macro_loaded"] += 1
                self.counters["macro_read_ns"] += end - start
                self.counters["macro_members"] += memory.graph.num_members
            else:
                memory.key = None
                if begun == self._begun:  # else a run has begun since, and has it read again
                    self._errors[key] = error
        self._owner.macro_read(served, (start, end) if error is None else (0, 0))
        return True
