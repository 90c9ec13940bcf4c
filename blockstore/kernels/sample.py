"""Neighbor sampling over graph blocks in arena slots (their layout: FORMAT.md, "Graph blocks").

Arguments that all kernels share:

arena32        uint32 view of the arena          ids           the arena viewed as id_dtype
nodes          id_dtype: the frontier            blocks        int32: block each column starts in
order          uint32: entries by block; empty: as they come; entries order[low:high] are meant
first_node     uint64 (num_blocks + 1,)          slot_of_block int32, -1 where absent
capacity       edges of one column that fill a block: a longer column is a *giant*
fanout         neighbors wanted, negative: all   replace       draw with replacement
key            uint64 of the hop and relation    starts        int64: place of each column in draws
"""

import numpy as np

from blockstore.kernels.columns import EDGES_START, column_degree, column_word, sections
from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import leaf, njit
from blockstore.kernels.picks import pick_positions, scratch_size

_GROUP = 64  # columns whose memory is asked for before any is used
_PLACE, _AT, _FOUND, _WHOLE = 0, 1, 2, 3  # rows of a group's table
_FEW_LINES = 16  # of a column that is copied whole; the processor asks for the rest by itself


@leaf
def _is_whole(degree, fanout, replace):
    """Whether the picks of a column are all its edges, in order."""
    return fanout < 0 or (degree <= fanout and not replace)


@njit(nogil=True, cache=True)
def column_degrees(
    arena32, nodes, order, low, high, blocks, first_node, slot_of_block, slot_bytes, id_bytes,
    capacity, counts,
):  # fmt: skip
    """counts[i] = total degree of entry i, uint32; 0 for a node of another type."""
    places = np.empty((4, _GROUP), np.int64)
    for start in range(low, high, _GROUP):
        count = min(_GROUP, high - start)
        _find_group(
            arena32, nodes, order, start, count, blocks, first_node, slot_of_block, slot_bytes,
            False, places,
        )  # fmt: skip
        _degree_group(
            arena32, order, start, count, blocks, slot_of_block, slot_bytes, capacity, counts,
            places,
        )  # fmt: skip


@leaf
def _degree_group(
    arena32, order, start, count, blocks, slot_of_block, slot_bytes, capacity, counts, places
):
    for g in range(count):
        i = np.int64(order[start + g]) if order.size else start + g
        counts[i] = 0
        if places[_PLACE, g] >= 0:
            base = np.int64(slot_of_block[blocks[i]]) * (slot_bytes // 4)
            counts[i] = column_degree(arena32, places[_PLACE, g], base, capacity)


@leaf
def _find_group(
    arena32, nodes, order, start, count, blocks, first_node, slot_of_block, slot_bytes, header,
    places,
):  # fmt: skip
    """places[_PLACE] = word of each column's offset, -1 for a node of another type; asked for."""
    for g in range(count):
        i = np.int64(order[start + g]) if order.size else start + g
        places[_PLACE, g] = -1
        if blocks[i] >= 0:
            place = column_word(nodes[i], blocks[i], first_node, slot_of_block, slot_bytes)
            places[_PLACE, g] = place
            prefetch(arena32, place)
            if header:
                prefetch(arena32, np.int64(slot_of_block[blocks[i]]) * (slot_bytes // 4))


@leaf
def _ask_for(values, first, degree, draws, at, found, whole):
    """Prefetch what a column's picks need: its cache lines, or those of the picks if fewer."""
    per_line = 64 // values.itemsize
    if whole or degree <= found * per_line:
        stop = first + (min(degree, _FEW_LINES * per_line) if whole else degree)
        for edge in range(first, stop, per_line):
            prefetch(values, edge)
        prefetch(values, stop - 1)
    else:
        for k in range(np.uint64(at), np.uint64(at + found)):
            prefetch(values, first + np.int64(draws[k]))


@leaf
def _pick_group(
    arena32, values, edge_ids, nodes, order, start, count, blocks, slot_of_block, slot_bytes,
    id_bytes, capacity, fanout, replace, key, starts, draws, counts, giants, giant_degrees,
    num_giants, scratch, places,
):  # fmt: skip
    """Positions of the picks into `draws`; where the columns lie, into `places`.

    Returns the number of giants so far; of edge ids neither counts nor giants are written.
    """
    for g in range(count):
        offset = places[_PLACE, g]
        i = np.int64(order[start + g]) if order.size else start + g
        places[_FOUND, g] = 0
        if offset < 0:
            if not edge_ids:
                counts[i] = 0
            continue
        slot = np.int64(slot_of_block[blocks[i]])
        base = slot * (slot_bytes // 4)
        degree = column_degree(arena32, offset, base, capacity)
        whole = _is_whole(degree, fanout, replace)
        found = degree if whole or degree == 0 else np.int64(fanout)
        if not edge_ids:
            counts[i] = found
        if degree > capacity:
            if not edge_ids:
                giants[num_giants] = i
                giant_degrees[num_giants] = degree
                num_giants += 1
            continue
        first = np.int64(arena32[offset])
        if edge_ids:
            first -= np.int64(arena32[base + EDGES_START])
            first += sections(arena32, slot, slot_bytes, id_bytes, values.itemsize, 0)[1]
        else:
            first += slot * (slot_bytes // id_bytes)
        if not whole:
            pick_positions(draws, starts[i], degree, found, replace, nodes[i], key, scratch)
        places[_PLACE, g], places[_AT, g], places[_FOUND, g] = first, starts[i], found
        places[_WHOLE, g] = whole
        if found:
            _ask_for(values, first, degree, draws, starts[i], found, whole)
    return num_giants


@leaf
def _fetch_group(values, count, draws, places):
    """Picks to what lies there."""
    for g in range(count):
        first, at = np.uint64(places[_PLACE, g]), np.uint64(places[_AT, g])
        found = np.uint64(places[_FOUND, g])
        if places[_WHOLE, g]:
            for k in range(found):
                draws[at + k] = values[first + k]
        else:
            for k in range(at, at + found):
                draws[k] = values[first + np.uint64(draws[k])]


@leaf
def _draw_columns(
    arena32, values, edge_ids, nodes, order, low, high, blocks, first_node, slot_of_block,
    slot_bytes, id_bytes, capacity, fanout, replace, key, starts, draws, counts, giants,
    giant_degrees, num_giants, scratch, places,
):  # fmt: skip
    """Sources, or edge ids, group by group: find the columns, pick, fetch."""
    for start in range(low, high, _GROUP):
        count = min(_GROUP, high - start)
        _find_group(
            arena32, nodes, order, start, count, blocks, first_node, slot_of_block, slot_bytes,
            edge_ids, places,
        )  # fmt: skip
        num_giants = _pick_group(
            arena32, values, edge_ids, nodes, order, start, count, blocks, slot_of_block,
            slot_bytes, id_bytes, capacity, fanout, replace, key, starts, draws, counts, giants,
            giant_degrees, num_giants, scratch, places,
        )  # fmt: skip
        _fetch_group(values, count, draws, places)
    return num_giants


@njit(nogil=True, cache=True)
def sample_columns(
    arena32, ids, nodes, order, low, high, blocks, first_node, slot_of_block, slot_bytes, id_bytes,
    capacity, fanout, replace, key, starts, draws, counts, giants, giant_degrees, num_giants,
):  # fmt: skip
    """draws[starts[i] : + counts[i]] = sampled sources of entry i, by store id.

    counts         uint32   out: min(degree, fanout); the degree where fanout < 0; with replacement
                            fanout, and 0 for a column without edges
    giants         uint32   out, appended: entries whose column is a giant; nothing is drawn yet
    giant_degrees  int64    out: their degrees

    Returns the number of giants so far, int64.  A column's picks depend on (key, node) alone, so
    that any order and grouping gives the same.  Time O(edges), O(fanout) more below fanout 64.
    """
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    places = np.empty((4, _GROUP), np.int64)
    return _draw_columns(
        arena32, ids, False, nodes, order, low, high, blocks, first_node, slot_of_block, slot_bytes,
        id_bytes, capacity, fanout, replace, key, starts, draws, counts, giants, giant_degrees,
        num_giants, scratch, places,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def column_edge_ids(
    arena32, edge_ids, nodes, order, low, high, blocks, first_node, slot_of_block, slot_bytes,
    id_bytes, capacity, fanout, replace, key, starts, edge_draws,
):  # fmt: skip
    """The same picks as `sample_columns`, as edge ids; giants are left to `fill_giant_edge_ids`.

    edge_ids    uint32 or uint64 view of the arena
    edge_draws  of that type
    """
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    places = np.empty((4, _GROUP), np.int64)
    none32, none64 = np.empty(0, np.uint32), np.empty(0, np.int64)
    _draw_columns(
        arena32, edge_ids, True, nodes, order, low, high, blocks, first_node, slot_of_block,
        slot_bytes, id_bytes, capacity, fanout, replace, key, starts, edge_draws, none32, none32,
        none64, 0, scratch, places,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def column_items(
    arena32, nodes, order, low, high, blocks, first_node, first_item, slot_of_block, slot_bytes,
    capacity, fanout, replace, key, starts, item_draws,
):  # fmt: skip
    """The same picks as `sample_columns`, as numbers of edges in block order; giants included.

    first_item  int64 (num_blocks + 1,)   number of each block's first edge
    item_draws  uint32 or uint64
    """
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    for j in range(low, high):
        i = np.int64(order[j]) if order.size else j
        if blocks[i] < 0:
            continue
        offset = column_word(nodes[i], blocks[i], first_node, slot_of_block, slot_bytes)
        base = np.int64(slot_of_block[blocks[i]]) * (slot_bytes // 4)
        degree = column_degree(arena32, offset, base, capacity)
        first = first_item[blocks[i]] + np.int64(arena32[offset])
        first -= np.int64(arena32[base + EDGES_START])
        at = starts[i]
        if _is_whole(degree, fanout, replace):
            for k in range(degree):
                item_draws[at + k] = first + k
        elif degree:
            pick_positions(item_draws, at, degree, fanout, replace, nodes[i], key, scratch)
            for k in range(at, at + fanout):
                item_draws[k] = first + np.int64(item_draws[k])


@njit(nogil=True, cache=True)
def giant_blocks(
    giants, giant_degrees, num_giants, nodes, blocks, capacity, fanout, replace, key, marks
):
    """marks[b] = 1 (uint8) for each block that a pick of a giant lies in."""
    picks = np.empty(max(1, fanout), np.int64)
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    _mark_giants(
        giants, giant_degrees, num_giants, nodes, blocks, capacity, fanout, replace, key, marks,
        picks, scratch,
    )  # fmt: skip


@leaf
def _mark_giants(
    giants, giant_degrees, num_giants, nodes, blocks, capacity, fanout, replace, key, marks, picks,
    scratch,
):  # fmt: skip
    for g in range(num_giants):
        i, degree = np.int64(giants[g]), giant_degrees[g]
        if _is_whole(degree, fanout, replace):
            for b in range((degree + capacity - 1) // capacity):
                marks[blocks[i] + b] = 1
        else:
            pick_positions(picks, 0, degree, fanout, replace, nodes[i], key, scratch)
            for k in range(fanout):
                marks[blocks[i] + picks[k] // capacity] = 1


@leaf
def _giant_edges_at(arena32, values, edge_ids, slot, slot_bytes, id_bytes):
    """Index in `values` of the first edge of the block in `slot`."""
    first, edge_at, _, _ = sections(
        arena32, slot, slot_bytes, id_bytes, values.itemsize if edge_ids else 0, 0
    )
    return edge_at if edge_ids else first


@leaf
def _fill(
    arena32, values, edge_ids, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block,
    slot_bytes, id_bytes, capacity, fanout, replace, key, starts, draws, picks, scratch,
):  # fmt: skip
    """Picks of giants whose block is present: sources, or edge ids."""
    for g in range(num_giants):
        i, degree = np.int64(giants[g]), giant_degrees[g]
        head, at = np.int64(blocks[i]), starts[i]
        if _is_whole(degree, fanout, replace):
            for done in range(0, degree, capacity):
                slot = np.int64(slot_of_block[head + done // capacity])
                if slot >= 0:
                    first = _giant_edges_at(arena32, values, edge_ids, slot, slot_bytes, id_bytes)
                    for k in range(min(capacity, degree - done)):
                        draws[at + done + k] = values[first + k]
            continue
        pick_positions(picks, 0, degree, fanout, replace, nodes[i], key, scratch)
        for k in range(fanout):
            slot = np.int64(slot_of_block[head + picks[k] // capacity])
            if slot >= 0:
                first = _giant_edges_at(arena32, values, edge_ids, slot, slot_bytes, id_bytes)
                draws[at + k] = values[first + picks[k] % capacity]


@njit(nogil=True, cache=True)
def fill_giants(
    arena32, ids, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block, slot_bytes,
    id_bytes, capacity, fanout, replace, key, starts, draws,
):  # fmt: skip
    """Sources of the giants' picks that lie in blocks present now.

    Position p of a giant that starts in block h is edge p % capacity of block h + p // capacity.
    """
    picks = np.empty(max(1, fanout), np.int64)
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    _fill(
        arena32, ids, False, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block,
        slot_bytes, id_bytes, capacity, fanout, replace, key, starts, draws, picks, scratch,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def fill_giant_edge_ids(
    arena32, edge_ids, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block, slot_bytes,
    id_bytes, capacity, fanout, replace, key, starts, edge_draws,
):  # fmt: skip
    """Edge ids of the giants' picks that lie in blocks present now."""
    picks = np.empty(max(1, fanout), np.int64)
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    _fill(
        arena32, edge_ids, True, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block,
        slot_bytes, id_bytes, capacity, fanout, replace, key, starts, edge_draws, picks, scratch,
    )  # fmt: skip
