"""Rows added to the sums of their neighbors; numbers as float32."""

import numpy as np

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import inner, njit

LINE_ITEMS = 16  # float32 in a cache line
_AHEAD = 6  # edges


@inner
def _ask_for_row(flat, at, low, high):
    """Prefetch the items [low, high) of the row that begins at `at`."""
    for item in range(at + low, at + high, LINE_ITEMS):
        prefetch(flat, item)


@njit(nogil=True, cache=True)
def add_rows(greatest, rows, first_row, origins, targets, low, high, sums):
    """sums[target] += row of its origin, edge by edge, in columns [low, high).

    greatest   the greater number stays instead; NaN wins
    rows       float32 (some, width)          those of nodes `first_row` and on
    origins    uint32 or uint64 (edges,)      nodes whose rows are there
    targets    uint32 or uint64 (>= edges,)   rows of `sums`
    sums       float32 (nodes, width)         in and out, C-contiguous
    """
    width, flat = sums.shape[1], sums.reshape(-1)
    for i in range(origins.size):
        if i + _AHEAD < origins.size:
            _ask_for_row(flat, np.int64(targets[i + _AHEAD]) * width, low, high)
        row = rows[np.int64(origins[i]) - first_row, low:high]
        into = sums[np.int64(targets[i]), low:high]
        if greatest:
            for c in range(row.size):
                into[c] = row[c] if (row[c] > into[c]) | (row[c] != row[c]) else into[c]
        else:
            for c in range(row.size):
                into[c] += row[c]
