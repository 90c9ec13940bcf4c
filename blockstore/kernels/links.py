"""Seed edges: their ends by place in graph blocks, negatives, and what a batch must not contain.

Layout of blocks: FORMAT.md, "Graph blocks".
"""

import numpy as np

from blockstore.kernels.columns import HEADER_WORDS, NUM_CARRIED, NUM_NODES, sections, slot_word
from blockstore.kernels.jit import leaf, njit
from blockstore.kernels.locate import first_above
from blockstore.kernels.packed import id_at
from blockstore.kernels.random import draw_below


@leaf
def find_ends(view, entries, blocks, first_edge, src, dst, index, times):
    """Ends of edges by their place in the order of the blocks, which are present.

    view        BlockView
    entries     uint32                    which of the edges are meant
    blocks      int32                     block of each edge
    first_edge  uint64 (num_blocks + 1,)  edges before each block
    src, dst    id_dtype                  out, store ids
    index       int64                     in: place of each edge; out: its edge id, if it has one
    times       int64                     out; of size 0: not wanted
    """
    for j in range(entries.size):
        i = np.int64(entries[j])
        block = np.int64(blocks[i])
        base = slot_word(view, block)
        k = index[i] - np.int64(first_edge[block])
        first, edge_at, _, time_at = sections(view, np.int64(view.slots[block]))
        src[i] = id_at(view.sources, first + k * view.sources.bits)
        if k < np.int64(view.words[base + NUM_CARRIED]):  # of the last column that starts before
            dst[i] = np.int64(view.first_node[block]) - 1
        else:
            offsets, num_nodes = base + HEADER_WORDS, np.int64(view.words[base + NUM_NODES])
            at = first_above(view.words, offsets, offsets + num_nodes, k)
            dst[i] = np.int64(view.first_node[block]) + at - 1 - offsets
        if view.edge_bytes:
            index[i] = np.int64(view.edge_ids[edge_at + k])
        if times.size:
            times[i] = view.longs[time_at + k]


@njit(nogil=True, cache=True)
def draw_negatives(key, start, num, first, num_nodes, out):
    """out[j] = a random node for edge start + j % num of the epoch's order, its draw j // num.

    first, num_nodes   the range of the type's store ids
    """
    for j in range(out.size):
        out[j] = first + draw_below(key, np.uint64(start + j % num), j // num, num_nodes)


@njit(nogil=True, cache=True)
def group_excluded(places, sources, starts, out):
    """Edges that a batch must not contain, by the place of their target among the seed nodes.

    places   uint32 (num,)              local id of each edge's target
    sources  id_dtype (num,)
    starts   uint32 (seed nodes + 1,)   out: where each target's begin in `out`
    out      id_dtype (num,)            out: sources, ascending for each target
    """
    starts[:] = 0
    for i in range(places.size):
        starts[places[i] + 1] += 1
    for s in range(starts.size - 1):
        starts[s + 1] += starts[s]
    at = starts[:-1].copy()
    for i in range(places.size):
        out[at[places[i]]] = sources[i]
        at[places[i]] += 1
    for s in range(starts.size - 1):
        if starts[s + 1] > starts[s] + 1:
            out[starts[s] : starts[s + 1]].sort()


@leaf
def drop_excluded(
    excluded_starts, excluded, starts, draws, edge_starts, edge_draws, counts, num
):  # fmt: skip
    """Take out of the draws of the first columns what a batch must not contain.

    excluded_starts, excluded   from `group_excluded`: column i is seed node i
    draws                       column i has counts[i] from starts[i] on; what stays keeps its order
    edge_draws                  their records, at edge_starts; of size 0 if there are none
    counts                      uint32   in and out
    """
    for i in range(min(num, excluded_starts.size - 1)):
        low, high = np.int64(excluded_starts[i]), np.int64(excluded_starts[i + 1])
        if low == high:
            continue
        first, kept = starts[i], np.int64(0)
        for k in range(np.int64(counts[i])):
            source = draws[first + k]
            found = first_above(excluded, low, high, np.int64(source) - 1)
            if found < high and excluded[found] == source:
                continue
            draws[first + kept] = source
            if edge_draws.size:
                for word in range(edge_draws.shape[1]):
                    edge_draws[edge_starts[i] + kept, word] = edge_draws[edge_starts[i] + k, word]
            kept += 1
        counts[i] = kept
