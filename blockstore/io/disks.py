"""The disks that a store is dealt over: threads that read each, and a check for slow ones."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.closing import Closing
from blockstore.format import PAGE_BYTES
from blockstore.io.reading import Request
from blockstore.io.ring import MAX_PIECES
from blockstore.io.threads import ReadThreads
from blockstore.kernels.reads import PAGES, ReadQueue
from blockstore.units import format_bytes

SLOW = 1.5  # a disk is slow if a byte takes so many times as long as on the others
_WINDOW_BYTES = 128 << 20  # read from all disks, after which they are compared
_WINDOWS = 2  # in a row, in which a disk is slow before it is named
Read = Callable[[NDArray[np.int64], ReadQueue], int]  # pieces; returns how many reads it took
_log = logging.getLogger(__name__)


class Disk:
    """One disk, with threads of its own: it waits for no other disk."""

    def __init__(self, folder: str, threads: int) -> None:
        self.folder, self.threads = folder, ReadThreads(threads)
        self.bytes_read = self.reads = self.errors = 0
        self.active_ns = 0  # in which at least one thread was reading
        self.slow = False
        self.readers = self.since = 0  # threads that are reading, and since when there are any
        self.before = 0, 0  # bytes and time when the disks were compared last
        self.windows = 0  # in a row, in which it was slow


class Disks(Closing):
    """All disks.  Each serves its share of the bytes, so the slowest decides for all."""

    def __init__(self, folders: Sequence[str], threads: int, direct: bool) -> None:
        """`threads`: number that reads each disk, by io_uring if `direct`."""
        self.all = [Disk(folder, threads) for folder in folders]
        self._direct = direct
        self._lock = concurrency.Lock()

    def close(self) -> None:
        for disk in self.all:
            disk.threads.close()

    def read(self, pieces: Sequence[NDArray[np.int64]], reads: Sequence[Read]) -> None:
        """Read pieces of each disk in its own threads, by the function of the disk in `reads`.

        Returns when nothing is in flight any more.  Raises the first error met.
        """
        tasks = [
            (disk, own[at : at + MAX_PIECES], read)
            for disk, own, read in zip(self.all, pieces, reads, strict=True)
            for at in range(0, len(own), MAX_PIECES)
        ]
        if not tasks:
            return
        request = Request(len(tasks))
        for disk, part, read in tasks:
            disk.threads.put(partial(self._read_one, disk, request, part, read))
        request.done.wait()
        if request.error is not None:
            raise request.error

    def _read_one(
        self,
        disk: Disk,
        request: Request,
        pieces: NDArray[np.int64],
        read: Read,
        queue: ReadQueue,
    ) -> None:
        """Read in a thread of the disk, which waits for nothing but this disk."""
        error: BaseException | None = None
        reads = num_bytes = 0
        with self._lock:
            if disk.readers == 0:
                disk.since = concurrency.perf_counter_ns()
            disk.readers += 1
        try:
            reads = read(pieces, queue if self._direct else queue.without_ring())
            num_bytes = int(pieces[:, PAGES].sum()) * PAGE_BYTES
        except BaseException as found:
            error = found
        with self._lock:
            disk.readers -= 1
            if disk.readers == 0:
                disk.active_ns += concurrency.perf_counter_ns() - disk.since
            disk.bytes_read += num_bytes
            disk.reads += reads
            disk.errors += error is not None
            if sum(d.bytes_read - d.before[0] for d in self.all) >= _WINDOW_BYTES:
                self._compare()
        request.finish(error)

    def _compare(self) -> None:
        """Name those that were slow in the last windows.  Under the lock."""
        now = concurrency.perf_counter_ns()
        costs = []
        for disk in self.all:
            if disk.readers:  # what is under way counts up to now
                disk.active_ns += now - disk.since
                disk.since = now
            num_bytes, ns = disk.bytes_read - disk.before[0], disk.active_ns - disk.before[1]
            disk.before = disk.bytes_read, disk.active_ns
            # a disk that was asked for little cannot be judged
            enough = 4 * len(self.all) * num_bytes >= _WINDOW_BYTES
            costs.append(ns / num_bytes if enough else 0.0)
        for i, disk in enumerate(self.all):
            others = [c for j, c in enumerate(costs) if j != i and c]
            was_slow = bool(others) and costs[i] > SLOW * median(others)
            disk.windows = disk.windows + 1 if was_slow else 0
            if disk.windows == _WINDOWS and not disk.slow:
                own, rest = (format_bytes(int(1e9 / c)) for c in (costs[i], median(others)))
                _log.warning(
                    "%s: slow disk: %s/s, the others %s/s, expected equal ones; every batch waits "
                    "for it: replace it, or deal the store without it by blockstore stripe",
                    disk.folder, own, rest,
                )  # fmt: skip
            disk.slow = disk.windows >= _WINDOWS or (disk.slow and was_slow)

    def counters(self) -> dict[str, int]:
        """What each has done so far, by its folder."""
        with self._lock:
            return {
                f"disk:{name}:{disk.folder}": value
                for disk in self.all
                for name, value in (
                    ("bytes_read", disk.bytes_read), ("reads", disk.reads),
                    ("errors", disk.errors), ("active_ns", disk.active_ns),
                    ("slow", int(disk.slow)),
                )
            }  # fmt: skip
