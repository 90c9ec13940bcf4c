"""Rows in memory: which row is in which entry, which entries make room, what must be read.

A region is 2**shift adjacent rows.  The rows of some regions stay, in entries that several tables
may share and that follow from the region's first one; rows of the others come and go one by one.

The entry of a row is found in a hash table with linear probing and two slots for each entry, so
rows that are not in memory cost nothing there.  When a row leaves, those behind it move up, so that
a search always ends at the first free slot.

Arguments that the kernels share:

nodes     id_dtype (>= num,)    store ids; rows are counted from `first`, the type's first node
table     CacheTable
layout    RowLayout of the array
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES
from blockstore.kernels.intrinsics import mulhi, popcount, prefetch, wrap_mul, wrap_sub
from blockstore.kernels.jit import inner, leaf
from blockstore.kernels.rows import NO_ROW, copy_row

ABSENT_ROW = np.int64(-1)
NEVER = np.int32(2**31 - 1)
_PAGE = np.int64(PAGE_BYTES)
_AHEAD = 16
FREE = np.uint64(2**64 - 1)  # a slot without a row
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)  # the low half of a slot, and its bits
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)  # 2**64 / the golden ratio: neighbors lie far apart
_MAX_USES = 15
_FAR = 63  # batches from now on, beyond which nothing is told apart
_SOON = 32  # batches from now on; rows that come again later are not worth a wait for room
_COMING = 2 + _MAX_USES  # of the levels of `choose_by_level`: the first of rows that come again
SOON = _COMING + _FAR - _SOON  # the first of those that come again soon
LEVELS = _COMING + _FAR + 1


class CacheTable(NamedTuple):
    """The rows of a type, and the entries that hold those of regions that do not stay."""

    stays: NDArray[np.uint8]  # (regions,) not 0: the rows of this region stay
    shift: np.int64
    slots: NDArray[np.uint64]  # (num_slots(entries),) hashed: the low 32 bits of a row and, below
    #   them, its entry; or FREE
    node: NDArray[Any]  # id_dtype (entries,) row in each entry; the highest value: free
    last: NDArray[np.int32]  # (entries,) last batch that uses the row, as far as known
    coming: NDArray[np.int32]  # (entries,) next batch that will use it, NEVER if none is known
    uses: NDArray[np.uint8]  # (entries,) groups of batches that used it, halved now and then
    empty: np.uint64  # what `node` holds in a free entry


class StayingEntries(NamedTuple):
    """Where the rows of regions that stay are, of one array."""

    first: NDArray[np.int64]  # (regions,) entry of a region's first row, ABSENT_ROW: it has none
    slots: NDArray[np.int64]  # arena slots of these entries

    def of(self, rows: NDArray[Any], shift: np.int64) -> NDArray[np.int64]:
        """Entries of rows that stay; a region is 2**shift of them."""
        wide = rows.astype(np.int64)
        found: NDArray[np.int64] = self.first[wide >> shift] + (wide & ((1 << int(shift)) - 1))
        return found


@leaf
def count_new(nodes, num, first, num_nodes, bits, shift, counts):
    """Count the rows of each region that are not in the set yet, which they enter.

    bits     uint64 (num_nodes // 64 + 1,)   the set
    counts   int64 (regions,)                out: added to
    """
    one, low = np.uint64(1), np.uint64(63)
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(bits, (np.int64(nodes[i + _AHEAD]) - first) >> 6)
        row = np.int64(nodes[i]) - first
        if 0 <= row < num_nodes:
            mask = one << (np.uint64(row) & low)
            word = row >> 6
            if not bits[word] & mask:
                bits[word] |= mask
                counts[row >> shift] += 1


def num_slots(entries: int) -> int:
    """Slots of the table by which the rows of so many entries are found; one is always free."""
    return 2 * entries + 1


@inner
def _home(low, slots):
    """The slot where the search for a row begins, by its low 32 bits."""
    return np.int64(mulhi(wrap_mul(low, _GOLDEN), np.uint64(slots.size)))


@inner
def _next(at, slots):
    return at + 1 if at + 1 < slots.size else np.int64(0)


@inner
def _find(row, table):
    """Slot of a row, or the free slot where it would go."""
    slots, node = table.slots, table.node
    low = np.uint64(row) & _LOW
    at = _home(low, slots)
    while slots[at] != FREE:
        # rows of a type with more than 2**32 may be alike in their low bits
        if slots[at] >> _HALF == low and (
            node.itemsize == 4 or np.int64(node[slots[at] & _LOW]) == row
        ):
            break
        at = _next(at, slots)
    return at


@inner
def _entry(row, table):
    """The entry of a row, ABSENT_ROW if it has none."""
    word = table.slots[_find(row, table)]
    return ABSENT_ROW if word == FREE else np.int64(word & _LOW)


@inner
def _remove(row, table):
    """Take a row out of the slots; those behind it that are further from their homes move up."""
    slots = table.slots
    hole = _find(row, table)
    at = _next(hole, slots)
    while slots[at] != FREE:
        moved, gap = at - _home(slots[at] >> _HALF, slots), at - hole
        if (moved if moved >= 0 else moved + slots.size) >= (gap if gap >= 0 else gap + slots.size):
            slots[hole] = slots[at]
            hole = at
        at = _next(at, slots)
    slots[hole] = FREE


@inner
def _row(nodes, i, first):
    """The row of the i-th node, uint64: beyond all others if the node comes before `first`."""
    return wrap_sub(np.uint64(nodes[i]), np.uint64(first))


@inner
def _may_leave(row, num_nodes, table):
    """Whether this is a row of the type, of a region that does not stay."""
    return row < np.uint64(num_nodes) and not table.stays[row >> np.uint64(table.shift)]


@leaf
def list_passing(nodes, num, first, num_nodes, table, out):
    """List the nodes whose rows may leave: those of regions that do not stay.

    out   id_dtype (room,)   out: store ids, in order

    Returns how many there are, int64; at the first that has no room, -1.
    """
    count = 0
    for i in range(num):
        if _may_leave(_row(nodes, i, first), num_nodes, table):
            if count == out.size:
                return -1
            out[count] = nodes[i]
            count += 1
    return count


@leaf
def find_entries(rows, num, table, out):
    """The entry of each row, ABSENT_ROW if it has none; out: int64 (>= num,)."""
    for i in range(num):
        out[i] = _entry(np.int64(rows[i]), table)


@leaf
def list_absent(bits, table, until, out):
    """List the rows of a set that have no entry, ascending; entries found stay until `until`.

    Rows of regions that stay are left out.  `until` is the last batch of a group, whose rows these
    are; what a group uses counts once in `uses`.

    bits   uint64 (words,)    the set
    out    id_dtype (room,)   out: rows; room for all of the set that may leave

    Returns how many are listed, int64.
    """
    one, found = np.uint64(1), 0
    for word in range(bits.size):
        left = bits[word]
        while left:
            row = 64 * word + np.int64(popcount((left & (~left + one)) - one))
            left &= left - one
            if not table.stays[row >> table.shift]:
                out[found] = row
                found += 1
    last, uses, count = table.last, table.uses, 0
    for i in range(found):
        if i + _AHEAD < found:
            prefetch(table.slots, _home(np.uint64(out[i + _AHEAD]) & _LOW, table.slots))
        row = np.int64(out[i])
        entry = _entry(row, table)
        if entry < 0:
            out[count] = row
            count += 1
        else:
            last[entry] = until
            uses[entry] = min(uses[entry] + 1, _MAX_USES)
    return count


@leaf
def note_use(nodes, num, first, num_nodes, table, batch, uses, earliest):
    """uses[entry] = batch (its number) for each of the rows that has an entry and may leave it.

    earliest   leave what is lower: `uses` is the next use, else the last one if batches ascend
    """
    for i in range(num):
        if i + _AHEAD < num:
            later = _row(nodes, i + _AHEAD, first)
            if _may_leave(later, num_nodes, table):
                prefetch(table.slots, _home(later & _LOW, table.slots))
        row = _row(nodes, i, first)
        if _may_leave(row, num_nodes, table):
            entry = _entry(np.int64(row), table)
            if entry >= 0 and not (earliest and uses[entry] < batch):
                uses[entry] = batch


@inner
def _level(table, entry, oldest, now):
    """What leaves first is lowest: 0 if the entry is free, LEVELS if its row may not leave.

    Rows that are never used again leave first, those seldom used so far before others; then
    those whose next use is furthest from now.
    """
    if np.uint64(table.node[entry]) == table.empty:
        return np.int64(0)
    if table.last[entry] >= oldest:
        return np.int64(LEVELS)
    if table.coming[entry] == NEVER:
        return np.int64(1 + min(table.uses[entry], _MAX_USES))
    return np.int64(_COMING + _FAR - min(max(table.coming[entry] - now, 0), _FAR))


@leaf
def choose_by_level(table, oldest, now, hand, want, levels, counts, out):
    """Entries that make room: free ones first, then those of the lowest levels.

    oldest   int                what batch `oldest` or a later one uses stays
    now      int                number of the batch that comes next
    hand     int64 (1,)         in and out: where the search begins, so that equals take turns
    levels   int                LEVELS, or SOON: rows that are known to come again soon stay
    counts   int64 (LEVELS,)    scratch
    out      int64 (>= want,)   out: entries

    Returns how many were found, int64: `want`, or all there are.
    """
    num = table.node.size
    counts[:] = 0
    for e in range(num):
        level = _level(table, e, oldest, now)
        if level < levels:
            counts[level] += 1
    bound, before = np.int64(0), np.int64(0)
    while bound < levels - 1 and before + counts[bound] < want:
        before += counts[bound]
        bound += 1
    at_bound = want - before  # entries of level `bound` that go
    found, begin = np.int64(0), hand[0]
    for step in range(num):
        e = begin + step if begin + step < num else begin + step - num
        if found == want:
            hand[0] = e
            break
        level = _level(table, e, oldest, now)
        if level > bound or (level == bound and at_bound == 0):
            continue
        if level == bound:
            at_bound -= 1
        out[found] = e
        found += 1
    return found


@leaf
def enter_rows(rows, low, high, entries, table, until):
    """Put rows[low:high] into the entries, whose former rows leave."""
    slots, node = table.slots, table.node
    for i in range(low, high):
        if i + _AHEAD < high:
            prefetch(slots, _home(np.uint64(rows[i + _AHEAD]) & _LOW, slots))
            leaving = np.uint64(node[entries[i + _AHEAD - low]])
            prefetch(slots, _home(leaving & _LOW, slots))
        entry, row = entries[i - low], np.int64(rows[i])
        if np.uint64(node[entry]) != table.empty:
            _remove(np.int64(node[entry]), table)
        node[entry] = row
        slots[_find(row, table)] = (np.uint64(row) & _LOW) << _HALF | np.uint64(entry)
        table.last[entry] = until
        table.coming[entry] = NEVER
        table.uses[entry] = 1


@leaf
def remove_rows(rows, num, table):
    """Empty the entries of these rows, if they have any."""
    for i in range(num):
        row = np.int64(rows[i])
        entry = _entry(row, table)
        if entry >= 0:
            _remove(row, table)
            table.node[entry] = table.empty


@leaf
def plan_extents(rows, low, high, layout, gap_pages, max_pages, out):
    """Runs of pages that hold the rows rows[low:high], ascending: what to read in one call each.

    gap_pages     a larger gap ends a run
    max_pages    of one run, but for one row longer than that
    out           int64 (>= high - low, 5)   out: shard, first page in it, pages, first and last + 1
                                             of the rows, as positions in `rows`

    Returns the number of runs, int64.
    """
    count, row_bytes = np.int64(0), layout.row_bytes
    for i in range(low, high):
        row = np.int64(rows[i])
        block = row // layout.rows_per_block
        shard = block // layout.blocks_per_shard
        start = (block - shard * layout.blocks_per_shard) * layout.block_bytes
        start += (row - block * layout.rows_per_block) * row_bytes
        page, stop = start // _PAGE, (start + row_bytes + _PAGE - 1) // _PAGE
        if count:
            end = out[count - 1, 1] + out[count - 1, 2]
            near = out[count - 1, 0] == shard and page - end <= gap_pages
            if near and stop - out[count - 1, 1] <= max_pages:
                out[count - 1, 2] = max(end, stop) - out[count - 1, 1]
                out[count - 1, 4] = i + 1
                continue
        out[count, 0], out[count, 1], out[count, 2] = shard, page, stop - page
        out[count, 3], out[count, 4] = i, i + 1
        count += 1
    return count


@inner
def _divisor(count):
    """What `_divide` takes for a divisor, 1 to 2**31."""
    return np.uint64(0xFFFF_FFFF_FFFF_FFFF) // np.uint64(count)


@inner
def _divide(entry, divisor):
    """entry // count of an entry below 2**32: a product takes a tenth of a division's time."""
    return mulhi(entry + np.uint64(1), divisor)


@leaf
def copy_extents(source, runs, rows, layout, entries, first, area, data, slot_bytes):
    """Copy the rows of runs of pages into their entries.

    source       uint8             the pages, run after run
    runs         int64 (runs, 5)   as `plan_extents` gives them, of `rows`
    entries      int64             that of rows[i] is entries[i - first]; None: it is i + first
    area         int64             arena slots of the array's entries
    data         uint8             the arena
    """
    row_bytes = layout.row_bytes
    per_slot, start = slot_bytes // row_bytes, 0
    for k in range(runs.shape[0]):
        # byte 0 of `source`, counted over the blocks of the array from its first
        begin = runs[k, 0] * layout.blocks_per_shard * layout.block_bytes + runs[k, 1] * _PAGE
        begin -= start
        for i in range(runs[k, 3], runs[k, 4]):
            row = np.int64(rows[i])
            entry = np.int64(i + first) if entries is None else np.int64(entries[i - first])
            block = row // layout.rows_per_block
            at = (row - block * layout.rows_per_block) * row_bytes
            at += block * layout.block_bytes - begin
            target = area[entry // per_slot] * slot_bytes + entry % per_slot * row_bytes
            copy_row(source, at, data, target, row_bytes)
        start += runs[k, 2] * _PAGE


@leaf
def address_entries(nodes, num, first, num_nodes, cached, area, slot_bytes, row_bytes, out):
    """Arena byte offset of each node's row, all of which have an entry; NO_ROW for other types.

    cached   CacheTable, StayingEntries
    area     int64             arena slots of the array's entries
    out      uint64 (>= num,)
    """
    table, staying = cached
    inside = (np.uint64(1) << np.uint64(table.shift)) - np.uint64(1)
    per_slot, divisor = np.uint64(slot_bytes // row_bytes), _divisor(slot_bytes // row_bytes)
    for i in range(num):
        row = _row(nodes, i, first)
        if row >= np.uint64(num_nodes):
            out[i] = NO_ROW
            continue
        region = row >> np.uint64(table.shift)
        if table.stays[region]:
            entry = np.uint64(staying.first[region]) + (row & inside)
            slot = _divide(entry, divisor)
            start = np.uint64(staying.slots[slot])
        else:
            entry = np.uint64(_entry(np.int64(row), table))
            slot = _divide(entry, divisor)
            start = np.uint64(area[slot])
        out[i] = start * np.uint64(slot_bytes) + (entry - slot * per_slot) * np.uint64(row_bytes)
