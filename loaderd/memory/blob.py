"""Arrays laid one after the other over arena slots that need not be adjacent."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from loaderd.api.protocol import Blob, BlobArray

ALIGN = 64


class Written(NamedTuple):
    """An array that is produced directly at its destination."""

    dtype: np.dtype[Any]
    size: int
    write: Callable[[int, NDArray[Any]], object]  # write(first, out): `out` = items from `first` on


Make = Callable[[NDArray[Any], NDArray[Any]], object]  # make(items, out): fills `out`


def chained(parts: Sequence[Written], dtype: DTypeLike) -> Written:
    """The concatenation of arrays."""

    def write(first: int, out: NDArray[Any]) -> None:
        at, done = first, 0
        for one in parts:
            if at < one.size and done < out.size:
                count = min(one.size - at, out.size - done)
                one.write(at, out[done : done + count])
                at, done = at + count, done + count
            at -= one.size

    return Written(np.dtype(dtype), sum(one.size for one in parts), write)


def made(pieces: Sequence[NDArray[Any]], dtype: DTypeLike, make: Make) -> Written:
    """The concatenation of pieces, each converted by `make`."""

    def of(piece: NDArray[Any]) -> Written:
        def write(first: int, out: NDArray[Any]) -> None:
            make(piece[first : first + out.size], out)

        return Written(np.dtype(dtype), piece.size, write)

    return chained([of(piece) for piece in pieces], dtype)


def joined(pieces: Sequence[NDArray[Any]], dtype: DTypeLike | None = None) -> Written:
    """The concatenation of pieces; `dtype` defaults to that of the first one."""
    return made(pieces, pieces[0].dtype if dtype is None else dtype, _copy)


def part(whole: Written, low: int, high: int) -> Written:
    """Items [low, high) of an array."""
    return whole._replace(size=high - low, write=lambda i, out: whole.write(low + i, out))


def _copy(items: NDArray[Any], out: NDArray[Any]) -> None:
    out[:] = items


def write_blob(
    data: NDArray[np.uint8],
    slot_bytes: int,
    slots: Sequence[int],
    arrays: Sequence[tuple[str, NDArray[Any] | Written]],
) -> Blob:
    """Write arrays into the slots, in order.

    data        uint8 (arena bytes,)
    slot_bytes  a multiple of every array's item size
    slots       enough for all arrays, each of which begins at a multiple of ALIGN bytes
    """
    placed, offset = [], 0
    for name, array in arrays:
        if not isinstance(array, Written):
            array = joined([array.reshape(-1)])
        done, item = 0, array.dtype.itemsize
        while done < array.size:
            slot, within = divmod(offset + done * item, slot_bytes)
            count = min(array.size - done, (slot_bytes - within) // item)
            start = slots[slot] * slot_bytes + within
            array.write(done, data[start : start + count * item].view(array.dtype))
            done += count
        placed.append(BlobArray(name, array.dtype.name, offset, array.size))
        offset += -(-array.size * item // ALIGN) * ALIGN
    return Blob(tuple(slots), tuple(placed))
