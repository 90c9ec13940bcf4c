"""Rows on their way into a store: sparse to dense, float32 to bfloat16, checks, grouping."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def densify(indptr, columns, values, out):
    """Rows of a CSR matrix, dense; of values for the same place the last one stays.

    indptr   int64 (rows + 1,)    only differences to the first count
    columns  integers (nnz,)      in range
    values   (nnz,)               of the dtype of `out`
    out      (rows, width)
    """
    for row in range(out.shape[0]):
        out[row, :] = 0
        for k in range(indptr[row] - indptr[0], indptr[row + 1] - indptr[0]):
            out[row, columns[k]] = values[k]


@njit(nogil=True, cache=True)
def to_bfloat16(bits, out):
    """float32, as its bits in uint32, to bfloat16 in uint16: nearest, ties to even; NaN stays."""
    for i in range(bits.size):
        value = bits[i]
        if (value & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            out[i] = np.uint16((value >> np.uint32(16)) | np.uint32(64))
        else:
            odd = (value >> np.uint32(16)) & np.uint32(1)
            out[i] = np.uint16((value + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(nogil=True, cache=True)
def group_places(places, per_bucket, starts, order):
    """Counting sort of rows by the bucket of their place, in the order in which they stand.

    places  uint32 or uint64 (rows,)   new place of each row
    starts  int64 (buckets + 1,)       out: where each bucket's rows begin in `order`
    order   int64 (>= rows,)           out
    """
    starts[:] = 0
    for i in range(places.size):
        starts[np.int64(places[i]) // per_bucket + 1] += 1
    for b in range(starts.size - 1):
        starts[b + 1] += starts[b]
    for i in range(places.size):
        b = np.int64(places[i]) // per_bucket
        order[starts[b]] = i
        starts[b] += 1
    for b in range(starts.size - 1, 0, -1):
        starts[b] = starts[b - 1]
    starts[0] = 0


@njit(nogil=True, cache=True)
def take_ids(values, limit, owner, number):
    """Give the nodes of a split to it.

    values  integers (ids,)      node ids
    owner   uint8 (limit,)       in and out: number of the split that has the node, 0: none

    Returns the position of the first id out of range or of another split's, int64, or -1.
    """
    for i in range(values.size):
        if values[i] < 0 or values[i] >= limit:
            return np.int64(i)
        v = np.int64(values[i])
        if owner[v] != 0 and owner[v] != number:
            return np.int64(i)
        owner[v] = number
    return np.int64(-1)
