"""Edges of least rank: by weight, up to a time, or by their sources.

BY_WEIGHT      The rank is -log(u) / weight, u drawn by (key, node, position): edges of weight 0
               are never picked.  Source: Efraimidis and Spirakis, IPL 97(5), 2006.
               With replacement an edge is met again and again: the ranks of its meetings are the
               sums of such numbers, those of a Poisson process of its weight's rate.  The edges of
               the least ranks of all are independent, each picked in proportion to its weight
               (superposition and marking: Kingman, Poisson Processes, 1993, chapters 2 and 5).
UNTIL, LATEST  Edges no later than the limit of the node's tree are picked: those with the least
               hashes of (key, tree, node, position), or the latest, of equal ones the last.
BY_SOURCE      The rank is a hash of (key, source): columns with one key agree on their sources.
               Of parallel edges, which are neighbors in a column, the first has that rank, each
               other one of (key, node, position): so all edges are picked equally often.  Source:
               Balin and Catalyurek, Layer-Neighbor Sampling, NeurIPS 2023, with a fixed fanout.

Picks are in the order of their positions.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import inner, leaf
from blockstore.kernels.packed import FEW_LINES, LINE_BITS, ask_for_id, id_at
from blockstore.kernels.picks import (
    BY_SOURCE,
    BY_WEIGHT,
    GROUP,
    GROUP_ROWS,
    LATEST,
    UNIFORM,
    DrawWorkspace,
    scratch_size,
)
from blockstore.kernels.random import draw_hash, mix, node_key
from blockstore.kernels.records import put_record

MEETING_BIT = 44  # of a draw's number: positions lie below, and how often an edge was met above


class Heap(NamedTuple):
    """The least ranks so far, the greatest first."""

    ranks: NDArray[np.int64]  # (most,)
    positions: NDArray[np.int64]  # (most,) that each belongs to


class RankWorkspace(NamedTuple):
    """Working memory of a ranked draw."""

    table: NDArray[np.int64]  # (GROUP_ROWS, GROUP)
    heap: Heap


def draw_rule(rule, uniform, ranked):
    """The one of two kernels that draws by a rule, and its working memory."""
    table = np.empty((GROUP_ROWS, GROUP), np.int64)
    if rule.kind == UNIFORM:
        return uniform, DrawWorkspace(table, np.full(scratch_size(rule.fanout), -1, np.int64))
    maximum = max(1, rule.fanout)
    return ranked, RankWorkspace(
        table, Heap(np.empty(maximum, np.int64), np.empty(maximum, np.int64))
    )


@inner
def _leaves_before(heap, a, b, last):
    if heap.ranks[a] == heap.ranks[b]:
        smaller = heap.positions[a] < heap.positions[b]
        return smaller if last else not smaller
    return heap.ranks[a] > heap.ranks[b]


@inner
def _swap(values, a, b):
    values[a], values[b] = values[b], values[a]


@leaf
def push(heap, count, maximum, rank, position, last):
    """Keep the `maximum` least ranks; of equal ones the first positions, or the last.

    Returns the number of entries, int64.
    """
    ranks, positions = heap.ranks, heap.positions
    if count < maximum:
        i = count
        ranks[i], positions[i] = rank, position
        while i > 0 and _leaves_before(heap, i, (i - 1) // 2, last):
            up = (i - 1) // 2
            _swap(ranks, i, up)
            _swap(positions, i, up)
            i = up
        return count + 1
    if rank > ranks[0]:
        return count
    if rank == ranks[0] and (position < positions[0] if last else position > positions[0]):
        return count
    ranks[0], positions[0] = rank, position
    i = np.int64(0)
    while 2 * i + 1 < count:
        child = 2 * i + 1
        if child + 1 < count and _leaves_before(heap, child + 1, child, last):
            child += 1
        if not _leaves_before(heap, child, i, last):
            break
        _swap(ranks, i, child)
        _swap(positions, i, child)
        i = child
    return count


@inner
def weight_key(nkey, draw, weight):
    """-log(u) / weight, u uniform in (0, 1); infinite for weight 0."""
    if not weight > 0:
        return np.inf
    u = (np.float64(draw_hash(nkey, np.uint64(draw)) >> np.uint64(11)) + 0.5) * 2.0**-53
    return -math.log(u) / np.float64(weight)


@inner
def _meet_again(nkey, position, weight, mark, rule, heap, found):
    """Take the edge at a position as often as it is met early enough, the first time at `mark`."""
    for meeting in range(1, rule.fanout + 1):
        rank = np.float64(mark + 0.0).view(np.int64)
        if found == rule.fanout and rank > heap.ranks[0]:
            break
        found = push(heap, found, rule.fanout, rank, position, False)
        draw = np.uint64(position) + (np.uint64(meeting) << np.uint64(MEETING_BIT))
        mark += weight_key(nkey, draw, weight)
    return found


@inner
def _columns_key(column, i):
    """Key of a node's draws; if nodes are in trees, a different one in each tree."""
    rule = column.rule
    key = rule.key
    if rule.trees.size:
        key ^= mix(rule.roots[rule.trees[i]])
    return node_key(key, column.nodes[i])


@inner
def _source_rank(key, source):
    return np.int64(node_key(key, source) >> np.uint64(1))


@inner
def _position_rank(nkey, position):
    return np.int64(draw_hash(nkey, np.uint64(position)) >> np.uint64(1))


@inner
def _source_rank_after(before, source, key, nkey, position):
    """The rank by source of an edge, where the edge before it is from `before`."""
    return _position_rank(nkey, position) if source == before else _source_rank(key, source)


@inner
def rank_seam(source, before, position, column, i, heap, found):
    """Take the edge of node i that `rank_edges` left out; returns how many the heap has then."""
    rule, nkey = column.rule, _columns_key(column, i)
    rank = _source_rank_after(before, source, rule.key, nkey, position)
    return push(heap, found, rule.fanout, rank, position, False)


@inner
def take_all(degree, heap):
    """Take a whole column, whose edges all have room in the heap; returns how many."""
    for k in range(degree):
        heap.positions[k] = k
    return degree


@inner
def ask_for_ranks(ids, floats, longs, at, count, rule):
    """Prefetch what `rank_edges` reads first; the processor asks for the rest by itself."""
    if rule.kind == BY_SOURCE:
        for bit in range(at, at + min(count * ids.bits, FEW_LINES * LINE_BITS), LINE_BITS):
            ask_for_id(ids, bit)
    elif rule.kind == BY_WEIGHT:
        _ask_for(floats, at, count)
    else:
        _ask_for(longs, at, count)


@inner
def _ask_for(values, at, count):
    per_line = 64 // values.itemsize
    for edge in range(at, at + min(count, FEW_LINES * per_line), per_line):
        prefetch(values, edge)


@inner
def rank_edges(ids, floats, longs, at, first, count, column, i, heap, found):
    """Take edges of node i into its heap; returns how many it has then, int64.

    ids, floats, longs   sources, weights and times; the rule tells which is read, from `at` on: the
                         bit of the first source, else an index
    first, count         positions of these edges in the column

    By source, the first edge of those that are not the column's first is left out: whether it is
    parallel to the one before it cannot be seen here.
    """
    rule, nkey = column.rule, _columns_key(column, i)
    if rule.kind == BY_SOURCE:
        if count == 0:
            return found
        source = id_at(ids, at)
        if first == 0:
            found = push(heap, found, rule.fanout, _source_rank(rule.key, source), 0, False)
        for k in range(1, count):
            before, source = source, id_at(ids, at + k * ids.bits)
            rank = _source_rank_after(before, source, rule.key, nkey, first + k)
            if found < rule.fanout or rank <= heap.ranks[0]:  # of equal ones the first position
                found = push(heap, found, rule.fanout, rank, first + k, False)
        return found
    if rule.kind == BY_WEIGHT:
        for k in range(count):
            mark = weight_key(nkey, first + k, floats[at + k])
            if mark < np.inf and rule.replace:
                found = _meet_again(nkey, first + k, floats[at + k], mark, rule, heap, found)
            elif mark < np.inf:  # positive floats are in the order of their bits; + 0.0: not -0.0
                rank = np.float64(mark + 0.0).view(np.int64)
                found = push(heap, found, rule.fanout, rank, first + k, False)
        return found
    limit = rule.limits[rule.trees[i]]
    for k in range(count):
        time = longs[at + k]
        if time <= limit:
            rank = ~time if rule.kind == LATEST else _position_rank(nkey, first + k)
            found = push(heap, found, rule.fanout, rank, first + k, True)
    return found


@leaf
def sort_first(values, count):
    """Sort the first entries, by Shell's method with Knuth's gaps.

    numba's own sort allocates a stack each time, which takes longer than to sort ten numbers.
    """
    gap = 1
    while 3 * gap + 1 < count:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(gap, count):
            value, to = values[k], k
            while to >= gap and values[to - gap] > value:
                values[to] = values[to - gap]
                to -= gap
            values[to] = value
        gap //= 3


@inner
def put_picks(ids, words, own, first, places, column, i, positions, draws):
    """Write sources and records at the positions picked of node i, ascending.

    first                bit of its first source
    words, own, places   as of `put_record`
    """
    column.counts[i] = positions.size
    at, to = draws.starts[i], draws.edge_starts[i]
    for k in range(positions.size):
        draws.sources[at + k] = id_at(ids, first + positions[k] * ids.bits)
        if draws.edges.size:
            put_record(words, own, places, positions[k], draws.record, draws.edges, to + k)
