"""An array in a temporary file: appended in order, read anywhere."""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import OutOfSpace
from blockstore.io.buffers import byte_view
from blockstore.io.files import read_exact, write_exact


class ArrayFile:
    """Numbers of one dtype.  A context manager that closes the file; removing it is the owner's.

    Raises OutOfSpace; CorruptBlock where it is shorter than what is read.
    """

    def __init__(self, path: Path, dtype: Any) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size // self.dtype.itemsize

    def append(self, values: NDArray[Any]) -> None:
        """More numbers, of any dtype that casts."""
        raw = byte_view(np.ascontiguousarray(values, self.dtype))
        write_exact(self._fd, raw, self.size * self.dtype.itemsize, str(self.path))
        self.size += values.size

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Numbers [first, first + count)."""
        out = np.empty(count, self.dtype)
        self.read_into(first, out)
        return out

    def read_into(self, first: int, out: NDArray[Any]) -> None:
        """Numbers from `first` on, as many as `out` holds."""
        read_exact(self._fd, [byte_view(out)], first * self.dtype.itemsize, str(self.path))

    def pieces(self, first: int, stop: int, count: int) -> Iterator[NDArray[Any]]:
        """Numbers [first, stop) in pieces of `count`; the array is reused by the next step."""
        count = max(count, 1)
        buffer = np.empty(min(count, max(stop - first, 0)), self.dtype)
        for at in range(first, stop, count):
            piece = buffer[: min(count, stop - at)]
            self.read_into(at, piece)
            yield piece

    def close(self) -> None:
        """It may be closed twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
    """All of a file."""
    with ArrayFile(path, dtype) as file:
        return file.read(0, file.size)
