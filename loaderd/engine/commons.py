"""What the stores of one daemon have in common: one arena, one crew of workers, one of readers."""

import itertools
from contextlib import ExitStack

from blockstore.io.arena import Arena
from blockstore.io.reader import ReadThreads
from loaderd.engine.floor import Floor
from loaderd.memory.ledger import EngineSettings
from loaderd.trace import Trace


class Commons:
    """Memory, taken once, and threads.  Ends with `close`, after all who use it."""

    def __init__(
        self, settings: EngineSettings, num_slots: int, slot_bytes: int, unused_bytes: int
    ) -> None:
        """`unused_bytes`: of --mem.  Raises BudgetTooSmall: the system does not give so much."""
        self._stack = ExitStack()
        self.unused_bytes = unused_bytes
        self.numbers = itertools.count(1)  # of sessions, through all stores
        self.trace = Trace(settings.trace) if settings.trace else None
        if self.trace is not None:
            self._stack.callback(self.trace.close)
        try:
            self.arena = self._stack.enter_context(Arena(num_slots, slot_bytes))
        except BaseException:
            self._stack.close()
            raise
        self.readers = ReadThreads(settings.readers)
        self._stack.callback(self.readers.close)
        self.floor = Floor(settings.workers)
        self._stack.callback(self.floor.close)

    def close(self) -> None:
        """End the threads, and give the memory back."""
        self._stack.close()
