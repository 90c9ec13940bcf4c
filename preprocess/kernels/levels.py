"""Breadth-first levels over columns, in memory or streamed, and the resulting order.

The state of a node is its entry in `rank`, uint32: its place, if it has one; FOUND | place of its
earliest discoverer so far, while a level is read; UNSET, if no level has reached it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import njit

UNSET = np.uint32(0xFFFFFFFF)
FOUND = np.uint32(0x80000000)
_PLACE = np.uint32(0x7FFFFFFF)
AHEAD = 32  # nodes between prefetching a table's entry and using it
STRIDE = 64  # columns between two entries of `starts`


class HeldColumns(NamedTuple):
    """Columns of a graph in memory."""

    starts: NDArray[np.int64]  # first edge of every STRIDE-th column
    degrees: NDArray[np.uint32]
    sources: NDArray[Any]
    edge_ids: NDArray[Any]  # uint32 or uint64, parallel to `sources`, or empty


class WordBits(NamedTuple):
    """Bits of the parts of an edge in a word."""

    source: int
    edge: int
    column: int  # of a column's number in its group


@njit(nogil=True, cache=True, inline="always")
def column_start(starts, degrees, node):
    """First edge of a column."""
    stride = node // STRIDE
    at = starts[stride]
    for v in range(stride * STRIDE, node):
        at += np.int64(degrees[v])
    return at


@njit(nogil=True, cache=True)
def merge_ranges(nodes, starts, degrees, gap, out):
    """Merge columns less than `gap` edges apart into runs to read at once.

    nodes   uint32 (nodes,)      ascending
    out     int64 (>= nodes, 3)  out: first column, first edge, and number of edges of each run

    Returns the number of runs.
    """
    runs = 0
    for i in range(nodes.size):
        node = np.int64(nodes[i])
        count = np.int64(degrees[node])
        if count == 0:
            continue
        first = column_start(starts, degrees, node)
        if runs and first - (out[runs - 1, 1] + out[runs - 1, 2]) < gap:
            out[runs - 1, 2] = first + count - out[runs - 1, 1]
        else:
            out[runs, 0], out[runs, 1], out[runs, 2] = node, first, count
            runs += 1
    return runs


@njit(nogil=True, cache=True)
def place_discovered(low, high, starts, degrees, sources, rank, order, placed):
    """One level with all columns in memory: new nodes get places as they are discovered.

    low, high   places of the frontier
    sources     uint32 (num_edges,)   ascending in each column, so that ids break ties
    order       uint32 (num_nodes,)   in and out: node of each place
    placed      int64                 number of places assigned before

    Returns the number of places assigned after this level.
    """
    for i in range(low, high):
        node = np.int64(order[i])
        at = column_start(starts, degrees, node)
        for k in range(at, at + np.int64(degrees[node])):
            u = sources[k]
            if rank[u] == UNSET:
                rank[u] = placed
                order[placed] = u
                placed += 1
    return placed


@njit(nogil=True, cache=True)
def mark_discovered(node, skip, degrees, sources, low, high, rank, touched, num_touched):
    """Process a piece of a level: mark the nodes it discovers with their earliest discoverer.

    node, skip  column of the first edge here, and the number of its edges in earlier pieces
    sources     uint32 (edges,)   of this column and the following ones
    low, high   places of the frontier; other columns are skipped
    touched     uint32            out: newly discovered nodes, appended while there is room

    Returns (node, skip, num_touched) for the next piece; num_touched includes those without room.
    """
    at = np.int64(0)
    while at < sources.size:
        degree = np.int64(degrees[node])
        here = min(degree - skip, sources.size - at)
        place = rank[node]
        if low <= place < high:
            mine = FOUND | place
            for k in range(at, at + here):
                if k + AHEAD < sources.size:
                    prefetch(rank, np.int64(sources[k + AHEAD]))
                u = sources[k]
                found = rank[u]
                if found > mine:
                    if found == UNSET:
                        if num_touched < touched.size:
                            touched[num_touched] = u
                        num_touched += 1
                    rank[u] = mine
        at += here
        skip += here
        if skip == degree:
            node += 1
            skip = np.int64(0)
    return node, skip, num_touched


@njit(nogil=True, cache=True)
def place_found(rank, low, offsets, order, placed):
    """Place the nodes that a level has marked, by (discoverer, id), after those with places.

    offsets   uint32 (frontier + 1,)   zeros; scratch
    """
    for u in range(rank.size):
        if rank[u] >= FOUND and rank[u] != UNSET:
            offsets[np.int64(rank[u] & _PLACE) - low + 1] += np.uint32(1)
    for i in range(offsets.size - 1):
        offsets[i + 1] += offsets[i]
    for u in range(rank.size):
        if rank[u] >= FOUND and rank[u] != UNSET:
            i = np.int64(rank[u] & _PLACE) - low
            order[placed + np.int64(offsets[i])] = u
            offsets[i] += np.uint32(1)


@njit(nogil=True, cache=True)
def assign_places(order, low, high, rank):
    """rank[order[i]] = i for low <= i < high."""
    for i in range(low, high):
        rank[order[i]] = i


@njit(nogil=True, cache=True)
def degree_keys(degrees, minimum, keys):
    """Keys to sort nodes of at least `minimum` edges by descending degree, id; returns how many."""
    count = 0
    for v in range(degrees.size):
        if degrees[v] >= minimum:
            keys[count] = np.uint64(UNSET - degrees[v]) << np.uint64(32) | np.uint64(v)
            count += 1
    return count


@njit(nogil=True, cache=True)
def take_roots(roots, at, wanted, rank, order, placed):
    """Place the next `wanted` roots without a place; returns (new `at`, new `placed`)."""
    end = placed + wanted
    while at < roots.size and placed < end:
        if rank[roots[at]] == UNSET:
            order[placed] = roots[at]
            rank[roots[at]] = placed
            placed += 1
        at += 1
    return at, placed


@njit(nogil=True, cache=True)
def place_rest(degrees, rank, order, placed):
    """Place the remaining nodes by id: first those with an edge, then isolated ones."""
    for isolated in (False, True):
        for v in range(rank.size):
            if rank[v] >= FOUND and (degrees[v] == 0 and rank[v] == UNSET) == isolated:
                rank[v] = placed
                order[placed] = v
                placed += 1
    return placed


@njit(nogil=True, cache=True)
def degree_classes(degrees):
    """degrees[v] = class of the degree: 32 for 0, 31 for 1, 30 for 2 and 3, 29 for 4 to 7, ..."""
    for v in range(degrees.size):
        left, number = np.int64(degrees[v]), 32
        while left:
            left >>= 1
            number -= 1
        degrees[v] = number


@njit(nogil=True, cache=True)
def gather_columns(order, columns, rank, bits, out, values):
    """Gather the columns of some nodes, in this order, in groups, with their sources renamed.

    order      uint32
    columns    HeldColumns
    bits       WordBits
    out        int64 (groups + 1,)  out: first edge of each group of 2**bits.column columns
    values     uint64               out: (column in its group, source, edge id), not sorted
    """
    starts, degrees, sources = columns.starts, columns.degrees, columns.sources
    edge_ids, id_shift = columns.edge_ids, np.uint64(bits.edge)
    to_column = np.uint64(min(63, bits.source + bits.edge))  # would be 64 if a group is one column
    count = np.int64(0)
    for i in range(order.size):
        column = i & ((1 << bits.column) - 1)
        if column == 0:
            out[i >> bits.column] = count
        word = np.uint64(column) << to_column
        node = np.int64(order[i])
        at = column_start(starts, degrees, node)
        for k in range(at, at + np.int64(degrees[node])):
            value = word | np.uint64(rank[sources[k]]) << id_shift
            values[count] = value | np.uint64(edge_ids[k]) if edge_ids.size else value
            count += 1
    out[out.size - 1] = count


@njit(nogil=True, cache=True)
def rename_columns(node, skip, degrees, sources, rank, base, dst, src):
    """Edges of columns, from edge `skip` of column `node` on, both ends renamed.

    sources   uint32 (edges,)
    rank      uint32 (num_nodes,)   new id of each node
    base      int64                 new id of the first column, subtracted from targets
    dst, src  int64 (edges,)        out

    Returns (node, skip) for the next edges.
    """
    at = np.int64(0)
    while at < sources.size:
        here = min(np.int64(degrees[node]) - skip, sources.size - at)
        target = np.int64(rank[node]) - base
        for k in range(at, at + here):
            if k + AHEAD < sources.size:
                prefetch(rank, np.int64(sources[k + AHEAD]))
            dst[k] = target
            src[k] = rank[sources[k]]
        at += here
        skip += here
        if skip == np.int64(degrees[node]):
            node += 1
            skip = np.int64(0)
    return node, skip


@njit(nogil=True, cache=True)
def advance_columns(node, skip, degrees, count):
    """Advance (node, skip) by `count` edges, as `rename_columns` does.

    degrees   uint32 (num_nodes,)
    """
    left = np.int64(count)
    while left and left >= np.int64(degrees[node]) - skip:
        left -= np.int64(degrees[node]) - skip
        node += 1
        skip = np.int64(0)
    return node, skip + left


@njit(nogil=True, cache=True)
def count_groups(bounds, partition, num_partitions, starts):
    """First place of each group of nodes, by type, then by partition.

    bounds     int64 (types + 1,)     first node of each type
    partition  uint32 (num_nodes,)    or empty: a single partition
    starts     int64 (groups + 1,)    out
    """
    starts[:] = 0
    for t in range(bounds.size - 1):
        for v in range(bounds[t], bounds[t + 1]):
            part = np.int64(partition[v]) if partition.size else np.int64(0)
            starts[t * num_partitions + part + 1] += 1
    for g in range(starts.size - 1):
        starts[g + 1] += starts[g]


@njit(nogil=True, cache=True)
def split_order(order, bounds, partition, num_partitions, cursors, out):
    """Group the nodes of an order; inside a group they keep the order.

    order    uint32 (num_nodes,)   or empty: nodes by id
    cursors  int64 (groups,)       starts of the groups; scratch
    out      uint32 (num_nodes,)   out
    """
    for place in range(out.size):
        v = np.int64(order[place]) if order.size else np.int64(place)
        t = 0
        while bounds[t + 1] <= v:
            t += 1
        part = np.int64(partition[v]) if partition.size else np.int64(0)
        g = t * num_partitions + part
        out[cursors[g]] = v
        cursors[g] += 1


@njit(nogil=True, cache=True)
def take_counts(counts, order, first, out):
    """out[i] = counts[order[i] - first]."""
    for i in range(order.size):
        if i + AHEAD < order.size:
            prefetch(counts, np.int64(order[i + AHEAD]) - first)
        out[i] = counts[np.int64(order[i]) - first]
