"""Reads pieces of files, many at a time, and verifies their pages, without a Python call for each.

Reads go to the kernel through a ring (io_uring) with many in flight, or one by one by `preadv`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES
from blockstore.kernels.crc import find_bad_page
from blockstore.kernels.intrinsics import enter_ring, load_shared, preadv, store_shared
from blockstore.kernels.jit import inner, leaf

SHARD, PAGE, PAGES, PLACE, KEEPER = 0, 1, 2, 3, 4  # columns of pieces; the last of those elsewhere
NO_RING = -1
ENTRY_WORDS = 8  # of 8 bytes, of an entry of a ring
_COMPLETION_WORDS = 4  # of 4 bytes: the number that the entry had, its high half, result, flags
_READV = 1  # what an entry asks for
_WORD = 0xFFFF_FFFF


class RingPlaces(NamedTuple):
    """Places of a ring's words in the memory that it shares with the kernel."""

    tail: int  # of entries: how many were ever handed over
    mask: int  # entries less one, a value
    completed_head: int  # completions that were seen
    completed_tail: int
    completed_mask: int  # a value
    completions: int


class ReadQueue(NamedTuple):
    """The read queue of one thread, with room for results on the pieces of one call."""

    fd: int  # of a ring, or NO_RING
    words: NDArray[np.uint32]  # of a ring
    entries: NDArray[np.uint64]  # of a ring
    places: RingPlaces
    iovecs: NDArray[np.uint64]  # (2 * pieces,) address and bytes of each piece
    first: NDArray[np.int64]  # (pieces + 1,) of each read: its first piece
    failed: NDArray[np.bool_]  # (pieces,)

    def without_ring(self) -> "ReadQueue":
        return self._replace(fd=NO_RING)


@inner
def _plan_reads(pieces, address, queue):
    """Pieces that follow each other in a file and in the list become one read; returns how many."""
    reads = 0
    for i in range(pieces.shape[0]):
        queue.iovecs[2 * i] = address + pieces[i, PLACE]
        queue.iovecs[2 * i + 1] = pieces[i, PAGES] * PAGE_BYTES
        if (
            i == 0
            or pieces[i, SHARD] != pieces[i - 1, SHARD]
            or pieces[i, PAGE] != pieces[i - 1, PAGE] + pieces[i - 1, PAGES]
        ):
            queue.first[reads] = i
            reads += 1
    queue.first[reads] = pieces.shape[0]
    return reads


@inner
def _judge(read, num_bytes, pieces, memory, crcs, shard_pages, queue):
    """Mark pieces of a read that brought `num_bytes` which are missing, or not as written.

    crcs   of all pages; or empty: pages are not verified
    """
    low, high = queue.first[read], queue.first[read + 1]
    wanted = (pieces[high - 1, PAGE] + pieces[high - 1, PAGES] - pieces[low, PAGE]) * PAGE_BYTES
    for i in range(low, high):
        queue.failed[i] = num_bytes != wanted
        if num_bytes == wanted and crcs.size:
            at, pages = pieces[i, PLACE], pieces[i, PAGES]
            page = pieces[i, SHARD] * shard_pages + pieces[i, PAGE]
            bad = find_bad_page(
                memory[at : at + pages * PAGE_BYTES], pages, crcs[page : page + pages]
            )
            queue.failed[i] = bad >= 0


@inner
def _through_ring(fds, reads, pieces, memory, crcs, shard_pages, queue):
    """Reads through a ring: as many in flight as it has entries; each is judged when it is there.

    Returns how many of the first reads are done: all, unless the kernel takes no more.
    Nothing is in flight then.
    """
    words, entries, at = queue.words, queue.entries, queue.places
    iovecs = np.uint64(queue.iovecs.ctypes.data)
    tail, head = np.int64(words[at.tail]), np.int64(words[at.completed_head])
    begun, pending, in_flight = 0, 0, 0
    while True:
        while begun < reads and pending + in_flight <= at.mask:
            low, entry = queue.first[begun], (tail & at.mask) * ENTRY_WORDS
            entries[entry] = np.uint64(_READV + (fds[pieces[low, SHARD]] << 32))
            entries[entry + 1] = np.uint64(pieces[low, PAGE] * PAGE_BYTES)
            entries[entry + 2] = iovecs + np.uint64(16 * low)
            entries[entry + 3] = np.uint64(queue.first[begun + 1] - low)
            entries[entry + 4] = np.uint64(begun)
            for k in range(5, ENTRY_WORDS):
                entries[entry + k] = 0
            tail = (tail + 1) & _WORD
            begun += 1
            pending += 1
        if pending + in_flight == 0:
            return reads
        store_shared(words, at.tail, np.uint32(tail))
        taken = enter_ring(queue.fd, pending)
        if taken > 0:
            pending -= taken
            in_flight += taken
        elif pending and in_flight == 0:  # take back what the kernel has not seen
            store_shared(words, at.tail, np.uint32((tail - pending) & _WORD))
            return begun - pending
        completed = np.int64(load_shared(words, at.completed_tail))
        while head != completed:
            place = at.completions + (head & at.completed_mask) * _COMPLETION_WORDS
            read, num_bytes = np.int64(words[place]), np.int64(words[place + 2])
            head = (head + 1) & _WORD
            store_shared(words, at.completed_head, np.uint32(head))
            _judge(read, num_bytes, pieces, memory, crcs, shard_pages, queue)
            in_flight -= 1


@leaf
def read_pieces(queue, fds, pieces, memory, crcs, shard_pages):
    """Read pieces of the shards of a file into memory; queue.failed says which are not there.

    queue         ReadQueue   of this thread alone, with room for the pieces
    fds           int64 (shards,)
    pieces        int64 (pieces, 4)   SHARD, first PAGE in it, PAGES, PLACE: byte in `memory`
    memory        uint8   page-aligned
    crcs          uint32 (pages of the file,)   crc32c of each; or empty: pages are not verified
    shard_pages   pages of every shard but the last

    Returns how many reads it made, int64: pieces that follow each other in a file share one.
    """
    reads = _plan_reads(pieces, memory.ctypes.data, queue)
    done = 0
    if queue.fd != NO_RING:
        done = _through_ring(fds, reads, pieces, memory, crcs, shard_pages, queue)
    for read in range(done, reads):
        low = queue.first[read]
        num_bytes = preadv(
            fds[pieces[low, SHARD]], queue.iovecs, low, queue.first[read + 1],
            pieces[low, PAGE] * PAGE_BYTES,
        )  # fmt: skip
        _judge(read, num_bytes, pieces, memory, crcs, shard_pages, queue)
    return reads


@leaf
def cut_tasks(runs, max_runs, max_pages, out):
    """Cut a list of runs into tasks: at most so many runs, of at most so many pages together.

    runs   int64 (runs, 3 or more)   one that is longer is a task of its own
    out    int64 (>= runs + 1,)      out: the first run of each task, then how many runs there are

    Returns how many tasks there are, int64.
    """
    tasks, first, total = 0, 0, 0
    for i in range(runs.shape[0]):
        pages = runs[i, PAGES]
        if i == 0 or i - first == max_runs or total + pages > max_pages:
            out[tasks] = first = i
            tasks += 1
            total = 0
        total += pages
    out[tasks] = runs.shape[0]
    return tasks


@leaf
def split_by_keeper(pieces, geometry, keepers, server, here, away):
    """Cut runs of pages where the blocks of another server begin, into those here and the others.

    pieces      int64 (pieces, 4)
    geometry    pages of a block, blocks of a shard
    keepers     uint16 (blocks of the file,)   the server that each block is read from
    server      this one
    here, away  int64 (>= blocks that the pieces touch, 4 and 5)   out; KEEPER: the server

    Returns how many are here and how many are not, int64.
    """
    per_block, per_shard = geometry
    num_here, num_away = np.int64(0), np.int64(0)
    for k in range(pieces.shape[0]):
        shard, page, place = pieces[k, SHARD], pieces[k, PAGE], pieces[k, PLACE]
        stop, base = page + pieces[k, PAGES], shard * per_shard
        block = page // per_block
        while page < stop:
            keeper = np.int64(keepers[base + block])
            block += 1
            while block * per_block < stop and keepers[base + block] == keeper:
                block += 1
            end = min(stop, block * per_block)
            out, at = (here, num_here) if keeper == server else (away, num_away)
            out[at, SHARD], out[at, PAGE], out[at, PAGES], out[at, PLACE] = (
                shard, page, end - page, place,
            )  # fmt: skip
            if keeper == server:
                num_here += 1
            else:
                out[at, KEEPER] = keeper
                num_away += 1
            place += (end - page) * PAGE_BYTES
            page = end
    return num_here, num_away
