"""Records by bucket, filled in any order, taken a bucket at a time: in memory or in one file."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.io.buffers import byte_view
from blockstore.io.files import read_exact, write_exact


class Buckets:
    """Records of several parts (keys, ids, ...), each part of one dtype and row width.

    A bucket has a region of its own for each part, so that nothing is moved later.  A context
    manager; leaving it removes the file.  Raises OutOfSpace.
    """

    def __init__(
        self,
        path: Path,
        sizes: NDArray[np.int64],
        parts: list[tuple[Any, int]],
        in_memory: bool,
    ) -> None:
        """`sizes`: int64 (buckets,), the most records of each.

        parts   dtype and items a record, of each part
        path    a file that does not exist, for when it is not `in_memory`
        """
        self._path, self._parts = path, [(np.dtype(d), width) for d, width in parts]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._filled = np.zeros(sizes.size, np.int64)
        self._held: list[NDArray[Any]] = []
        self._scratch = [np.empty(0, dtype) for dtype, _ in self._parts]
        self._fd = -1
        if in_memory:
            total = int(self._starts[-1])
            self._held = [np.empty(total * width, dtype) for dtype, width in self._parts]
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)

    def append(self, bucket: int, parts: list[NDArray[Any]]) -> None:
        """More records of a bucket."""
        at = int(self._starts[bucket] + self._filled[bucket])
        count = parts[0].size // self._parts[0][1]
        assert at + count <= int(self._starts[bucket + 1])
        for number, part in enumerate(parts):
            width = self._parts[number][1]
            if self._held:
                self._held[number][at * width : (at + count) * width] = part.reshape(-1)
            else:
                write_exact(self._fd, byte_view(part), self._offset(number, at), str(self._path))
        self._filled[bucket] += count

    def append_grouped(self, starts: NDArray[np.int64], parts: list[NDArray[Any]]) -> None:
        """Records of all buckets, those of bucket b at [starts[b], starts[b + 1])."""
        for b in np.flatnonzero(np.diff(starts)).tolist():
            low, high = int(starts[b]), int(starts[b + 1])
            self.append(
                b, [p[low * w : high * w] for p, (_, w) in zip(parts, self._parts, strict=True)]
            )

    def filled(self, bucket: int) -> int:
        """Records of a bucket."""
        return int(self._filled[bucket])

    def take(
        self, bucket: int, part: int, first: int = 0, count: int | None = None
    ) -> NDArray[Any]:
        """Records of a part of a bucket, flat; the caller may write to them.  Take them once.

        The array is reused by the next call for the part.
        """
        dtype, width = self._parts[part]
        count = int(self._filled[bucket]) - first if count is None else count
        at = int(self._starts[bucket]) + first
        if self._held:
            return self._held[part][at * width : (at + count) * width]
        if self._scratch[part].size < count * width:
            self._scratch[part] = np.empty(count * width, dtype)
        out = self._scratch[part][: count * width]
        offset = self._offset(part, at)
        read_exact(self._fd, [byte_view(out)], offset, str(self._path))
        return out

    def _offset(self, part: int, at: int) -> int:
        """Byte offset in the file: part after part."""
        before: int = sum(d.itemsize * w for d, w in self._parts[:part]) * int(self._starts[-1])
        dtype, width = self._parts[part]
        return int(before + at * dtype.itemsize * width)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held, self._scratch = [], []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)
