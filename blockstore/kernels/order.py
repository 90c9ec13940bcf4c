"""Brings work into block order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import leaf, njit
from blockstore.kernels.rows import ABSENT

_AHEAD = 32  # entries of a table, asked for before they are taken


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct values of some integers, ascending.

    NumPy's `unique` hashes them first, which takes fifty times as long as sorting them.
    """
    ordered = np.sort(values, axis=None)
    first = np.ones(ordered.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def only_blocks(slots: NDArray[np.int32], blocks: NDArray[np.int64]) -> NDArray[np.int32]:
    """The slots of these blocks, -1 for all others: they may be present, but leave at any time."""
    found = np.full(slots.size, -1, np.int32)
    found[blocks] = slots[blocks]
    return found


@leaf
def count_nodes(nodes, maximum, counts):
    """Count each of these nodes as often as it is named.

    nodes    (n,) store ids
    maximum  a count that stays as it is
    counts   unsigned integers (nodes of the store,)   in and out
    """
    for i in range(nodes.size):
        if counts[nodes[i]] < maximum:
            counts[nodes[i]] += 1


@njit(nogil=True, cache=True)
def order_by_block(blocks, num, starts, order):
    """Counting sort of `num` entries by block; entries with a negative block are left out.

    blocks   int32 (>= num,)            block of each entry
    starts   int64 (num_blocks + 1,)    out: where the entries of each block begin in `order`
    order    uint32 (>= num,)           out: entries, ascending by block, then by entry

    Returns the number of entries ordered, int64.
    """
    starts[:] = 0
    num_blocks = starts.size - 1
    for i in range(num):
        if blocks[i] >= 0:
            starts[blocks[i] + 1] += 1
    for b in range(num_blocks):
        starts[b + 1] += starts[b]
    for i in range(num):
        b = blocks[i]
        if b >= 0:
            order[starts[b]] = i
            starts[b] += 1
    for b in range(num_blocks, 0, -1):
        starts[b] = starts[b - 1]
    starts[0] = 0
    return starts[num_blocks]


@njit(nogil=True, cache=True)
def missing_keys(nodes, num, divisor, addresses, keys):
    """keys[i] = store id // divisor for each row that has no address yet; other keys stay.

    nodes      id_dtype (>= num,)   store ids
    addresses  uint64 (>= num,)     from `address_rows`
    keys       int32 (>= num,)      in and out, so that several arrays can be asked in turn
    """
    for i in range(num):
        if addresses[i] == ABSENT:
            keys[i] = np.int64(nodes[i]) // divisor


@njit(nogil=True, cache=True)
def find_outside(ids, stop):
    """First i with ids[i] outside [0, stop), or -1: int64."""
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= stop:
            return i
    return -1


@njit(nogil=True, cache=True)
def map_range(ids, first, table, out):
    """out[i] = table[ids[i] - first] if that lies in the table; other entries stay."""
    last = first + table.size
    for i in range(ids.size):
        row = np.int64(ids[i])
        if first <= row < last:
            out[i] = table[row - first]


@njit(nogil=True, cache=True)
def take_ids(table, index, num, out):
    """out[i] = table[index[i]] for i < num; the table may be larger than any cache."""
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(table, np.int64(index[i + _AHEAD]))
        out[i] = table[index[i]]


@njit(nogil=True, cache=True)
def stride_starts(num, fanout, starts):
    """starts[i] = i * fanout for i <= num: columns of equal room."""
    for i in range(num + 1):
        starts[i] = i * fanout


@njit(nogil=True, cache=True)
def prefix_starts(counts, num, starts):
    """starts[i] = sum of counts[:i] for i <= num; returns the sum of all, int64."""
    total = np.int64(0)
    for i in range(num):
        starts[i] = total
        total += counts[i]
    starts[num] = total
    return total


@njit(nogil=True, cache=True)
def compact_records(draws, starts, counts, num, out, first):
    """Append draws[starts[i] : + counts[i]] of every column to out[first:]; returns the new end.

    draws, out   uint32 (edges, words)
    """
    for i in range(num):
        for k in range(counts[i]):
            for word in range(out.shape[1]):
                out[first, word] = draws[starts[i] + k, word]
            first += 1
    return first


@njit(nogil=True, cache=True)
def entries_of_blocks(order, starts, blocks, out):
    """The entries of some blocks, one block after the other.

    order    uint32                 entries by block, from `order_by_block`
    starts   integers (blocks + 1,) where those of each block begin in `order`
    blocks   int64                  blocks that are meant
    out      uint32                 out

    Returns their number, int64.
    """
    count = np.int64(0)
    for b in blocks:
        for j in range(starts[b], starts[b + 1]):
            out[count] = order[j]
            count += 1
    return count


@njit(nogil=True, cache=True)
def group_by_range(ids, offsets, starts, out):
    """Places of ids, range by range, in a range in their order.

    ids      integers (num,)
    offsets  int64 (ranges + 1,)   range r is [offsets[r], offsets[r + 1]); every id is in one
    starts   int64 (ranges + 1,)   out: where each range's places begin in `out`, then num
    out      int64 (num,)          out
    """
    starts[:] = 0
    for i in range(ids.size):
        out[i] = np.searchsorted(offsets, np.int64(ids[i]), side="right") - 1
        starts[out[i] + 1] += 1
    for r in range(starts.size - 1):
        starts[r + 1] += starts[r]
    at = starts[:-1].copy()
    ranges = out.copy()
    for i in range(ids.size):
        out[at[ranges[i]]] = i
        at[ranges[i]] += 1
