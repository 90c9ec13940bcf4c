"""What reading costs on this device, measured when the first session needs to know."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import PAGE_BYTES
from blockstore.io.reader import BlockReader, make_transit
from blockstore.kernels.rowcache import plan_extents
from blockstore.kernels.rows import RowLayout
from blockstore.store import BlockedFile

RUN_BYTES = 1 << 20  # of pages read in one call, at most
_PAGES, _RUNS = 512, 24  # of a page each, and of a whole buffer
_TRIES = 4  # of each, in turn: the disk may be slow for a tenth of a second
_MAX_GAP = 256


class DeviceCost(NamedTuple):
    """The cost of reads, with all reader threads at work."""

    run_s: float  # for one more run of pages, however short
    page_s: float  # for one more page in a run

    def plan_runs(
        self, rows: NDArray[Any], low: int, high: int, layout: RowLayout, max_pages: int,
        out: NDArray[np.int64],
    ) -> int:  # fmt: skip
        """`plan_extents` with the gaps that are best read over; returns the number of runs."""
        count = int(plan_extents(rows, low, high, layout, 0, max_pages, out))
        runs = out[:count]
        between = runs[1:, 1] - runs[:-1, 1] - runs[:-1, 2]
        near = (between > 0) & (between <= _MAX_GAP) & (runs[1:, 0] == runs[:-1, 0])
        lengths = np.bincount(between[near], minlength=_MAX_GAP + 1)
        pages = runs[:, 2].sum() + np.cumsum(lengths * np.arange(lengths.size))
        gap = self.best_of(pages, count - np.cumsum(lengths))
        if gap:
            count = int(plan_extents(rows, low, high, layout, gap, max_pages, out))
        return count

    def of_file(self, file: BlockedFile) -> "DeviceCost":
        """The cost by which runs of a file's pages are planned.

        Pages from object storage are requested without gaps: their cache bridges gaps by itself, by
        the bucket's cost, if the pages in them are missing, too.
        """
        return self if file.pages is None else self._replace(run_s=0.0)

    def best_of(self, pages: NDArray[Any], runs: NDArray[Any]) -> int:
        """Choose the best of several ways to read the same rows, by the pages and runs of each.

        Of the ways that take at most a ninth more than the least time (0.9 of the best rate), it is
        the one with the least product of time and bytes.  Ways close to the least time differ by
        half in bytes, and daemons measure costs of a run that differ by a third.
        """
        seconds = runs * self.run_s + pages * self.page_s
        fast = seconds <= seconds.min() * 10 / 9
        return int(np.argmin(np.where(fast, seconds * pages, np.inf)))


FLASH = DeviceCost(13e-6, 3.4e-6)  # if there is too little to measure on


def measure_cost(
    reader: BlockReader,
    number: int,
    file: BlockedFile,
    buffers: Sequence[NDArray[np.uint8]],
    disk: int = 0,
) -> DeviceCost:
    """Read pages here and there, then longer runs; a few hundred milliseconds at most.

    number    of `file` in the reader
    buffers   page-aligned, of equal size
    disk      of those that the file is dealt over: only pages on it are read

    Raises CorruptBlock, OSError.
    """
    geometry, deal = file.geometry, file.deal
    shard_pages = min(geometry.num_blocks, geometry.blocks_per_shard) * geometry.pages_per_block
    # units of pages, every so many of which lie on the disk
    unit, disks = (deal.unit_pages, len(deal.files)) if deal else (shard_pages, 1)
    long = min(min(b.size for b in buffers) // PAGE_BYTES, unit)
    rows = shard_pages // max(1, unit * disks)
    if rows * unit < 4 * _PAGES or rows * unit < 4 * long:
        return FLASH
    transit = make_transit(buffers)
    spread = np.random.default_rng(0)

    def seconds(count: int, pages: int) -> float:
        runs = np.zeros((count, 3), np.int64)
        units = spread.integers(0, rows, count) * disks + disk
        runs[:, 1] = np.sort(units * unit + spread.integers(0, unit - pages + 1, count))
        runs[:, 2] = pages
        begun = concurrency.perf_counter_ns()
        reader.stream(number, runs, transit, lambda _low, _high, _data: None).wait()
        return (concurrency.perf_counter_ns() - begun) / 1e9 / count

    tries = [(seconds(_PAGES, 1), seconds(_RUNS, long)) for _ in range(_TRIES)]
    short, whole = map(min, zip(*tries, strict=True))
    page_s = max(1e-9, (whole - short) / max(1, long - 1))
    return DeviceCost(max(short - page_s, 0.0), page_s)


class DeviceGauge:
    """What reading costs, measured when somebody first asks.

    disks   cost of each disk that blocks are dealt over, by its folder
    known   cost of the slowest: each has the same share of the bytes, so batches wait for that one,
            and runs are planned by its cost
    """

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self._through = 0  # bytes of the buffers it was measured through
        self._lock = concurrency.Lock()
        self.known: DeviceCost | None = None
        self.disks: dict[str, DeviceCost] = {}

    def cost(self, files: Sequence[int], buffers: Sequence[NDArray[np.uint8]]) -> DeviceCost:
        """Measure over the largest of the reader's `files`; again only through larger buffers.

        For a part of a store only whole arrays are read; for a store in object storage none, as
        each page that is read would be fetched.

        Raises CorruptBlock, OSError.
        """
        with self._lock:
            known = self._reader.files
            files = [i for i in files if known[i].holes is None and known[i].pages is None]
            size = min((b.size for b in buffers), default=0)
            if files and self._through < min(size, RUN_BYTES):
                number = max(files, key=lambda i: self._reader.files[i].geometry.num_blocks)
                file = self._reader.files[number]
                folders = file.deal.folders if file.deal else ("",)
                costs = [
                    measure_cost(self._reader, number, file, buffers, disk)
                    for disk in range(len(folders))
                ]
                self.disks = dict(zip(folders, costs, strict=True)) if file.deal else {}
                self.known = max(costs, key=lambda cost: cost.run_s + cost.page_s)
                self._through = size
            return self.known or FLASH
