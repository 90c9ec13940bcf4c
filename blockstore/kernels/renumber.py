"""Store ids to local ids, in order of first occurrence: by a table of all nodes, or by hashing."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import popcount, prefetch
from blockstore.kernels.jit import inner, leaf
from blockstore.kernels.random import mix

_COLUMNS = 8  # whose memory is asked for ahead, at most _DRAWS of each
_DRAWS = 64
_NODES = 32  # of n_id, likewise
NODE_BITS = 40  # of a key (tree, node): nodes below 2**40, trees below 2**24 - 1


class NodeTable(NamedTuple):
    """Local ids by node: of all nodes, or hashed.  Clean between batches.

    A hashed table has a power of two of slots, at most two thirds of them used; a node may then be
    a different one in each of several trees.
    """

    keys: (
        NDArray[Any] | None
    )  # id_dtype, or uint64 for (tree, node); clean: all ones.  None: of all
    values: NDArray[Any]  # uint32 local ids; of all nodes int32, clean: all -1


# `keys` of a table of all nodes, and `trees` if there are none, are None as a kernel is compiled.
@inner
def _key(node, trees, i):
    """Key of a node; with `trees`, that of the node in tree `trees[i]`."""
    if trees is None:
        return np.uint64(node)
    return (np.uint64(trees[i]) << np.uint64(NODE_BITS)) | np.uint64(node)


@inner
def _empty(keys):
    """The key of an empty slot: all ones of the width of the keys."""
    return np.uint64(0xFFFFFFFF) if keys.itemsize == 4 else np.uint64(0xFFFFFFFFFFFFFFFF)


@inner
def _find(key, keys):
    """Slot of a key, or the empty slot where it would go."""
    if keys is None:
        return np.int64(key)
    mask, empty = keys.size - 1, _empty(keys)
    slot = np.int64(mix(key) & np.uint64(mask))
    while np.uint64(keys[slot]) != empty and np.uint64(keys[slot]) != key:
        slot = (slot + 1) & mask
    return slot


@inner
def _is_free(slot, keys, values):
    if keys is None:
        return values[slot] < 0
    return np.uint64(keys[slot]) == _empty(keys)


@inner
def _take(slot, key, keys):
    if keys is not None:
        keys[slot] = key


@inner
def _free(slot, keys, values):
    if keys is None:
        values[slot] = -1
    else:
        keys[slot] = _empty(keys)


@inner
def _ask_for(key, keys, values):
    """Prefetch where the search for a key begins."""
    if keys is None:
        prefetch(values, np.int64(key))
    else:
        slot = np.int64(mix(key) & np.uint64(keys.size - 1))
        prefetch(keys, slot)
        prefetch(values, slot)


@inner
def has_node(node, table, trees, i):
    """Whether a table has a node; with `trees` in tree `trees[i]`."""
    slot = _find(_key(node, trees, i), table.keys)
    return not _is_free(slot, table.keys, table.values)


@leaf
def enter_seeds(n_id, num, table, trees):
    """Enter the seeds n_id[:num] with their places; of equal ones the first counts.

    trees   uint32 (>= num,)   tree of each node; None: nodes are the same in all trees
    """
    keys, values = table.keys, table.values
    for i in range(num):
        key = _key(n_id[i], trees, i)
        slot = _find(key, keys)
        if _is_free(slot, keys, values):
            _take(slot, key, keys)
            values[slot] = i


@leaf
def renumber(draws, starts, counts, table, n_id, num_nodes, local, edge, frontier, trees):
    """Local ids of a hop's sources; new ones are appended to n_id.

    draws      id_dtype                column i holds counts[i] ids from starts[i] on
    n_id       id_dtype                num_nodes of it are in use
    local      uint32                  out, compact, from position `edge` on
    frontier   uint32 (counts.size,)   tree of each column, to which its draws belong, or None
    trees      uint32                  in and out, beside n_id; None: as in `enter_seeds`

    Returns (num_nodes, edge) after the hop; ~num_nodes, if n_id or `local` has no more room.
    """
    keys, values, num = table.keys, table.values, counts.size
    for i in range(num):
        if i + _COLUMNS < num:
            start = starts[i + _COLUMNS]
            for k in range(start, start + min(np.int64(counts[i + _COLUMNS]), _DRAWS)):
                _ask_for(_key(draws[k], frontier, i + _COLUMNS), keys, values)
        stop = starts[i] + np.int64(counts[i])
        if edge + np.int64(counts[i]) > local.size:
            return ~np.int64(num_nodes), edge
        for low in range(starts[i], stop, _DRAWS):
            for k in range(low + _DRAWS, min(low + 2 * _DRAWS, stop)):
                _ask_for(_key(draws[k], frontier, i), keys, values)
            for k in range(low, min(low + _DRAWS, stop)):
                key = _key(draws[k], frontier, i)
                slot = _find(key, keys)
                if _is_free(slot, keys, values):
                    if num_nodes == n_id.size:
                        return ~np.int64(num_nodes), edge
                    _take(slot, key, keys)
                    values[slot] = num_nodes
                    n_id[num_nodes] = draws[k]
                    if trees is not None:
                        trees[num_nodes] = frontier[i]
                    num_nodes += 1
                local[edge] = values[slot]
                edge += 1
    return np.int64(num_nodes), edge


@leaf
def clear_table(n_id, num_nodes, table, trees):
    """Empty the table by going through the nodes backwards: each is the last of its chain."""
    keys, values = table.keys, table.values
    for i in range(num_nodes - 1, -1, -1):
        if i >= _NODES:
            _ask_for(_key(n_id[i - _NODES], trees, i - _NODES), keys, values)
        slot = _find(_key(n_id[i], trees, i), keys)
        if values[slot] == i:  # not the second place of a seed that is given twice
            _free(slot, keys, values)


@leaf
def split_sources(local, kept):
    """Compress local sources: a bit if the source is the next new node, else its id.

    local   uint32 (edges,)
    kept    new    local id of the first node that these edges find
            found  uint64 (>= edges / 64,)       out: a bit an edge, the lowest first
            low    uint16, high uint8 or uint16  out: lower and upper bits of the other ids

    Returns how many others there are; -1: more than have room.
    """
    low, high, maximum = kept.low, kept.high, np.uint64(kept.low.size)
    new, others = np.uint64(kept.new), np.uint64(0)
    for word in range((local.size + 63) // 64):
        bits, bit = np.uint64(0), np.uint64(1)
        for edge in range(64 * word, min(local.size, 64 * word + 64)):
            if others == maximum:
                return -1
            source = local[edge]
            low[others] = source
            high[others] = source >> np.uint32(16)
            is_new = np.uint64(source == new)
            bits |= bit * is_new
            bit <<= np.uint64(1)
            new += is_new
            others += np.uint64(1) - is_new
        kept.found[word] = bits
    return np.int64(others)


@leaf
def join_sources(kept, first, out):
    """Restore sources of edges [first, first + out.size); `low` and `high` have one more."""
    found = 0
    for word in range(first // 64):
        found += popcount(kept.found[word])
    if first & 63:
        found += popcount(kept.found[first // 64] << np.uint64(64 - (first & 63)))
    low, high = kept.low, kept.high
    new, others = np.uint64(kept.new + found), np.uint64(first - found)
    at, stop = first, first + out.size
    while at < stop:
        bits = kept.found[at // 64] >> np.uint64(at & 63)
        until = min(stop, (at // 64 + 1) * 64)
        for edge in range(at - first, until - first):
            is_new = bits & np.uint64(1)
            other = np.uint64(low[others]) | np.uint64(high[others]) << np.uint64(16)
            out[edge] = new if is_new else other
            bits >>= np.uint64(1)
            new += is_new
            others += np.uint64(1) - is_new
        at = until
