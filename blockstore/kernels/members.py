"""Subgraphs over some of the nodes: who is a member, members' columns, and draws from these.

Arguments that the kernels share:

words     uint64 (2 * (nodes // 64 + 1),)   pairs: a bit for each of 64 nodes, 1 for members; how
                                            many members come before them (a member's *rank*)
base      int      rank of the first member of a type: its columns and rows count from there
starts    int64    of each member of a type, where its column lies in `sources`
degrees   uint32   edges in the column
sources   id_dtype columns, sources that are members alone; `edge_ids` and `weights` beside them, of
                   size 0 where they are not wanted
"""

import numpy as np

from blockstore.kernels.columns import (
    EDGES_START,
    HEADER_WORDS,
    NUM_CARRIED,
    NUM_EDGES,
    NUM_NODES,
)
from blockstore.kernels.heap import push
from blockstore.kernels.intrinsics import popcount, prefetch
from blockstore.kernels.jit import leaf, njit
from blockstore.kernels.picks import pick_positions, scratch_size
from blockstore.kernels.random import node_key
from blockstore.kernels.rows import NO_ROW
from blockstore.kernels.weighted import weight_key

_GROUP = 64  # columns whose memory is asked for before any is used
_ONE, _ALL = np.uint64(1), np.uint64(2**64 - 1)


def words_size(num_nodes: int) -> int:
    """Items of `words`."""
    return 2 * (num_nodes // 64 + 1)


@leaf
def add_range(words, first, stop):
    """Nodes [first, stop) are members."""
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


@leaf
def _is_member(words, node):
    return (words[2 * (np.int64(node) >> 6)] >> (np.uint64(node) & np.uint64(63))) & _ONE


@leaf
def rank_of(words, node):
    """Members before a node."""
    word = 2 * (np.int64(node) >> 6)
    below = words[word] & ((_ONE << (np.uint64(node) & np.uint64(63))) - _ONE)
    return np.int64(words[word + 1]) + popcount(below)


@leaf
def take_new(words, nodes, take):
    """take[i] = 1 (uint8) where nodes[i] was no member, and makes it one; else 0."""
    for i in range(nodes.size):
        word, bit = 2 * (np.int64(nodes[i]) >> 6), _ONE << (np.uint64(nodes[i]) & np.uint64(63))
        take[i] = (words[word] & bit) == 0
        words[word] |= bit


@leaf
def _copy_members(
    words, ids, edge_ids, floats, at, edge_at, weight_at, count, sources, out_ids, out_weights, to
):
    """Edges of a column whose source is a member, from `to` on; returns where they end."""
    for k in range(count):
        source = ids[at + k]
        sources[to] = source
        if out_ids.size:
            out_ids[to] = edge_ids[edge_at + k]
        if out_weights.size:
            out_weights[to] = floats[weight_at + k]
        to += np.int64(_is_member(words, source))
    return to


@leaf
def filter_block(
    block, ids, edge_ids, floats, edge_bytes, first_node, low, high, nodes, take, words, base,
    starts, degrees, sources, out_ids, out_weights, to, fragments, row,
):  # fmt: skip
    """Columns [low, high) of a graph block without sources that are no members, from `to` on.

    block       uint32 view of the block; ids, edge_ids, floats: its other views
    edge_bytes  of an edge id in the block, 0 where it has none
    first_node  int    of the block: the first column that starts here
    nodes       id_dtype (high - low,)   store id of each column; empty: columns are store ids
    take        uint8 (high - low,)      0: not this column; empty: all
    fragments   int64 (blocks, 3)        out, at `row`: rank of the column that the block carries
                                         edges of, where they begin and how many; untouched
                                         where it carries none that are wanted

    All edges of the block have room.  Returns where the next column would begin.
    """
    id_bytes = ids.itemsize
    begin = np.int64(block[EDGES_START])
    num_edges, carried = np.int64(block[NUM_EDGES]), np.int64(block[NUM_CARRIED])
    at = ((begin + num_edges) * id_bytes + 7) // 8 * 8
    edge_at, weight_at = np.int64(0), np.int64(0)
    if edge_bytes:
        edge_at = at // edge_bytes
        at = (at + num_edges * edge_bytes + 7) // 8 * 8
    weight_at = at // 4
    for column in range(first_node - 1, first_node + np.int64(block[NUM_NODES])):
        if column < low or column >= high:
            continue
        if take.size and not take[column - low]:
            continue
        if column < first_node:
            skip, count = np.int64(0), carried
        else:
            offset = HEADER_WORDS + column - first_node
            skip = np.int64(block[offset]) - begin
            count = np.int64(block[offset + 1]) - begin - skip
        node = np.int64(nodes[column - low]) if nodes.size else column
        rank = rank_of(words, node) - base
        end = _copy_members(
            words, ids, edge_ids, floats, begin + skip, edge_at + skip, weight_at + skip, count,
            sources, out_ids, out_weights, to,
        )  # fmt: skip
        if column < first_node:
            if carried:
                fragments[row, 0], fragments[row, 1], fragments[row, 2] = rank, to, end - to
        else:
            starts[rank], degrees[rank] = to, end - to
        to = end
    return to


@leaf
def join_fragments(fragments, starts, degrees, sources, edge_ids, weights):
    """Columns that go on in further blocks, in one piece; `fragments` in the order of blocks."""
    for row in range(fragments.shape[0]):
        rank, at = fragments[row, 0], fragments[row, 1]
        if rank < 0:
            continue
        to = starts[rank] + np.int64(degrees[rank])
        for k in range(fragments[row, 2]):
            sources[to + k] = sources[at + k]
            if edge_ids.size:
                edge_ids[to + k] = edge_ids[at + k]
            if weights.size:
                weights[to + k] = weights[at + k]
        degrees[rank] += fragments[row, 2]


@leaf
def address_group(
    first, stop, nodes, take, in_order, words, base, rows_per_block, row_bytes, slot_bytes,
    per_shard, shard, places, out,
):  # fmt: skip
    """out[rank] = arena byte offset of the rows [first, stop) of an array that lie in the arena.

    nodes      id_dtype (stop - first,)   store id of each row; where `in_order`, of the first one
    take       uint8 (stop - first,)      0: not this row; empty: all
    per_shard  blocks of a shard
    places     int64 (shards,)            where byte 0 of shard `shard`, `shard` + 1, ... would lie
    out        uint64 (members of the type,)
    """
    for row in range(first, stop):
        i = row - first
        if take.size and not take[i]:
            continue
        node = np.int64(nodes[0]) + i if in_order else np.int64(nodes[i])
        block = row // rows_per_block
        number = block // per_shard
        offset = (block - number * per_shard) * slot_bytes
        offset += (row - block * rows_per_block) * row_bytes
        out[rank_of(words, node) - base] = places[number - shard] + offset


@leaf
def address_members(words, nodes, num, first, num_nodes, base, addresses, out):
    """out[i] = addresses[rank of node i], or NO_ROW for a node of another type; uint64."""
    for start in range(0, num, _GROUP):
        count = min(_GROUP, num - start)
        for i in range(start, start + count):
            prefetch(words, 2 * (np.int64(nodes[i]) >> 6))
        for i in range(start, start + count):
            out[i] = NO_ROW
            if first <= np.int64(nodes[i]) < first + num_nodes:
                rank = rank_of(words, nodes[i]) - base
                out[i] = rank
                prefetch(addresses, rank)
        for i in range(start, start + count):
            if out[i] != NO_ROW:
                out[i] = addresses[np.int64(out[i])]


@leaf
def member_degrees(words, nodes, num, first, num_nodes, base, degrees, counts):
    """counts[i] = edges of each node's column, uint32; 0 for a node of another type."""
    for i in range(num):
        counts[i] = 0
        if first <= np.int64(nodes[i]) < first + num_nodes:
            counts[i] = degrees[rank_of(words, nodes[i]) - base]


@njit(nogil=True, cache=True)
def draw_members(
    words, base, first, num_nodes, starts, degrees, sources, edge_ids, nodes, num, fanout, replace,
    key, draw_starts, draws, edge_draws, counts,
):  # fmt: skip
    """draws[draw_starts[i] : + counts[i]] = sampled sources of node i, all of them members.

    nodes       id_dtype (>= num,)    the frontier: members
    fanout      neighbors wanted, negative: all
    edge_draws  the same picks' edge ids; of size 0: not wanted
    counts      uint32 (>= num,)      out: min(degree, fanout); with replacement fanout or 0

    A column's picks depend on (key, node) and its members alone.
    """
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    places = np.empty(_GROUP, np.int64)
    for start in range(0, num, _GROUP):
        _draw_group(
            words, base, first, num_nodes, starts, degrees, sources, edge_ids, nodes, start,
            min(_GROUP, num - start), fanout, replace, key, draw_starts, draws, edge_draws, counts,
            scratch, places,
        )  # fmt: skip


@leaf
def _draw_group(
    words, base, first, num_nodes, starts, degrees, sources, edge_ids, nodes, start, count, fanout,
    replace, key, draw_starts, draws, edge_draws, counts, scratch, places,
):  # fmt: skip
    for i in range(start, start + count):
        prefetch(words, 2 * (np.int64(nodes[i]) >> 6))
    for i in range(start, start + count):
        counts[i], places[i - start] = 0, -1
        if first <= np.int64(nodes[i]) < first + num_nodes:
            rank = rank_of(words, nodes[i]) - base
            places[i - start] = rank
            prefetch(starts, rank)
            prefetch(degrees, rank)
    for i in range(start, start + count):
        rank = places[i - start]
        if rank < 0:
            continue
        degree = np.int64(degrees[rank])
        places[i - start] = starts[rank]
        whole = fanout < 0 or (degree <= fanout and not replace)
        counts[i] = degree if whole or degree == 0 else np.int64(fanout)
        at = draw_starts[i]
        if whole:
            for k in range(degree):
                draws[at + k] = k
        elif degree:
            pick_positions(draws, at, degree, fanout, replace, nodes[i], key, scratch)
        for k in range(np.int64(counts[i])):
            prefetch(sources, starts[rank] + np.int64(draws[at + k]))
    for i in range(start, start + count):
        at, place = draw_starts[i], places[i - start]
        for k in range(np.int64(counts[i])):
            edge = place + np.int64(draws[at + k])
            if edge_draws.size:
                edge_draws[at + k] = edge_ids[edge]
            draws[at + k] = sources[edge]


@njit(nogil=True, cache=True)
def draw_weighted_members(
    words, base, first, num_nodes, starts, degrees, sources, edge_ids, weights, nodes, num, fanout,
    key, draw_starts, draws, edge_draws, counts,
):  # fmt: skip
    """The same by weights, without replacement, as `kernels.weighted` draws."""
    keys, places = np.empty(max(1, fanout)), np.empty(max(1, fanout), np.int64)
    for i in range(num):
        counts[i] = 0
        if not first <= np.int64(nodes[i]) < first + num_nodes:
            continue
        rank = rank_of(words, nodes[i]) - base
        begin, nkey, found = starts[rank], node_key(key, nodes[i]), np.int64(0)
        for k in range(np.int64(degrees[rank])):
            mark = weight_key(nkey, k, weights[begin + k])
            if mark < np.inf:
                found = push(keys, places, found, fanout, mark, k, False)
        places[:found].sort()
        counts[i] = found
        at = draw_starts[i]
        for k in range(found):
            if edge_draws.size:
                edge_draws[at + k] = edge_ids[begin + places[k]]
            draws[at + k] = sources[begin + places[k]]
