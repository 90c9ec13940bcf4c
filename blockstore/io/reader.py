"""Blocks from disk into slots: reader threads, adjacent blocks in one call, every block checked."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.closing import Closing
from blockstore.errors import CorruptBlock
from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import byte_view
from blockstore.io.files import open_to_read, probe_direct, read_exact
from blockstore.kernels.crc import find_bad_page
from blockstore.store import BlockedFile, corrupt_page
from blockstore.validate import GraphCheck, RowCheck

MERGE_BYTES = 4 << 20  # of adjacent blocks, at most, in one call
_TASK_RUNS, _TASK_PAGES = 16, 256  # runs of pages that one thread takes at a time, at most
_MOST_BUFFERS = 512  # of one call; the kernel takes 1024


class _BlockRun(NamedTuple):
    """Adjacent blocks of one shard."""

    file: int
    first: int  # block
    slots: NDArray[np.int64]


class _Request:
    """What one `read` waits for."""

    def __init__(self, left: int) -> None:
        self._left, self._lock = left, concurrency.Lock()
        self.done = concurrency.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if self._left == 0:
                self.done.set()


Transit = concurrency.SimpleQueue[NDArray[np.uint8]]  # buffers that runs of pages pass through
Consume = Callable[[int, NDArray[np.uint8]], None]  # number of a run, its pages


def make_transit(buffers: Iterable[NDArray[np.uint8]]) -> Transit:
    """A queue of these buffers."""
    transit: Transit = concurrency.SimpleQueue()
    for buffer in buffers:
        transit.put(buffer)
    return transit


class Parts(NamedTuple):
    """Runs that are read in part: some pages first, and what these ask for."""

    heads: NDArray[np.int64]  # (runs,) pages of each that come first; 0: the run is read whole
    choose: Callable[[int, NDArray[np.uint8]], Sequence[tuple[int, int]]]  # of a run, by its first
    #   pages: pages [first, stop) that are to be read beside them, ascending; they may overlap


class Reading:
    """Runs of pages on their way."""

    def __init__(self, request: _Request | None, waited: Callable[[int], None]) -> None:
        self._request, self._waited = request, waited

    def wait(self) -> None:
        """Until all are read and consumed.  Raises the first error met."""
        if self._request is not None:
            begun = concurrency.perf_counter_ns()
            self._request.done.wait()
            self._waited(concurrency.perf_counter_ns() - begun)
            if self._request.error is not None:
                raise self._request.error


def wait_all(readings: Iterable[Reading]) -> None:
    """Until nothing is on its way any more, whatever failed.  Raises the first error met."""
    error: BaseException | None = None
    for reading in readings:
        try:
            reading.wait()
        except Exception as found:
            error = error or found
    if error is not None:
        raise error


class ReadThreads:
    """Threads that any number of readers share.  Ends with `close`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._queue: concurrency.SimpleQueue[Callable[[], None] | None] = concurrency.SimpleQueue()
        self._threads = [
            concurrency.Thread(target=self._serve, name=f"read-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Have one of them do this, which raises nothing."""
        self._queue.put(task)

    def close(self) -> None:
        """End them, after what was asked for."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task()


class BlockReader(Closing):
    """Threads that read blocks of several files into the slots of one piece of memory."""

    def __init__(
        self,
        files: Sequence[BlockedFile],
        data: NDArray[np.uint8],
        slot_bytes: int,
        threads: int | ReadThreads = 8,
    ) -> None:
        """`data`: uint8, page-aligned, slots of `slot_bytes`, at least as wide as any block's.

        threads   how many, or those that other readers use, too

        Raises CorruptBlock: a shard is missing.
        """
        self.files, self._data, self._slot_bytes = tuple(files), data, slot_bytes
        self._view = byte_view(data)
        shards = [path for f in files for path in f.shards]
        self.mode = probe_direct(shards[0]) if shards else "O_DIRECT"
        self._direct = self.mode == "O_DIRECT"
        self._fds: list[list[int]] = []
        try:
            for f in files:
                self._fds.append([])
                for path in f.shards:
                    self._fds[-1].append(open_to_read(path, self._direct))
        except BaseException:
            self._close()
            raise
        self.bytes_read = self.reads = self.blocks_read = self.errors = 0
        self.retries = 0  # of reads that failed once
        self.busy_ns = self.wait_ns = 0  # of reader threads at work; of threads that waited
        self._lock = concurrency.Lock()
        self._own = isinstance(threads, int)
        self._threads = ReadThreads(threads) if isinstance(threads, int) else threads

    def close(self) -> None:
        if self._own:
            self._threads.close()
        self._close()

    def read(self, file: int, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Bring blocks[i] of files[file] into slot slots[i]; returns when all are there.

        Ascending blocks that are adjacent on disk are read by one call.  Any thread may call.
        Raises CorruptBlock (file, offset, found, expected), OSError: the first error met.
        """
        runs = list(self._runs(file, blocks, slots))
        if not runs:
            return
        request = _Request(len(runs))
        for run in runs:
            self._put(partial(self._read_run, run), request)
        Reading(request, self._waited).wait()

    def stream(
        self,
        file: int,
        runs: NDArray[np.int64],
        transit: Transit,
        consume: Consume,
        parts: Parts | None = None,
    ) -> Reading:
        """Bring runs of pages through buffers; `consume` gets each in a reader thread.

        runs      int64 (runs, 3 or more)   shard, first page in it, pages; kept until all are read
        transit   page-aligned uint8 buffers, each with room for the longest run
        parts     runs that are not read whole; `consume` gets them with anything in the gaps

        Returns at once; errors come at `Reading.wait`: CorruptBlock, OSError.
        """
        return self._ask(runs, partial(self._pass_pages, file, runs, transit, consume, parts))

    def fetch(self, file: int, runs: NDArray[np.int64], places: NDArray[np.int64]) -> Reading:
        """Bring runs of pages straight to where they stay.

        runs    int64 (runs, 3 or more)   shard, first page in it, pages; kept until all are read
        places  int64 (runs,)             byte in `data` that each run goes to; page-aligned

        Returns at once; errors come at `Reading.wait`: CorruptBlock, OSError.
        """
        return self._ask(runs, partial(self._place_pages, file, runs, places))

    def _ask(self, runs: NDArray[np.int64], read: Callable[[int, int], None]) -> Reading:
        """Have runs [low, high) read, some at a time."""
        tasks, first, pages = [], 0, 0
        for i, count in enumerate(runs[:, 2].tolist()):
            if i - first == _TASK_RUNS or (i > first and pages + count > _TASK_PAGES):
                tasks.append((first, i))
                first, pages = i, 0
            pages += count
        if not len(runs):
            return Reading(None, self._waited)
        tasks.append((first, len(runs)))
        request = _Request(len(tasks))
        for low, high in tasks:
            self._put(partial(read, low, high), request)
        return Reading(request, self._waited)

    def _waited(self, ns: int) -> None:
        with self._lock:
            self.wait_ns += ns

    def _pass_pages(
        self,
        number: int,
        runs: NDArray[np.int64],
        transit: Transit,
        consume: Consume,
        parts: Parts | None,
        low: int,
        high: int,
    ) -> None:
        buffer = transit.get()
        try:
            for i in range(low, high):
                data = buffer[: int(runs[i, 2]) * PAGE_BYTES]
                if parts is None or not parts.heads[i]:
                    self._read_pages(number, runs[i], data)
                    self._check_blocks(number, runs[i], data)
                else:
                    self._read_part(number, runs[i], data, i, parts)
                consume(i, data)
        finally:
            transit.put(buffer)

    def _read_part(
        self, number: int, run: NDArray[np.int64], data: NDArray[np.uint8], i: int, parts: Parts
    ) -> None:
        """The first pages of a run, then those that these ask for."""
        head = int(parts.heads[i])
        self._read_between(number, run, data, 0, head)
        block, where = self._first_block(number, run)
        check = self.files[number].check
        graph = check if isinstance(check, GraphCheck) else None
        if graph is not None:
            graph.check(block, data[: head * PAGE_BYTES], head * PAGE_BYTES, where)
        for first, stop in parts.choose(i, data[: head * PAGE_BYTES]):
            assert stop <= run[2]
            self._read_between(number, run, data, max(first, head), stop)
            if graph is not None:
                graph.check_part(
                    block, data, max(first, head) * PAGE_BYTES, stop * PAGE_BYTES, where
                )
            head = max(head, stop)

    def _first_block(self, number: int, run: NDArray[np.int64]) -> tuple[int, str]:
        file, shard, page = self.files[number], int(run[0]), int(run[1])
        geometry = file.geometry
        block = shard * geometry.blocks_per_shard - (-page // geometry.pages_per_block)
        return block, str(file.shards[shard])

    def _check_blocks(self, number: int, run: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        file = self.files[number]
        if file.check is None:
            return
        pages, size = file.geometry.pages_per_block, file.geometry.slot_bytes
        block, where = self._first_block(number, run)
        whole = data[-int(run[1]) % pages * PAGE_BYTES :]
        whole = whole[: whole.size // size * size]
        file.check.check(block, whole, size, where)

    def _read_between(
        self, number: int, run: NDArray[np.int64], data: NDArray[np.uint8], first: int, stop: int
    ) -> None:
        if first < stop:
            piece = np.array([run[0], run[1] + first, stop - first])
            self._read_pages(number, piece, data[first * PAGE_BYTES : stop * PAGE_BYTES])

    def _place_pages(
        self, number: int, runs: NDArray[np.int64], places: NDArray[np.int64], low: int, high: int
    ) -> None:
        for i in range(low, high):
            start = int(places[i])
            size = int(runs[i, 2]) * PAGE_BYTES
            data = self._data[start : start + size]
            self._read_pages(number, runs[i], data)
            self._check_blocks(number, runs[i], data)

    def _twice(self, read: Callable[[], None]) -> None:
        """A read that fails is tried once more: a disk may err, a bit flip on the way.

        Raises CorruptBlock, OSError: of the second attempt.
        """
        try:
            read()
        except (CorruptBlock, OSError):
            with self._lock:
                self.retries += 1
            read()

    def _read_pages(self, number: int, run: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        self._twice(partial(self._read_pages_once, number, run, data))

    def _read_pages_once(
        self, number: int, run: NDArray[np.int64], data: NDArray[np.uint8]
    ) -> None:
        begun = concurrency.perf_counter_ns()
        file = self.files[number]
        shard, page, pages = run[:3].tolist()
        offset = page * PAGE_BYTES
        fd, where = self._fds[number][shard], str(file.shards[shard])
        read_exact(fd, [byte_view(data)], offset, where)
        if not self._direct:
            os.posix_fadvise(fd, offset, data.size, os.POSIX_FADV_DONTNEED)
        first = shard * file.geometry.blocks_per_shard * file.geometry.pages_per_block + page
        expected = file.crcs[first : first + pages]
        bad = int(find_bad_page(data, pages, expected))
        if bad >= 0:
            rest = data[bad * PAGE_BYTES :]
            raise corrupt_page(where, offset + bad * PAGE_BYTES, rest, int(expected[bad]))
        with self._lock:
            self.bytes_read += data.size
            self.reads += 1
            self.busy_ns += concurrency.perf_counter_ns() - begun

    def _runs(
        self, file: int, blocks: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> list[_BlockRun]:
        geometry = self.files[file].geometry
        most = max(1, min(_MOST_BUFFERS, MERGE_BYTES // geometry.slot_bytes))
        most = min(most, max(1, -(-blocks.size // self._threads.count)))  # all threads have work
        shard = blocks // geometry.blocks_per_shard
        cuts = (np.flatnonzero((np.diff(blocks) != 1) | (np.diff(shard) != 0)) + 1).tolist()
        runs = []
        for low, high in zip([0, *cuts], [*cuts, blocks.size], strict=True):
            for i in range(low, high, most):
                part = slots[i : min(i + most, high)]
                runs.append(_BlockRun(file, int(blocks[i]), part))
        return runs if blocks.size else []

    def _put(self, task: Callable[[], None], request: _Request) -> None:
        self._threads.put(partial(self._do, task, request))

    def _do(self, task: Callable[[], None], request: _Request) -> None:
        """In a reader thread."""
        try:
            task()
        except BaseException as error:
            with self._lock:
                self.errors += 1
            request.finish(error)
        else:
            request.finish(None)

    def _read_run(self, run: _BlockRun) -> None:
        self._twice(partial(self._read_run_once, run))

    def _read_run_once(self, run: _BlockRun) -> None:
        begun = concurrency.perf_counter_ns()
        file = self.files[run.file]
        geometry = file.geometry
        shard, offset = geometry.locate(run.first)
        size = geometry.slot_bytes
        where = str(file.shards[shard])
        starts = [int(slot) * self._slot_bytes for slot in run.slots]
        fd = self._fds[run.file][shard]
        read_exact(fd, [self._view[s : s + size] for s in starts], offset, where)
        if not self._direct:
            os.posix_fadvise(fd, offset, size * len(starts), os.POSIX_FADV_DONTNEED)
        pages = geometry.pages_per_block
        for i, start in enumerate(starts):
            first = (run.first + i) * pages
            expected = file.crcs[first : first + pages]
            data = self._data[start : start + size]
            if isinstance(file.check, GraphCheck):
                bad = file.check.find_bad_page(run.first + i, data, expected, where)
            else:
                bad = int(find_bad_page(data, pages, expected))
            if bad >= 0:
                place = offset + i * size + bad * PAGE_BYTES
                raise corrupt_page(where, place, data[bad * PAGE_BYTES :], int(expected[bad]))
            if isinstance(file.check, RowCheck):
                file.check.check(run.first + i, data, size, where)
        with self._lock:
            self.bytes_read += size * len(starts)
            self.blocks_read += len(starts)
            self.reads += 1
            self.busy_ns += concurrency.perf_counter_ns() - begun

    def _close(self) -> None:
        for fds in self._fds:
            for fd in fds:
                os.close(fd)
        self._fds = []
