"""Estimates when groups of pages are used again, from their earlier uses.

Plans use what they read in orders of their own: partitions once an epoch in a random order, rows in
ascending passes, blocks of minibatches by chance, twice at once where two workers want them.  One
rule serves all of them: the intervals between two uses of a group are counted, and of a group that
was used `a` uses ago the next use is expected after E[T - a | T > a].  If groups come once in a
cycle the one used last is the farthest; if some come again at once, one that did not is; if the
chance grows with the age of none, as of hot and cold blocks, the oldest is.
"""

import numpy as np
from numpy.typing import NDArray

_BINS, _PER_OCTAVE = 96, 3  # of intervals: 2**32 uses are the longest
_MEMORY = 4  # intervals of each group that are counted, until all count half


class UseIntervals:
    """Intervals between uses, in uses of groups.  The caller holds a lock."""

    def __init__(self, groups: int) -> None:
        self._last = np.zeros(groups, np.uint32)  # use of each, counted from 1; 0: not yet
        self._now = 1
        self._counts = np.zeros(_BINS)
        self._maximum = _MEMORY * max(groups, 1024)
        self._middle = 2 ** ((np.arange(_BINS) + 0.5) / _PER_OCTAVE) - 1

    @property
    def memory_bytes(self) -> int:
        return self._last.nbytes

    def use(self, groups: NDArray[np.int64]) -> None:
        """Distinct groups are used, in this order."""
        last = self._last[groups]
        now = (self._now + np.arange(groups.size)).astype(np.uint32)
        self._counts += np.bincount(self._bins((now - last)[last > 0]), minlength=_BINS)
        if self._counts.sum() > self._maximum:
            self._counts /= 2
        self._last[groups] = now
        self._now += groups.size

    def last_use(self, groups: NDArray[np.int64]) -> NDArray[np.uint32]:
        """A number that changes with each use."""
        return self._last[groups]

    def farthest(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Groups ordered by when they are expected, the farthest first.

        If a group is older than all intervals were, all that is known is that it is not used much:
        an interval of twice its age is added to those that were counted.
        """
        ages = np.uint32(self._now & 0xFFFFFFFF) - self._last[groups]
        longer = np.cumsum(self._counts[::-1])[::-1]
        uses = np.cumsum((self._counts * self._middle)[::-1])[::-1]
        expected = (uses + 2 * (self._middle + 1)) / (longer + 1)
        expected_at: NDArray[np.float64] = expected[self._bins(ages)]
        found: NDArray[np.int64] = groups[np.argsort(ages - expected_at, kind="stable")]
        return found

    @staticmethod
    def _bins(intervals: NDArray[np.uint32]) -> NDArray[np.int64]:
        bins = np.minimum(_BINS - 1, np.log2(intervals + 1.0) * _PER_OCTAVE)
        found: NDArray[np.int64] = bins.astype(np.int64)
        return found
