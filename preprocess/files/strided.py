"""Arrays inside a file at any strides, as files of torch have them: described, read by rows."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from blockstore.io.buffers import byte_view
from preprocess.errors import BadInput
from preprocess.files.npy import StoredArray, read_at

_MOST_SPAN = 1 << 20  # bytes that are read at once where rows do not lie side by side
BFLOAT16 = "bfloat16"


class Placed(msgspec.Struct, frozen=True, tag=True):
    """An array that lies in the file."""

    dtype: str  # as numpy writes it, or "bfloat16"
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items, none below 0
    offset: int


class GivenArray(msgspec.Struct, frozen=True, tag=True):
    """An array that is given as it is, in C order."""

    dtype: str
    shape: tuple[int, ...]
    items: bytes


Array = Placed | GivenArray


class StridedRows(StoredArray):
    """Rows of an array, in order.  bfloat16 is given as float32.

    Raises BadInput: it is one number; while it is read, the file has become shorter.
    """

    def __init__(self, path: Path, array: Array, where: str) -> None:
        self._array, self._is_bfloat16 = array, array.dtype == BFLOAT16
        self._stored = np.dtype(np.uint16 if self._is_bfloat16 else array.dtype)
        dtype = np.dtype(np.float32) if self._is_bfloat16 else self._stored
        super().__init__(path, where, where, array.shape, dtype)
        if not array.shape:
            raise BadInput.at(where, "one number", "rows", "leave it out")

    def row(self, index: int) -> "StridedRows":
        """One row of an array of several dimensions, as an array."""
        array, item = self._array, self._stored.itemsize
        if isinstance(array, GivenArray):
            num_bytes = prod(array.shape[1:]) * item
            items = array.items[index * num_bytes : (index + 1) * num_bytes]
            row: Array = GivenArray(array.dtype, array.shape[1:], items)
        else:
            offset = array.offset + index * array.strides[0] * item
            row = Placed(array.dtype, array.shape[1:], array.strides[1:], offset)
        return StridedRows(self.path, row, self.where)

    def pieces(self, first: int, stop: int, count: int) -> Iterator[NDArray[Any]]:
        """Rows [first, stop), `count` at a time; the array is reused, and not to be written to."""
        array = self._array
        if isinstance(array, GivenArray):
            rows = np.frombuffer(array.items, self._stored).reshape(array.shape)
            for at in range(first, stop, count):
                yield self._widened(rows[at : min(at + count, stop)])
            return
        buffer = np.empty((min(count, max(stop - first, 0)), *self.shape[1:]), self._stored)
        with self.path.open("rb", buffering=0) as file:
            for at in range(first, stop, count):
                piece = buffer[: min(count, stop - at)]
                offset = array.offset + at * array.strides[0] * self._stored.itemsize
                self._fill(file.fileno(), piece, offset, array.strides)
                yield self._widened(piece)

    def _widened(self, values: NDArray[Any]) -> NDArray[Any]:
        if not self._is_bfloat16:
            return values
        return (values.astype(np.uint32) << 16).view(np.float32)

    def _fill(self, fd: int, out: NDArray[Any], offset: int, strides: tuple[int, ...]) -> None:
        """Items that begin at an offset: all at once, or in halves that lie close together."""
        if not out.size:
            return
        if _lie_together(out, strides):
            read_at(fd, byte_view(out), offset, self.path, "copy it again")
            return
        reach = [(n - 1) * s for n, s in zip(out.shape, strides, strict=True)]
        span = sum(reach) + 1
        if span * out.itemsize <= _MOST_SPAN:
            raw = np.empty(span, out.dtype)
            read_at(fd, byte_view(raw), offset, self.path, "copy it again")
            out[...] = as_strided(raw, out.shape, [s * out.itemsize for s in strides])
            return
        axis = int(np.argmax(reach))
        half = out.shape[axis] // 2
        low, high = np.split(out, [half], axis)
        self._fill(fd, low, offset, strides)
        self._fill(fd, high, offset + half * strides[axis] * out.itemsize, strides)


def _lie_together(out: NDArray[Any], strides: tuple[int, ...]) -> bool:
    """Whether items are in the same order, without a gap, in memory and in the file."""
    width, together = 1, bool(out.flags.c_contiguous)
    for size, stride in zip(reversed(out.shape), reversed(strides), strict=True):
        together = together and (size == 1 or stride == width)
        width *= size
    return together
