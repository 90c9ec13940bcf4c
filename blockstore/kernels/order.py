"""Bringing work into block order, and rows that pass through into their row area."""

import numpy as np
from numba import njit

from blockstore.kernels.rows import ABSENT, copy_row


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
def mark_missing(nodes, order, low, high, first, rows_per_block, addresses, marks):
    """Mark the blocks of the rows among entries order[low:high] that have no address yet.

    marks   uint8 (num_blocks,)   out: 1 where a row is needed; the caller clears it
    """
    for j in range(low, high):
        i = order[j]
        if addresses[i] == ABSENT:
            marks[(np.int64(nodes[i]) - first) // rows_per_block] = 1


@njit(nogil=True, cache=True)
def stage_rows(
    data, nodes, order, low, high, first, rows_per_block, row_bytes, transit, slot_bytes,
    addresses, area, cursor,
):  # fmt: skip
    """Copy rows whose block is in transit into the row area, and give them their addresses.

    data       uint8 (arena bytes,)
    order      uint32                    entries low..high are looked at
    transit    int32 (num_blocks,)       slot of each block that is in transit now, else -1
    addresses  uint64                    in: ABSENT where the row is wanted; out: where it is now
    area       int64 (slots,)            slots of the row area of this array
    cursor     int64                     rows in the area so far

    Returns the number of rows in the area, int64.
    """
    rows_per_slot = slot_bytes // row_bytes
    for j in range(low, high):
        i = order[j]
        if addresses[i] != ABSENT:
            continue
        row = np.int64(nodes[i]) - first
        block = row // rows_per_block
        if transit[block] < 0:
            continue
        source = transit[block] * slot_bytes + (row - block * rows_per_block) * row_bytes
        target = area[cursor // rows_per_slot] * slot_bytes + (cursor % rows_per_slot) * row_bytes
        copy_row(data, source, data, target, row_bytes)
        addresses[i] = target
        cursor += 1
    return cursor


@njit(nogil=True, cache=True)
def map_range(ids, first, table, out):
    """out[i] = table[ids[i] - first] where that lies in the table; other entries stay."""
    last = first + table.size
    for i in range(ids.size):
        row = np.int64(ids[i])
        if first <= row < last:
            out[i] = table[row - first]


@njit(nogil=True, cache=True)
def take_seeds(seeds, index, num, out):
    """out[i] = seeds[index[i]] for i < num."""
    for i in range(num):
        out[i] = seeds[index[i]]


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
def compact_draws(draws, starts, counts, num, out, first):
    """Append draws[starts[i] : + counts[i]] of every column to out[first:]; returns the new end."""
    for i in range(num):
        for k in range(counts[i]):
            out[first] = draws[starts[i] + k]
            first += 1
    return first
