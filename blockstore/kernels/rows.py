"""Rows in arena slots: which blocks hold them, where they are, and copying them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.kernels.crc import crc_pages, crc_rest
from blockstore.kernels.intrinsics import VECTOR, copy_bytes, fence, prefetch, stream_vector
from blockstore.kernels.jit import inner, leaf, njit
from blockstore.kernels.reads import PAGE, PAGES, PLACE, SHARD

ABSENT = np.uint64(2**64 - 1)  # address of a row whose block has no slot
NO_ROW = np.uint64(2**64 - 2)  # address for a node of another type
_LINE = 64  # bytes
# Rows are asked for so many bytes ahead, a few rows at least: as many lines as may be under way.
_AHEAD_BYTES, _MIN_AHEAD, _MAX_AHEAD = 8 << 10, 2, 16
# Rows of so many bytes are written past the caches, which could not keep them for their reader:
# a line is then not read before it is written.
_STREAM_BYTES = 16 << 20
_MOVED_BYTES = 16 << 10  # rows that are copied at once: what the first cache has while they are
_HOPS_AHEAD = 4  # rows of propagated features, of all arrays


class RowLayout(NamedTuple):
    """Where the rows of an array lie on disk."""

    rows_per_block: int
    row_bytes: int
    block_bytes: int  # distance between blocks
    blocks_per_shard: int


def row_layout(geometry: BlockGeometry, row_bytes: int) -> RowLayout:
    """The layout of an array with rows of so many bytes."""
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
    """Count in each block the nodes that have their row there, up to 255.

    nodes   id_dtype (>= num,)    store ids; those of other types have no row
    view    RowView
    marks   uint8 (num_blocks,)   the caller clears it
    """
    per_block, maximum = np.uint32(min(view.rows_per_block, view.num_nodes)), np.uint8(255)
    for i in range(num):
        row = np.int64(nodes[i]) - view.first
        if 0 <= row < view.num_nodes:
            if view.num_nodes < 2**32:
                block = np.int64(np.uint32(row) // per_block)
            else:
                block = row // view.rows_per_block
            if marks[block] < maximum:
                marks[block] += 1


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
    ahead = min(_MAX_AHEAD, max(_MIN_AHEAD, _AHEAD_BYTES // max(1, row_bytes)))
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


@inner
def _row_at(layout, shard, at, whole):
    """The first row of an array that has a byte at byte `at` of a shard or after it; `whole`: all
    of whose bytes are there."""
    block = at // layout.block_bytes
    inside = at - block * layout.block_bytes
    if whole:
        inside += layout.row_bytes - 1
    row = min(inside // layout.row_bytes, layout.rows_per_block)
    return (shard * layout.blocks_per_shard + block) * layout.rows_per_block + row


@inner
def _place_of(rows, row):
    """Index of the first of some ascending rows that is not below `row`."""
    low, high = np.int64(0), np.int64(rows.size)
    while low < high:
        middle = (low + high) // 2
        if np.int64(rows[middle]) < row:
            low = middle + 1
        else:
            high = middle
    return low


@leaf
def list_rows(pieces, layout, num_rows, every, rows, out):
    """Rows of an array that lie in runs of pages, ascending, each once.

    pieces    int64 (n, 4 or more)   as `read_pieces` takes them, by ascending pages
    num_rows  of the array
    every     True: all that have a byte there; False: of `rows` those that are there as a whole
    rows      integers (any,)        ascending
    out       int64                  out; has room for all of the pages

    Returns how many there are, int64.
    """
    count, last = np.int64(0), np.int64(-1)
    for k in range(pieces.shape[0]):
        shard, low = pieces[k, SHARD], pieces[k, PAGE] * PAGE_BYTES
        first = max(_row_at(layout, shard, low, not every), last + 1)
        stop = _row_at(layout, shard, low + pieces[k, PAGES] * PAGE_BYTES, every)
        stop = min(stop, num_rows)
        i = np.int64(0) if every else _place_of(rows, first)
        row = first
        while True:
            if not every:
                if i == rows.size:
                    break
                row = np.int64(rows[i])
            if row >= stop:
                break
            out[count] = last = row
            count, i, row = count + 1, i + 1, row + 1
    return count


@leaf
def move_rows(packed, rows, pieces, layout, memory, to_pages):
    """Copy rows between their pages and a packed array; of a row, only what the pages have of it.

    packed    uint8 (rows * row_bytes,)
    rows      int64 (rows,)            ascending
    pieces    int64 (n, 4 or more)     as `read_pieces` takes them
    memory    uint8                    with the pages
    to_pages  bool                     from `packed` to `memory`, else the other way

    Returns the crc32c of `packed`, of which a part is copied while the caches have it; or 0, if it
    is what is filled.
    """
    row_bytes, per_block = layout.row_bytes, layout.rows_per_block
    words = packed[: packed.size // 8 * 8].view(np.uint64)
    page, num_pages, crc = 0, packed.size // PAGE_BYTES if to_pages else 0, np.uint32(0)
    for k in range(pieces.shape[0]):
        shard, low = pieces[k, SHARD], pieces[k, PAGE] * PAGE_BYTES
        high = low + pieces[k, PAGES] * PAGE_BYTES
        i = _place_of(rows, _row_at(layout, shard, low, False))
        stop = _row_at(layout, shard, high, True)
        while i < rows.size and rows[i] < stop:
            # rows that follow each other here and there are copied at once
            block, run = rows[i] // per_block, i + 1
            last = min(stop, (block + 1) * per_block, rows[i] + _MOVED_BYTES // row_bytes)
            while run < rows.size and rows[run] == rows[run - 1] + 1 and rows[run] < last:
                run += 1
            while page < min(num_pages, run * row_bytes // PAGE_BYTES):
                count, crc = crc_pages(words, page, num_pages, crc)
                page += count
            at = (block - shard * layout.blocks_per_shard) * layout.block_bytes
            at += (rows[i] - block * per_block) * row_bytes
            first, end = max(at, low), min(at + (run - i) * row_bytes, high)
            place, other = pieces[k, PLACE] + first - low, i * row_bytes + first - at
            if to_pages:
                copy_row(packed, other, memory, place, end - first)
            else:
                copy_row(memory, place, packed, other, end - first)
            i = run
    if not to_pages:
        return crc
    while page < num_pages:
        count, crc = crc_pages(words, page, num_pages, crc)
        page += count
    return crc_rest(packed, num_pages * PAGE_BYTES, crc)


class PlacedRows(NamedTuple):
    """The rows of one array that a batch of a group may want, by the places of its nodes."""

    hot: tuple[int, int]  # places of nodes whose rows stay: [first, stop)
    cold: tuple[int, int]  # and of those whose rows belong to the group
    hot_slots: NDArray[np.int64]  # of the blocks of the first
    cold_slots: NDArray[np.int64]  # and of the second
    rows_per_block: int
    row_bytes: int
    slot_bytes: int


@leaf
def address_places(places, rows, out):
    """Arena byte offset of each node's row; NO_ROW for a node that has none in this array.

    places   uint32 (nodes,)
    rows     PlacedRows
    out      uint64 (>= nodes,)
    """
    hot_first, hot_stop = rows.hot
    cold_first, cold_stop = rows.cold
    per_block, row_bytes = np.uint32(rows.rows_per_block), rows.row_bytes
    slot_bytes = rows.slot_bytes
    for i in range(places.size):
        place = np.int64(places[i])
        if hot_first <= place < hot_stop:
            row = np.uint32(place - hot_first)
            block = row // per_block
            slot = rows.hot_slots[block]
        elif cold_first <= place < cold_stop:
            row = np.uint32(place - cold_first)
            block = row // per_block
            slot = rows.cold_slots[block]
        else:
            out[i] = NO_ROW
            continue
        out[i] = np.uint64(slot * slot_bytes + np.int64(row - block * per_block) * row_bytes)


@leaf
def gather_hops(data, bases, row_bytes, index, start, stop, firsts, out):
    """Row index[i] of every array, for start <= i < stop: one pass for all of them.

    data       uint8 (arena bytes,)
    bases      int64 (arrays,)       where in `data` row 0 of each array begins
    row_bytes  int64 (arrays,)
    index      int64 (>= stop,)      in range
    firsts     int64 (arrays,)       where in `out` row 0 of each array goes
    out        uint8 (bytes,)
    """
    for i in range(start, stop):
        if i + _HOPS_AHEAD < stop:
            for a in range(bases.size):
                near = bases[a] + index[i + _HOPS_AHEAD] * row_bytes[a]
                for byte in range(near, near + row_bytes[a], _LINE):
                    prefetch(data, byte)
        for a in range(bases.size):
            copy_row(
                data, bases[a] + index[i] * row_bytes[a], out, firsts[a] + i * row_bytes[a],
                row_bytes[a],
            )  # fmt: skip


@leaf
def spread_rows(pages, runs, shard_bytes, rows, places, row_bytes, out):
    """Row places[i] of `out` = row rows[i] of an array, for those that runs of pages hold.

    pages        uint8             of the runs, one run after the other
    runs         int64 (runs, 5)   as `plan_extents` gives them, of `rows`
    shard_bytes  int               of the array that a shard holds
    rows         int64 (rows,)
    places       int64 (rows,)
    out          uint8 (bytes,)    flat
    """
    start = 0
    for k in range(runs.shape[0]):
        first = runs[k, 0] * shard_bytes + runs[k, 1] * PAGE_BYTES - start
        for i in range(runs[k, 3], runs[k, 4]):
            copy_row(pages, rows[i] * row_bytes - first, out, places[i] * row_bytes, row_bytes)
        start += runs[k, 2] * PAGE_BYTES
