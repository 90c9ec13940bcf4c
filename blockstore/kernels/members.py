"""Subgraphs over some of the nodes: which are members, members' columns, and draws from these.

A member's *rank* is the number of members before it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.columns import (
    HEADER_WORDS,
    NUM_CARRIED,
    NUM_NODES,
    edges_start,
    record_places,
)
from blockstore.kernels.intrinsics import popcount, prefetch
from blockstore.kernels.jit import inner, leaf, njit
from blockstore.kernels.locate import first_above
from blockstore.kernels.packed import id_at, view_ids
from blockstore.kernels.picks import (
    BY_SOURCE,
    FIRST,
    FOUND,
    GROUP,
    Column,
    Draws,
    fetch_group,
    note_places,
    pick_column,
)
from blockstore.kernels.ranked import draw_rule, put_picks, rank_edges, sort_first, take_all
from blockstore.kernels.records import EdgeRecord, RecordPlaces
from blockstore.kernels.rows import NO_ROW

_ONE, _ALL = np.uint64(1), np.uint64(2**64 - 1)
_LOW = np.int64(0xFFFFFFFF)
_NO_ITEMS = np.empty(0, np.int64)


class Members(NamedTuple):
    """The members, and the type whose columns and rows are meant."""

    words: NDArray[np.uint64]  # (words_size,) pairs: a bit for each of 64 nodes, 1 for members; how
    #   many members come before them
    first: int  # store id of the type's first node
    num_nodes: int  # of the type
    base: int  # rank of the type's first member: its columns and rows count from there


class MemberColumns(NamedTuple):
    """Columns of one relation by rank, with only those sources that are members."""

    starts: NDArray[np.int64]  # where the column lies in `sources`
    degrees: NDArray[np.uint32]
    sources: NDArray[Any]  # id_dtype
    beside: NDArray[np.uint32]  # section by section, each with room for as many edges
    weights: NDArray[np.float32]  # the same memory
    own: EdgeRecord  # words of an edge in each section
    capacity: int  # edges that there is room for
    fragments: NDArray[np.int64]  # (blocks, 3) of each block: rank of the column that it carries
    #   edges of, where they begin and how many; rank -1: it carries none that are wanted


class WantedMembers(NamedTuple):
    """Columns, or rows of an array, of one part."""

    low: int
    high: int
    nodes: NDArray[Any]  # id_dtype: store id of each; size 0: columns are store ids
    take: NDArray[np.uint8]  # 0: not this one; size 0: all
    shifts: NDArray[np.int64]  # of each column: its first edge in the relation, less that among the
    #   copies; size 0: columns are those of the relation


def words_size(num_nodes: int) -> int:
    """Items of `Members.words`: two for each 64 nodes."""
    return 2 * (num_nodes // 64 + 1)


@leaf
def add_range(words, first, stop):
    """Make nodes [first, stop) members."""
    node = np.int64(first)
    while node < stop:
        word, bit = node >> 6, node & 63
        count = min(64 - bit, stop - node)
        mask = _ALL if count == 64 else ((_ONE << np.uint64(count)) - _ONE) << np.uint64(bit)
        words[2 * word] |= mask
        node += count


@leaf
def count_members(words):
    """Write the ranks; returns the number of members."""
    total = np.int64(0)
    for word in range(0, words.size, 2):
        words[word + 1] = total
        total += popcount(words[word])
    return total


# Unsigned numbers where an index is computed: one that could be negative is compared with 0 first,
# which takes a third of the time of `filter_block`.
@inner
def _word_of(node):
    return (np.uint64(node) >> np.uint64(6)) << _ONE


@inner
def _is_member(words, node):
    return (words[_word_of(node)] >> (np.uint64(node) & np.uint64(63))) & _ONE


@leaf
def rank_of(words, node):
    """Members before a node."""
    word = _word_of(node)
    below = words[word] & ((_ONE << (np.uint64(node) & np.uint64(63))) - _ONE)
    return np.int64(words[word + _ONE]) + popcount(below)


@leaf
def take_new(words, nodes, take):
    """take[i] = 1 (uint8) if nodes[i] was not a member, and makes it one; else 0."""
    for i in range(nodes.size):
        word, bit = _word_of(nodes[i]), _ONE << (np.uint64(nodes[i]) & np.uint64(63))
        take[i] = (words[word] & bit) == 0
        words[word] |= bit


@inner
def _places_from(columns, edge):
    """RecordPlaces of a column that begins at an edge of those kept."""
    own, capacity = columns.own, np.int64(columns.capacity)
    weights = own.ids * capacity
    times = weights + own.weights * capacity
    items = times + own.times * capacity
    return RecordPlaces(
        edge * own.ids, weights + edge * own.weights, times + edge * own.times,
        items + edge * own.items,
    )  # fmt: skip


@inner
def _move(words, first, out, to, count):
    for k in range(count):
        out[to + k] = words[first + k]


@inner
def _keep_beside(block, places, item, columns, k, end):
    """Keep the record and the item of edge k of a block as edge `end` of those kept."""
    own, out, to = columns.own, columns.beside, _places_from(columns, end)
    _move(block, places.ids + k * own.ids, out, to.ids, own.ids)
    _move(block, places.weights + k * own.weights, out, to.weights, own.weights)
    _move(block, places.times + k * own.times, out, to.times, own.times)
    if own.items:
        out[to.items] = np.uint32(item & _LOW)
        if own.items == 2:
            out[to.items + 1] = np.uint32(item >> 32)


@leaf
def filter_block(view, first_node, first_item, wanted, members, columns, to, row):
    """Keep the wanted columns of a graph block, with member sources only, from `to` on.

    view        BlockView of the block alone, in slot 0
    first_node  int    the first column that starts in the block
    first_item  int    of the block's first edge, if items are kept; `wanted.shifts` are added
    row         int    of the block, in the fragments

    All edges of the block have room.  Returns where the next column would begin.
    """
    block, ids, words, sources = view.words, view.sources, members.words, columns.sources
    begin, beside = 8 * edges_start(np.int64(block[NUM_NODES])), columns.beside.size > 0
    places = record_places(view, 0, np.int64(0), _NO_ITEMS)
    for column in range(first_node - 1, first_node + np.int64(block[NUM_NODES])):
        if column < wanted.low or column >= wanted.high:
            continue
        if wanted.take.size and not wanted.take[column - wanted.low]:
            continue
        if column < first_node:
            skip, count = np.int64(0), np.int64(block[NUM_CARRIED])
        else:
            offset = HEADER_WORDS + column - first_node
            skip = np.int64(block[offset])
            count = np.int64(block[offset + 1]) - skip
        node = np.int64(wanted.nodes[column - wanted.low]) if wanted.nodes.size else column
        item = np.int64(first_item)
        if wanted.shifts.size:
            item += wanted.shifts[column - wanted.low]
        rank, last = rank_of(words, node) - members.base, np.uint64(to)
        bit = begin + skip * ids.bits
        # the loop is here: a call for each column, with all these arrays, takes as long as it does
        for k in range(skip, skip + count):
            source = id_at(ids, bit)
            bit += ids.bits
            sources[last] = source
            if beside:
                _keep_beside(block, places, item + k, columns, k, np.int64(last))
            last += _is_member(words, source)
        end = np.int64(last)
        if column >= first_node:
            columns.starts[rank], columns.degrees[rank] = to, end - to
        elif count:
            fragment = columns.fragments[row]
            fragment[0], fragment[1], fragment[2] = rank, to, end - to
        to = end
    return to


@leaf
def join_fragments(columns):
    """Join columns that go on in further blocks; fragments are in the order of blocks."""
    fragments, sources, own = columns.fragments, columns.sources, columns.own
    for row in range(fragments.shape[0]):
        rank, at, count = fragments[row, 0], fragments[row, 1], fragments[row, 2]
        if rank < 0:
            continue
        end = columns.starts[rank] + np.int64(columns.degrees[rank])
        for k in range(count):
            sources[end + k] = sources[at + k]
        if columns.beside.size:
            words, first, to = columns.beside, _places_from(columns, at), _places_from(columns, end)
            _move(words, first.ids, words, to.ids, count * own.ids)
            _move(words, first.weights, words, to.weights, count * own.weights)
            _move(words, first.times, words, to.times, count * own.times)
            _move(words, first.items, words, to.items, count * own.items)
        columns.degrees[rank] += count


@leaf
def add_first_edges(offsets, first_node, first_edge, nodes, bounds, out):
    """out[i] += the first edge of the column nodes[i], of those that start in one block.

    offsets     uint32 (columns + 1,) of the block
    first_node  int   its first column
    first_edge  int   edges in the blocks before it
    nodes       ascending from bounds[g] to bounds[g + 1], for each g
    """
    stop_node = first_node + offsets.size - 1
    for g in range(bounds.size - 1):
        low, stop = np.int64(bounds[g]), np.int64(bounds[g + 1])
        low = first_above(nodes, low, stop, first_node - 1)
        while low < stop and np.int64(nodes[low]) < stop_node:
            out[low] += first_edge + np.int64(offsets[np.int64(nodes[low]) - first_node])
            low += 1


@leaf
def address_group(wanted, in_order, members, layout, shard, places, out):
    """out[rank] = arena byte offset of rows of an array that lie in the arena.

    in_order   wanted.nodes holds the store id of the first row alone, the others follow
    layout     RowLayout
    places     int64 (shards,)   where byte 0 of shard `shard`, `shard` + 1, ... would lie
    out        uint64 (members of the type,)
    """
    for row in range(wanted.low, wanted.high):
        i = row - wanted.low
        if wanted.take.size and not wanted.take[i]:
            continue
        node = np.int64(wanted.nodes[0]) + i if in_order else np.int64(wanted.nodes[i])
        block = row // layout.rows_per_block
        number = block // layout.blocks_per_shard
        offset = (block - number * layout.blocks_per_shard) * layout.block_bytes
        offset += (row - block * layout.rows_per_block) * layout.row_bytes
        out[rank_of(members.words, node) - members.base] = places[number - shard] + offset


@inner
def _is_of_type(members, node):
    return members.first <= np.int64(node) < members.first + members.num_nodes


@leaf
def address_members(members, nodes, addresses, out):
    """out[i] = addresses[rank of node i], or NO_ROW for a node of another type; uint64."""
    words = members.words
    for start in range(0, nodes.size, GROUP):
        stop = min(start + GROUP, nodes.size)
        for i in range(start, stop):
            prefetch(words, _word_of(nodes[i]))
        for i in range(start, stop):
            out[i] = NO_ROW
            if _is_of_type(members, nodes[i]):
                rank = rank_of(words, nodes[i]) - members.base
                out[i] = rank
                prefetch(addresses, rank)
        for i in range(start, stop):
            if out[i] != NO_ROW:
                out[i] = addresses[np.int64(out[i])]


@leaf
def member_degrees(members, degrees, column):
    """Write degrees into the column's counts; 0 for a node of another type."""
    for i in range(column.nodes.size):
        column.counts[i] = 0
        if _is_of_type(members, column.nodes[i]):
            rank = rank_of(members.words, column.nodes[i]) - members.base
            column.counts[i] = degrees[rank]


def draw_members(members: Members, columns: MemberColumns, column: Column, draws: Draws) -> None:
    """Sampled sources and edges of a frontier, all of them members; see `sample.draw_columns`.

    A column's picks depend on (key, node) and its members alone.
    """
    draw, room = draw_rule(column.rule, _draw_uniform, _draw_ranked)
    draw(members, columns, column, draws, room)


@leaf
def _draw_uniform(members, columns, column, draws, room):
    for start in range(0, column.nodes.size, GROUP):
        count = min(GROUP, column.nodes.size - start)
        _pick_group(members, columns, column, start, count, draws, room)
        fetch_group(
            view_ids(columns.sources), columns.beside, columns.own, count, draws, room.table
        )


@inner
def _pick_group(members, columns, column, start, count, draws, room):
    nodes, table = column.nodes, room.table
    for i in range(start, start + count):
        prefetch(members.words, _word_of(nodes[i]))
    for g in range(count):
        table[FIRST, g] = -1
        if _is_of_type(members, nodes[start + g]):
            rank = rank_of(members.words, nodes[start + g]) - members.base
            table[FIRST, g] = rank
            prefetch(columns.starts, rank)
            prefetch(columns.degrees, rank)
    for g in range(count):
        rank = table[FIRST, g]
        table[FOUND, g] = 0
        if rank < 0:
            column.counts[start + g] = 0
            continue
        ids, begin = view_ids(columns.sources), columns.starts[rank]
        table[FIRST, g] = begin * ids.bits
        if draws.edges.size:
            note_places(table, g, _places_from(columns, begin))
        pick_column(
            ids, columns.beside, columns.own, column, start + g, np.int64(columns.degrees[rank]),
            draws, g, room,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _draw_ranked(members, columns, column, draws, room):
    heap, positions = room.heap, room.heap.positions
    for i in range(column.nodes.size):
        found = _rank_column(members, columns, column, i, heap)
        if found > 0:
            sort_first(positions, found)
            _put_column(members, columns, column, i, positions[:found], draws)


@inner
def _rank_column(members, columns, column, i, heap):
    """Edges of least rank into the heap; how many."""
    column.counts[i] = 0
    if column.rule.fanout == 0 or not _is_of_type(members, column.nodes[i]):
        return np.int64(0)
    rank = rank_of(members.words, column.nodes[i]) - members.base
    degree = np.int64(columns.degrees[rank])
    if column.rule.kind == BY_SOURCE and degree <= column.rule.fanout:
        return take_all(degree, heap)
    ids, at = view_ids(columns.sources), columns.starts[rank]
    if column.rule.kind == BY_SOURCE:
        at *= ids.bits
    else:
        at = _places_from(columns, at).weights
    return rank_edges(
        ids, columns.weights, columns.starts, at, 0, degree, column, i, heap, np.int64(0)
    )


@inner
def _put_column(members, columns, column, i, positions, draws):
    begin = columns.starts[rank_of(members.words, column.nodes[i]) - members.base]
    ids, places = view_ids(columns.sources), _places_from(columns, begin)
    put_picks(
        ids, columns.beside, columns.own, begin * ids.bits, places, column, i, positions, draws
    )
