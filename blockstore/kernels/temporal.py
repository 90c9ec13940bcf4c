"""Sampling of edges up to a time, in trees: each seed has nodes of its own.

Of a column's edges that are no later than its seed's limit, `fanout` are picked: at random, those
with the least hashes of (key, seed, node, position); or the last ones, of equal ones those that
stand last.  Picks stand in the order of their positions.  Arguments as in `kernels.sample` and
`kernels.weighted`, and

times      int64 view of the arena       weight_bytes  of an edge, 0 where blocks hold no weights
trees      uint32: tree of each column   limits        int64: latest time of each tree
roots      uint64: number of each tree   last          whether the last ones are picked
"""

import numpy as np

from blockstore.kernels.columns import EDGES_START, column_degree, column_word, sections
from blockstore.kernels.heap import push
from blockstore.kernels.jit import leaf, njit
from blockstore.kernels.random import draw_hash, mix, node_key

NODE_BITS = 40  # of a key (tree, node): nodes below 2**40, trees below 2**24 - 1
_EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)


@leaf
def tree_key(key, root, node):
    """Key of the draws of a node in the tree of that number."""
    return node_key(key ^ mix(root), node)


@leaf
def _rank(nkey, position, time, last):
    """What picks are ordered by, int64: the least are taken."""
    if last:
        return ~time
    return np.int64(draw_hash(nkey, np.uint64(position)) >> np.uint64(1))


@njit(nogil=True, cache=True)
def sample_until(
    arena32, ids, edge_ids, times, nodes, trees, limits, roots, order, low, high, blocks,
    first_node, slot_of_block, slot_bytes, id_bytes, edge_bytes, weight_bytes, capacity, fanout,
    last, key, starts, draws, edge_starts, edge_draws, first_item, counts, giants, giant_degrees,
    num_giants,
):  # fmt: skip
    """draws[starts[i] : + counts[i]] = sampled sources of entry i; fanout 0 or more.

    counts   uint32   out: min(edges no later than the limit, fanout)
    giants   as in `sample_columns`: nothing is drawn of them yet

    Returns the number of giants so far, int64.  Time O(degree log fanout).
    """
    keys, places = np.empty(max(1, fanout), np.int64), np.empty(max(1, fanout), np.int64)
    for j in range(low, high):
        i = np.int64(order[j]) if order.size else j
        counts[i] = 0
        if blocks[i] < 0 or fanout == 0:
            continue
        slot = np.int64(slot_of_block[blocks[i]])
        base = slot * (slot_bytes // 4)
        word = column_word(nodes[i], blocks[i], first_node, slot_of_block, slot_bytes)
        degree = column_degree(arena32, word, base, capacity)
        if degree > capacity:
            giants[num_giants], giant_degrees[num_giants] = i, degree
            num_giants += 1
            continue
        first, edge_at, _, time_at = sections(
            arena32, slot, slot_bytes, id_bytes, edge_bytes, weight_bytes
        )
        skip = np.int64(arena32[word]) - np.int64(arena32[base + EDGES_START])
        limit, nkey = limits[trees[i]], tree_key(key, roots[trees[i]], nodes[i])
        found = np.int64(0)
        for k in range(degree):
            time = times[time_at + skip + k]
            if time <= limit:
                rank = _rank(nkey, k, time, last)
                found = push(keys, places, found, fanout, rank, k, True)
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
def rank_giants(
    arena32, times, giants, giant_degrees, num_giants, nodes, trees, limits, roots, blocks,
    slot_of_block, slot_bytes, id_bytes, edge_bytes, weight_bytes, capacity, fanout, last, key,
    keys, places, found,
):  # fmt: skip
    """Take the giants' edges in blocks that are present into their heaps; each block comes once.

    keys     int64 (giants, fanout)     heaps, with
    places   int64 (giants, fanout)     positions
    found    int64 (giants,)            entries of each heap
    """
    for g in range(num_giants):
        i, degree = np.int64(giants[g]), giant_degrees[g]
        limit, nkey = limits[trees[i]], tree_key(key, roots[trees[i]], nodes[i])
        for part in range((degree + capacity - 1) // capacity):
            slot = np.int64(slot_of_block[np.int64(blocks[i]) + part])
            if slot < 0:
                continue
            _, _, _, time_at = sections(
                arena32, slot, slot_bytes, id_bytes, edge_bytes, weight_bytes
            )
            low = part * capacity
            for p in range(low, min(degree, low + capacity)):
                time = times[time_at + p - low]
                if time <= limit:
                    rank = _rank(nkey, p, time, last)
                    found[g] = push(keys[g], places[g], found[g], fanout, rank, p, True)


@leaf
def find_times(
    arena32, times, entries, num, places, blocks, first_edge, slot_of_block, slot_bytes, id_bytes,
    edge_bytes, weight_bytes, out,
):  # fmt: skip
    """Times of edges by their place in the order of the blocks: as `links.find_ends`."""
    for j in range(num):
        i = np.int64(entries[j])
        slot = np.int64(slot_of_block[np.int64(blocks[i])])
        _, _, _, time_at = sections(arena32, slot, slot_bytes, id_bytes, edge_bytes, weight_bytes)
        out[i] = times[time_at + places[i] - np.int64(first_edge[blocks[i]])]


@leaf
def _find(wanted, keys, mask):
    """Slot of a key, or the empty slot where it would go."""
    slot = np.int64(mix(wanted) & np.uint64(mask))
    while keys[slot] != _EMPTY and keys[slot] != wanted:
        slot = (slot + 1) & mask
    return slot


@leaf
def _pair(tree, node):
    """Key of a node in a tree."""
    return (np.uint64(tree) << np.uint64(NODE_BITS)) | np.uint64(node)


@leaf
def enter_trees(n_id, trees, num, keys, values, mask):
    """The first `num` nodes get their places.

    trees   uint32 (>= num,)       tree of each node
    keys    uint64 (mask + 1,)     all ones between batches; at most half of them are used
    values  uint32 (mask + 1,)     local ids
    """
    for i in range(num):
        slot = _find(_pair(trees[i], n_id[i]), keys, mask)
        if keys[slot] == _EMPTY:
            keys[slot] = _pair(trees[i], n_id[i])
            values[slot] = i


@leaf
def renumber_trees(
    draws, starts, counts, num, frontier, keys, values, mask, n_id, trees, num_nodes, local, edge
):
    """As `renumber_hash`, a node being another one in each tree.

    frontier   uint32 (num,)    tree of each column: its draws belong to that
    trees      uint32           in and out, beside n_id
    """
    for i in range(num):
        if edge + np.int64(counts[i]) > local.size:
            return ~np.int64(num_nodes), edge
        for k in range(starts[i], starts[i] + np.int64(counts[i])):
            wanted = _pair(frontier[i], draws[k])
            slot = _find(wanted, keys, mask)
            if keys[slot] == _EMPTY:
                if num_nodes == n_id.size:
                    return ~np.int64(num_nodes), edge
                keys[slot] = wanted
                values[slot] = num_nodes
                n_id[num_nodes] = draws[k]
                trees[num_nodes] = frontier[i]
                num_nodes += 1
            local[edge] = values[slot]
            edge += 1
    return np.int64(num_nodes), edge


@leaf
def clear_trees(n_id, trees, num_nodes, keys, values, mask):
    """All empty again, by going through the nodes backwards: each is the last of its chain."""
    for i in range(num_nodes - 1, -1, -1):
        keys[_find(_pair(trees[i], n_id[i]), keys, mask)] = _EMPTY
