"""Count what one session was handed, and how long it had a batch, or had none."""

from collections.abc import Callable

from blockstore import concurrency

# Measurements, which are not added up: several stores may lie on one slow disk.
_MEASURED = (
    "device_run_ns", "device_page_ns", "object_request_ns", "object_mib_ns", "disk:slow:",
    "disk:run_ns:", "disk:page_ns:",
)  # fmt: skip


class Meter:
    """Counts and times of a session.  Its owner calls it under a lock of its own.

    Time runs only while a run is open: from its start until its last batch is released.  It is
    `ready` while at least one finished batch is with the client, else `starved`.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        """`clock` in nanoseconds; None: the steady one."""
        self._clock = clock or concurrency.perf_counter_ns
        self.rows = self.edges = 0
        self._left = self._held = 0  # batches of the run not yet released; with the client
        self._ready_ns = self._starved_ns = 0
        self._since = self._clock()

    def begin(self, num_batches: int) -> None:
        """Begin a run of that many batches; what an earlier one held is taken back."""
        self._pass()
        self._left, self._held = num_batches, 0

    def end(self) -> None:
        """Nothing more comes of the run."""
        self.begin(0)

    def handed(self, rows: int, edges: int = 0) -> None:
        """A batch goes to the client."""
        self._pass()
        self._held += 1
        self.rows += rows
        self.edges += edges

    def released(self) -> None:
        self._pass()
        self._held = max(0, self._held - 1)
        self._left = max(0, self._left - 1)

    def times(self) -> dict[str, int]:
        """`ready_ns` and `starved_ns` until now."""
        self._pass()
        return {"ready_ns": self._ready_ns, "starved_ns": self._starved_ns}

    def _pass(self) -> None:
        now = self._clock()
        if self._left and self._held:
            self._ready_ns += now - self._since
        elif self._left:
            self._starved_ns += now - self._since
        self._since = now


def add_counts(to: dict[str, int], more: dict[str, int]) -> None:
    """Add counters of another session or store; of measurements keep the larger one."""
    for name, count in more.items():
        known = to.get(name, 0)
        to[name] = max(known, count) if name.startswith(_MEASURED) else known + count
