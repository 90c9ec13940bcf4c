"""`.npy` files in pieces: the header is checked first, nothing is mapped, nothing unpickled."""

import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from blockstore.io.buffers import byte_view
from blockstore.io.files import write_exact
from preprocess.errors import BadInput

_READ_HEADER = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
}
# numpy parses the header with Python's own parser; what that raises for wild bytes comes through
_UNREADABLE = (
    ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError, OverflowError,
)  # fmt: skip
_SAVE_AGAIN = "save it again with numpy.save"
_LIST_HEADER_BYTES = 128  # what numpy takes for any one-dimensional array of numbers


class NpyFile:
    """The header of a `.npy` file, and reads of its items.  It is open only while it is read.

    Raises BadInput: missing, not an npy file, objects or records, or shorter than it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as f, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of headers that Python 2 wrote
                version = npy_format.read_magic(f)
                if version not in _READ_HEADER:
                    raise ValueError(f"npy version {version}")
                self.shape, fortran, self._stored = _READ_HEADER[version](f)
                self._start = f.tell()
                if min(self.shape, default=0) < 0:
                    raise ValueError(f"shape {self.shape}")
        except FileNotFoundError as error:
            raise BadInput.at(path, "no file: it is missing", "an npy file", "add it") from error
        except OSError as error:
            raise BadInput.at(path, error.strerror, "an npy file", _SAVE_AGAIN) from error
        except _UNREADABLE as error:
            raise BadInput.at(
                f"{path}: header", " ".join(str(error).split()), "that of an npy file", _SAVE_AGAIN
            ) from error
        if self._stored.kind not in "biufc":
            kind = "Python objects" if self._stored.hasobject else f"items of {self._stored}"
            raise BadInput.at(path, kind, "plain numbers", _SAVE_AGAIN)
        self.dtype = self._stored.newbyteorder("=")
        self.fortran_order = bool(fortran) and len(self.shape) > 1 and min(self.shape) > 1
        expected = self._start + self.size * self.dtype.itemsize
        found = path.stat().st_size
        if found < expected:
            raise BadInput.at(
                f"{path}: end", f"{found} bytes", f"{expected} for shape {self.shape}",
                "the file is truncated: copy it again",
            )  # fmt: skip

    @property
    def size(self) -> int:
        """Items in the array."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Items [first, first + count) in the order of the file."""
        out = np.empty(count, self.dtype)
        for piece in self.pieces(first, first + count, count):
            out[:] = piece
        return out

    def pieces(self, first: int, stop: int, count: int) -> Iterator[NDArray[Any]]:
        """Items [first, stop) in pieces of `count`; the array is reused by the next step."""
        count = max(count, 1)
        buffer = np.empty(min(count, max(stop - first, 0)), self.dtype)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at in range(first, stop, count):
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
                raise BadInput.at(
                    f"{self.path}+{offset + done}", "the end of the file",
                    f"{len(view) - done} more bytes", "it became shorter while it was read",
                )  # fmt: skip
            done += count
        os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)  # it is read once
        if not self._stored.isnative:
            out.byteswap(inplace=True)


class NpyWriter:
    """An `.npy` file, its header first, then items in order.  A context manager.

    Raises OutOfSpace.
    """

    def __init__(self, path: Path, shape: tuple[int, ...] | None, dtype: Any) -> None:
        """`shape` None: a list whose length is known when the file is closed."""
        self.path, self._shape, self._dtype = path, shape, np.dtype(dtype)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._start = self._items = 0
        self._start = self._write_header()

    def append(self, values: NDArray[Any]) -> None:
        """The next items."""
        self.put(self._items, values)
        self._items += values.size

    def put(self, first: int, values: NDArray[Any]) -> None:
        """Items from `first` on, wherever that is."""
        raw = byte_view(np.ascontiguousarray(values, self._dtype))
        offset = self._start + first * self._dtype.itemsize
        write_exact(self._fd, raw, offset, str(self.path))

    def _write_header(self) -> int:
        shape = (self._items,) if self._shape is None else self._shape
        descr = npy_format.dtype_to_descr(self._dtype)
        raw = io.BytesIO()
        npy_format.write_array_header_1_0(
            raw, {"descr": descr, "fortran_order": False, "shape": shape}
        )
        assert self._shape is not None or len(raw.getbuffer()) == _LIST_HEADER_BYTES
        write_exact(self._fd, raw.getbuffer(), 0, str(self.path))
        return len(raw.getbuffer())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self._shape is None:
                self._write_header()
        finally:
            os.close(self._fd)
