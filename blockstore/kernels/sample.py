"""Neighbor sampling over graph blocks in arena slots (their layout: FORMAT.md, "Graph blocks").

Arguments that all kernels share:

view     BlockView of the relation       column   Column: the frontier, and how edges are picked
blocks   int32: block in which each column starts, -1 for a node of another type
order    uint32: entries by block; empty: as they come; entries order[low:high] are meant
draws    Draws
multi_block  MultiBlockColumns

A column's picks depend on (key, node) alone, in trees on the tree's number, too, so that any order
and grouping gives the same.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.columns import (
    BlockView,
    column_degree,
    column_word,
    first_bit,
    record_places,
    sections,
    slot_word,
    words_of_edge,
)
from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import inner, leaf, njit
from blockstore.kernels.packed import id_at
from blockstore.kernels.picks import (
    BY_SOURCE,
    BY_WEIGHT,
    FIRST,
    FOUND,
    GROUP,
    GROUP_ROWS,
    UNIFORM,
    Column,
    Draws,
    Rule,
    fetch_group,
    is_whole,
    note_places,
    pick_column,
    pick_positions,
    scratch_size,
)
from blockstore.kernels.ranked import (
    Heap,
    ask_for_ranks,
    draw_rule,
    put_picks,
    rank_edges,
    rank_seam,
    sort_first,
    take_all,
)
from blockstore.kernels.records import put_record


class MultiBlockColumns(NamedTuple):
    """Entries of a frontier whose column goes on in further blocks."""

    entries: NDArray[np.uint32]
    degrees: NDArray[np.int64]


class Picks(NamedTuple):
    """Positions picked of multi-block columns, ascending for a ranked draw; found -1: all edges."""

    ranks: NDArray[np.int64]  # (columns, fanout), of a ranked draw
    positions: NDArray[np.int64]  # (columns, fanout)
    found: NDArray[np.int64]  # (columns,)
    seams: NDArray[np.int64]  # (blocks of all the columns, 2): first and last source that each has
    #   of its column, of a draw by source


@njit(nogil=True, cache=True)
def column_degrees(view, column, blocks, order, low, high):
    """Write total degrees into the column's counts; 0 for a node of another type."""
    table = np.empty((GROUP_ROWS, GROUP), np.int64)
    for start in range(low, high, GROUP):
        count = min(GROUP, high - start)
        _find_group(view, column, blocks, order, start, count, False, table)
        _degree_group(view, column, blocks, order, start, count, table)


@inner
def _degree_group(view, column, blocks, order, start, count, table):
    for g in range(count):
        i = np.int64(order[start + g]) if order.size else start + g
        column.counts[i] = 0
        if table[FIRST, g] >= 0:
            column.counts[i] = column_degree(view, table[FIRST, g], slot_word(view, blocks[i]))


@inner
def _find_group(view, column, blocks, order, start, count, header, table):
    """table[FIRST] = word of each column's offset, -1 for a node of another type; asked for."""
    for g in range(count):
        i = np.int64(order[start + g]) if order.size else start + g
        table[FIRST, g] = -1
        if blocks[i] >= 0:
            place = column_word(view, column.nodes[i], blocks[i])
            table[FIRST, g] = place
            prefetch(view.words, place)
            if header:
                prefetch(view.words, slot_word(view, blocks[i]))


@inner
def _pick_group(
    view, column, blocks, order, start, count, draws, multi_block, num_multi_block, room
):
    """Write positions of the picks into the draws, places of the columns into the table.

    Returns the number of multi-block columns so far.
    """
    table = room.table
    for g in range(count):
        word = table[FIRST, g]
        i = np.int64(order[start + g]) if order.size else start + g
        table[FOUND, g] = 0
        if word < 0:
            column.counts[i] = 0
            continue
        slot = np.int64(view.slots[blocks[i]])
        base = slot * (view.slot_bytes // 4)
        degree = column_degree(view, word, base)
        if degree > view.capacity:
            _append(multi_block, num_multi_block, column, i, degree)
            num_multi_block += 1
            continue
        offset = np.int64(view.words[word])
        table[FIRST, g] = first_bit(view, blocks[i]) + offset * view.sources.bits
        if draws.edges.size:
            note_places(table, g, record_places(view, blocks[i], offset, draws.first_item))
        pick_column(
            view.sources, view.words, words_of_edge(view), column, i, degree, draws, g, room
        )
    return num_multi_block


@inner
def _append(multi_block, num_multi_block, column, i, degree):
    multi_block.entries[num_multi_block], multi_block.degrees[num_multi_block] = i, degree
    column.counts[i] = 0


@leaf
def _draw_uniform(
    view, column, blocks, order, low, high, draws, multi_block, num_multi_block, room
):
    """Group by group: find the columns, pick, fetch."""
    edges = draws.edges.size > 0
    for start in range(low, high, GROUP):
        count = min(GROUP, high - start)
        _find_group(view, column, blocks, order, start, count, edges, room.table)
        num_multi_block = _pick_group(
            view, column, blocks, order, start, count, draws, multi_block, num_multi_block, room
        )
        fetch_group(view.sources, view.words, words_of_edge(view), count, draws, room.table)
    return num_multi_block


@inner
def _rank_column(view, column, blocks, i, multi_block, num_multi_block, heap):
    """Put edges of least rank of entry i into the heap; how many, or -1: a multi-block column."""
    column.counts[i] = 0
    if blocks[i] < 0 or column.rule.fanout == 0:
        return np.int64(0)
    base = slot_word(view, blocks[i])
    word = column_word(view, column.nodes[i], blocks[i])
    degree = column_degree(view, word, base)
    if degree > view.capacity:
        _append(multi_block, num_multi_block, column, i, degree)
        return np.int64(-1)
    if column.rule.kind == BY_SOURCE and degree <= column.rule.fanout:
        return take_all(degree, heap)
    at = _values_at(view, column.rule, blocks[i], np.int64(view.words[word]))
    return rank_edges(
        view.sources, view.floats, view.longs, at, 0, degree, column, i, heap, np.int64(0)
    )


@inner
def _values_at(view, rule, block, edge):
    """Place of the values by which the edges of a block, from `edge` on, are ranked."""
    if rule.kind == BY_SOURCE:
        return first_bit(view, block) + edge * view.sources.bits
    _, _, weight_at, time_at = sections(view, np.int64(view.slots[block]))
    return edge + (weight_at if rule.kind == BY_WEIGHT else time_at)


@inner
def _ask_group(view, column, blocks, order, start, count, table):
    """Prefetch the values that the columns of a group are ranked by."""
    for g in range(count):
        word = table[FIRST, g]
        if word >= 0:
            i = np.int64(order[start + g]) if order.size else start + g
            edge = np.int64(view.words[word])
            at = _values_at(view, column.rule, blocks[i], edge)
            degree = np.int64(view.words[word + 1]) - edge
            ask_for_ranks(view.sources, view.floats, view.longs, at, degree, column.rule)


@inner
def _put_column(view, column, blocks, i, positions, draws):
    """Picks of entry i, whose column lies in one block."""
    edge = np.int64(view.words[column_word(view, column.nodes[i], blocks[i])])
    first = first_bit(view, blocks[i]) + edge * view.sources.bits
    places = record_places(view, blocks[i], edge, draws.first_item)
    put_picks(
        view.sources, view.words, words_of_edge(view), first, places, column, i, positions, draws
    )


@njit(nogil=True, cache=True)
def _draw_ranked(view, column, blocks, order, low, high, draws, multi_block, num_multi_block, room):
    """Group by group: find the columns, then each by itself, O(degree log fanout)."""
    heap, positions = room.heap, room.heap.positions
    for start in range(low, high, GROUP):
        count = min(GROUP, high - start)
        _find_group(view, column, blocks, order, start, count, True, room.table)
        _ask_group(view, column, blocks, order, start, count, room.table)
        for j in range(start, start + count):
            i = np.int64(order[j]) if order.size else j
            found = _rank_column(view, column, blocks, i, multi_block, num_multi_block, heap)
            if found < 0:
                num_multi_block += 1
            elif found > 0:
                sort_first(positions, found)
                _put_column(view, column, blocks, i, positions[:found], draws)
    return num_multi_block


def draw_columns(
    view: BlockView,
    column: Column,
    blocks: NDArray[np.int32],
    order: NDArray[np.uint32],
    low: int,
    high: int,
    draws: Draws,
    multi_block: MultiBlockColumns,
    num_multi_block: int,
) -> int:
    """Write sampled sources and edges of the entries into the draws, their number into the counts.

    counts      uint32   out: of a uniform draw min(degree, fanout), the degree if fanout < 0, with
                         replacement fanout, and 0 for a column without edges; of a ranked draw
                         min(edges that may be picked, fanout); of multi-block columns 0 for now
    num_multi_block  how many there are already; what is found is appended

    Returns the number of multi-block columns so far, int64.  Time of a uniform draw O(edges),
    O(fanout) more below fanout 64.
    """
    # chosen here, so that rules that nobody uses are not compiled
    draw, room = draw_rule(column.rule, _draw_uniform, _draw_ranked)
    return int(
        draw(view, column, blocks, order, low, high, draws, multi_block, num_multi_block, room)
    )


def make_picks(rule: Rule, multi_block: MultiBlockColumns, capacity: int) -> Picks:
    """Room for the picks of multi-block columns; a ranked draw counts all edges as picked first."""
    shape = multi_block.entries.size, max(1, rule.fanout)
    parts = int(np.sum(-(-multi_block.degrees // capacity))) if rule.kind == BY_SOURCE else 0
    return Picks(
        np.empty((0, 0) if rule.kind == UNIFORM else shape, np.int64), np.empty(shape, np.int64),
        np.full(shape[0], -1, np.int64), np.empty((parts, 2), np.int64),
    )  # fmt: skip


@njit(nogil=True, cache=True)
def pick_multi_block(column, multi_block, picks):
    """Picks of a uniform draw, which do not depend on what is present."""
    scratch = np.full(scratch_size(column.rule.fanout), -1, np.int64)
    _pick_multi_block(column, multi_block, picks, scratch)


@inner
def _pick_multi_block(column, multi_block, picks, scratch):
    rule = column.rule
    for g in range(multi_block.entries.size):
        if is_whole(multi_block.degrees[g], rule):
            picks.found[g] = -1
            continue
        node = column.nodes[np.int64(multi_block.entries[g])]
        pick_positions(
            picks.positions[g], 0, multi_block.degrees[g], rule.fanout, rule.replace, node,
            rule.key, scratch,
        )  # fmt: skip
        picks.found[g] = rule.fanout


@leaf
def mark_multi_block(capacity, blocks, multi_block, picks, marks):
    """marks[b] = 1 (uint8) for each block that picks lie in; all blocks of a column if found is -1.

    Position p of a column that starts in block h is edge p % capacity of block h + p // capacity.
    """
    for g in range(multi_block.entries.size):
        head = np.int64(blocks[np.int64(multi_block.entries[g])])
        if picks.found[g] < 0:
            for b in range((multi_block.degrees[g] + capacity - 1) // capacity):
                marks[head + b] = 1
        for k in range(picks.found[g]):
            marks[head + picks.positions[g, k] // capacity] = 1


@leaf
def rank_multi_block(view, column, blocks, multi_block, picks):
    """Take edges in blocks that are present into the columns' heaps; each block comes once."""
    by_source, part = column.rule.kind == BY_SOURCE, 0  # of all blocks of all columns
    for g in range(multi_block.entries.size):
        i, degree = np.int64(multi_block.entries[g]), multi_block.degrees[g]
        heap = Heap(picks.ranks[g], picks.positions[g])
        for low in range(0, degree, view.capacity):
            block = np.int64(blocks[i]) + low // view.capacity
            if view.slots[block] >= 0:
                at = _values_at(view, column.rule, block, 0)
                count = min(view.capacity, degree - low)
                picks.found[g] = rank_edges(
                    view.sources, view.floats, view.longs, at, low, count, column, i, heap,
                    picks.found[g],
                )  # fmt: skip
                if by_source:
                    picks.seams[part, 0] = id_at(view.sources, at)
                    last = at + (count - 1) * view.sources.bits
                    picks.seams[part, 1] = id_at(view.sources, last)
            part += 1


@leaf
def rank_seams(capacity, column, multi_block, picks):
    """For a draw by source: take the first edge of each later block, after all were present."""
    part = 0
    for g in range(multi_block.entries.size):
        i, heap = np.int64(multi_block.entries[g]), Heap(picks.ranks[g], picks.positions[g])
        for low in range(0, multi_block.degrees[g], capacity):
            if low:
                source, before = picks.seams[part, 0], picks.seams[part - 1, 1]
                picks.found[g] = rank_seam(source, before, low, column, i, heap, picks.found[g])
            part += 1


@leaf
def fetch_multi_block(view, column, blocks, draws, multi_block, picks):
    """Sources and edges of the multi-block columns' picks that lie in blocks present now."""
    for g in range(multi_block.entries.size):
        i, found = np.int64(multi_block.entries[g]), picks.found[g]
        if found >= 0:
            column.counts[i] = found
            for k in range(found):
                _fetch_part(view, blocks[i], picks.positions[g, k], 1, i, k, draws)
        else:
            column.counts[i] = multi_block.degrees[g]
            for low in range(0, multi_block.degrees[g], view.capacity):
                count = min(view.capacity, multi_block.degrees[g] - low)
                _fetch_part(view, blocks[i], low, count, i, low, draws)


@inner
def _fetch_part(view, head, position, count, i, k, draws):
    """Picks k and on of entry i: edges of one block, from a position on, if it is present."""
    part = position // view.capacity
    block = np.int64(head) + part
    if view.slots[block] < 0:
        return
    skip = position - part * view.capacity
    first, own = first_bit(view, block) + skip * view.sources.bits, words_of_edge(view)
    places = record_places(view, block, skip, draws.first_item)
    for j in range(count):
        draws.sources[draws.starts[i] + k + j] = id_at(view.sources, first + j * view.sources.bits)
        if draws.edges.size:
            row = draws.edge_starts[i] + k + j
            put_record(view.words, own, places, j, draws.record, draws.edges, row)
