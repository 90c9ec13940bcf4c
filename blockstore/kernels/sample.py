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
from numba import njit

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.random import bounded, draw_hash, mix, node_key

_GROUP = 64  # columns whose memory is asked for before any is used
_LINEAR = 64  # fanout up to which a pick is looked for among the others one by one
_HEADER_WORDS = 16  # 64 bytes of header, then the offsets
_LAST_DEGREE, _NUM_EDGES, _EDGES_START = 4, 7, 9  # header fields, in words of four bytes


@njit(nogil=True, cache=True, inline="always")
def _column(node, block, first_node, slot_of_block, slot_bytes):
    """Word index in the arena of the offset of a column; its block is present."""
    base = np.int64(slot_of_block[block]) * (slot_bytes // 4)
    return base + _HEADER_WORDS + np.int64(node) - np.int64(first_node[block])


@njit(nogil=True, cache=True, inline="always")
def _degree(arena32, offset, node, block, first_node, capacity):
    """Total degree of the column whose offset is at word `offset`."""
    degree = np.int64(arena32[offset + 1]) - np.int64(arena32[offset])
    if degree == capacity:  # alone in its block: it may go on in the next
        base = offset - _HEADER_WORDS - (np.int64(node) - np.int64(first_node[block]))
        low = np.int64(arena32[base + _LAST_DEGREE])
        degree = low + (np.int64(arena32[base + _LAST_DEGREE + 1]) << 32)
    return degree


@njit(nogil=True, cache=True)
def scratch_size(fanout):
    """Slots of the set of picks that `pick_positions` needs."""
    size = 1
    while fanout > _LINEAR and size < 2 * fanout:
        size *= 2
    return size


@njit(nogil=True, cache=True, inline="always")
def _among(out, at, count, pick):
    """Whether `pick` is among out[at : at + count]."""
    for j in range(at, at + count):
        if np.int64(out[j]) == pick:
            return True
    return False


@njit(nogil=True, cache=True)
def _remember(scratch, pick):
    """Put `pick` into the set `scratch` (-1 where empty); whether it was there already."""
    mask = scratch.size - 1
    slot = np.int64(mix(np.uint64(pick)) & np.uint64(mask))
    while scratch[slot] >= 0:
        if scratch[slot] == pick:
            return True
        slot = (slot + 1) & mask
    scratch[slot] = pick
    return False


@njit(nogil=True, cache=True)
def _pick_few(out, at, degree, fanout, nkey):
    """Floyd's picks, at most _LINEAR of them: a word of bits tells most picks from those before.

    Where the degree is at most 64 the bits are exact, and no pick is ever compared.
    """
    one, low = np.uint64(1), np.uint64(63)
    bits = np.uint64(0)
    for k in range(fanout):
        last = degree - fanout + k
        pick = bounded(draw_hash(nkey, k), last + 1)
        bit = one << (np.uint64(pick) & low)
        if bits & bit and (degree <= 64 or _among(out, at, k, pick)):
            pick = last
            bit = one << (np.uint64(pick) & low)
        bits |= bit
        out[at + k] = pick


@njit(nogil=True, cache=True)
def _pick_many(out, at, degree, fanout, nkey, scratch):
    """Floyd's picks with a set of them."""
    scratch[:] = -1
    for k in range(fanout):
        last = degree - fanout + k
        pick = bounded(draw_hash(nkey, k), last + 1)
        if _remember(scratch, pick):
            pick = last
            _remember(scratch, pick)
        out[at + k] = pick


@njit(nogil=True, cache=True)
def pick_positions(out, at, degree, fanout, replace, node, key, scratch):
    """Positions of the picks of one column, into out[at:]; returns their number, int64.

    Without replacement by Floyd's method: draw k is uniform in [0, degree - fanout + k], and where
    it was picked before, that bound is picked.  Source: Bentley and Floyd, CACM 30(9), 1987.
    """
    if fanout < 0 or (degree <= fanout and not replace):
        for k in range(degree):
            out[at + k] = k
        return degree
    if degree == 0:
        return np.int64(0)
    nkey = node_key(key, node)
    if replace:
        for k in range(fanout):
            out[at + k] = bounded(draw_hash(nkey, k), degree)
    elif scratch.size == 1:
        _pick_few(out, at, degree, fanout, nkey)
    else:
        _pick_many(out, at, degree, fanout, nkey, scratch)
    return np.int64(fanout)


@njit(nogil=True, cache=True)
def column_degrees(
    arena32, nodes, order, low, high, blocks, first_node, slot_of_block, slot_bytes, id_bytes,
    capacity, counts,
):  # fmt: skip
    """counts[i] = total degree of entry i, uint32; 0 for a node of another type."""
    for j in range(low, high):
        i = np.int64(order[j]) if order.size else j
        if blocks[i] < 0:
            counts[i] = 0
            continue
        offset = _column(nodes[i], blocks[i], first_node, slot_of_block, slot_bytes)
        counts[i] = _degree(arena32, offset, nodes[i], blocks[i], first_node, capacity)


@njit(nogil=True, cache=True)
def sample_columns(
    arena32, ids, nodes, order, low, high, blocks, first_node, slot_of_block, slot_bytes, id_bytes,
    capacity, fanout, replace, key, starts, draws, counts, giants, giant_degrees, num_giants,
):  # fmt: skip
    """draws[starts[i] : + counts[i]] = sampled sources of entry i, by store id.

    counts         uint32   out: min(degree, fanout); the degree where fanout < 0
    giants         uint32   out, appended: entries whose column is a giant; nothing is drawn yet
    giant_degrees  int64    out: their degrees

    Returns the number of giants so far, int64.  A column's picks depend on (key, node) alone, so
    that any order and grouping gives the same.  Time O(edges), O(fanout) more below fanout 64.
    """
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    place = np.empty(_GROUP, np.int64)  # offset word, then ids index of the column's first edge
    at, found = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    for group in range(low, high, _GROUP):
        count = min(_GROUP, high - group)
        for g in range(count):
            i = np.int64(order[group + g]) if order.size else group + g
            place[g] = -1
            if blocks[i] >= 0:
                place[g] = _column(nodes[i], blocks[i], first_node, slot_of_block, slot_bytes)
                prefetch(arena32, place[g])
        for g in range(count):
            i = np.int64(order[group + g]) if order.size else group + g
            counts[i] = 0
            if place[g] < 0:
                continue
            offset = place[g]
            degree = _degree(arena32, offset, nodes[i], blocks[i], first_node, capacity)
            if degree > capacity:
                giants[num_giants] = i
                giant_degrees[num_giants] = degree
                num_giants += 1
                counts[i] = degree if fanout < 0 or degree < fanout else fanout
                place[g] = -1
                continue
            slot = np.int64(slot_of_block[blocks[i]])
            place[g] = slot * (slot_bytes // id_bytes) + np.int64(arena32[offset])
            at[g] = starts[i]
            found[g] = pick_positions(draws, at[g], degree, fanout, replace, nodes[i], key, scratch)
            counts[i] = found[g]
            for k in range(at[g], at[g] + found[g]):
                prefetch(ids, place[g] + np.int64(draws[k]))
        for g in range(count):
            if place[g] >= 0:
                base, first = np.uint64(place[g]), np.uint64(at[g])
                for k in range(first, first + np.uint64(found[g])):
                    draws[k] = ids[base + np.uint64(draws[k])]
    return num_giants


@njit(nogil=True, cache=True, inline="always")
def _edge_ids_at(arena32, base32, slot, slot_bytes, id_bytes, edge_id_bytes):
    """Index, in the view of edge ids, of the edge id of the block's first edge."""
    edges_start = np.int64(arena32[base32 + _EDGES_START])
    end = (edges_start + np.int64(arena32[base32 + _NUM_EDGES])) * id_bytes
    return (slot * slot_bytes + (end + 7) // 8 * 8) // edge_id_bytes


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
    for j in range(low, high):
        i = np.int64(order[j]) if order.size else j
        if blocks[i] < 0:
            continue
        offset = _column(nodes[i], blocks[i], first_node, slot_of_block, slot_bytes)
        degree = _degree(arena32, offset, nodes[i], blocks[i], first_node, capacity)
        if degree > capacity:
            continue
        slot = np.int64(slot_of_block[blocks[i]])
        base = slot * (slot_bytes // 4)
        first = _edge_ids_at(arena32, base, slot, slot_bytes, id_bytes, edge_ids.itemsize)
        first += np.int64(arena32[offset]) - np.int64(arena32[base + _EDGES_START])
        at = starts[i]
        found = pick_positions(edge_draws, at, degree, fanout, replace, nodes[i], key, scratch)
        for k in range(found):
            edge_draws[at + k] = edge_ids[first + np.int64(edge_draws[at + k])]


@njit(nogil=True, cache=True)
def giant_blocks(
    giants, giant_degrees, num_giants, nodes, blocks, capacity, fanout, replace, key, marks
):
    """marks[b] = 1 (uint8) for each block that a pick of a giant lies in."""
    picks = np.empty(max(1, fanout), np.int64)
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    for g in range(num_giants):
        i, degree = np.int64(giants[g]), giant_degrees[g]
        if fanout < 0 or (degree <= fanout and not replace):
            for b in range((degree + capacity - 1) // capacity):
                marks[blocks[i] + b] = 1
            continue
        found = pick_positions(picks, 0, degree, fanout, replace, nodes[i], key, scratch)
        for k in range(found):
            marks[blocks[i] + picks[k] // capacity] = 1


@njit(nogil=True, cache=True)
def _fill(
    arena32, values, edge_id_bytes, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block,
    slot_bytes, id_bytes, capacity, fanout, replace, key, starts, draws,
):  # fmt: skip
    """Picks of giants whose block is present; `edge_id_bytes` 0: sources, else edge ids."""
    picks = np.empty(max(1, fanout), np.int64)
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    for g in range(num_giants):
        i, degree = np.int64(giants[g]), giant_degrees[g]
        everything = fanout < 0 or (degree <= fanout and not replace)
        found = degree
        if not everything:
            found = pick_positions(picks, 0, degree, fanout, replace, nodes[i], key, scratch)
        for k in range(found):
            position = k if everything else picks[k]
            slot = np.int64(slot_of_block[blocks[i] + position // capacity])
            if slot < 0:
                continue
            base = slot * (slot_bytes // 4)
            if edge_id_bytes:
                first = _edge_ids_at(arena32, base, slot, slot_bytes, id_bytes, edge_id_bytes)
            else:
                first = slot * (slot_bytes // id_bytes) + np.int64(arena32[base + _EDGES_START])
            draws[starts[i] + k] = values[first + position % capacity]


@njit(nogil=True, cache=True)
def fill_giants(
    arena32, ids, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block, slot_bytes,
    id_bytes, capacity, fanout, replace, key, starts, draws,
):  # fmt: skip
    """Sources of the giants' picks that lie in blocks present now.

    Position p of a giant that starts in block h is edge p % capacity of block h + p // capacity.
    """
    _fill(
        arena32, ids, 0, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block,
        slot_bytes, id_bytes, capacity, fanout, replace, key, starts, draws,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def fill_giant_edge_ids(
    arena32, edge_ids, giants, giant_degrees, num_giants, nodes, blocks, slot_of_block, slot_bytes,
    id_bytes, capacity, fanout, replace, key, starts, edge_draws,
):  # fmt: skip
    """Edge ids of the giants' picks that lie in blocks present now."""
    _fill(
        arena32, edge_ids, edge_ids.itemsize, giants, giant_degrees, num_giants, nodes, blocks,
        slot_of_block, slot_bytes, id_bytes, capacity, fanout, replace, key, starts, edge_draws,
    )  # fmt: skip
