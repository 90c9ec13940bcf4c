"""Store ids to local ids, in order of first occurrence: by a table of all nodes, or by hashing."""

import numpy as np
from numba import njit

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.random import mix

_AHEAD = 16


@njit(nogil=True, cache=True)
def enter_seeds_stamp(n_id, num, stamp):
    """The seeds n_id[:num] get their places; of equal ones the first counts.

    stamp   int32 (num store ids,)   all -1 between batches; else the local id
    """
    for i in range(num):
        if stamp[n_id[i]] < 0:
            stamp[n_id[i]] = i


@njit(nogil=True, cache=True)
def renumber_stamp(draws, starts, counts, num, stamp, n_id, num_nodes, local, edge):
    """Local ids of a hop's sources; new ones are appended to n_id.

    draws   id_dtype               column i holds counts[i] ids from starts[i] on
    stamp   int32                  see `enter_seeds_stamp`
    n_id    id_dtype               num_nodes of it are in use
    local   uint32                 out, compact, from position `edge` on

    Returns (num_nodes, edge) after the hop.
    """
    size = draws.size
    for i in range(num):
        start = starts[i]
        if start + _AHEAD < size:  # may lie in the next columns: harmless
            for k in range(counts[i]):
                if start + k + _AHEAD < size:
                    ahead = np.int64(draws[start + k + _AHEAD])
                    if ahead < stamp.size:
                        prefetch(stamp, ahead)
        for k in range(counts[i]):
            node = draws[start + k]
            place = stamp[node]
            if place < 0:
                place = np.int32(num_nodes)
                stamp[node] = place
                n_id[num_nodes] = node
                num_nodes += 1
            local[edge] = place
            edge += 1
    return num_nodes, edge


@njit(nogil=True, cache=True)
def clear_stamp(n_id, num_nodes, stamp):
    """All -1 again."""
    for i in range(num_nodes):
        stamp[n_id[i]] = -1


@njit(nogil=True, cache=True, inline="always")
def _empty(keys):
    """The key of an empty slot: all ones of the width of the keys."""
    return np.uint64(0xFFFFFFFF) if keys.itemsize == 4 else np.uint64(0xFFFFFFFFFFFFFFFF)


@njit(nogil=True, cache=True, inline="always")
def _find(node, keys, mask, empty):
    """Slot of `node`, or the empty slot where it would go."""
    slot = np.int64(mix(node) & np.uint64(mask))
    while np.uint64(keys[slot]) != empty and np.uint64(keys[slot]) != node:
        slot = (slot + 1) & mask
    return slot


@njit(nogil=True, cache=True)
def enter_seeds_hash(n_id, num, keys, values, mask):
    """As `enter_seeds_stamp`, into a table of mask + 1 slots, at most half of them used.

    keys    id_dtype (mask + 1,)   all ones between batches
    values  uint32 (mask + 1,)     local ids
    """
    empty = _empty(keys)
    for i in range(num):
        slot = _find(np.uint64(n_id[i]), keys, mask, empty)
        if np.uint64(keys[slot]) == empty:
            keys[slot] = n_id[i]
            values[slot] = i


@njit(nogil=True, cache=True)
def renumber_hash(draws, starts, counts, num, keys, values, mask, n_id, num_nodes, local, edge):
    """As `renumber_stamp`, through a hash table."""
    empty = _empty(keys)
    size = draws.size
    for i in range(num):
        start = starts[i]
        for k in range(counts[i]):
            if start + k + _AHEAD < size:
                ahead = mix(np.uint64(draws[start + k + _AHEAD])) & np.uint64(mask)
                prefetch(keys, np.int64(ahead))
            node = draws[start + k]
            slot = _find(np.uint64(node), keys, mask, empty)
            if np.uint64(keys[slot]) == empty:
                keys[slot] = node
                values[slot] = num_nodes
                n_id[num_nodes] = node
                num_nodes += 1
            local[edge] = values[slot]
            edge += 1
    return num_nodes, edge


@njit(nogil=True, cache=True)
def clear_hash(n_id, num_nodes, keys, values, mask):
    """All empty again, by going through the nodes backwards: each is the last of its chain."""
    empty = _empty(keys)
    for i in range(num_nodes - 1, -1, -1):
        slot = _find(np.uint64(n_id[i]), keys, mask, empty)
        if values[slot] == i:  # not the second place of a seed that is given twice
            keys[slot] = empty
