"""Arrays inside files, with any strides, described and read in pieces of rows, without mmap."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from math import prod
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from blockstore.io.buffers import byte_view
from preprocess.errors import BadInput

_MAX_SPAN = 1 << 20  # bytes read at once if rows are not contiguous
BFLOAT16 = "bfloat16"

Fill = Callable[[memoryview, int], None]  # fills a view from an offset, counted from the array's


class Placed(msgspec.Struct, frozen=True, tag=True):
    """An array that lies in a file at an offset, with strides."""

    dtype: str  # as numpy writes it, or "bfloat16"
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items, none below 0
    offset: int


class GivenArray(msgspec.Struct, frozen=True, tag=True):
    """An array given by its bytes, in C order."""

    dtype: str
    shape: tuple[int, ...]
    items: bytes


Array = Placed | GivenArray


class StoredArray:
    """An array in a file of any format, read in order; in one dimension, a row is an item.

    `dtype` is in native byte order; bfloat16 is returned as float32.  The file is open only while
    it is read.  Raises BadInput from all methods.
    """

    fortran_order = False  # whether the file has Fortran order: the first index varies fastest
    drops = True  # whether data leaves the page cache after it has been read
    seeks = True  # whether reading from the middle costs no more than from the beginning

    def __init__(self, path: Path, where: str, header: str, array: Placed) -> None:
        """`where` and `header` name the array and its header in messages."""
        self.path, self.where, self.header = path, where, header
        self.shape, self._strides, self._start = array.shape, array.strides, array.offset
        self._is_bfloat16 = array.dtype == BFLOAT16
        self._stored = np.dtype(np.uint16 if self._is_bfloat16 else array.dtype)
        self._items = self._stored.newbyteorder("=")
        self.dtype = np.dtype(np.float32) if self._is_bfloat16 else self._items
        self._first = 0  # first item of this view in the array

    @property
    def size(self) -> int:
        """Items in the array."""
        return prod(self.shape)

    def transposed(self) -> Self:
        """The same items with dimensions and order reversed."""
        part = copy(self)
        part.shape, part._strides = self.shape[::-1], self._strides[::-1]
        part.fortran_order = not self.fortran_order
        return part

    def flat(self) -> Self:
        """The same items as one dimension, in the order of the file."""
        part = copy(self)
        part.shape, part._strides = (self.size,), (1,)
        return part

    def row(self, index: int) -> Self:
        """One row of an array of several dimensions, as an array."""
        part = copy(self)
        part.shape, part._strides = self.shape[1:], self._strides[1:]
        part._first += index * self._strides[0]
        return part

    def pieces(self, first: int, stop: int, count: int) -> Iterator[NDArray[Any]]:
        """Rows [first, stop), `count` at a time; the array is reused, and must not be modified."""
        count = max(count, 1)
        buffer = np.empty((min(count, max(stop - first, 0)), *self.shape[1:]), self._items)
        with self._opened() as fill:
            for at in range(first, stop, count):
                piece = buffer[: min(count, stop - at)]
                self._fill(fill, piece, self._first + at * self._strides[0], self._strides)
                if not self._stored.isnative:
                    piece.byteswap(inplace=True)
                if self._is_bfloat16:
                    yield (piece.astype(np.uint32) << 16).view(np.float32)
                else:
                    yield piece

    def all_pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Every row, `count` at a time."""
        return self.pieces(0, self.shape[0], count)

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Rows [first, first + count)."""
        out = np.empty((count, *self.shape[1:]), self.dtype)
        for piece in self.pieces(first, first + count, count):
            out[:] = piece
        return out

    def check(self, fits: bool, expected: str, remedy: str = "save it again") -> None:
        """Raises BadInput, with the shape and dtype of the array, unless it `fits`."""
        if not fits:
            order = " in Fortran order" if self.fortran_order else ""
            found = f"shape {self.shape} of {self.dtype}{order}"
            raise BadInput.at(self.header, found, expected, remedy)

    def _opened(self) -> AbstractContextManager[Fill]:
        return self._in_place()

    @contextmanager
    def _in_place(self) -> Iterator[Fill]:
        def fill(view: memoryview, offset: int) -> None:
            offset, done = self._start + offset, 0
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    raise BadInput.at(
                        f"{self.path}+{offset + done}", "the end of the file",
                        f"{len(view) - done} more bytes", "it became shorter while it was read",
                    )  # fmt: skip
                done += count
            if self.drops:
                os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)

        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fill
        finally:
            os.close(fd)

    def _fill(self, fill: Fill, out: NDArray[Any], first: int, strides: tuple[int, ...]) -> None:
        """Read items from `first` on: all at once, or split recursively until they are close."""
        if not out.size:
            return
        if _lie_together(out, strides):
            fill(byte_view(out), first * out.itemsize)
            return
        reach = [(n - 1) * s for n, s in zip(out.shape, strides, strict=True)]
        span = sum(reach) + 1
        if span * out.itemsize <= _MAX_SPAN:
            raw = np.empty(span, out.dtype)
            fill(byte_view(raw), first * out.itemsize)
            out[...] = as_strided(raw, out.shape, [s * out.itemsize for s in strides])
            return
        axis = int(np.argmax(reach))
        half = out.shape[axis] // 2
        low, high = np.split(out, [half], axis)
        self._fill(fill, low, first, strides)
        self._fill(fill, high, first + half * strides[axis], strides)


class StridedRows(StoredArray):
    """A tensor or an array in a file of torch.  Raises BadInput: it is a single number."""

    drops = False  # the next rows may be interleaved with these

    def __init__(self, path: Path, array: Array, where: str) -> None:
        if not array.shape:
            raise BadInput.at(where, "one number", "rows", "leave it out")
        self._given = array.items if isinstance(array, GivenArray) else None
        if isinstance(array, GivenArray):
            array = Placed(array.dtype, array.shape, c_strides(array.shape), 0)
        super().__init__(path, where, where, array)

    def _opened(self) -> AbstractContextManager[Fill]:
        return super()._opened() if self._given is None else nullcontext(self._copy)

    def _copy(self, view: memoryview, offset: int) -> None:
        assert self._given is not None
        view[:] = self._given[offset : offset + len(view)]


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in items of an array in C order."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _lie_together(out: NDArray[Any], strides: tuple[int, ...]) -> bool:
    """Whether items are contiguous and in the same order in memory and in the file."""
    width, together = 1, bool(out.flags.c_contiguous)
    for size, stride in zip(reversed(out.shape), reversed(strides), strict=True):
        together = together and (size == 1 or stride == width)
        width *= size
    return together
