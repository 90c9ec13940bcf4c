"""Edges among chosen nodes: of whole columns, the sources that are in a table are kept.

Arguments `view`, `column`, `blocks`, `order`, `low`, `high` and `draws` are as in
`kernels.sample`; `chosen` is `ChosenNodes`.  Edges are written one after the other, from `used` on;
with ~used the kernels say that there is no more room.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.columns import (
    column_degree,
    column_word,
    first_bit,
    record_places,
    slot_word,
    words_of_edge,
)
from blockstore.kernels.jit import inner, njit
from blockstore.kernels.packed import id_at
from blockstore.kernels.records import put_record
from blockstore.kernels.renumber import NodeTable, has_node


class ChosenNodes(NamedTuple):
    """The nodes whose edges are kept."""

    table: NodeTable
    trees: NDArray[np.uint32] | None  # of each column, if a node is a different one in each tree


@inner
def _keep(view, block, edge, count, i, chosen, draws, used):
    """Keep those of `count` edges of a block, from `edge` on, whose source the table has."""
    bits, own = view.sources.bits, words_of_edge(view)
    first = first_bit(view, block) + edge * bits
    places = record_places(view, block, edge, draws.first_item)
    for k in range(count):
        source = id_at(view.sources, first + k * bits)
        if has_node(source, chosen.table, chosen.trees, i):
            if used == draws.sources.size:
                return ~np.int64(used)
            draws.sources[used] = source
            if draws.edges.size:
                put_record(view.words, own, places, k, draws.record, draws.edges, used)
            used += 1
    return np.int64(used)


@njit(nogil=True, cache=True)
def keep_columns(view, column, blocks, order, low, high, chosen, draws, degrees, used):
    """Write kept edges of columns whose blocks are present, at draws.starts, and their counts.

    degrees   int64 (columns,)  out: of those that go on in further blocks, which `keep_parts`
              takes; else 0

    Returns the end of what was written, int64.  Time O(edges of the columns).
    """
    for j in range(low, high):
        i = np.int64(order[j]) if order.size else j
        column.counts[i], degrees[i], draws.starts[i] = 0, 0, used
        if blocks[i] < 0:
            continue
        word = column_word(view, column.nodes[i], blocks[i])
        degree = column_degree(view, word, slot_word(view, blocks[i]))
        if degree > view.capacity:
            degrees[i] = degree
            continue
        edge = np.int64(view.words[word])
        end = _keep(view, blocks[i], edge, degree, i, chosen, draws, used)
        if end < 0:
            return end
        column.counts[i] = end - used
        used = end
    return np.int64(used)


@njit(nogil=True, cache=True)
def keep_parts(view, column, blocks, parts, degrees, chosen, draws, used):
    """The same for parts of columns, each the edges of one block; the blocks are present.

    parts   int64 (parts, 2)  column and number of its block, in that order: all of a column come
            one after the other, in one call or in several
    """
    for p in range(parts.shape[0]):
        i, part = parts[p, 0], parts[p, 1]
        if part == 0:
            draws.starts[i] = used
        count = min(view.capacity, degrees[i] - part * view.capacity)
        end = _keep(view, np.int64(blocks[i]) + part, 0, count, i, chosen, draws, used)
        if end < 0:
            return end
        column.counts[i] += end - used
        used = end
    return np.int64(used)
