"""Sort edges in any order into columns: checks, counts, buckets, and sorting inside a bucket."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import njit

AHEAD = 32  # edges between prefetching a table's entry and using it
NO_RANKS = np.empty(0, np.uint32)


class Ends(NamedTuple):
    """How the ends of a relation's edges are renamed, and loops and reverses are treated."""

    undirected: bool = False  # whether reverses are added; both ends have the same type then
    keep_loops: bool = True
    src_rank: NDArray[Any] = NO_RANKS  # uint32 or uint64: new id of each node of the type
    dst_rank: NDArray[Any] = NO_RANKS  # likewise
    src_first: int = 0  # without ranks: added to ids
    dst_first: int = 0
    base: int = 0  # new id of the first column, from which columns are counted


class Records(NamedTuple):
    """Edges as they will be stored, int64 each; valid until the next step."""

    dst: NDArray[np.int64]
    src: NDArray[np.int64]
    edge_ids: NDArray[np.int64]  # empty if they are not kept


class Cuts(NamedTuple):
    """Lookup of a target's bucket, which is guide[target >> shift] or a later one."""

    bounds: NDArray[np.int64]  # (buckets + 1,) first target of each bucket
    guide: NDArray[np.uint32]
    shift: int


@njit(nogil=True, cache=True)
def first_outside(ids, limit):
    """Position of the first id outside [0, limit), int64, or -1; ids any integers."""
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= limit:
            return np.int64(i)
    return np.int64(-1)


@njit(nogil=True, cache=True)
def count_ids(ids, first, counts):
    """counts[id - first] += 1; uint32 or uint64 ids, uint32 counts."""
    for i in range(ids.size):
        counts[np.int64(ids[i]) - first] += np.uint32(1)


@njit(nogil=True, cache=True)
def mark_nodes(ids, marks):
    """marks[v] = 1 for every id; marks uint8 (num_nodes,)."""
    for i in range(ids.size):
        if i + AHEAD < ids.size:
            prefetch(marks, np.int64(ids[i + AHEAD]))
        marks[ids[i]] = 1


@njit(nogil=True, cache=True)
def count_targets(src, dst, undirected, keep_loops, counts):
    """counts[v] += edges into v, uint32; if `undirected` also reverses, with loops once."""
    for i in range(src.size):
        if i + AHEAD < src.size:
            prefetch(counts, np.int64(dst[i + AHEAD]))
        if src[i] == dst[i]:
            if keep_loops:
                counts[dst[i]] += np.uint32(1)
            continue
        counts[dst[i]] += np.uint32(1)
        if undirected:
            counts[src[i]] += np.uint32(1)


@njit(nogil=True, cache=True)
def expand_edges(src, dst, first_edge, num_edges, ends, out):
    """Edges of a chunk as they will be stored: loops dropped, reverses added, ends renamed.

    src, dst     integers (chunk,)           ids in the source, in range
    first_edge   int64                       id of the chunk's first edge
    num_edges    int64                       added to the id of an edge to get that of its reverse
    ends         Ends                        `undirected` and loops apply to ends of one type only
    out          Records                     out; twice the chunk if undirected; ids may be empty

    Returns the number of records.
    """
    count = 0
    src_rank, dst_rank = ends.src_rank, ends.dst_rank
    out_dst, out_src, out_ids = out.dst, out.src, out.edge_ids
    ranked, with_ids = dst_rank.size > 0, out_ids.size > 0
    for i in range(src.size):
        if ranked and i + AHEAD < src.size:
            prefetch(src_rank, np.int64(src[i + AHEAD]))
            prefetch(dst_rank, np.int64(dst[i + AHEAD]))
        u, v = np.int64(src[i]), np.int64(dst[i])
        loop = u == v
        if loop and not ends.keep_loops:
            continue
        if ranked:
            u, v = np.int64(src_rank[u]), np.int64(dst_rank[v])
        else:
            u, v = u + ends.src_first, v + ends.dst_first
        out_dst[count], out_src[count] = v - ends.base, u
        if with_ids:
            out_ids[count] = first_edge + i
        count += 1
        if ends.undirected and not loop:
            out_dst[count], out_src[count] = u - ends.base, v
            if with_ids:
                out_ids[count] = first_edge + i + num_edges
            count += 1
    return count


@njit(nogil=True, cache=True)
def group_edges(records, count, cuts, src_bits, bucket, starts, keys, out_ids):
    """Group edges by the bucket of their target, each as one key.

    records  Records               from `expand_edges`
    cuts     Cuts
    bucket   uint32 (>= count,)    scratch
    starts   int64 (buckets + 1,)  out: where each bucket's edges begin
    keys     uint64 (>= count,)    out: (target - its bucket's first) << src_bits | source
    out_ids  uint32 or uint64      out, in the same order; may be empty
    """
    dst, src, ids = records.dst, records.src, records.edge_ids
    bounds, guide = cuts.bounds, cuts.guide
    bits, with_ids = np.uint64(src_bits), out_ids.size > 0
    starts[:] = 0
    for i in range(count):
        b = guide[dst[i] >> cuts.shift]
        while bounds[b + 1] <= dst[i]:
            b += 1
        bucket[i] = b
        starts[b + 1] += 1
    for b in range(starts.size - 1):
        starts[b + 1] += starts[b]
    for i in range(count):
        at = starts[bucket[i]]
        starts[bucket[i]] = at + 1
        keys[at] = np.uint64(dst[i] - bounds[bucket[i]]) << bits | np.uint64(src[i])
        if with_ids:
            out_ids[at] = ids[i]
    for b in range(starts.size - 1, 0, -1):
        starts[b] = starts[b - 1]
    starts[0] = 0


@njit(nogil=True, cache=True)
def add_ids(keys, ids, id_bits):
    """keys[i] = keys[i] << id_bits | ids[i], in place: (column, source, edge id) in a word."""
    shift = np.uint64(id_bits)
    for i in range(keys.size):
        keys[i] = keys[i] << shift | np.uint64(ids[i])


@njit(nogil=True, cache=True)
def group_columns(keys, ids, src_bits, id_bits, column_bits, starts, values):
    """Group a bucket's edges by 2**column_bits columns, so that each edge fits in a word.

    keys    uint64 (edges,)        column << src_bits | source
    ids     uint32 or uint64       edge ids
    starts  int64 (groups + 1,)    out: first edge of each group
    values  uint64 (edges,)        out: (column in its group, source, edge id) in a word
    """
    to_group = np.uint64(src_bits) + np.uint64(column_bits)
    mask = (np.uint64(1) << to_group) - np.uint64(1)
    shift = np.uint64(id_bits)
    starts[:] = 0
    for i in range(keys.size):
        starts[np.int64(keys[i] >> to_group) + 1] += 1
    for g in range(starts.size - 1):
        starts[g + 1] += starts[g]
    for i in range(keys.size):
        group = np.int64(keys[i] >> to_group)
        values[starts[group]] = (keys[i] & mask) << shift | np.uint64(ids[i])
        starts[group] += 1
    for g in range(starts.size - 1, 0, -1):
        starts[g] = starts[g - 1]
    starts[0] = 0


@njit(nogil=True, cache=True)
def split_values(
    values, starts, src_bits, id_bits, column_bits, drop_equal, degrees, sources, edge_ids
):
    """Split sorted edges into degrees, sources and edge ids; if `drop_equal`, keep one of equals.

    values             uint64 (edges,)      (column in its group, source, edge id), sorted by group
    starts             int64 (groups + 1,)  first edge of each group of 2**column_bits columns
    degrees            int64 (columns,)     out
    sources, edge_ids  uint32 or uint64     out; edge_ids may be empty; of equals the first is kept

    Returns the number of edges kept.
    """
    id_shift = np.uint64(id_bits)
    to_column = np.uint64(min(63, src_bits + id_bits))  # would be 64 if a group is one column
    column_mask = (np.uint64(1) << np.uint64(column_bits)) - np.uint64(1)
    id_mask = (np.uint64(1) << id_shift) - np.uint64(1)
    src_mask = (np.uint64(1) << np.uint64(src_bits)) - np.uint64(1)
    kept = 0
    degrees[:] = 0
    for g in range(starts.size - 1):
        for i in range(starts[g], starts[g + 1]):
            edge = values[i] >> id_shift
            if drop_equal and i > starts[g] and values[i - 1] >> id_shift == edge:
                continue
            column = np.int64(values[i] >> to_column & column_mask)
            degrees[(g << column_bits) + column] += 1
            sources[kept] = edge & src_mask
            if edge_ids.size:
                edge_ids[kept] = values[i] & id_mask
            kept += 1
    return kept


def cut_ranges(
    counts: NDArray[np.uint32], edge_bytes: int, column_bytes: int, max_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide columns into ranges, as long as possible, of at most `max_bytes` each.

    counts   uint32 (columns,)   edges of each column

    Returns the first column of each range, then the end, (ranges + 1,); and the edges of each.
    """
    total = int(counts.sum(dtype=np.int64)) * edge_bytes + counts.size * column_bytes
    maximum = 2 * total // max_bytes + 2  # two adjacent ranges take more than `max_bytes`
    bounds, sizes = np.zeros(maximum + 1, np.int64), np.zeros(maximum, np.int64)
    ranges = _cut_ranges(counts, edge_bytes, column_bytes, max_bytes, bounds, sizes)
    return bounds[: ranges + 1], sizes[:ranges]


@njit(nogil=True, cache=True)
def _cut_ranges(counts, edge_bytes, column_bytes, max_bytes, bounds, sizes):
    """Returns the number of ranges; `bounds` and `sizes` must be zeros at first."""
    ranges, taken = 0, np.int64(0)
    for c in range(counts.size):
        count = np.int64(counts[c])
        more = count * edge_bytes + column_bytes
        if taken + more > max_bytes:
            ranges, taken = ranges + 1, np.int64(0)
            bounds[ranges] = c
        taken += more
        sizes[ranges] += count
    if counts.size:
        ranges += 1
        bounds[ranges] = counts.size
    return ranges
