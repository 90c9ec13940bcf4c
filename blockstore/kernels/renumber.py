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
        return key
    mask, empty = np.uint64(keys.size - 1), _empty(keys)
    slot = mix(key) & mask
    while np.uint64(keys[slot]) != empty and np.uint64(keys[slot]) != key:
        slot = (slot + np.uint64(1)) & mask
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
    # unsigned, as numba compares an index that may be negative with 0: a quarter of the time here
    one, part = np.uint64(1), np.uint64(_DRAWS)
    new, at = np.uint64(num_nodes), np.uint64(edge)
    for i in range(num):
        if i + _COLUMNS < num:
            start = np.uint64(starts[i + _COLUMNS])
            for k in range(start, start + min(np.uint64(counts[i + _COLUMNS]), part)):
                _ask_for(_key(draws[k], frontier, i + _COLUMNS), keys, values)
        start = np.uint64(starts[i])
        stop = start + np.uint64(counts[i])
        if at + np.uint64(counts[i]) > np.uint64(local.size):
            return ~np.int64(new), np.int64(at)
        for low in range(start, stop, part):
            for k in range(low + part, min(low + part + part, stop)):
                _ask_for(_key(draws[k], frontier, i), keys, values)
            for k in range(low, min(low + part, stop)):
                key = _key(draws[k], frontier, i)
                slot = _find(key, keys)
                if _is_free(slot, keys, values):
                    if new == np.uint64(n_id.size):
                        return ~np.int64(new), np.int64(at)
                    _take(slot, key, keys)
                    values[slot] = new
                    n_id[new] = draws[k]
                    if trees is not None:
                        trees[new] = frontier[i]
                    new += one
                local[at] = values[slot]
                at += one
    return np.int64(new), np.int64(at)


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
    new, others, one = np.uint32(kept.new), np.uint64(0), np.uint64(1)
    edge, size = np.uint64(0), np.uint64(local.size)
    while edge < size:
        word, stop = edge >> np.uint64(6), min(size, edge + np.uint64(64))
        bits, bit = np.uint64(0), np.uint64(0)
        while edge < stop:
            if others == maximum:
                return -1
            source = local[edge]
            low[others] = source
            high[others] = source >> np.uint32(16)
            is_new = np.uint64(source == new)
            bits |= is_new << bit
            new += np.uint32(is_new)
            others += one - is_new
            bit += one
            edge += one
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
    new, others, one = np.uint32(kept.new + found), np.uint64(first - found), np.uint64(1)
    edge, size, at = np.uint64(0), np.uint64(out.size), np.uint64(first)
    while edge < size:
        bit = at & np.uint64(63)
        bits, stop = kept.found[at >> np.uint64(6)] >> bit, min(size, edge + np.uint64(64) - bit)
        at += stop - edge
        while edge < stop:
            is_new = np.uint32(bits & one)
            other = np.uint32(low[others]) | np.uint32(high[others]) << np.uint32(16)
            out[edge] = new if is_new else other
            new += is_new
            others += np.uint64(np.uint32(1) - is_new)
            bits >>= one
            edge += one
