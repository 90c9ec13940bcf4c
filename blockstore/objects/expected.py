"""Pages that readers have announced, so that others leave the cache before them.

Each reader has two bits of a byte of each page: it reads the page in its coming pass, which ascends
through each array, or after that.  Four readers have bits; announcements of further ones are not
kept, and their pages leave by the intervals between uses.
"""

import numpy as np
from numpy.typing import NDArray

MAX_READERS = 4
_NOW = 0x55  # the bits of all readers for their coming passes


class ExpectedUses:
    """Announced uses of the pages of one store.  The caller holds a lock."""

    def __init__(self, pages: int) -> None:
        self.bits = np.zeros(pages, np.uint8)  # 0: nobody has announced the page
        self._readers: dict[object, int] = {}  # the pair of bits of each reader

    def expect(self, reader: object, pages: NDArray[np.int64], later: bool) -> None:
        """A reader will want pages in its coming pass, or after that."""
        free = set(range(MAX_READERS)).difference(self._readers.values())
        if reader not in self._readers and free:
            self._readers[reader] = min(free)
        if reader in self._readers:
            self.bits[pages] |= np.uint8(1 << 2 * self._readers[reader] + later)

    def had(self, reader: object, pages: NDArray[np.int64]) -> None:
        """A reader has read pages in its coming pass."""
        if reader in self._readers:
            self.bits[pages] &= np.uint8(0xFF ^ 1 << 2 * self._readers[reader])

    def forget(self, reader: object) -> None:
        """Drop what a reader has announced."""
        if reader in self._readers:
            self.bits &= np.uint8(0xFF ^ 3 << 2 * self._readers.pop(reader))

    def farthest(
        self, pages: NDArray[np.int64], position: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Expected pages, ordered by when they are wanted, the last first.

        position   of each in its array, below 1: passes ascend
        """
        later = self.bits[pages] & _NOW == 0
        found: NDArray[np.int64] = pages[np.argsort(-(later + position), kind="stable")]
        return found
