"""Steps that several threads share, each done by a thread that is free."""

from collections.abc import Callable
from typing import Protocol

from blockstore import concurrency


class Steps:
    """Steps 0, 1, ...: taken in this order, done in any."""

    def __init__(self, count: int, active: int = 0) -> None:
        self.error: BaseException | None = None  # the first one
        self.active = active
        self._next, self._stop, self._running = 0, count, set[int]()
        self._changed = concurrency.Condition()

    def take(self) -> int | None:
        """The next step, which the caller now does; None: there is none."""
        with self._changed:
            if self._next == self._stop:
                return None
            step = self._next
            self._next += 1
            self._running.add(step)
            return step

    def done(self, step: int, more: bool = True, error: BaseException | None = None) -> None:
        """A step that was taken is done; without `more`, or with an error, it was the last."""
        with self._changed:
            self.error = self.error or error
            if error is not None or not more:
                self._stop = self._next
            self._running.discard(step)
            self._changed.notify_all()

    def end(self) -> None:
        """Let no more steps be taken; returns once those that were taken are done."""
        with self._changed:
            self._stop = self._next
            self._changed.wait_for(lambda: not self._running)

    def leave(self) -> None:
        """One of the `active` participants does nothing more."""
        with self._changed:
            self.active -= 1
            self._changed.notify_all()

    def wait_all(self) -> None:
        """Wait until all active participants have left.  Raises the first error met."""
        with self._changed:
            self._changed.wait_for(lambda: self.active == 0)
            if self.error is not None:
                raise self.error

    def wait(self, step: int) -> None:
        """Wait until a step that was taken is done.  Raises the first error met."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or step not in self._running)
            if self.error is not None:
                raise self.error

    def do_next(self, do: Callable[[int], object]) -> bool:
        """Take a step and do it; False: there was none.  An error becomes that of all steps."""
        if (step := self.take()) is None:
            return False
        try:
            do(step)
        except BaseException as error:
            self.done(step, error=error)
        else:
            self.done(step)
        return True

    def is_done(self, step: int) -> bool:
        with self._changed:
            return step < self._next and step not in self._running


class Helpers(Protocol):
    """Threads that may help another one with its steps."""

    @property
    def idle(self) -> int:
        """Number of threads that have nothing else to do now."""

    def share(self, count: int, do: Callable[[int], object], then: Callable[[int], object]) -> None:
        """Run do(0), do(1), ... on the caller and idle threads; then(i), in order, on the caller.

        Raises the first error met, once no step is running any more.
        """


class NoHelpers:
    """Nobody helps."""

    idle = 0

    def share(self, count: int, do: Callable[[int], object], then: Callable[[int], object]) -> None:
        for step in range(count):
            do(step)
            then(step)
