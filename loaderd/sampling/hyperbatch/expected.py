"""Announces what a row cache will read of a store in object storage to the disk's page cache.

All rows that a group lacks are known before the first of them is read, and so are the batches that
follow it.  The page cache is told, and keeps their pages until they have been read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES
from blockstore.io.places import page_numbers
from blockstore.io.reader import BlockReader
from blockstore.kernels.rowcache import ABSENT_ROW, find_entries
from blockstore.kernels.rows import RowLayout
from loaderd.sampling.hyperbatch.entries import CachedType, Needs

_ROWS = 1 << 16  # rows whose pages are computed at once: 64 bytes of the heap each, or less


def pages_of_rows(rows: NDArray[np.int64], layout: RowLayout) -> NDArray[np.int64]:
    """Numbers of the pages that hold rows, counted through all shards; some may repeat."""
    block, row = np.divmod(rows, layout.rows_per_block)
    start = block * layout.block_bytes + row * layout.row_bytes
    first, last = start // PAGE_BYTES, (start + layout.row_bytes - 1) // PAGE_BYTES
    longest = int((last - first).max(initial=0))
    return np.concatenate([np.minimum(first + i, last) for i in range(longest + 1)])


class ExpectedPages:
    """Tells page caches what one row cache will read.  For a store on this disk it does nothing."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self._sources = list({id(f.pages): f.pages for f in reader.files if f.pages}.values())

    @contextmanager
    def announced(self, types: Sequence[CachedType], later: Sequence[Needs]) -> Iterator[None]:
        """Announce listed rows, which are read in one pass inside, and later batches' absent rows.

        Earlier announcements are forgotten; if the pass fails or is cancelled, so are these.
        """
        self.forget()
        try:
            self._announce(types, later)
            yield
        except BaseException:
            self.forget()
            raise

    def _announce(self, types: Sequence[CachedType], later: Sequence[Needs]) -> None:
        if not self._sources:
            return
        for t in types:
            for low in range(0, t.num_listed, _ROWS):
                rows = t.listed[low : min(low + _ROWS, t.num_listed)]
                self._expect(t, rows.astype(np.int64), later=False)
            for needs in later:
                for piece in needs.pieces:
                    for low in range(0, piece.size, _ROWS):
                        rows = piece[low : low + _ROWS].astype(np.int64) - t.first
                        rows = rows[(rows >= 0) & (rows < t.num_nodes)]
                        stays = t.table.stays[rows >> int(t.table.shift)] != 0
                        entries = np.empty(rows.size, np.int64)
                        find_entries(rows, rows.size, t.table, entries)
                        listed = t.bits[rows >> 6] >> (rows & 63).astype(np.uint64) & np.uint64(1)
                        absent = ~stays & (entries == ABSENT_ROW) & (listed == 0)
                        self._expect(t, rows[absent], later=True)

    def had(self, file: int, runs: NDArray[np.int64]) -> None:
        """Runs of pages of a file have been read.  Any thread may call."""
        stored = self._reader.files[file]
        if stored.pages is not None:
            pages = page_numbers(stored.geometry.pages_per_shard, runs)
            stored.pages.had(self, stored.path, pages)

    def forget(self) -> None:
        """Withdraw all announcements.  Any thread may call."""
        for source in self._sources:
            source.forget(self)

    def _expect(self, t: CachedType, rows: NDArray[np.int64], later: bool) -> None:
        for a in t.arrays:
            stored = self._reader.files[a.file]
            if stored.pages is not None and rows.size:
                stored.pages.expect(self, stored.path, pages_of_rows(rows, a.layout), later)
