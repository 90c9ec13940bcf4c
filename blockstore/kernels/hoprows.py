"""Rows of hop-wise arrays, which have no gaps: row i is `row_bytes` bytes from i * row_bytes on."""

from blockstore.format import PAGE_BYTES
from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import leaf, njit
from blockstore.kernels.random import permute
from blockstore.kernels.rows import copy_row

_AHEAD = 4  # rows
_LINE = 64  # bytes


@njit(nogil=True, cache=True)
def permute_each(index, size, key, out):
    """out[i] = permute(index[i], size, key) where index[i] < size, else index[i]; int64, int64."""
    for i in range(index.size):
        out[i] = permute(index[i], size, key) if index[i] < size else index[i]


@leaf
def gather_hops(data, bases, row_bytes, index, start, stop, firsts, out):
    """Row index[i] of every array, for start <= i < stop: one pass for all of them.

    data       uint8 (arena bytes,)
    bases      int64 (arrays,)       where in `data` row 0 of each array begins
    row_bytes  int64 (arrays,)
    index      int64 (>= stop,)      in range
    firsts     int64 (arrays,)       where in `out` row 0 of each array goes
    out        uint8 (bytes,)
    """
    for i in range(start, stop):
        if i + _AHEAD < stop:
            for a in range(bases.size):
                near = bases[a] + index[i + _AHEAD] * row_bytes[a]
                for byte in range(near, near + row_bytes[a], _LINE):
                    prefetch(data, byte)
        for a in range(bases.size):
            copy_row(
                data, bases[a] + index[i] * row_bytes[a], out, firsts[a] + i * row_bytes[a],
                row_bytes[a],
            )  # fmt: skip


@leaf
def spread_rows(pages, runs, shard_bytes, rows, places, row_bytes, out):
    """Row places[i] of `out` = row rows[i] of an array, for those that runs of pages hold.

    pages        uint8             of the runs, one run after the other
    runs         int64 (runs, 5)   as `plan_extents` gives them, of `rows`
    shard_bytes  int               of the array that a shard holds
    rows         int64 (rows,)
    places       int64 (rows,)
    out          uint8 (bytes,)    flat
    """
    start = 0
    for k in range(runs.shape[0]):
        first = runs[k, 0] * shard_bytes + runs[k, 1] * PAGE_BYTES - start
        for i in range(runs[k, 3], runs[k, 4]):
            copy_row(pages, rows[i] * row_bytes - first, out, places[i] * row_bytes, row_bytes)
        start += runs[k, 2] * PAGE_BYTES
