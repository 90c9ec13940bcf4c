"""`.npy` files read in pieces: header checked first, nothing mapped, nothing unpickled."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from blockstore.io.buffers import byte_view
from preprocess.errors import BadInput


class NpyFile:
    """The header of a `.npy` file and reads of its items.  A descriptor is open only while reading.

    `fortran`: an array of two dimensions lies column by column; `read` gives items as they lie.
    Raises BadInput: missing, not an npy file, objects, or shorter than it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as f:
                version = npy_format.read_magic(f)
                read = (
                    npy_format.read_array_header_1_0
                    if version == (1, 0)
                    else npy_format.read_array_header_2_0
                )
                self.shape, order, self.dtype = read(f)
                self._start = f.tell()
        except FileNotFoundError as error:
            raise BadInput(f"{path}: missing, expected an npy file") from error
        except (ValueError, OSError) as error:
            raise BadInput(f"{path}: {error}; expected an npy file") from error
        if self.dtype.hasobject:
            raise BadInput(f"{path}: holds Python objects, expected plain numbers")
        self.fortran = order and len(self.shape) > 1 and min(self.shape) > 1
        expected = self._start + self.size * self.dtype.itemsize
        if path.stat().st_size < expected:
            raise BadInput(
                f"{path}: {path.stat().st_size} bytes, expected {expected} for shape {self.shape}; "
                "the file is truncated"
            )

    @property
    def size(self) -> int:
        """Items in the array."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Items [first, first + count) of the flattened array."""
        out = np.empty(count, self.dtype)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_into(fd, first, out)
        finally:
            os.close(fd)
        return out

    def pieces(self, first: int, stop: int, count: int) -> Iterator[NDArray[Any]]:
        """Items [first, stop) in pieces of `count`; the array is reused by the next step."""
        buffer = np.empty(min(count, max(stop - first, 0)), self.dtype)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at in range(first, stop, max(count, 1)):
                piece = buffer[: min(count, stop - at)]
                self._read_into(fd, at, piece)
                yield piece
        finally:
            os.close(fd)

    def _read_into(self, fd: int, first: int, out: NDArray[Any]) -> None:
        view = byte_view(out)
        offset = self._start + first * self.dtype.itemsize
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise BadInput(
                    f"{self.path}+{offset + done}: file ends, expected {len(view)} bytes"
                )
            done += count
        if done:  # what was read once is not wanted in the page cache
            os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)


class NpyWriter:
    """An `.npy` file of known shape, written in order.  A context manager."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any) -> None:
        self.path = path
        self._file = path.open("wb")
        header = {
            "descr": npy_format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": shape,
        }
        npy_format.write_array_header_1_0(self._file, header)
        self._start = self._file.tell()
        self._dtype = np.dtype(dtype)

    def append(self, values: NDArray[Any]) -> None:
        """The next items."""
        self._file.write(np.ascontiguousarray(values, self._dtype).data)

    def put(self, first: int, values: NDArray[Any]) -> None:
        """Items from `first` on, wherever that is."""
        self._file.seek(self._start + first * self._dtype.itemsize)
        self.append(values)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
