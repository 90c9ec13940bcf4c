"""Convert rows for a store: sparse to dense, float32 to bfloat16 or int8, grouping by bucket."""

import numpy as np

from blockstore.kernels.jit import njit


@njit(nogil=True, cache=True)
def densify(indptr, columns, values, out):
    """Convert rows of a CSR matrix to dense ones; of duplicate entries the last one is kept.

    indptr   int64 (rows + 1,)    relative to the first
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
    """float32 bits in uint32 to bfloat16 bits in uint16: nearest, ties to even; NaN stays NaN."""
    for i in range(bits.size):
        value = bits[i]
        if (value & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            out[i] = np.uint16((value >> np.uint32(16)) | np.uint32(64))
        else:
            odd = (value >> np.uint32(16)) & np.uint32(1)
            out[i] = np.uint16((value + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(nogil=True, cache=True)
def group_places(places, per_bucket, starts, order):
    """Stable counting sort of rows by the bucket of their place.

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
def quantize(values, scale, out, errors):
    """Rows to int8: values divided by their column's scale, to nearest, ties to even.

    values  float32 (rows, columns)   finite
    scale   float32 (columns,)        0 if all values of a column are 0
    out     int8 (rows, columns)      out: within -127 to 127
    errors  float64 (2,)              in and out: largest error, sum of squared errors
    """
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            value, unit = np.float64(values[row, column]), np.float64(scale[column])
            nearest = np.rint(value / unit) if unit > 0 else 0.0
            nearest = min(127.0, max(-127.0, nearest))
            out[row, column] = np.int8(nearest)
            error = abs(value - nearest * unit)
            errors[0] = max(errors[0], error)
            errors[1] += error * error
