"""Rows in arena slots: which blocks hold them, where they are, and copying them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import BlockGeometry
from blockstore.kernels.intrinsics import copy_bytes, prefetch
from blockstore.kernels.jit import leaf, njit

ABSENT = np.uint64(2**64 - 1)  # address of a row whose block has no slot
NO_ROW = np.uint64(2**64 - 2)  # address for a node of another type
_AHEAD = 4  # rows
_FAR = 16  # items of a table
_LINE = 64  # bytes


class RowLayout(NamedTuple):
    """Where the rows of an array lie on disk."""

    rows_per_block: int
    row_bytes: int
    block_bytes: int  # distance between blocks
    blocks_per_shard: int


def row_layout(geometry: BlockGeometry, row_bytes: int) -> RowLayout:
    """Of an array with rows of so many bytes."""
    return RowLayout(
        geometry.rows_per_block, row_bytes, geometry.slot_bytes, geometry.blocks_per_shard
    )


class RowView(NamedTuple):
    """The rows of a type's nodes in slots of an arena."""

    first: int  # store id of the type's first node
    num_nodes: int
    rows_per_block: int
    row_bytes: int
    slots: NDArray[np.int32]  # (num_blocks,) slot of each block, -1 if it is absent
    slot_bytes: int


@leaf
def look_up(table, ids, out):
    """out[i] = table[ids[i]]; the table is too large for the processor's caches."""
    for i in range(ids.size):
        if i + _FAR < ids.size:
            prefetch(table, np.int64(ids[i + _FAR]))
        out[i] = table[np.int64(ids[i])]


@leaf
def mark_blocks(nodes, num, view, marks):
    """marks[b] = 1 for each block that holds a row of the nodes.

    nodes   id_dtype (>= num,)    store ids; those of other types have no row
    view    RowView
    marks   uint8 (num_blocks,)   the caller clears it
    """
    per_block = np.uint32(min(view.rows_per_block, view.num_nodes))
    for i in range(num):
        row = np.int64(nodes[i]) - view.first
        if 0 <= row < view.num_nodes:
            if view.num_nodes < 2**32:
                marks[np.uint32(row) // per_block] = 1
            else:
                marks[row // view.rows_per_block] = 1


@leaf
def address_rows(nodes, num, view, out):
    """Arena byte offset of each node's row; returns how many are ABSENT, int64.

    nodes   id_dtype (>= num,)   store ids
    view    RowView
    out     uint64 (>= num,)     offset, ABSENT, or NO_ROW for a node of another type
    """
    missing = np.int64(0)
    rows_per_block, slots = view.rows_per_block, view.slots
    narrow = view.num_nodes < 2**32
    per_block = np.uint32(min(rows_per_block, view.num_nodes))
    for i in range(num):
        row = np.int64(nodes[i]) - view.first
        if row < 0 or row >= view.num_nodes:
            out[i] = NO_ROW
            continue
        block = np.int64(np.uint32(row) // per_block) if narrow else row // rows_per_block
        slot = np.int64(slots[block])
        if slot < 0:
            out[i] = ABSENT
            missing += 1
        else:
            offset = (row - block * rows_per_block) * view.row_bytes
            out[i] = np.uint64(slot * view.slot_bytes + offset)
    return missing


@leaf
def copy_row(source, start, target, to, row_bytes):
    """target[to : + row_bytes] = source[start : + row_bytes], both flat uint8, not overlapping."""
    copy_bytes(source, np.int64(start), target, np.int64(to), np.int64(row_bytes))


@njit(nogil=True, cache=True)
def scatter_rows(data, addresses, positions, start, stop, row_bytes, out):
    """Row positions[i] of `out` = the row at addresses[i], for start <= i < stop.

    data       uint8 (arena bytes,)
    addresses  uint64 (rows,)         of any alignment; NO_ROW gives a row of zeros
    positions  uint32 (rows,)         empty: row i goes to row i
    out        uint8 (bytes,)         flat
    """
    for i in range(start, stop):
        if i + _AHEAD < stop and addresses[i + _AHEAD] < NO_ROW:
            near = np.int64(addresses[i + _AHEAD])
            for byte in range(near, near + row_bytes, _LINE):
                prefetch(data, byte)
        to = (np.int64(positions[i]) if positions.size else i) * row_bytes
        if addresses[i] < NO_ROW:
            copy_row(data, addresses[i], out, to, row_bytes)
        else:
            out[to : to + row_bytes] = 0


@njit(nogil=True, cache=True)
def gather_rows(data, addresses, start, stop, row_bytes, out):
    """Row i of `out` = the row at addresses[i], for start <= i < stop; see `scatter_rows`."""
    scatter_rows(data, addresses, np.empty(0, np.uint32), start, stop, row_bytes, out)


@leaf
def widen(values, out):
    """out[i] = values[i]; uint32 or uint64 in, int64 out."""
    for i in range(values.size):
        out[i] = np.int64(values[i])


@leaf
def expand_counts(counts, first_local, out):
    """Local target of each edge: entry i, counts[i] times first_local + i; out int64.

    Returns the number of edges, int64.
    """
    edge = np.int64(0)
    for i in range(counts.size):
        for _ in range(counts[i]):
            out[edge] = first_local + i
            edge += 1
    return edge
