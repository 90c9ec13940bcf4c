"""Pages of stores in object storage, kept in sparse files of a folder on this machine.

    <cache>/lock
    <cache>/<digest of the URL>/<name>/     the files of the store; shards have holes
    <cache>/<digest of the URL>/origin.json the URL, the root's etag, the etag of each shard

The file system tells which pages are there: data, or a hole.  So there is no other record of them,
which could be wrong after a crash.  A page that a crash has torn has a wrong checksum, is found
when it is read, and fetched again.  Design and arithmetic: docs/derivations/objects.md.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.closing import Closing
from blockstore.errors import OutOfSpace, StoreBusy, StoreError
from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.io.elsewhere import Arrived
from blockstore.io.files import write_exact
from blockstore.io.threads import ReadThreads, Task
from blockstore.kernels.crc import find_bad_page
from blockstore.lock import lock_folder
from blockstore.objects.bucket import Bucket
from blockstore.objects.expected import ExpectedUses
from blockstore.objects.intervals import UseIntervals
from blockstore.units import format_bytes

IN_FLIGHT = 64  # requests for ranges, of one store
_MAX_RANGE, _MIN_RANGE = 1 << 20, 64 << 10  # bytes of one request, at most
_MAX_BYTES, _MEM_PART = IN_FLIGHT * _MAX_RANGE, 8  # in flight; or an 8th of --mem, if less
# Most pages between two wanted ones that are fetched, too: few, if others leave for them.
_MAX_GAP, _MAX_ROOMY_GAP = 1, 16
_LONGEST_RUN = 1024  # pages that readers ask for at once, but for blocks that are longer
_GROUP = 16  # pages whose uses are counted together
_WINDOW = 1 << 20  # groups searched at a time for pages to evict: bounds time and memory
_HELD_PART = 16  # part of the cache that may be held at once
_LISTED = 64  # part of the cache that is listed at a time as what leaves next
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_HERE, _COMING = 1, 2  # of a page: in its file; in flight
_KEPT_PART = 4  # part of the bytes in flight, for those that came and are not copied yet


def object_bytes(mem_bytes: int) -> int:
    """Part of --mem for ranges of one store that are in flight."""
    return max(IN_FLIGHT * _MIN_RANGE, min(_MAX_BYTES, mem_bytes // _MEM_PART))


class CachedShard(NamedTuple):
    """One file of an array."""

    name: str  # of its object
    file: Path
    etag: str


class _Run(NamedTuple):
    """Adjacent pages of one file."""

    shard: CachedShard
    fd: int
    offset: int  # in the file
    number: int  # of the first page, in its array
    first: int  # the same, among all pages of the store
    stop: int


def _adjacent(pages: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs [first, stop)."""
    if pages.size:
        for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
            yield int(run[0]), int(run[-1]) + 1


class PageCache(Closing):
    """Room on disk that some stores share."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Raises StoreBusy: another process has the folder; StoreError: it cannot be made."""
        self.folder, self.limit = folder, size_bytes // PAGE_BYTES
        try:
            self._lock = lock_folder(folder, folder, "keeping pages in")
        except StoreBusy as error:
            raise StoreBusy(
                f"--cache {folder}: another daemon or command keeps pages there, expected none; "
                "give each a folder of its own"
            ) from error
        except OSError as error:
            raise StoreError(f"--cache {folder}: {error.strerror}, expected a folder") from error
        self.changed = concurrency.Condition()
        self.held = 0  # pages that must stay, or are to come
        self._members: list[CachedPages] = []

    def close(self) -> None:
        os.close(self._lock)

    def add(self, member: "CachedPages", metadata_bytes: int) -> None:
        """Add a store.  Raises StoreError: the cache is too small."""
        with self.changed:
            maximum = -(-metadata_bytes // PAGE_BYTES)
            minimum = member.largest + maximum
            if self.limit < minimum:
                raise StoreError(
                    f"--cache-size {format_bytes(self.limit * PAGE_BYTES)}: the tables of "
                    f"{member.url} take {format_bytes(metadata_bytes)}, expected at least "
                    f"{format_bytes(minimum * PAGE_BYTES)}"
                )
            self.limit -= maximum
            self._members.append(member)
            self.make_room(0)

    def remove(self, member: "CachedPages", metadata_bytes: int) -> None:
        with self.changed:
            self._members.remove(member)
            self.limit += -(-metadata_bytes // PAGE_BYTES)

    @property
    def largest(self) -> int:
        """Pages that a thread may hold at once, of any store."""
        return max(member.largest for member in self._members)

    @property
    def holds_all(self) -> bool:
        """Whether nothing ever leaves."""
        return self.limit >= sum(member.num_pages for member in self._members)

    def max_held(self, early: bool) -> int:
        """Pages that all threads may hold together, if another one holds some.

        The cache has room for them, so it can make room for those that are missing.  They cannot
        leave, so they are few beside those that stay for later.  A thread that holds early may wait
        for the buffer of one that has yet to hold: room for that one is left.
        """
        held = max(self.limit // _HELD_PART, self.largest)
        return held if early else min(self.limit, held + self.largest)

    def make_room(self, pages: int) -> None:
        """Make room for so many pages that are to come; under `changed`, when they are held."""
        excess = sum(member.present for member in self._members) + pages - self.limit
        for member in sorted(self._members, key=lambda one: -one.present):
            if excess > 0:
                excess -= member.evict(excess)


class CachedPages(Closing):
    """The pages of one store: a `PageSource` of its readers."""

    def __init__(
        self,
        bucket: Bucket,
        cache: PageCache,
        arrays: Mapping[str, tuple[BlockGeometry, Sequence[CachedShard]]],
        metadata_bytes: int,
        flight_bytes: int,
    ) -> None:
        """Find out which pages are there.

        arrays        by path: their shards, which are files of full length
        flight_bytes  that may be in flight at once

        Raises StoreError: the cache is too small; OSError.
        """
        self.url, self._bucket, self._cache, self._arrays = bucket.url, bucket, cache, arrays
        self._range = max(1, min(_MAX_RANGE, flight_bytes // IN_FLIGHT) // PAGE_BYTES)
        self._first: dict[str, int] = {}
        self.num_pages = self.largest = 0  # largest: most pages held at once
        for path, (geometry, _) in arrays.items():
            self._first[path] = self.num_pages
            self.num_pages += geometry.num_pages
            run = min(_LONGEST_RUN, geometry.num_pages)
            self.largest = max(self.largest, run, geometry.pages_per_block)
        groups = -(-self.num_pages // _GROUP)
        self._state = np.zeros(groups * _GROUP, np.uint8)
        self._pins = np.zeros(groups * _GROUP, np.uint8)  # by threads, which are fewer than 256
        self._uses = UseIntervals(groups)
        self._spare = flight_bytes // _KEPT_PART
        self._expected = ExpectedUses(groups * _GROUP)
        states = self._uses.memory_bytes + 3 * self._state.size
        self.memory_bytes = states + flight_bytes + self._spare
        self._leaving, self._listed_at = np.zeros(0, np.int64), np.zeros((0, 2), np.uint32)
        self._hand = 0
        self.closed = False
        self._counts = dict.fromkeys(("object_pages_evicted", "object_pages_torn"), 0)
        self._fds: dict[str, list[int]] = {}
        self._metadata_bytes = metadata_bytes
        try:
            for path, (geometry, shards) in arrays.items():
                self._fds[path] = []
                for i, shard in enumerate(shards):
                    fd = os.open(shard.file, os.O_RDWR | os.O_CLOEXEC)
                    self._fds[path].append(fd)
                    self._scan_shard(
                        fd, self._first[path] + i * geometry.pages_per_shard, geometry, i
                    )
            self.present = int(np.count_nonzero(self._state))  # pages in files, or in flight
            cache.add(self, metadata_bytes)
        except BaseException:
            self._close_files()
            raise
        self._pool = concurrency.ThreadPoolExecutor(IN_FLIGHT, "object")
        self._threads = ReadThreads(IN_FLIGHT)

    def close(self) -> None:
        self._bucket.hurry()
        self._threads.close()
        self._pool.shutdown()
        self._cache.remove(self, self._metadata_bytes)
        self._close_files()
        self.closed = True

    @property
    def roomy(self) -> bool:
        return self._cache.limit >= 4 * self._cache.largest

    def hurry(self) -> None:
        self._bucket.hurry()

    def put(self, task: Task) -> None:
        self._threads.put(task)

    def counters(self) -> dict[str, int]:
        seconds, per_byte = self._bucket.cost()
        with self._cache.changed:
            return self._counts | {
                "object_requests": self._bucket.requests,
                "object_retries": self._bucket.retries,
                "object_bytes_read": self._bucket.bytes_read,
                "object_request_ns": int(seconds * 1e9),
                "object_mib_ns": int(per_byte * 1e9 * (1 << 20)),
                "object_cache_bytes": self.present * PAGE_BYTES,
            }

    # -- as readers ask ---------------------------------------------------------------------------

    @contextmanager
    def hold(
        self, path: str, pages: NDArray[np.int64], crcs: NDArray[Any], early: bool
    ) -> Iterator[Sequence[Arrived]]:
        """As `PageSource` says.  Raises ObjectError, OutOfSpace: the cache's disk is full."""
        asked = np.unique(pages) + self._first[path]
        changed, cache = self._cache.changed, self._cache
        with changed:
            limit = cache.max_held(early)
            wanted = self._with_gaps(asked, cache.largest)
            while cache.held and cache.held + wanted.size > limit:
                changed.wait()
                wanted = self._with_gaps(asked, cache.largest)
            cache.held += wanted.size
            self._pins[wanted] += 1
            self._uses.use(np.unique(wanted // _GROUP))
        arrived = list[Arrived]()
        try:
            while not self._bring(wanted, crcs, arrived):
                pass
            yield sorted(arrived, key=lambda one: one.first)
        finally:
            with changed:
                self._spare += sum(one.body.size for one in arrived)
                arrived.clear()
                cache.held -= wanted.size
                self._pins[wanted] -= 1
                changed.notify_all()

    def expect(self, reader: object, path: str, pages: NDArray[np.int64], later: bool) -> None:
        with self._cache.changed:
            self._expected.expect(reader, pages + self._first[path], later)

    def had(self, reader: object, path: str, pages: NDArray[np.int64]) -> None:
        with self._cache.changed:
            self._expected.had(reader, pages + self._first[path])

    def forget(self, reader: object) -> None:
        with self._cache.changed:
            self._expected.forget(reader)

    def bring_again(self, path: str, pages: NDArray[np.int64], crcs: NDArray[Any]) -> None:
        """As `PageSource` says: pages that a crash has torn, or that the disk has changed."""
        with self._cache.changed:
            self._counts["object_pages_torn"] += pages.size
        runs = self._runs(pages + self._first[path], self._range)
        _wait([self._pool.submit(self._fetch, run, crcs) for run in runs])

    def _bring(self, wanted: NDArray[np.int64], crcs: NDArray[Any], arrived: list[Arrived]) -> bool:
        """Fetch those of the pinned pages that are missing; returns whether all are there then.

        What others fetch is waited for; it is missing again if they fail.  What is fetched here is
        added to `arrived`, as far as there is memory.
        """
        with self._cache.changed:
            missing = wanted[self._state[wanted] & (_HERE | _COMING) == 0]
            self._cache.make_room(missing.size)
            self._state[missing] = _COMING
            self.present += missing.size
        runs = self._runs(missing, self._range)
        _wait([self._pool.submit(self._arrive, run, crcs, arrived) for run in runs])
        with self._cache.changed:
            self._cache.changed.wait_for(lambda: not (self._state[wanted] & _COMING).any())
            return bool((self._state[wanted] & _HERE).all())

    def _with_gaps(self, asked: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
        """These pages, and short gaps between missing ones, if all pages of the gap are missing.

        To fetch them takes less time than another request, as measured on this bucket.
        """
        missing = asked[self._state[asked] == 0]
        gaps = np.diff(missing) - 1
        seconds, per_byte = self._bucket.cost()
        maximum = _MAX_ROOMY_GAP if self._cache.holds_all else _MAX_GAP
        maximum = min(maximum, int(seconds / (per_byte * PAGE_BYTES))) if per_byte else maximum
        short = np.flatnonzero((gaps > 0) & (gaps <= maximum))
        first, counts = missing[short] + 1, gaps[short]
        before = np.cumsum(counts) - counts
        pages = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
        gap = np.repeat(np.arange(short.size), counts)
        absent = np.bincount(gap, self._state[pages] == 0, short.size) == counts
        found: NDArray[np.int64] = np.union1d(asked, pages[absent[gap]])
        return found if found.size <= limit else asked

    def _runs(self, pages: NDArray[np.int64], maximum: int) -> Iterator[_Run]:
        """Ascending pages as runs of at most so many, each of one shard."""
        paths, firsts = list(self._first), np.array(list(self._first.values()))
        for low, stop in _adjacent(pages):
            while low < stop:
                path = paths[int(np.searchsorted(firsts, low, "right")) - 1]
                geometry, first = self._arrays[path][0], self._first[path]
                i, page = divmod(low - first, geometry.pages_per_shard)
                ends = low + geometry.pages_per_shard - page, first + geometry.num_pages
                end = min(stop, low + maximum, *ends)
                shard, fd = self._arrays[path][1][i], self._fds[path][i]
                yield _Run(shard, fd, page * PAGE_BYTES, low - first, low, end)
                low = end

    def _arrive(self, run: _Run, crcs: NDArray[Any], arrived: list[Arrived]) -> None:
        """In a thread of the pool: fetch pages; if that fails, they are missing again.

        They are added to `arrived` if there is memory for them until their reader has copied them.
        """
        good = False
        try:
            body = self._fetch(run, crcs)
            good = True
        finally:
            with self._cache.changed:
                self._state[run.first : run.stop] = _HERE if good else 0
                self.present -= 0 if good else run.stop - run.first
                if good and body.size <= self._spare:
                    self._spare -= body.size
                    arrived.append(Arrived(run.number, body))
                self._cache.changed.notify_all()

    def _fetch(self, run: _Run, crcs: NDArray[Any]) -> NDArray[np.uint8]:
        count, shard, start = run.stop - run.first, run.shard, run.offset
        expected = crcs[run.number : run.number + count]

        def check(body: Any) -> str:
            bad = int(find_bad_page(np.frombuffer(body, np.uint8), count, expected))
            page = start // PAGE_BYTES + bad
            return f"page {page} has another checksum than it was written with" * (bad >= 0)

        end = start + count * PAGE_BYTES
        body = self._bucket.read(shard.name, start, end, shard.etag, check)
        write_exact(run.fd, body, start, str(shard.file))
        return np.frombuffer(body, np.uint8)

    # -- files ------------------------------------------------------------------------------------

    def _scan_shard(self, fd: int, base: int, geometry: BlockGeometry, shard: int) -> None:
        """Note which pages of a shard are data, not a hole."""
        size = geometry.blocks_in(shard) * geometry.slot_bytes
        at = 0
        while at < size:
            try:
                low = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # nothing but a hole
                return
            at = os.lseek(fd, low, os.SEEK_HOLE)
            first, stop = -(-low // PAGE_BYTES), min(at, size) // PAGE_BYTES
            self._state[base + first : base + max(first, stop)] = _HERE

    def evict(self, count: int) -> int:
        """Make holes of up to `count` pages that nobody holds; returns how many.

        Pages that no reader expects leave first, beginning with those whose next use is expected
        last by the intervals of their groups; then those that readers want last.  They are listed
        for a part of the cache at a time; a page that was used since then, or of which readers have
        said something else, stays.  Under the cache's `changed`.
        """
        freed = 0
        while freed < count:
            if not self._leaving.size:
                self._leaving = self._list(max(count - freed, self._cache.limit // _LISTED))
                self._listed_at = self._known(self._leaving)
                if not self._leaving.size:
                    break
            some = count - freed
            pages, at = self._leaving[:some], self._listed_at[:some]
            self._leaving, self._listed_at = self._leaving[some:], self._listed_at[some:]
            pages = np.sort(pages[(self._known(pages) == at).all(1)])
            pages = pages[(self._state[pages] == _HERE) & (self._pins[pages] == 0)]
            self._punch(pages)
            freed += pages.size
        self.present -= freed
        self._counts["object_pages_evicted"] += freed
        return freed

    def _known(self, pages: NDArray[np.int64]) -> NDArray[np.uint32]:
        """What decides when pages leave, uint32 (pages, 2)."""
        uses = self._uses.last_use(pages // _GROUP)
        return np.stack([uses, self._expected.bits[pages].astype(np.uint32)], 1)

    def _list(self, count: int) -> NDArray[np.int64]:
        """Up to `count` pages that may leave, in the order in which they are to leave."""
        groups = self._state.size // _GROUP
        for _ in range(-(-groups // _WINDOW)):
            low, high = self._hand, min(self._hand + _WINDOW, groups)
            self._hand = high % groups
            pages = slice(low * _GROUP, high * _GROUP)
            free = (self._state[pages] == _HERE) & (self._pins[pages] == 0)
            if not free.any():
                continue
            expected = self._expected.bits[pages] != 0
            ours = (free & ~expected).reshape(-1, _GROUP)
            order = self._uses.farthest(np.flatnonzero(ours.any(1)) + low) - low
            enough = int(np.searchsorted(np.cumsum(ours.sum(1)[order]), count)) + 1
            order = order[:enough]
            found = (order[:, np.newaxis] * _GROUP + np.arange(_GROUP))[ours[order]][:count]
            if found.size < count:
                some = np.flatnonzero(free & expected) + low * _GROUP
                known = self._expected.farthest(some, self._position(some)) - low * _GROUP
                found = np.concatenate([found, known[: count - found.size]])
            leaving: NDArray[np.int64] = found + low * _GROUP
            return leaving
        return np.zeros(0, np.int64)

    def _position(self, pages: NDArray[np.int64]) -> NDArray[np.float64]:
        """Positions of pages in their arrays, from 0 to less than 1."""
        firsts = np.array([*self._first.values(), self.num_pages])
        array = np.searchsorted(firsts, pages, "right") - 1
        found: NDArray[np.float64] = (pages - firsts[array]) / np.diff(firsts)[array]
        return found

    def _punch(self, pages: NDArray[np.int64]) -> None:
        self._state[pages] = 0
        for run in self._runs(pages, self.num_pages):
            size = (run.stop - run.first) * PAGE_BYTES
            if _fallocate(run.fd, _KEEP_SIZE | _PUNCH_HOLE, run.offset, size):
                number, where = ctypes.get_errno(), str(run.shard.file)
                raise OSError(number, f"{os.strerror(number)} (no holes can be made)", where)

    def _close_files(self) -> None:
        for fds in self._fds.values():
            for fd in fds:
                os.close(fd)
        self._fds = {}


def _wait(asked: Sequence["Future[Any]"]) -> None:
    """Wait until none is in flight.  Raises the first error met."""
    errors = [error for one in asked if (error := one.exception()) is not None]
    for error in errors:
        if isinstance(error, OutOfSpace):
            raise OutOfSpace(f"{error}, or give less --cache-size")
        raise error


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.restype = ctypes.c_int
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
