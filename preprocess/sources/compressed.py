"""Compressed sparse rows or columns as a list of edges: the ids that `indptr` stands for."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import StoredArray

_PIECE = 1 << 16  # offsets at a time
_AGAIN = "write the matrix again"


def major_ids(
    indptr: Iterator[NDArray[np.integer]], where: str, num_entries: int, count: int
) -> Iterator[NDArray[np.int64]]:
    """The row (column, in CSC) of every entry in order, `count` at a time; the array is reused.

    indptr       integers   in pieces; the first is 0, none is below the one before it
    where        of `indptr`, for messages
    num_entries  what the last of `indptr` must be

    Raises BadInput.
    """
    out = np.empty(min(count, num_entries), np.int64)
    filled, last, row = 0, 0, -1  # ids in `out`; the offset before a piece, and the row it ends
    for piece in indptr:
        ends = piece.astype(np.int64)
        starts = np.concatenate([[last], ends[:-1]])
        _check_offsets(starts, ends, row, num_entries, where)
        done = last
        while done < ends[-1]:
            stop = min(done + count - filled, int(ends[-1]))
            low = int(np.searchsorted(ends, done, "right"))
            high = int(np.searchsorted(ends, stop, "left")) + 1
            here = np.minimum(ends[low:high], stop) - np.maximum(starts[low:high], done)
            ids = np.arange(row + low, row + high, dtype=np.int64)
            out[filled : filled + stop - done] = np.repeat(ids, here)
            filled, done = filled + stop - done, stop
            if filled == count:
                yield out
                filled = 0
        last, row = int(ends[-1]), row + ends.size
    if last != num_entries:
        raise BadInput.at(f"{where}[{row}]", last, f"{num_entries}, the entries", _AGAIN)
    if filled:
        yield out[:filled]


def check_ends(indptr: StoredArray, num_entries: int) -> None:
    """The first and the last offset, read alone, are right.  Raises BadInput."""
    for at, expected in ((0, 0), (indptr.size - 1, num_entries)):
        found = int(indptr.read(at, 1)[0])
        if found != expected:
            raise BadInput.at(f"{indptr.where}[{at}]", f"offset {found}", expected, _AGAIN)


def offsets(indptr: StoredArray) -> Iterator[NDArray[np.integer]]:
    """All of a stored `indptr`, in pieces."""
    return indptr.pieces(0, indptr.size, _PIECE)


def _check_offsets(
    starts: NDArray[np.int64], ends: NDArray[np.int64], row: int, num_entries: int, where: str
) -> None:
    bad = (ends < starts) | (ends > num_entries)
    if row < 0:
        bad[0] = ends[0] != 0
    if bad.any():
        at = int(np.argmax(bad))
        expected = "0" if row + at < 0 else f"{starts[at]} to {num_entries}, in ascending order"
        raise BadInput.at(f"{where}[{row + 1 + at}]", f"offset {ends[at]}", expected, _AGAIN)
