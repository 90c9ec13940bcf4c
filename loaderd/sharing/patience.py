"""How long a line that is to end waits for what its followers hold."""

from loaderd.memory.slots import WAIT_S
from loaderd.sharing.line import Line

SETTLE_S = 1.0  # without a release, where batches usually take less than half of that
FIRST_S = 10.0  # that a trainer may take for its first batch: it compiles, and warms up


class Patience:
    """Of one line, from now on.  Times in seconds, of any clock."""

    def __init__(self, line: Line, now: float, allowed_s: float) -> None:
        """`allowed_s`: from one release to the next, as far as is known of those who hold any."""
        self._begun = self._since = now
        self._held = _num_held(line)
        self._allowed_s = min(WAIT_S, max(SETTLE_S, allowed_s))

    def is_over(self, line: Line, now: float) -> bool:
        """Whether nothing has moved for too long."""
        if (held := _num_held(line)) != self._held:
            self._held, self._since = held, now
        waits = any(not f.held for f in line.live)  # one for another one
        most = SETTLE_S if waits else self._allowed_s
        return now - self._since >= most or now - self._begun >= WAIT_S


def allowed_s(num_batches: int, ready_s: float) -> float:
    """Time for a release, of who has had batches for `ready_s` and released so many of them."""
    return 2 * ready_s / num_batches if num_batches else FIRST_S - ready_s


def _num_held(line: Line) -> int:
    return sum(len(f.held) for f in line.followers.values())
