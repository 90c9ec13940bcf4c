"""Add up rows of neighbors, column by column from graph blocks, or edge by edge."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.columns import (
    FIRST_NODE,
    HEADER_WORDS,
    LAST_DEGREE,
    NUM_CARRIED,
    NUM_EDGES,
    NUM_NODES,
    edges_start,
    packed_size,
    wide,
)
from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import inner, leaf, njit
from blockstore.kernels.packed import PackedIds
from preprocess.kernels.rowsum import MORE, NO_ROW, RowSources, sum_rows

CHUNK_EDGES = 128  # summed in registers, then added: errors grow with chunks, not with edges
HEAVY = 256  # edges of a node beyond which its sum is compensated for rounding errors
LINE_ITEMS = 16  # float32 in a cache line
_AHEAD = 6  # edges to prefetch ahead in the loops below


class RawBlocks(NamedTuple):
    """Consecutive whole graph blocks, already checked."""

    words: NDArray[np.uint32]
    sources: PackedIds  # the same bytes
    weights: NDArray[np.float32] | None  # the same bytes again, or None: edges weigh 1
    block_bytes: int
    edge_id_bytes: int  # bytes of an edge's id, which precede weights; 0: none


class Product(NamedTuple):
    """out[v] = scale * factor[v] * (sum of the rows of v's sources [+ rows[v]]) + share * x[v]."""

    factor: NDArray[np.float32]  # (nodes,)
    scale: np.float32
    share: np.float32  # 0: `x` is not read
    x: NDArray[np.float32]  # (nodes * width,)
    loops: bool  # whether a node is its own source, too


@inner
def sum_edges(table, edges, low, high, weight_at, out, at, own, times):
    """out[at : at + width] = times * (row `own`, if there is one, + the rows of all edges).

    Calls `sum_rows` in chunks.
    """
    begin, one = low, np.float32(1)
    while high - begin > CHUNK_EDGES:
        stop = begin + CHUNK_EDGES
        sum_rows(table, edges, begin, stop, weight_at, out, at, own, one)
        weight_at += CHUNK_EDGES
        begin, own = stop, np.int64(MORE)
    sum_rows(table, edges, begin, high, weight_at, out, at, own, times)


@inner
def _add_share(node, width, product, out):
    for c in range(node * width, (node + 1) * width):
        out[c] += product.share * product.x[c]


@leaf
def multiply_blocks(blocks, table, product, out, carry_slots, carry, part, parts):
    """Compute a product for the columns that start in some blocks.

    blocks        RawBlocks
    table         RowTable                  rows of the nodes; row 0: of store id `first`
    product       Product
    out           float32 (nodes * width,)  must not be the array of `table`
    carry_slots   int64 (blocks,)           slot for the sum of a block's carried edges, or -1
    carry         float32 (slots * width,)  out: these sums
    part, parts   int64                     process part `part` of `parts` of each block's columns

    A column that continues in later blocks is not finished: its row is the sum of its edges here.
    """
    words, width, sources = blocks.words, table.width, blocks.sources
    for block in range(carry_slots.size):
        word = block * (blocks.block_bytes // 4)
        node = wide(words, word + FIRST_NODE) - table.first
        last_degree = wide(words, word + LAST_DEGREE)
        count, num_edges = np.int64(words[word + NUM_NODES]), np.int64(words[word + NUM_EDGES])
        start = edges_start(count)
        zero = np.int64(8 * (block * blocks.block_bytes + start))  # the block's first edge
        edges = RowSources(
            sources.data, sources.bits, sources.base, zero, blocks.weights, num_edges
        )
        weight_at = np.int64(0)
        if blocks.weights is not None:
            over = start + packed_size(num_edges, sources.bits)
            over += (num_edges * blocks.edge_id_bytes + 7) & -8
            weight_at = word + over // 4
        if part == 0 and carry_slots[block] >= 0:
            at, high = carry_slots[block] * width, np.int64(words[word + NUM_CARRIED])
            sum_edges(table, edges, 0, high, weight_at, carry, at, np.int64(-1), np.float32(1))
        begin, end = count * part // parts, count * (part + 1) // parts
        high = np.int64(words[word + HEADER_WORDS + begin])
        for i in range(begin, end):
            low, high = high, np.int64(words[word + HEADER_WORDS + i + 1])
            own = node + i if product.loops else np.int64(NO_ROW)
            whole = i < count - 1 or last_degree == high - low
            times = product.scale * product.factor[node + i] if whole else np.float32(1)
            sum_edges(table, edges, low, high, weight_at + low, out, (node + i) * width, own, times)
            if whole and product.share != 0:
                _add_share(node + i, width, product, out)


@leaf
def finish_carried(nodes, carry, width, product, out):
    """Add the sums of carried edges to their columns, in order, and finish these columns.

    nodes   int64 (slots,)   ascending: the column of each slot of `carry`

    Other parameters are those of `multiply_blocks`.
    """
    for slot in range(nodes.size):
        node, at = nodes[slot], nodes[slot] * width
        for c in range(width):
            out[at + c] += carry[slot * width + c]
        if slot + 1 == nodes.size or nodes[slot + 1] != node:
            times = product.scale * product.factor[node]
            for c in range(at, at + width):
                out[c] *= times
            if product.share != 0:
                _add_share(node, width, product, out)


@njit(nogil=True, cache=True)
def add_weights(ids, first, weights, totals):
    """totals[ids[e] - first] += weights[e]; weights float32, or None for 1; totals float64."""
    for e in range(ids.size):
        if e + _AHEAD < ids.size:
            prefetch(totals, np.int64(ids[e + _AHEAD]) - first)
        totals[np.int64(ids[e]) - first] += 1.0 if weights is None else np.float64(weights[e])


@njit(nogil=True, cache=True)
def take_rows(rows, width, scale, places, out):
    """out[i] = rows[places[i]] / scale[places[i]], first columns only.

    rows     float32 (nodes * width,)
    scale    float32 (nodes,)              or (0,): rows are not scaled
    places   uint32 or uint64 (count,)
    out      float32 (count, columns)      columns <= width
    """
    ahead = 8
    for i in range(places.size):
        if i + ahead < places.size:
            near = np.int64(places[i + ahead]) * width
            for item in range(near, near + width, LINE_ITEMS):
                prefetch(rows, item)
        place = np.int64(places[i])
        for c in range(out.shape[1]):
            value = rows[place * width + c]
            out[i, c] = value / scale[place] if scale.size else value


@njit(nogil=True, cache=True)
def add_rows(greatest, rows, first_row, origins, targets, low, high, sums):
    """sums[target] += row of the origin, edge by edge, in columns [low, high).

    greatest   take the maximum instead of the sum; NaN wins
    rows       float32 or float64 (some, width)   those of nodes from `first_row` on
    origins    uint32 or uint64 (edges,)          nodes whose rows are in `rows`
    targets    uint32 or uint64 (>= edges,)       rows of `sums`
    sums       as `rows` (nodes, width)           in and out, C-contiguous
    """
    width, flat = sums.shape[1], sums.reshape(-1)
    for i in range(origins.size):
        if i + _AHEAD < origins.size:
            at = np.int64(targets[i + _AHEAD]) * width
            for item in range(at + low, at + high, LINE_ITEMS):
                prefetch(flat, item)
        row = rows[np.int64(origins[i]) - first_row, low:high]
        into = sums[np.int64(targets[i]), low:high]
        if greatest:
            for c in range(row.size):
                into[c] = row[c] if (row[c] > into[c]) | (row[c] != row[c]) else into[c]
        else:
            for c in range(row.size):
                into[c] += row[c]


@njit(nogil=True, cache=True)
def add_shares(rows, origins, targets, shares, heavy, lost, sums):
    """sums[target] += share of the target * row of the origin, edge by edge.

    rows       float32 or float64 (some, width)
    origins    uint32 or uint64 (edges,)   rows of `rows`
    targets    uint32 or uint64 (edges,)   rows of `sums`
    shares     as `rows` (nodes,)
    heavy      int64 (some,)               rows of `sums` with a share below 1 / HEAVY, ascending
    lost       as `rows` (some, width)     in and out: rounding errors of heavy rows so far
    sums       as `rows` (nodes, width)    in and out, C-contiguous

    Heavy rows use Kahan's compensated summation, as errors grow with the number of edges of a row.
    """
    width, flat = sums.shape[1], sums.reshape(-1)
    for i in range(origins.size):
        if i + _AHEAD < origins.size:
            at = np.int64(targets[i + _AHEAD]) * width
            for item in range(at, at + width, LINE_ITEMS):
                prefetch(flat, item)
        target = np.int64(targets[i])
        row, into, share = rows[np.int64(origins[i])], sums[target], shares[target]
        if share * HEAVY < 1:
            less = lost[np.searchsorted(heavy, target)]
            for c in range(width):
                more = share * row[c] - less[c]
                total = into[c] + more
                less[c] = (total - into[c]) - more
                into[c] = total
        else:
            for c in range(width):
                into[c] += share * row[c]
