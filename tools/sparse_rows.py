"""Rows of a sparse matrix times a dense one, and the gradient: float32, one thread."""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, fastmath=True)
def sparse_times(nodes, indptr, indices, data, weight, out):
    """out[i] = row nodes[i] of a sparse matrix @ weight; float32."""
    out[:] = 0
    for i in range(nodes.size):
        total = out[i]
        for k in range(indptr[nodes[i]], indptr[nodes[i] + 1]):
            value, row = np.float32(data[k]), weight[indices[k]]
            for c in range(row.size):
                total[c] += value * row[c]


@njit(nogil=True, cache=True, fastmath=True)
def sparse_gradient(nodes, indptr, indices, data, gradient, out):
    """out = transpose of these rows @ gradient."""
    out[:] = 0
    for i in range(nodes.size):
        row = gradient[i]
        for k in range(indptr[nodes[i]], indptr[nodes[i] + 1]):
            value, total = np.float32(data[k]), out[indices[k]]
            for c in range(row.size):
                total[c] += value * row[c]
