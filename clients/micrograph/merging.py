"""How many time steps an iteration has: fewer and fewer, as long as epochs become faster."""

from collections.abc import Callable
from typing import Any


class MergeSearch:
    """Looks for the number of time steps with the fastest epochs; knows nothing but the time.

    The first epoch has one time step for each rank.  After each epoch that was faster than the one
    before there is one less; the first that was not takes that back, and ends the search.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float]) -> None:
        """`clock`: gives seconds, as `time.monotonic`."""
        self.time_steps = num_ranks
        self.ended = num_ranks == 1
        self._num_ranks, self._clock = num_ranks, clock
        self._before = float("inf")  # seconds of the epoch before
        self._spent = 0.0  # seconds of this epoch, before it was gone on with
        self._begun = clock()

    def begin_epoch(self) -> None:
        """An epoch begins, or goes on where a state was saved."""
        self._begun = self._clock()

    def end_epoch(self) -> None:
        """Decide the time steps of the next one."""
        seconds, self._spent, self._begun = self._seconds, 0.0, self._clock()
        if self.ended:
            return
        if seconds >= self._before:
            self.time_steps += 1
            self.ended = True
            return
        self._before = seconds
        # one time step is left: there are none to merge
        self.ended = self.time_steps == 1
        self.time_steps = max(1, self.time_steps - 1)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: where the search stands, in the middle of an epoch, too."""
        return {
            "num_ranks": self._num_ranks, "time_steps": self.time_steps, "ended": self.ended,
            "before": self._before, "spent": self._seconds,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a search; one with another number of ranks begins from scratch."""
        if state["num_ranks"] != self._num_ranks:
            return
        self.time_steps, self.ended = state["time_steps"], state["ended"]
        self._before, self._spent = state["before"], state["spent"]
        self._begun = self._clock()

    @property
    def _seconds(self) -> float:
        """Of this epoch, so far."""
        return self._spent + self._clock() - self._begun
