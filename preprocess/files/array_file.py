"""Arrays in temporary files: appended in order, read at any position."""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import OutOfSpace
from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import byte_view
from blockstore.io.files import naming, read_exact, write_exact

_STEP_BYTES = 1 << 23  # bytes flushed together; two steps of a written file are cached
_LARGE_READ = 1 << 20  # larger reads leave the page cache; smaller ones may be repeated
_WRITE, _WRITE_AND_WAIT = 2, 7  # flags of sync_file_range


class ArrayFile(ExitStack):
    """Numbers of one dtype in a file, which this context manager closes but does not remove.

    Raises OutOfSpace; CorruptBlock if the file is shorter than what is read.
    """

    def __init__(self, path: Path, dtype: Any) -> None:
        super().__init__()
        self.path, self.dtype = path, np.dtype(dtype)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.callback(os.close, self._fd)
        self.size = os.fstat(self._fd).st_size // self.dtype.itemsize
        # bytes whose write has begun, and bytes that have left the page cache
        self._begun = self._gone = self.size * self.dtype.itemsize

    def append(self, values: NDArray[Any]) -> None:
        """Append numbers of any dtype that can be cast."""
        raw = byte_view(np.ascontiguousarray(values, self.dtype))
        write_exact(self._fd, raw, self.size * self.dtype.itemsize, str(self.path))
        self.size += values.size
        if self.size * self.dtype.itemsize - self._begun >= _STEP_BYTES:
            self._leave_cache()

    def _leave_cache(self) -> None:
        """Begin to flush a step; wait for the one before, and drop it from the page cache.

        Otherwise dirty pages, for which the control group is charged, could pile up.
        """
        end = self.size * self.dtype.itemsize
        _sync_range(self._fd, self._gone, self._begun, _WRITE_AND_WAIT, str(self.path))
        os.posix_fadvise(self._fd, self._gone, self._begun - self._gone, os.POSIX_FADV_DONTNEED)
        self._gone = self._begun // PAGE_BYTES * PAGE_BYTES
        _sync_range(self._fd, self._begun, end, _WRITE, str(self.path))
        self._begun = end

    def read(self, first: int, count: int) -> NDArray[Any]:
        out = np.empty(count, self.dtype)
        self.read_into(first, out)
        return out

    def read_into(self, first: int, out: NDArray[Any]) -> None:
        """Fill `out` with numbers from `first` on."""
        offset = first * self.dtype.itemsize
        read_exact(self._fd, [byte_view(out)], offset, str(self.path))
        if out.nbytes >= _LARGE_READ:
            os.posix_fadvise(self._fd, offset, out.nbytes, os.POSIX_FADV_DONTNEED)

    def pieces(self, first: int, stop: int, count: int) -> Iterator[NDArray[Any]]:
        """Numbers [first, stop) in pieces of `count`; the array is reused by the next step."""
        count = max(count, 1)
        buffer = np.empty(min(count, max(stop - first, 0)), self.dtype)
        for at in range(first, stop, count):
            piece = buffer[: min(count, stop - at)]
            self.read_into(at, piece)
            yield piece


def _sync_range(fd: int, first: int, stop: int, flags: int, where: str) -> None:
    """Flush bytes [first, stop) to disk, if the system supports it.  Raises OutOfSpace, OSError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None or first >= stop:  # a length of 0 would mean the whole file
        return
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    with naming(Path(where), stop - first):
        if call(fd, first, stop - first, flags):
            number = ctypes.get_errno()
            if number not in (errno.ENOSYS, errno.ESPIPE, errno.EINVAL):
                raise OSError(number, os.strerror(number))


def reserve(fd: int, num_bytes: int, where: str) -> None:
    """Preallocate a file's blocks, if the file system can: it speeds up writes in any order.

    Raises OutOfSpace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate", None)
    if call is not None and num_bytes:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if call(fd, 0, 0, num_bytes) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"{where}: {os.strerror(ctypes.get_errno())}, {num_bytes} bytes to write; free "
                "some space, or choose another disk"
            )


def remove_file(path: Path) -> None:
    """Remove a file at once; a background thread waits until its blocks are freed."""
    with held_open(path):
        path.unlink(missing_ok=True)


@contextmanager
def held_open(path: Path) -> Iterator[None]:
    """Keep a file open meanwhile, so that removing it is fast; a thread frees its blocks later."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = -1
    try:
        yield
    finally:
        if fd >= 0:
            Thread(target=os.close, args=(fd,), name="remove").start()


def save_array(path: Path, values: NDArray[Any]) -> None:
    """Write an array to a new file."""
    path.unlink(missing_ok=True)
    with ArrayFile(path, values.dtype) as file:
        file.append(values)


def load_array(path: Path, dtype: Any) -> NDArray[Any]:
    with ArrayFile(path, dtype) as file:
        return file.read(0, file.size)
