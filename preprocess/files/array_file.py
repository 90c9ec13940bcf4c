"""An array in a temporary file: appended in order, read anywhere."""

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

_STEP_BYTES = 1 << 23  # of a file that is written: two steps of it are cached
_LARGE_READ = 1 << 20  # bytes that are not kept in the page cache; shorter reads may come again
_WRITE, _WRITE_AND_WAIT = 2, 7  # of sync_file_range


class ArrayFile(ExitStack):
    """Numbers of one dtype.  A context manager that closes the file; removing it is the owner's.

    Raises OutOfSpace; CorruptBlock where it is shorter than what is read.
    """

    def __init__(self, path: Path, dtype: Any) -> None:
        super().__init__()
        self.path, self.dtype = path, np.dtype(dtype)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.callback(os.close, self._fd)
        self.size = os.fstat(self._fd).st_size // self.dtype.itemsize
        self._begun = self._gone = self.size * self.dtype.itemsize  # bytes on their way; cached not

    def append(self, values: NDArray[Any]) -> None:
        """More numbers, of any dtype that casts."""
        raw = byte_view(np.ascontiguousarray(values, self.dtype))
        write_exact(self._fd, raw, self.size * self.dtype.itemsize, str(self.path))
        self.size += values.size
        if self.size * self.dtype.itemsize - self._begun >= _STEP_BYTES:
            self._leave_cache()

    def _leave_cache(self) -> None:
        """Begin to write a step to the disk; the one before has gone, and leaves the page cache.

        A control group is charged for pages that its processes write, and may not get rid of them
        as fast.
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
        """Numbers from `first` on, as many as `out` holds."""
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
    """Write bytes [first, stop) to the disk, where the system can.  Raises OutOfSpace, OSError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None or first >= stop:  # a length of 0 would be all of the file
        return
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    with naming(Path(where), stop - first):
        if call(fd, first, stop - first, flags):
            number = ctypes.get_errno()
            if number not in (errno.ENOSYS, errno.ESPIPE, errno.EINVAL):
                raise OSError(number, os.strerror(number))


def reserve(fd: int, num_bytes: int, where: str) -> None:
    """Give a file its blocks on disk, where the file system can: writes in any order are faster.

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
    """Remove a file at once; a thread waits until its blocks are free."""
    with held_open(path):
        path.unlink(missing_ok=True)


@contextmanager
def held_open(path: Path) -> Iterator[None]:
    """Inside, a file that is removed keeps its blocks; a thread waits until they are free."""
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
    """One array to a new file."""
    path.unlink(missing_ok=True)
    with ArrayFile(path, values.dtype) as file:
        file.append(values)


def load_array(path: Path, dtype: Any) -> NDArray[Any]:
    with ArrayFile(path, dtype) as file:
        return file.read(0, file.size)
