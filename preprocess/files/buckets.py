"""Records in buckets, filled in any order and read a bucket at a time, in memory or in one file.

Records for the file are collected in a buffer for each bucket; other threads write full buffers,
bypassing the page cache if the file system allows it.  If there is no memory for so many buffers,
records are written as they come.

If a file named SPARE lies beside the path, it is reused for the buckets and given back afterwards:
freeing gigabytes on disk only to allocate others costs seconds.
"""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, align
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.files import open_to_write, read_exact, write_exact
from preprocess.files.array_file import remove_file, reserve

_WRITERS, _READERS = 3, 4  # threads; the caller is one of the readers
_MIN_READ = 1 << 20
_IN_FLIGHT = 4  # buffers being written
_MAX_BUFFER = 1 << 20
SPARE = "spare"


def passing_bytes(num_records: int, record_bytes: int, share: int) -> int:
    """Bytes that bucket records take on disk: 0 if half of the share holds them in memory."""
    total = num_records * record_bytes
    return total if total > share // 2 else 0


class KeptBuckets(NamedTuple):
    """A file of buckets that outlives the process that filled it, with the places of records."""

    path: Path
    begins: NDArray[np.int64]  # (buckets, parts) offset in the file of each part of a bucket
    filled: NDArray[np.int64]  # (buckets,) records

    def read(self, bucket: int, part: int, first: int, out: NDArray[Any], row_bytes: int) -> None:
        """Fill `out` with records of a bucket's part from `first` on, of `row_bytes` bytes each.

        Reads through the page cache, as the file may lie on a shared file system.
        """
        offset = int(self.begins[bucket, part]) + first * row_bytes
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            read_exact(fd, [byte_view(out)], offset, str(self.path))
            os.posix_fadvise(fd, offset, out.nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Buckets:
    """Records of several parts (keys, ids, ...), each part of one dtype and row width.

    A bucket has a region of its own for each part, so that nothing is moved later.  A context
    manager that removes the file at its end.  Raises OutOfSpace, possibly for an earlier call.
    """

    def __init__(
        self,
        path: Path,
        sizes: NDArray[np.int64],
        parts: list[tuple[Any, int]],
        in_memory: bool,
        room: int = 0,
        sparse: bool = False,
    ) -> None:
        """`sizes`: int64 (buckets,), maximum records of each bucket.

        parts   (dtype, items in a record) of each part
        path    the file to create, unless `in_memory`
        room    bytes of memory for buffers
        sparse  far fewer records than `sizes` are expected: the file is not preallocated
        """
        self._parts = [(np.dtype(d), width) for d, width in parts]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._filled = np.zeros(sizes.size, np.int64)
        self._held: list[NDArray[Any]] = []
        self._scratch = [aligned_buffer(0) for _ in parts]
        self._file: _RegionFile | None = None
        if in_memory:
            total = int(self._starts[-1])
            self._held = [np.empty(total * width, dtype) for dtype, width in self._parts]
        else:
            widths = [d.itemsize * width for d, width in self._parts]
            self._file = _RegionFile(path, sizes, widths, room, sparse)

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def __len__(self) -> int:
        return self._filled.size

    def append_grouped(
        self,
        starts: NDArray[np.int64],
        parts: list[NDArray[Any]],
        order: NDArray[np.int64] | None = None,
    ) -> None:
        """Append records [starts[b], starts[b + 1]) of the parts to bucket b, for all buckets.

        order   positions of the records in the parts; None: the parts are in order already
        """
        for b in np.flatnonzero(np.diff(starts)).tolist():
            low, high = int(starts[b]), int(starts[b + 1])
            at = self._advance(b, high - low)
            for number, (part, (_, width)) in enumerate(zip(parts, self._parts, strict=True)):
                rows = part.reshape(-1, width)
                chosen = None if order is None else order[low:high]
                if self._file is None:
                    held = self._held[number][at * width : (at + high - low) * width]
                    some = rows[low:high] if chosen is None else rows[chosen]
                    held[:] = some.reshape(-1)
                else:
                    rows = rows[low:high] if chosen is None else rows
                    self._file.append(b, number, rows, chosen)

    def _advance(self, bucket: int, count: int) -> int:
        """Reserve `count` records of a bucket; returns the position of the first."""
        at = int(self._starts[bucket] + self._filled[bucket])
        assert at + count <= int(self._starts[bucket + 1])
        self._filled[bucket] += count
        return at

    def finish(self) -> None:
        """Flush; call it after the last append, before records are taken."""
        if self._file is not None:
            self._file.finish()

    def filled(self, bucket: int) -> int:
        return int(self._filled[bucket])

    def take(
        self, bucket: int, part: int, first: int = 0, count: int | None = None
    ) -> NDArray[Any]:
        """Records of a part of a bucket, flat.  The caller may overwrite them: take them only once.

        The array is reused by the next call for the part.
        """
        count = int(self._filled[bucket]) - first if count is None else count
        need = self.scratch_bytes(part, count)
        if self._scratch[part].size < need:
            self._scratch[part] = aligned_buffer(need)
        return self.take_into(bucket, part, self._scratch[part], first, count)

    def scratch_bytes(self, part: int, count: int) -> int:
        """Bytes of scratch that `take_into` needs for `count` records."""
        dtype, width = self._parts[part]
        return 0 if self._file is None else count * width * dtype.itemsize + 2 * PAGE_BYTES

    def take_into(
        self, bucket: int, part: int, scratch: NDArray[np.uint8], first: int = 0, count: int = -1
    ) -> NDArray[Any]:
        """As `take`, into memory from `aligned_buffer`; any thread may call it."""
        dtype, width = self._parts[part]
        count = int(self._filled[bucket]) - first if count < 0 else count
        if self._file is None:
            at = int(self._starts[bucket]) + first
            return self._held[part][at * width : (at + count) * width]
        size = width * dtype.itemsize
        raw = self._file.read(bucket, part, first * size, count * size, scratch)
        return raw.view(dtype)

    def keep(self, path: Path) -> KeptBuckets:
        """Rename the file of finished buckets atomically to `path`, where it stays."""
        assert self._file is not None
        begins = self._file.keep(path).reshape(self._filled.size, len(self._parts))
        return KeptBuckets(path, begins, self._filled)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory, and remove the file."""
        self._held, self._scratch = [], []
        if self._file is not None:
            self._file.remove()


class _Region:
    """The region of one part of a bucket: its place in the file, and bytes not yet written."""

    __slots__ = ("buffer", "offset", "waiting")

    def __init__(self, offset: int) -> None:
        self.offset = offset  # where in the file the buffer will be written
        self.buffer: NDArray[np.uint8] | None = None
        self.waiting = 0  # bytes in the buffer


class _RegionFile:
    """The regions of all buckets in one file; each begins at a page boundary."""

    def __init__(
        self, path: Path, sizes: NDArray[np.int64], widths: list[int], room: int, sparse: bool
    ) -> None:
        self._path, self._widths, self._num_parts = path, widths, len(widths)
        self._fd = -1
        bytes_of = [[align(int(s) * w, PAGE_BYTES) for w in widths] for s in sizes.tolist()]
        ends = np.cumsum([0, *(b for each in bytes_of for b in each)]).tolist()
        self._begins = ends[:-1]
        self._regions = [_Region(offset) for offset in self._begins]
        count = max(1, len(self._regions)) + _IN_FLIGHT
        usable = room // count - 2 * PAGE_BYTES - max(widths)
        self._buffer_bytes = min(_MAX_BUFFER, usable) // PAGE_BYTES * PAGE_BYTES
        path.unlink(missing_ok=True)
        self._spare = path.with_name(SPARE)
        self._borrowed = self._spare.exists()
        if self._borrowed:
            self._spare.rename(path)
        if self._buffer_bytes > 0:
            self._fd, self._direct = open_to_write(path)
            if not sparse:
                reserve(self._fd, ends[-1], str(path))
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._fd, self._direct = os.open(path, flags, 0o600), False
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
        self._read_fd = os.open(path, flags)
        self._free: list[NDArray[np.uint8]] = []
        self._made = 0
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="bucket")
        self._pending: deque[tuple[Future[None], NDArray[np.uint8]]] = deque()

    def append(
        self, bucket: int, part: int, rows: NDArray[Any], chosen: NDArray[np.int64] | None
    ) -> None:
        """Append rows (n, items), or the `chosen` ones, in order."""
        region = self._regions[bucket * self._num_parts + part]
        if self._buffer_bytes <= 0:
            raw = byte_view(np.ascontiguousarray(rows if chosen is None else rows[chosen]))
            write_exact(self._fd, raw, region.offset, str(self._path))
            region.offset += len(raw)
            return
        width, done = self._widths[part], 0
        total = rows.shape[0] if chosen is None else chosen.size
        while done < total:
            if region.buffer is None:
                region.buffer = self._next_buffer()
            count = min(total - done, (region.buffer.size - region.waiting) // width)
            out = region.buffer[region.waiting : region.waiting + count * width]
            out = out.view(rows.dtype).reshape(count, rows.shape[1])
            if chosen is None:
                out[:] = rows[done : done + count]
            else:
                np.take(rows, chosen[done : done + count], 0, out=out, mode="clip")
            region.waiting += count * width
            done += count
            self._flush_full(region)

    def finish(self) -> None:
        """Write everything to the file; the last page of each region is padded with any bytes."""
        for region in self._regions:
            if region.waiting:
                region.waiting = align(region.waiting, PAGE_BYTES)
                assert region.buffer is not None
                self._write(region, region.waiting)
                region.buffer, region.waiting = None, 0
        while self._pending:
            self._wait()
        self._free = []

    def read(
        self, bucket: int, part: int, first: int, count: int, scratch: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Read bytes [first, first + count) of a region into `scratch`."""
        if count == 0:
            return scratch[:0]
        begin = self._begins[bucket * self._num_parts + part] + first
        skip = begin % PAGE_BYTES if self._direct else 0
        size = align(skip + count, PAGE_BYTES) if self._direct else count
        raw, offset = scratch[:size], begin - skip
        step = align(max(-(-size // _READERS), _MIN_READ), PAGE_BYTES)
        others = [
            self._pool.submit(self._read, raw[at : at + step], offset + at)
            for at in range(step, size, step)
        ]
        self._read(raw[:step], offset)
        for other in others:
            other.result()
        return raw[skip : skip + count]

    def _read(self, out: NDArray[np.uint8], offset: int) -> None:
        read_exact(self._read_fd, [byte_view(out)], offset, str(self._path))

    def keep(self, path: Path) -> NDArray[np.int64]:
        """Close and rename the file; returns where each region begins."""
        self._pool.shutdown()
        os.close(self._fd)
        os.close(self._read_fd)
        self._fd = -1
        self._path.rename(path)
        return np.array(self._begins, np.int64)

    def remove(self) -> None:
        """Close the file, and remove it, or give it back as SPARE."""
        self._pool.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._read_fd)
            self._fd = -1
            if self._borrowed:
                self._path.rename(self._spare)
            else:
                remove_file(self._path)

    def _next_buffer(self) -> NDArray[np.uint8]:
        while not self._free and self._made == len(self._regions) + _IN_FLIGHT:
            self._wait()
        if self._free:
            return self._free.pop()
        self._made += 1
        return aligned_buffer(self._buffer_bytes + PAGE_BYTES + max(self._widths))

    def _flush_full(self, region: _Region) -> None:
        """Write whole pages once the buffer is full; the rest moves to the next buffer."""
        if region.waiting >= self._buffer_bytes:
            whole = region.waiting // PAGE_BYTES * PAGE_BYTES
            left, old = region.waiting - whole, region.buffer
            assert old is not None
            fresh = self._next_buffer() if left else None
            if fresh is not None:
                fresh[:left] = old[whole : region.waiting]
            self._write(region, whole)
            region.buffer, region.waiting = fresh, left

    def _write(self, region: _Region, count: int) -> None:
        assert region.buffer is not None
        data, offset = region.buffer, region.offset
        if len(self._pending) == _IN_FLIGHT:
            self._wait()
        view = byte_view(data[:count])
        future = self._pool.submit(write_exact, self._fd, view, offset, str(self._path))
        self._pending.append((future, data))
        region.offset += count

    def _wait(self) -> None:
        """Wait for the oldest write, and free its buffer."""
        future, data = self._pending.popleft()
        self._free.append(data)
        future.result()
