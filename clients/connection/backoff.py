"""How long a client waits for a daemon to come back, and how often it tries."""

import time
from collections.abc import Callable

FIRST_S, MOST_S = 0.02, 1.0  # between two attempts: doubled from one to the next, up to


class Backoff:
    """Waits between attempts until so many seconds have passed since the first of them failed."""

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """0: not at all."""
        self.seconds = seconds
        self._now, self._sleep = now, sleep
        self._end: float | None = None
        self._pause = FIRST_S

    def wait(self) -> bool:
        """Before another attempt; False where the time is over."""
        now = self._now()
        if self._end is None:
            self._end = now + self.seconds
        left = self._end - now
        if left <= 0:
            return False
        self._sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, MOST_S)
        return True
