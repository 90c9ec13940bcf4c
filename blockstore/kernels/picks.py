"""Picks edges of a column at random: positions, with replacement or without."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import mulhi
from blockstore.kernels.jit import inner, leaf
from blockstore.kernels.packed import ask_for_picks, id_at
from blockstore.kernels.random import draw_hash, mix, node_key
from blockstore.kernels.records import EdgeRecord, RecordPlaces, ask_for_records, put_record

UNIFORM, BY_WEIGHT, UNTIL, LATEST, BY_SOURCE = range(5)  # kinds of a rule: all but one rank edges
_LINEAR = 64  # fanout up to which a pick is looked for among the others one by one


class Rule(NamedTuple):
    """How many of a column's edges are picked, and which.

    UNIFORM draws positions.  The other kinds look at every edge and keep those of least rank, see
    `kernels.ranked`; their fanout is 0 or more.
    """

    fanout: int  # -1: all edges
    replace: bool  # of draws uniform or by weight
    kind: int
    key: np.uint64  # of the hop and relation
    trees: NDArray[np.uint32]  # tree of each node if edges are picked up to a time, else empty
    limits: NDArray[np.int64]  # latest time of each tree
    roots: NDArray[np.uint64]  # number of each tree, unique in the epoch


class Column(NamedTuple):
    """The columns of a frontier's nodes in one relation."""

    nodes: NDArray[Any]  # id_dtype: store ids
    relation: int
    counts: NDArray[np.uint32]  # out: edges picked of each
    rule: Rule


class Draws(NamedTuple):
    """Destination of a frontier's picks: those of node i from starts[i] and edge_starts[i] on."""

    starts: NDArray[np.int64]
    sources: NDArray[Any]  # id_dtype
    edge_starts: NDArray[np.int64]
    edges: NDArray[np.uint32]  # (edges, words) records of the edges; size 0: not wanted
    record: EdgeRecord  # what these are
    first_item: NDArray[np.int64]  # (num_blocks + 1,) of each block's first edge; size 0: no items


# What is kept of each column of a group whose memory is asked for before any is used: the first bit
# of its sources, where the sections of its records begin, where picks go in both, how many.
FIRST, IDS_AT, WEIGHTS_AT, TIMES_AT, ITEMS_AT, AT, EDGE_AT, FOUND, WHOLE, GROUP_ROWS = range(10)
GROUP = 64  # columns


class DrawWorkspace(NamedTuple):
    """Working memory of a uniform draw."""

    table: NDArray[np.int64]  # (GROUP_ROWS, GROUP)
    scratch: NDArray[np.int64]  # (scratch_size(fanout),)


@leaf
def scratch_size(fanout):
    """Slots of the set of picks that `pick_positions` needs, int64 (-1 where empty)."""
    size = 1
    while fanout > _LINEAR and size < 2 * fanout:
        size *= 2
    return size


@inner
def _among(out, at, count, pick):
    """Whether `pick` is among out[at : at + count]."""
    for j in range(at, at + count):
        if np.uint64(out[j]) == pick:
            return True
    return False


@inner
def _remember(scratch, pick):
    """Put `pick` into the set `scratch`; whether it was there already."""
    mask = np.uint64(scratch.size - 1)
    slot = mix(pick) & mask
    while scratch[slot] >= 0:
        if np.uint64(scratch[slot]) == pick:
            return True
        slot = (slot + np.uint64(1)) & mask
    scratch[slot] = pick
    return False


@inner
def _pick_short(out, at, degree, fanout, nkey):
    """Floyd's picks of a column of 64 edges at most: a word of bits is the set, and no branch."""
    one, bits, place = np.uint64(1), np.uint64(0), np.uint64(at)
    for k in range(np.uint64(fanout)):
        last = np.uint64(degree - fanout) + np.uint64(k)
        pick = mulhi(draw_hash(nkey, k), last + one)
        taken = (bits >> pick) & one
        pick += taken * (last - pick)
        bits |= one << pick
        out[place + np.uint64(k)] = pick


@inner
def _pick_few(out, at, degree, fanout, nkey):
    """Floyd's picks, _LINEAR at most: a word of bits tells most of them from those before."""
    one, low = np.uint64(1), np.uint64(63)
    bits, place = np.uint64(0), np.uint64(at)
    for k in range(np.uint64(fanout)):
        last = np.uint64(degree - fanout) + np.uint64(k)
        pick = mulhi(draw_hash(nkey, k), last + one)
        if (bits >> (pick & low)) & one and _among(out, place, np.uint64(k), pick):
            pick = last
        bits |= one << (pick & low)
        out[place + np.uint64(k)] = pick


@inner
def _pick_many(out, at, degree, fanout, nkey, scratch):
    """Floyd's picks with a set of them."""
    place = np.uint64(at)
    scratch[:] = -1
    for k in range(np.uint64(fanout)):
        last = np.uint64(degree - fanout) + np.uint64(k)
        pick = mulhi(draw_hash(nkey, k), last + np.uint64(1))
        if _remember(scratch, pick):
            pick = last
            _remember(scratch, pick)
        out[place + np.uint64(k)] = pick


@leaf
def pick_positions(out, at, degree, fanout, replace, node, key, scratch):
    """out[at : at + fanout] = positions that a column's draws pick, by draw slot.

    out      any integers, wide enough for degree - 1
    degree   int64    more than fanout, or with replacement at least 1
    fanout   int64    0 or more
    scratch  int64 (scratch_size(fanout),)

    Without replacement by Floyd's method: draw k is uniform in [0, degree - fanout + k], and if
    it was picked before, that bound is picked.  Source: Bentley and Floyd, CACM 30(9), 1987.
    Draws are `draw_below(key, node, k, bound)`.
    """
    nkey = node_key(key, node)
    if replace:
        for k in range(np.uint64(fanout)):
            out[np.uint64(at) + np.uint64(k)] = mulhi(draw_hash(nkey, k), np.uint64(degree))
    elif degree <= 64:
        _pick_short(out, at, degree, fanout, nkey)
    elif scratch.size == 1:
        _pick_few(out, at, degree, fanout, nkey)
    else:
        _pick_many(out, at, degree, fanout, nkey, scratch)


@inner
def is_whole(degree, rule):
    """Whether the picks of a column are all its edges, in order."""
    return rule.fanout < 0 or (degree <= rule.fanout and not rule.replace)


@inner
def note_places(table, g, places):
    """Keep where the records of column g begin."""
    table[IDS_AT, g], table[WEIGHTS_AT, g] = places.ids, places.weights
    table[TIMES_AT, g], table[ITEMS_AT, g] = places.times, places.items


@inner
def _noted_places(table, g):
    return RecordPlaces(
        table[IDS_AT, g], table[WEIGHTS_AT, g], table[TIMES_AT, g], table[ITEMS_AT, g]
    )


@inner
def pick_column(ids, words, own, column, i, degree, draws, g, room):
    """Pick edges of node i, whose first edge column g of the table tells: positions, to the draws.

    ids          PackedIds: sources, of which FIRST tells the bit
    words, own   as of `put_record`
    """
    rule, table = column.rule, room.table
    whole = is_whole(degree, rule)
    found = degree if whole or degree == 0 else np.int64(rule.fanout)
    at = draws.starts[i]
    if not whole:
        pick_positions(
            draws.sources, at, degree, found, rule.replace, column.nodes[i], rule.key, room.scratch
        )
    column.counts[i] = found
    table[AT, g], table[FOUND, g], table[WHOLE, g] = at, found, whole
    if found:
        first = table[FIRST, g]
        ask_for_picks(ids.data, first, ids.bits, degree, draws.sources, at, found, whole)
    if draws.edges.size:
        table[EDGE_AT, g] = draws.edge_starts[i]
        if found:
            places = _noted_places(table, g)
            ask_for_records(
                words, own, places, draws.record, degree, draws.sources, at, found, whole
            )


@inner
def fetch_group(ids, words, own, count, draws, table):
    """Replace positions by the sources and records there, for the first columns of a group."""
    sources = draws.sources
    for g in range(count):
        first, at = table[FIRST, g], np.uint64(table[AT, g])
        found = np.uint64(table[FOUND, g])
        if draws.edges.size:
            _fetch_records(words, own, draws, table, g)
        if table[WHOLE, g]:
            for k in range(found):
                sources[at + k] = id_at(ids, first)
                first += ids.bits
        else:
            for k in range(at, at + found):
                sources[k] = id_at(ids, first + np.int64(sources[k]) * ids.bits)


@inner
def _fetch_records(words, own, draws, table, g):
    at, to, places = table[AT, g], table[EDGE_AT, g], _noted_places(table, g)
    for k in range(table[FOUND, g]):
        position = k if table[WHOLE, g] else np.int64(draws.sources[at + k])
        put_record(words, own, places, position, draws.record, draws.edges, to + k)
