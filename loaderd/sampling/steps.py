"""Steps that several threads do, each by whoever is free."""

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
        """Nothing more is taken; returns once what was taken is done."""
        with self._changed:
            self._stop = self._next
            self._changed.wait_for(lambda: not self._running)

    def leave(self) -> None:
        """One of those who are counted as `active` does nothing more."""
        with self._changed:
            self.active -= 1
            self._changed.notify_all()

    def wait_all(self) -> None:
        """Until all who are active have left.  Raises the first error met."""
        with self._changed:
            self._changed.wait_for(lambda: self.active == 0)
            if self.error is not None:
                raise self.error

    def wait(self, step: int) -> None:
        """Until a step that was taken is done.  Raises the first error met."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or step not in self._running)
            if self.error is not None:
                raise self.error

    def do_next(self, do: Callable[[int], object]) -> bool:
        """Take a step and do it; False: there was none.  An error is that of all steps."""
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
    """Who may help a thread with its steps."""

    @property
    def idle(self) -> int:
        """How many have nothing else to do now."""

    def share(self, count: int, do: Callable[[int], object], then: Callable[[int], object]) -> None:
        """do(0), do(1), ... by the caller and who is idle; then(i), in order, by the caller.

        Raises the first error met, once none of the steps is being done any more.
        """


class NoHelpers:
    """Nobody helps."""

    idle = 0

    def share(self, count: int, do: Callable[[int], object], then: Callable[[int], object]) -> None:
        for step in range(count):
            do(step)
            then(step)
