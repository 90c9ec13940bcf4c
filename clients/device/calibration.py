"""Choose how rows get to a device by measuring each way; does no I/O itself."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

STAGING, DIRECT, CACHED = "staging", "direct", "cached"
MODES = (STAGING, DIRECT, CACHED)
WARM, TRIALS = 3, 6  # batches per mode: WARM unmeasured, as kernels compile, then TRIALS measured


class Choice(NamedTuple):
    """How rows get to the device, and why."""

    mode: str
    reason: str
    ns_per_row: dict[str, float]  # measured, by mode
    cached_rows: int = 0
    cached_bytes: int = 0


class Calibration:
    """Gives each batch a mode until all modes are measured; then chooses the fastest.

    Host and device work at the same time, so a batch costs the time of the slower one.  Among
    equals the earlier in `candidates` is chosen: the one that needs less.
    """

    def __init__(self, candidates: Sequence[str], reason: str) -> None:
        """`reason`: of the choice, if there is only one candidate."""
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
        """Record the times of a batch in `mode`, once its caches are in their final state."""
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
        """Choose staging, as the device cannot gather rows after all."""
        self.choice = Choice(STAGING, reason, {})
