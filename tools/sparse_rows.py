"""Kernels for training on one thread: rows of a sparse matrix, and means over edges; float32."""

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


@njit(nogil=True, cache=True, fastmath=True)
def edge_means(src, dst, rows, out):
    """out[v] = mean of rows[u] over edges (u, v), 0 where there are none; dst ascends."""
    out[:] = 0
    first = 0
    while first < dst.size:
        stop, total = first, out[dst[first]]
        while stop < dst.size and dst[stop] == dst[first]:
            row = rows[src[stop]]
            for c in range(row.size):
                total[c] += row[c]
            stop += 1
        share = np.float32(1.0 / (stop - first))
        for c in range(total.size):
            total[c] *= share
        first = stop


@njit(nogil=True, cache=True, fastmath=True)
def edge_means_gradient(src, dst, gradient, out):
    """out[u] = sum of gradient[v] / in-degree of v over edges (u, v)."""
    out[:] = 0
    first = 0
    while first < dst.size:
        stop = first
        while stop < dst.size and dst[stop] == dst[first]:
            stop += 1
        share, row = np.float32(1.0 / (stop - first)), gradient[dst[first]]
        for e in range(first, stop):
            total = out[src[e]]
            for c in range(row.size):
                total[c] += share * row[c]
        first = stop
