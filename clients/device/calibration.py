"""The choice among ways of bringing rows to a device, by what each is measured to take; pure."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

STAGING, DIRECT, CACHED = "staging", "direct", "cached"
MODES = (STAGING, DIRECT, CACHED)
WARM, TRIALS = 3, 6  # batches of each way: not counted, as kernels are built, then counted


class Choice(NamedTuple):
    """How rows come to the device, and why."""

    mode: str
    reason: str
    ns_per_row: dict[str, float]  # measured: by mode
    cached_rows: int = 0
    cached_bytes: int = 0


class Calibration:
    """Says how each batch is to be brought, until all ways are measured; then the fastest.

    Host and device work side by side, so a batch costs what the slower of the two takes.  Of equals
    the earlier in `candidates` is taken: the one that needs less.
    """

    def __init__(self, candidates: Sequence[str], reason: str) -> None:
        """`reason`: why there is no more than one."""
        self._left = list(candidates)
        self._costs: dict[str, list[float]] = {mode: [] for mode in candidates}
        self._seen = 0
        self.choice: Choice | None = None
        if len(candidates) == 1:
            self.choice = Choice(candidates[0], reason, {})

    @property
    def mode(self) -> str:
        return self.choice.mode if self.choice is not None else self._left[0]

    def note(self, host_s: float, device_s: float, num_rows: int) -> None:
        """What a batch took that was brought by `mode`, its caches being what they will be."""
        if self.choice is not None or not num_rows:
            return
        self._seen += 1
        costs = self._costs[self._left[0]]
        if self._seen > WARM:
            costs.append(max(host_s, device_s) / num_rows)
        if len(costs) == TRIALS:
            self._left.pop(0)
            self._seen = 0
        if not self._left:
            medians = {m: 1e9 * statistics.median(costs) for m, costs in self._costs.items()}
            best = min(medians, key=lambda mode: medians[mode])  # the first of equals
            self.choice = Choice(best, "the fastest, measured", medians)

    def decline(self, reason: str) -> None:
        """The device gathers no rows after all: staging takes its place."""
        self.choice = Choice(STAGING, reason, {})
