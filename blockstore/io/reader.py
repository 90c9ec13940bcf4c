"""Reads blocks from disk into slots: by threads with many reads at a time; checks every block."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.closing import Closing
from blockstore.format import PAGE_BYTES
from blockstore.io.absent import bring, split_pieces, tasks_away
from blockstore.io.disks import Disks
from blockstore.io.elsewhere import Arrived, Elsewhere, RemoteRows
from blockstore.io.files import open_to_read, probe_direct
from blockstore.io.places import Place, bytes_of, page_numbers, pieces_of, place_arrived, places_of
from blockstore.io.reading import Reading, Request
from blockstore.io.ring import MAX_PIECES
from blockstore.io.threads import CallingThreads, ReadThreads, Task
from blockstore.kernels.reads import PAGE, PAGES, PLACE, SHARD, ReadQueue, cut_tasks, read_pieces
from blockstore.store import BlockedFile, read_verified
from blockstore.validate import GraphCheck

MERGE_BYTES = 4 << 20  # of blocks that one thread takes at a time, at most
_TASK_PAGES = 256  # of runs, likewise
_NO_CRCS = np.empty(0, np.uint32)


class Transit(NamedTuple):
    """Buffers that runs of pages pass through."""

    free: concurrency.SimpleQueue[NDArray[np.uint8]]
    pages: int  # for which each has room

    @contextmanager
    def buffer(self) -> Iterator[NDArray[np.uint8]]:
        """Wait for a buffer, which nobody else has inside."""
        buffer = self.free.get()
        try:
            yield buffer
        finally:
            self.free.put(buffer)


def make_transit(buffers: Sequence[NDArray[np.uint8]]) -> Transit:
    """A transit of these buffers, which are page-aligned."""
    free: concurrency.SimpleQueue[NDArray[np.uint8]] = concurrency.SimpleQueue()
    for buffer in buffers:
        free.put(buffer)
    return Transit(free, min(b.size for b in buffers) // PAGE_BYTES)


Consume = Callable[[int, int, NDArray[np.uint8]], None]  # runs [low, high), their pages in a row


class Parts(NamedTuple):
    """Runs that are read in part: some pages first, and what these ask for."""

    heads: NDArray[np.int64]  # (runs,) pages of each that come first; 0: the run is read whole
    choose: Callable[[int, NDArray[np.uint8]], Sequence[tuple[int, int]]]  # of a run, by its first
    #   pages: pages [first, stop) that are to be read beside them, ascending; they may overlap


class _Passing(NamedTuple):
    """Arguments of `stream`."""

    file: int
    runs: NDArray[np.int64]
    transit: Transit
    consume: Consume
    parts: Parts | None
    rows: NDArray[Any] | None


class _Placing(NamedTuple):
    """Arguments of `read` or `fetch`."""

    file: int
    runs: NDArray[np.int64]
    places: NDArray[np.int64]
    are_blocks: bool  # each run is one block


class BlockReader(Closing):
    """Threads that read blocks of several files into the slots of one piece of memory.

    mode    how it reads: past the page cache or not, by which call, and why
    disks   that the blocks of some files are dealt over; None: there are none
    """

    def __init__(
        self,
        files: Sequence[BlockedFile],
        data: NDArray[np.uint8],
        slot_bytes: int,
        threads: int | ReadThreads | CallingThreads = 8,
        source: RemoteRows | None = None,
    ) -> None:
        """`data`: uint8, page-aligned, slots of `slot_bytes`, at least as wide as any block's.

        threads   how many, or those that other readers use, too
        source    of the rows in blocks that are holes; None: reading these is an error

        Raises CorruptBlock: a shard is missing.
        """
        self.files, self._data, self._slot_bytes = tuple(files), data, slot_bytes
        deal = next((f.deal for f in files if f.deal), None)
        probed = [path for f in files if f.deal is None for path in f.shards][:1]  # beside disks
        modes = (probe_direct(path) for path in (*probed, *(deal.files if deal else ())))
        self.mode = next((mode for mode in modes if mode != "O_DIRECT"), "O_DIRECT")
        self._direct = self.mode == "O_DIRECT"
        self._fds: list[int] = []
        self._places: list[list[Place]] = []  # of each file: one, or one for each disk
        try:
            for f in files:
                first = len(self._fds)
                for path in f.shards:
                    self._fds.append(open_to_read(path, self._direct))
                self._places.append(places_of(f, np.array(self._fds[first:], np.int64)))
        except BaseException:
            self._close()
            raise
        self.bytes_read = self.reads = self.blocks_read = self.errors = 0
        self.retries = 0  # of pieces that did not come, or not as they were written
        self.busy_ns = self.wait_ns = 0  # of reader threads at work; of threads that waited
        self._lock = concurrency.Lock()
        self._own = isinstance(threads, int)
        self._threads = ReadThreads(threads) if isinstance(threads, int) else threads
        self._source = source
        self.disks = Disks(deal.folders, self._threads.count, self._direct) if deal else None
        if self._direct:
            refusal = self._threads.refusal
            self.mode += f" by preadv: {refusal}" if refusal else " by io_uring"
        if self.disks is not None:
            many = len(self.disks.all)
            self.mode += f", {many} disk{'s' * (many > 1)}"

    def close(self) -> None:
        if self._own:
            self._threads.close()
        if self.disks is not None:
            self.disks.close()
        self._close()

    def beside(self, files: Sequence[BlockedFile]) -> "BlockReader":
        """A reader of other files into the same memory, by the same threads."""
        return BlockReader(files, self._data, self._slot_bytes, self._threads)

    def counters(self) -> dict[str, int]:
        """What it has done so far."""
        return {
            "bytes_read": self.bytes_read,
            "reads": self.reads,
            "read_errors": self.errors,
            "read_retries": self.retries,
            "read_ns": self.busy_ns,
            "read_wait_ns": self.wait_ns,
            **(self.disks.counters() if self.disks else {}),
        }

    def read(self, file: int, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Bring blocks[i] of files[file] into slot slots[i]; returns when all are there.

        Ascending blocks that are adjacent on disk are read by one call, before runs of pages that
        wait for a thread.  Any thread may call.
        Raises StoreError (file, offset, found, expected), OSError: the first error met.
        """
        geometry = self.files[file].geometry
        runs = np.empty((blocks.size, 3), np.int64)
        runs[:, SHARD] = blocks // geometry.blocks_per_shard
        runs[:, PAGE] = blocks % geometry.blocks_per_shard * geometry.pages_per_block
        runs[:, PAGES] = geometry.pages_per_block
        asked = _Placing(file, runs, slots * self._slot_bytes, are_blocks=True)
        task = partial(self._place_pages, asked)
        self._ask(file, runs, MERGE_BYTES // PAGE_BYTES, task, urgent=True).wait()

    def stream(
        self,
        file: int,
        runs: NDArray[np.int64],
        transit: Transit,
        consume: Consume,
        parts: Parts | None = None,
        rows: NDArray[Any] | None = None,
        urgent: bool = False,
    ) -> Reading:
        """Bring runs of pages through buffers; `consume` gets some at a time in a reader thread.

        runs      int64 (runs, 3 or more)   shard, first page in it, pages; kept until all are read
        transit   each buffer has room for the longest run
        parts     runs that are not read whole; `consume` gets them with anything in the gaps
        rows      ascending; of blocks that another server has, only these are brought, and
                  `consume` gets anything in place of others; None: all
        urgent    before other reads that wait for a thread

        Returns at once; errors come at `Reading.wait`: StoreError, OSError.
        """
        task = partial(self._pass_pages, _Passing(file, runs, transit, consume, parts, rows))
        return self._ask(file, runs, min(_TASK_PAGES, transit.pages), task, urgent)

    def fetch(self, file: int, runs: NDArray[np.int64], places: NDArray[np.int64]) -> Reading:
        """Bring runs of pages straight to where they stay.

        runs    int64 (runs, 3 or more)   shard, first page in it, pages; kept until all are read
        places  int64 (runs,)             byte in `data` that each run goes to; page-aligned

        Returns at once; errors come at `Reading.wait`: CorruptBlock, OSError.
        """
        task = partial(self._place_pages, _Placing(file, runs, places, are_blocks=False))
        return self._ask(file, runs, _TASK_PAGES, task)

    def _ask(
        self,
        file: int,
        runs: NDArray[np.int64],
        max_pages: int,
        task: Callable[[int, int, ReadQueue], None],
        urgent: bool = False,
    ) -> Reading:
        """Have runs read, at most `max_pages` in a task, with all threads at work.

        A task has more runs than a thread may have in flight, whose number falls at its end.
        """
        maximum = min(MAX_PIECES, -(-len(runs) // self._threads.count))
        first = np.empty(len(runs) + 1, np.int64)
        tasks = int(cut_tasks(runs, maximum, max_pages, first))
        if not tasks:
            return Reading(None, self._waited)
        request = Request(tasks)
        blocked, first = self.files[file], first[: tasks + 1]
        source: Elsewhere | None = blocked.pages or self._source
        holes = None if self._source is None else blocked.holes
        away = tasks_away(runs, first, blocked.geometry, holes)
        for (low, high), others in zip(pairwise(first.tolist()), away, strict=True):
            own = partial(self._do, partial(task, low, high), request)
            # tasks that may wait for others must not delay the threads that read the disk
            if source is not None and (others or blocked.pages is not None):
                source.put(own)
            else:
                self._threads.put(own, urgent)
        return Reading(request, self._waited)

    def _waited(self, ns: int) -> None:
        with self._lock:
            self.wait_ns += ns

    def _do(self, task: Task, request: Request, queue: ReadQueue) -> None:
        """In a reader thread."""
        try:
            task(queue if self._direct else queue.without_ring())
        except BaseException as error:
            with self._lock:
                self.errors += 1
            request.finish(error)
        else:
            request.finish(None)

    # -- tasks ------------------------------------------------------------------------------------

    def _place_pages(self, asked: _Placing, low: int, high: int, queue: ReadQueue) -> None:
        number, data = asked.file, self._data
        pieces = pieces_of(asked.runs[low:high], asked.places[low:high])
        check = self.files[number].check
        shard_pages = self.files[number].geometry.pages_per_shard
        with self._held(number, pieces) as arrived:
            left = place_arrived(shard_pages, pieces, data, arrived)
            if asked.are_blocks and isinstance(check, GraphCheck):
                self._read(number, left, data, queue, verify=False)
                for piece in pieces:
                    self._verify_block(number, check, piece)
            else:
                self._read(number, left, data, queue)
                self._check_blocks(number, pieces, data)
        if asked.are_blocks:
            with self._lock:
                self.blocks_read += len(pieces)

    def _pass_pages(self, asked: _Passing, low: int, high: int, queue: ReadQueue) -> None:
        runs, file = asked.runs[low:high], self.files[asked.file]
        pages, shard_pages = file.pages, file.geometry.pages_per_shard
        # pages from afar are fetched already while others have the buffers
        early = pages is not None and pages.roomy and asked.parts is None
        ahead = self._held(asked.file, runs, early=True) if early else nullcontext(())
        with ahead as arrived, asked.transit.buffer() as buffer:
            ends = np.cumsum(runs[:, PAGES]) * PAGE_BYTES
            pieces = pieces_of(runs, ends - runs[:, PAGES] * PAGE_BYTES)
            if asked.parts is not None:
                self._read_parts(asked.file, asked.parts, low, pieces, buffer, queue)
            else:
                with nullcontext(arrived) if early else self._held(asked.file, runs) as came:
                    left = place_arrived(shard_pages, pieces, buffer, came)
                    self._read(asked.file, left, buffer, queue, rows=asked.rows)
                    self._check_blocks(asked.file, pieces, buffer)
            asked.consume(low, high, buffer[: int(ends[-1])])

    def _read_parts(
        self,
        number: int,
        parts: Parts,
        low: int,
        pieces: NDArray[np.int64],
        buffer: NDArray[np.uint8],
        queue: ReadQueue,
    ) -> None:
        """Read the first pages of runs, numbered from `low` on, then what these ask for."""
        heads = parts.heads[low : low + len(pieces)]
        first = pieces.copy()
        first[:, PAGES] = np.where(heads > 0, heads, pieces[:, PAGES])
        with self._held(number, first):
            self._read(number, first, buffer, queue)
            self._check_blocks(number, pieces[heads == 0], buffer)
        check = self.files[number].check
        graph = check if isinstance(check, GraphCheck) else None
        # pages [start, stop) of a piece: those that are wanted, and what is to be read of them
        wanted: list[tuple[int, int, int]] = []
        rest: list[tuple[int, int, int]] = []
        for k in np.flatnonzero(heads).tolist():
            data, done = bytes_of(first[k], buffer), int(heads[k])
            if graph is not None:
                block, where = self._first_block(number, pieces[k])
                graph.check_head(block, data, where)
            for start, stop in parts.choose(low + k, data):
                assert stop <= pieces[k, PAGES]
                wanted.append((k, start, stop))
                if done < stop:
                    rest.append((k, max(start, done), stop))
                    done = stop
        more = pieces[[k for k, _, _ in rest]]
        for piece, (_, start, stop) in zip(more, rest, strict=True):
            piece += (0, start, 0, start * PAGE_BYTES)
            piece[PAGES] = stop - start
        for i in range(0, len(more), MAX_PIECES):
            with self._held(number, more[i : i + MAX_PIECES]):
                self._read(number, more[i : i + MAX_PIECES], buffer, queue)
        if graph is not None:
            for k, start, stop in wanted:
                block, where = self._first_block(number, pieces[k])
                data = bytes_of(pieces[k], buffer)
                graph.check_part(block, data, start * PAGE_BYTES, stop * PAGE_BYTES, where)

    # -- checks -----------------------------------------------------------------------------------

    def _verify_block(self, number: int, check: GraphCheck, piece: NDArray[np.int64]) -> None:
        """Verify a graph block that was read to its slot: checksums and contents in one pass."""
        begun = concurrency.perf_counter_ns()
        data = bytes_of(piece, self._data)
        block, where = self._first_block(number, piece)
        geometry = self.files[number].geometry
        page = block * geometry.pages_per_block
        crcs = self.files[number].crcs[page : page + geometry.pages_per_block]
        bad = check.find_bad_page(block, data, crcs, where)
        self._count(begun)
        if bad >= 0:
            self._read_again(number, piece, self._data)
            check.check(block, data, data.size, where)

    def _check_blocks(
        self, number: int, pieces: NDArray[np.int64], memory: NDArray[np.uint8]
    ) -> None:
        """Check the blocks that lie wholly in pieces.  Raises CorruptBlock."""
        file = self.files[number]
        if file.check is None:
            return
        pages, size = file.geometry.pages_per_block, file.geometry.slot_bytes
        for piece in pieces:
            block, _ = self._first_block(number, piece)
            whole = bytes_of(piece, memory)[-int(piece[PAGE]) % pages * PAGE_BYTES :]
            file.check_blocks(block, whole[: whole.size // size * size])

    def _first_block(self, number: int, piece: NDArray[np.int64]) -> tuple[int, str]:
        """The first block that begins in a piece or after it, and the name of the piece's file."""
        file, page = self.files[number], self._page(number, piece)
        block = -(-page // file.geometry.pages_per_block)
        return block, str(file.shards[file.place(page)[0]])

    def _page(self, number: int, piece: NDArray[np.int64]) -> int:
        """The first page of a piece, counted through all shards."""
        return int(piece[SHARD]) * self.files[number].geometry.pages_per_shard + int(piece[PAGE])

    # -- reads ------------------------------------------------------------------------------------

    def _held(
        self, number: int, runs: NDArray[np.int64], early: bool = False
    ) -> AbstractContextManager[Sequence[Arrived]]:
        """Inside, runs of a file's pages, if they come from object storage, are on this disk."""
        file = self.files[number]
        if file.pages is None:
            return nullcontext(())
        pages = page_numbers(file.geometry.pages_per_shard, runs)
        return file.pages.hold(file.path, pages, file.crcs, early)

    def _read(
        self,
        number: int,
        pieces: NDArray[np.int64],
        memory: NDArray[np.uint8],
        queue: ReadQueue,
        verify: bool = True,
        rows: NDArray[Any] | None = None,
    ) -> None:
        """Read pieces of a file into memory, at most MAX_PIECES: from disk, or from other servers.

        What is on this machine is read by this thread, or by those of its disks.
        """
        file = self.files[number]
        if file.holes is not None:
            pieces, away = split_pieces(pieces, file.geometry, file.holes)
            if len(away):
                if self._source is None:
                    file.holes.check(0, file.geometry.num_blocks, file.path)
                else:
                    bring(self._source, file, away, memory, rows)
        places = self._places[number]
        if file.deal is None or self.disks is None:
            for i in range(0, len(pieces), MAX_PIECES):
                part = pieces[i : i + MAX_PIECES]
                self._read_place(number, places[0], memory, verify, part, queue)
            return
        runs = pieces.copy()
        runs[:, PAGE] += runs[:, SHARD] * file.geometry.pages_per_shard
        runs[:, SHARD] = 0
        reads = [partial(self._read_place, number, place, memory, verify) for place in places]
        self.disks.read(file.deal.cut(runs), reads)

    def _read_place(
        self,
        number: int,
        place: Place,
        memory: NDArray[np.uint8],
        verify: bool,
        pieces: NDArray[np.int64],
        queue: ReadQueue,
    ) -> int:
        """Read at most MAX_PIECES of one place; returns how many reads it took.

        A piece that does not come, or not as it was written, is tried once more: a disk may err, a
        bit may flip on the way.  Raises CorruptBlock, OSError: of the second attempt.
        """
        begun = concurrency.perf_counter_ns()
        crcs = place.crcs if verify else _NO_CRCS
        reads = int(read_pieces(queue, place.fds, pieces, memory, crcs, place.stride))
        failed = queue.failed[: len(pieces)].copy()
        place.forget(pieces, self._direct)
        self._count(begun, int(pieces[~failed, PAGES].sum()), reads)
        for piece in pieces[failed]:
            self._read_place_again(number, place, piece, memory)
        return reads

    def _read_again(self, number: int, piece: NDArray[np.int64], memory: NDArray[np.uint8]) -> None:
        """Read a piece again, one block long, which did not come as it was written."""
        file, places = self.files[number], self._places[number]
        if file.deal is None:
            self._read_place_again(number, places[0], piece, memory)
            return
        runs = np.array([[0, self._page(number, piece), piece[PAGES], piece[PLACE]]], np.int64)
        for place, own in zip(places, file.deal.cut(runs), strict=True):
            for part in own:
                self._read_place_again(number, place, part, memory)

    def _read_place_again(
        self,
        number: int,
        place: Place,
        piece: NDArray[np.int64],
        memory: NDArray[np.uint8],
    ) -> None:
        begun = concurrency.perf_counter_ns()
        with self._lock:
            self.retries += 1
        shard, page, pages = piece[:PLACE].tolist()
        file, first = self.files[number], place.number(piece)
        if file.pages is not None:
            file.pages.bring_again(file.path, np.arange(first, first + pages), file.crcs)
        data, crcs = bytes_of(piece, memory), place.crcs[first : first + pages]
        fd, where = int(place.fds[shard]), str(place.path(shard))
        read_verified(fd, data, page * PAGE_BYTES, crcs, where)
        place.forget(piece[np.newaxis], self._direct)
        self._count(begun, pages, 1)

    def _count(self, begun: int, pages: int = 0, reads: int = 0) -> None:
        with self._lock:
            self.bytes_read += pages * PAGE_BYTES
            self.reads += reads
            self.busy_ns += concurrency.perf_counter_ns() - begun

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
