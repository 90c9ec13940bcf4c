"""Rows that came from another server, to where their pages belong."""

from blockstore.kernels.jit import njit
from blockstore.kernels.rows import copy_row


@njit(nogil=True, cache=True)
def place_rows(rows, which, starts, lows, highs, row_bytes, memory):
    """Copy rows into runs of pages; of a row on the edge of a run what is inside.

    rows         uint8 (count * row_bytes,)
    which        int64 (n,)   number in `rows` of each row that is placed
    starts       int64 (n,)   byte of `memory` where it begins; may be before `lows`
    lows, highs  int64 (n,)   bytes of `memory` that its run of pages takes
    memory       uint8        out
    """
    for i in range(which.size):
        first = max(lows[i] - starts[i], 0)
        stop = min(highs[i] - starts[i], row_bytes)
        if first < stop:
            copy_row(rows, which[i] * row_bytes + first, memory, starts[i] + first, stop - first)
