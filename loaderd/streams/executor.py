"""Steps that are done one after another, in a thread of their own."""

import logging
from collections.abc import Callable, Iterable

from blockstore import concurrency

log = logging.getLogger(__name__)


class SerialExecutor:
    """A thread that does what it is given, in order, until it is closed."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self._steps: concurrency.SimpleQueue[Callable[[], None] | None] = concurrency.SimpleQueue()
        self._thread = concurrency.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, step: Callable[[], None]) -> None:
        """To be done after those that were put before."""
        self._steps.put(step)

    def put_later(self, step: Callable[[], None], delay_s: float) -> None:
        """To be put in so many seconds."""
        timer = concurrency.Timer(delay_s, self._steps.put, [step])
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """What was put before is done; nothing after it."""
        self.closed = True
        self._steps.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                step()
            except Exception:  # a defect in one session's step: the others still need this thread
                log.exception("an task failed")


def do_all(steps: Iterable[Callable[[], None]]) -> None:
    """At once, in order; the caller holds no lock."""
    for step in steps:
        step()
