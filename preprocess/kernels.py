"""Kernels of the pipeline: counting, bucketing, breadth-first levels, sparse to dense."""

import numpy as np
from numba import njit

UNSET = np.uint32(0xFFFFFFFF)


@njit(nogil=True, cache=True)
def first_outside(ids, limit):
    """Position of the first id outside [0, limit), int64, or -1."""
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= limit:
            return np.int64(i)
    return np.int64(-1)


@njit(nogil=True, cache=True)
def densify(indptr, columns, values, out):
    """Rows of a CSR matrix, dense: out (rows, width), indptr absolute."""
    out[:] = 0
    for row in range(out.shape[0]):
        for k in range(indptr[row] - indptr[0], indptr[row + 1] - indptr[0]):
            out[row, columns[k]] = values[k]


@njit(nogil=True, cache=True)
def count_targets(src, dst, undirected, keep_loops, counts):
    """counts[v] += edges into v (uint32); with `undirected` their reverses too, loops once."""
    for i in range(src.size):
        if src[i] == dst[i]:
            if keep_loops:
                counts[dst[i]] += 1
            continue
        counts[dst[i]] += 1
        if undirected:
            counts[src[i]] += 1


@njit(nogil=True, cache=True)
def _bucket(node, bounds):
    """The b with bounds[b] <= node < bounds[b + 1]."""
    low, high = 0, bounds.size - 2
    while low < high:
        middle = (low + high + 1) // 2
        if bounds[middle] <= node:
            low = middle
        else:
            high = middle - 1
    return low


@njit(nogil=True, cache=True)
def _emit(src, dst, edge_id, at, rank, out_dst, out_src, out_ids):
    out_dst[at] = rank[dst] if rank.size else dst
    out_src[at] = rank[src] if rank.size else src
    if out_ids.size:
        out_ids[at] = edge_id


@njit(nogil=True, cache=True)
def bucket_edges(
    src, dst, first_edge, num_edges, undirected, keep_loops, rank, bounds, starts, out_dst, out_src,
    out_ids,
):  # fmt: skip
    """Edges of a chunk, relabelled, grouped by the bucket of their target, in the source's order.

    first_edge  id of the chunk's first edge; an added reverse has num_edges more
    rank        uint32 or uint64 (num_nodes,) new ids, or empty: ids stay
    bounds      int64 (buckets + 1,)   first target of each bucket
    starts      int64 (buckets + 1,)   out: where each bucket's edges begin in the outputs
    out_ids     empty where edge ids are not kept
    """
    starts[:] = 0
    for i in range(src.size):
        if src[i] == dst[i] and not keep_loops:
            continue
        starts[_bucket(rank[dst[i]] if rank.size else dst[i], bounds) + 1] += 1
        if undirected and src[i] != dst[i]:
            starts[_bucket(rank[src[i]] if rank.size else src[i], bounds) + 1] += 1
    for b in range(bounds.size - 1):
        starts[b + 1] += starts[b]
    for i in range(src.size):
        if src[i] == dst[i] and not keep_loops:
            continue
        edge = first_edge + i
        b = _bucket(rank[dst[i]] if rank.size else dst[i], bounds)
        _emit(src[i], dst[i], edge, starts[b], rank, out_dst, out_src, out_ids)
        starts[b] += 1
        if undirected and src[i] != dst[i]:
            b = _bucket(rank[src[i]] if rank.size else src[i], bounds)
            _emit(dst[i], src[i], edge + num_edges, starts[b], rank, out_dst, out_src, out_ids)
            starts[b] += 1
    for b in range(bounds.size - 1, 0, -1):
        starts[b] = starts[b - 1]
    starts[0] = 0


@njit(nogil=True, cache=True)
def pack_keys(dst, src, first, keys):
    """keys[i] = (dst[i] - first) << 32 | src[i], uint64: sorts by target, then source."""
    for i in range(dst.size):
        keys[i] = (np.uint64(dst[i]) - np.uint64(first)) << np.uint64(32) | np.uint64(src[i])


@njit(nogil=True, cache=True)
def unpack_keys(keys, drop_equal, degrees, sources):
    """Sorted keys to columns; equal neighbors only once where asked.  Returns edges kept."""
    kept = np.int64(0)
    low = np.uint64(0xFFFFFFFF)
    for i in range(keys.size):
        if drop_equal and i > 0 and keys[i] == keys[i - 1]:
            continue
        degrees[np.int64(keys[i] >> np.uint64(32))] += 1
        sources[kept] = keys[i] & low
        kept += 1
    return kept


@njit(nogil=True, cache=True)
def expand_level(nodes, degrees, sources, low, high, rank, best, touched, num_touched):
    """One piece of a breadth-first level: sources of frontier columns that no level has reached.

    nodes    uint32: the columns whose sources are given, one after the other
    degrees  uint32 (num_nodes,)
    low, high  ranks of the frontier: other columns are passed over
    best     uint32 (num_nodes,)  in and out: least rank of a discoverer, UNSET where none
    touched  uint32               out, appended: nodes reached for the first time

    Returns the number touched so far.
    """
    at = np.int64(0)
    for i in range(nodes.size):
        v = nodes[i]
        degree = np.int64(degrees[v])
        if low <= rank[v] < high:
            for k in range(at, at + degree):
                u = sources[k]
                if rank[u] == UNSET:
                    if best[u] == UNSET:
                        touched[num_touched] = u
                        num_touched += 1
                    if rank[v] < best[u]:
                        best[u] = rank[v]
        at += degree
    return num_touched


@njit(nogil=True, cache=True)
def expand_frontier(frontier, starts, sources, degrees, rank, best, touched, num_touched):
    """As `expand_level`, with all columns in memory: column v begins at starts[v], int64."""
    for i in range(frontier.size):
        v = frontier[i]
        for k in range(starts[v], starts[v] + np.int64(degrees[v])):
            u = sources[k]
            if rank[u] == UNSET:
                if best[u] == UNSET:
                    touched[num_touched] = u
                    num_touched += 1
                if rank[v] < best[u]:
                    best[u] = rank[v]
    return num_touched


@njit(nogil=True, cache=True)
def take_roots(roots, at, wanted, rank, out):
    """The next `wanted` nodes of `roots` that have no rank; returns (new position, taken)."""
    taken = 0
    while at < roots.size and taken < wanted:
        if rank[roots[at]] == UNSET:
            out[taken] = roots[at]
            taken += 1
        at += 1
    return at, taken


@njit(nogil=True, cache=True)
def assign_ranks(nodes, first, rank):
    """rank[nodes[i]] = first + i."""
    for i in range(nodes.size):
        rank[nodes[i]] = first + i


@njit(nogil=True, cache=True)
def to_bfloat16(values, out):
    """float32, as its bits in uint32, to bfloat16 in uint16: nearest, ties to even; NaN stays."""
    for i in range(values.size):
        bits = values[i]
        if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            out[i] = np.uint16((bits >> np.uint32(16)) | np.uint32(64))
        else:
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            out[i] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
