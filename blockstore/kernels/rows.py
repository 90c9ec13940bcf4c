"""Rows in arena slots: which blocks hold them, where they are, and copying them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import BlockGeometry
from blockstore.kernels.intrinsics import VECTOR, copy_bytes, fence, prefetch, stream_vector
from blockstore.kernels.jit import inner, leaf, njit

ABSENT = np.uint64(2**64 - 1)  # address of a row whose block has no slot
NO_ROW = np.uint64(2**64 - 2)  # address for a node of another type
_LINE = 64  # bytes
# Rows are asked for so many bytes ahead, a few rows at least: as many lines as may be under way.
_AHEAD_BYTES, _LEAST_AHEAD, _MOST_AHEAD = 8 << 10, 2, 16
# Rows of so many bytes are written past the caches, which could not keep them for their reader:
# a line is then not read before it is written.
_STREAM_BYTES = 16 << 20


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


@inner
def _stream_row(source, start, target, to, row_bytes):
    for byte in range(0, row_bytes, VECTOR):
        stream_vector(source, start + byte, target, to + byte)


@njit(nogil=True, cache=True)
def scatter_rows(data, addresses, positions, start, stop, row_bytes, out):
    """Row positions[i] of `out` = the row at addresses[i], for start <= i < stop.

    data       uint8 (arena bytes,)
    addresses  uint64 (rows,)         of any alignment; NO_ROW gives a row of zeros
    positions  uint32 (rows,)         empty: row i goes to row i
    out        uint8 (bytes,)         flat
    """
    streams = (stop - start) * row_bytes >= _STREAM_BYTES
    streams = streams and row_bytes % VECTOR == 0 and out.ctypes.data % VECTOR == 0
    ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, _AHEAD_BYTES // max(1, row_bytes)))
    for i in range(start, stop):
        if i + ahead < stop and addresses[i + ahead] < NO_ROW:
            near = np.int64(addresses[i + ahead])
            for byte in range(near, near + row_bytes, _LINE):
                prefetch(data, byte)
        to = (np.int64(positions[i]) if positions.size else i) * row_bytes
        if addresses[i] >= NO_ROW:
            out[to : to + row_bytes] = 0
        elif streams:
            _stream_row(data, np.int64(addresses[i]), out, to, row_bytes)
        else:
            copy_row(data, addresses[i], out, to, row_bytes)
    if streams:
        fence()


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
