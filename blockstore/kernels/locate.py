"""Finds the graph block in which a node's column starts."""

import numpy as np

from blockstore.kernels.jit import inner, leaf, njit

_STEPS = 8  # blocks between two entries of the guide that are tried one by one


def choose_shift(num_nodes: int, num_blocks: int) -> int:
    """log2 of the nodes that share one entry of the guide: about four entries a block."""
    shift = 0
    while num_nodes >> shift > 4 * max(1, num_blocks):
        shift += 1
    return shift


@njit(nogil=True, cache=True)
def build_guide(first_node, first, num_nodes, shift):
    """Entry g: the block in which the column of node first + (g << shift) starts, uint32.

    first_node  uint64 (num_blocks + 1,)  first column that starts in each block
    """
    size = ((num_nodes - 1) >> shift) + 1 if num_nodes > 0 else 0
    guide = np.empty(size, np.uint32)
    block = 0
    for g in range(size):
        node = np.uint64(first + (g << shift))
        while block + 2 < first_node.size and first_node[block + 1] <= node:
            block += 1
        guide[g] = block
    return guide


@inner
def first_above(values, low, high, value):
    """The first of values[low:high], which ascend, that is above an int64, or `high`."""
    while low < high:
        middle = (low + high) >> 1
        if np.int64(values[middle]) <= value:
            low = middle + 1
        else:
            high = middle
    return low


@leaf
def hide_outside(nodes, num, ranges, blocks):
    """Write -1 over the block of each node outside of all ranges.

    nodes   id_dtype (>= num,)
    ranges  int64 (2 n,)        ascending: first and stop of each range
    blocks  int32 (>= num,)     in, out
    """
    for i in range(num):
        if first_above(ranges, np.int64(0), ranges.size, np.int64(nodes[i])) % 2 == 0:
            blocks[i] = -1


@leaf
def locate_columns(nodes, num, first, num_nodes, first_node, guide, shift, blocks):
    """The block in which each node's column starts, -1 for a node of another type.

    nodes       id_dtype (>= num,)        store ids
    first       int                       store id of the type's first node; it has num_nodes
    first_node  uint64 (num_blocks + 1,)
    guide       uint32                    from `build_guide`
    blocks      int32 (>= num,)           out

    Time: a few steps from the guide's entry; O(log blocks) beside a column of many blocks.
    """
    for i in range(num):
        local = np.int64(nodes[i]) - first
        if local < 0 or local >= num_nodes:
            blocks[i] = -1
            continue
        entry = local >> shift
        block = np.int64(guide[entry])
        high = np.int64(guide[entry + 1]) if entry + 1 < guide.size else first_node.size - 2
        node = np.uint64(nodes[i])
        if high - block > _STEPS:
            block = first_above(first_node, block, high + 1, np.int64(node)) - 1
        while block < high and first_node[block + 1] <= node:
            block += 1
        blocks[i] = block
