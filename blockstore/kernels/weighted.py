"""Weighted sampling without replacement (their layout: FORMAT.md, "Graph blocks").

Of a column's edges those with the `fanout` least keys -log(u) / weight are picked, u drawn by (key,
node, position): edges of weight 0 never.  Source: Efraimidis and Spirakis, IPL 97(5), 2006.  Picks
stand in the order of their positions.  Arguments as in `kernels.sample`, and

arena_f    float32 view of the arena
edge_ids   the arena viewed as edge ids; edge_bytes: of an edge id in a block, 0 where it has none
edge_draws where the picks' edge ids go, at edge_starts; of size 0 where they are not asked for
"""

import math

import numpy as np
from numba import njit

from blockstore.kernels.jit import leaf
from blockstore.kernels.random import draw_hash, node_key

_HEADER_WORDS = 16
_LAST_DEGREE, _NUM_EDGES, _EDGES_START = 4, 7, 9  # header fields, in words of four bytes


@leaf
def weight_key(nkey, position, weight):
    """-log(u) / weight, u uniform in (0, 1); infinite for weight 0."""
    if not weight > 0:
        return np.inf
    u = (np.float64(draw_hash(nkey, np.uint64(position)) >> np.uint64(11)) + 0.5) * 2.0**-53
    return -math.log(u) / np.float64(weight)


@leaf
def _before(keys, places, a, b):
    """Whether pick a of a heap is worse than pick b: it leaves first."""
    return keys[a] > keys[b] or (keys[a] == keys[b] and places[a] > places[b])


@leaf
def push(keys, places, count, most, key, place):
    """Keep the `most` least (key, place) in a heap whose worst one is first; returns the count."""
    if key == np.inf:
        return count
    if count < most:
        i = count
        keys[i], places[i] = key, place
        while i > 0 and _before(keys, places, i, (i - 1) // 2):
            up = (i - 1) // 2
            keys[i], keys[up] = keys[up], keys[i]
            places[i], places[up] = places[up], places[i]
            i = up
        return count + 1
    if key > keys[0] or (key == keys[0] and place > places[0]):
        return count
    keys[0], places[0] = key, place
    i = np.int64(0)
    while 2 * i + 1 < count:
        child = 2 * i + 1
        if child + 1 < count and _before(keys, places, child + 1, child):
            child += 1
        if not _before(keys, places, child, i):
            break
        keys[i], keys[child] = keys[child], keys[i]
        places[i], places[child] = places[child], places[i]
        i = child
    return count


@leaf
def _sections(arena32, slot, slot_bytes, id_bytes, edge_bytes):
    """Indices, in their views, of the block's first source, edge id and weight."""
    base = slot * (slot_bytes // 4)
    start = np.int64(arena32[base + _EDGES_START])
    edges = np.int64(arena32[base + _NUM_EDGES])
    at = ((start + edges) * id_bytes + 7) // 8 * 8
    edge_at = np.int64(0)
    if edge_bytes:
        edge_at = (slot * slot_bytes + at) // edge_bytes
        at = (at + edges * edge_bytes + 7) // 8 * 8
    return slot * (slot_bytes // id_bytes) + start, edge_at, (slot * slot_bytes + at) // 4


@njit(nogil=True, cache=True)
def sample_weighted(
    arena32, ids, edge_ids, arena_f, nodes, order, low, high, blocks, first_node, slot_of_block,
    slot_bytes, id_bytes, edge_bytes, capacity, fanout, key, starts, draws, edge_starts, edge_draws,
    first_item, counts, giants, giant_degrees, num_giants,
):  # fmt: skip
    """draws[starts[i] : + counts[i]] = sampled sources of entry i; fanout 0 or more.

    counts   uint32   out: min(edges of a weight above 0, fanout)
    giants   as in `sample_columns`: nothing is drawn of them yet

    Returns the number of giants so far, int64.  Time O(degree log fanout).
    """
    keys, places = np.empty(max(1, fanout)), np.empty(max(1, fanout), np.int64)
    for j in range(low, high):
        i = np.int64(order[j]) if order.size else j
        counts[i] = 0
        if blocks[i] < 0:
            continue
        slot = np.int64(slot_of_block[blocks[i]])
        base = slot * (slot_bytes // 4)
        offset = base + _HEADER_WORDS + np.int64(nodes[i]) - np.int64(first_node[blocks[i]])
        begin = np.int64(arena32[offset])
        degree = np.int64(arena32[offset + 1]) - begin
        if degree == capacity:  # alone in its block: it may go on in the next
            last = np.int64(arena32[base + _LAST_DEGREE])
            degree = max(degree, last + (np.int64(arena32[base + _LAST_DEGREE + 1]) << 32))
        if degree > capacity:
            giants[num_giants], giant_degrees[num_giants] = i, degree
            num_giants += 1
            continue
        first, edge_at, weight_at = _sections(arena32, slot, slot_bytes, id_bytes, edge_bytes)
        skip = begin - np.int64(arena32[base + _EDGES_START])
        nkey, found = node_key(key, nodes[i]), np.int64(0)
        for k in range(degree):
            mark = weight_key(nkey, k, arena_f[weight_at + skip + k])
            found = push(keys, places, found, fanout, mark, k)
        places[:found].sort()
        counts[i] = found
        for k in range(found):
            draws[starts[i] + k] = ids[first + skip + places[k]]
            if first_item.size:
                edge_draws[edge_starts[i] + k] = first_item[blocks[i]] + skip + places[k]
            elif edge_draws.size:
                edge_draws[edge_starts[i] + k] = edge_ids[edge_at + skip + places[k]]
    return num_giants


@leaf
def mark_whole_giants(giants, giant_degrees, num_giants, blocks, capacity, marks):
    """marks[b] = 1 (uint8) for each block of a giant."""
    for g in range(num_giants):
        for b in range((giant_degrees[g] + capacity - 1) // capacity):
            marks[blocks[np.int64(giants[g])] + b] = 1


@leaf
def weigh_giants(
    arena32, arena_f, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block, slot_bytes,
    id_bytes, edge_bytes, capacity, fanout, key, keys, places, found,
):  # fmt: skip
    """Take the giants' edges in blocks that are present into their heaps; each block comes once.

    keys     float64 (giants, fanout)   heaps, with
    places   int64 (giants, fanout)     positions
    found    int64 (giants,)            entries of each heap
    """
    for g in range(num_giants):
        i, degree = np.int64(giants[g]), giant_degrees[g]
        nkey = node_key(key, nodes[i])
        for part in range((degree + capacity - 1) // capacity):
            slot = np.int64(slot_of_block[np.int64(blocks[i]) + part])
            if slot < 0:
                continue
            _, _, weight_at = _sections(arena32, slot, slot_bytes, id_bytes, edge_bytes)
            low = part * capacity
            for p in range(low, min(degree, low + capacity)):
                mark = weight_key(nkey, p, arena_f[weight_at + p - low])
                found[g] = push(keys[g], places[g], found[g], fanout, mark, p)


@leaf
def mark_picked_giants(giants, num_giants, blocks, capacity, places, found, marks):
    """marks[b] = 1 (uint8) for each block that a giant's picks, now known, lie in."""
    for g in range(num_giants):
        for k in range(found[g]):
            marks[np.int64(blocks[np.int64(giants[g])]) + places[g, k] // capacity] = 1


@leaf
def fetch_giants(
    arena32, ids, edge_ids, giants, num_giants, blocks, slot_of_block, slot_bytes, id_bytes,
    edge_bytes, capacity, places, found, starts, draws, edge_starts, edge_draws, first_item, counts,
):  # fmt: skip
    """Sources and edge ids of the giants' picks, ascending, that lie in blocks present now."""
    for g in range(num_giants):
        i = np.int64(giants[g])
        counts[i] = found[g]
        for k in range(found[g]):
            slot = np.int64(slot_of_block[np.int64(blocks[i]) + places[g, k] // capacity])
            if slot < 0:
                continue
            first, edge_at, _ = _sections(arena32, slot, slot_bytes, id_bytes, edge_bytes)
            draws[starts[i] + k] = ids[first + places[g, k] % capacity]
            if first_item.size:
                edge_draws[edge_starts[i] + k] = first_item[blocks[i]] + places[g, k]
            elif edge_draws.size:
                edge_draws[edge_starts[i] + k] = edge_ids[edge_at + places[g, k] % capacity]
