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

from blockstore.kernels.columns import EDGES_START, column_degree, column_word, sections
from blockstore.kernels.heap import push
from blockstore.kernels.jit import leaf, njit
from blockstore.kernels.random import draw_hash, node_key

_WEIGHT_BYTES = 4


@leaf
def weight_key(nkey, position, weight):
    """-log(u) / weight, u uniform in (0, 1); infinite for weight 0."""
    if not weight > 0:
        return np.inf
    u = (np.float64(draw_hash(nkey, np.uint64(position)) >> np.uint64(11)) + 0.5) * 2.0**-53
    return -math.log(u) / np.float64(weight)


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
        word = column_word(nodes[i], blocks[i], first_node, slot_of_block, slot_bytes)
        degree = column_degree(arena32, word, base, capacity)
        if degree > capacity:
            giants[num_giants], giant_degrees[num_giants] = i, degree
            num_giants += 1
            continue
        first, edge_at, weight_at, _ = sections(
            arena32, slot, slot_bytes, id_bytes, edge_bytes, _WEIGHT_BYTES
        )
        skip = np.int64(arena32[word]) - np.int64(arena32[base + EDGES_START])
        nkey, found = node_key(key, nodes[i]), np.int64(0)
        for k in range(degree):
            mark = weight_key(nkey, k, arena_f[weight_at + skip + k])
            if mark < np.inf:
                found = push(keys, places, found, fanout, mark, k, False)
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
            _, _, weight_at, _ = sections(
                arena32, slot, slot_bytes, id_bytes, edge_bytes, _WEIGHT_BYTES
            )
            low = part * capacity
            for p in range(low, min(degree, low + capacity)):
                mark = weight_key(nkey, p, arena_f[weight_at + p - low])
                if mark < np.inf:
                    found[g] = push(keys[g], places[g], found[g], fanout, mark, p, False)


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
            first, edge_at, _, _ = sections(
                arena32, slot, slot_bytes, id_bytes, edge_bytes, _WEIGHT_BYTES
            )
            draws[starts[i] + k] = ids[first + places[g, k] % capacity]
            if first_item.size:
                edge_draws[edge_starts[i] + k] = first_item[blocks[i]] + places[g, k]
            elif edge_draws.size:
                edge_draws[edge_starts[i] + k] = edge_ids[edge_at + places[g, k] % capacity]
