"""Which graph block a node's column starts in."""

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
def _search(first_node, low, high, node):
    """The last of blocks low..high whose first column is `node` or before it."""
    while low < high:
        middle = (low + high + 1) >> 1
        if first_node[middle] <= node:
            low = middle
        else:
            high = middle - 1
    return low


@leaf
def hide_outside(nodes, num, ranges, blocks):
    """Writes -1 over the block of each node outside of all ranges.

    nodes   id_dtype (>= num,)
    ranges  int64 (2 n,)        ascending: first and stop of each range
    blocks  int32 (>= num,)     in, out
    """
    for i in range(num):
        low, high, node = 0, ranges.size, np.int64(nodes[i])
        while low < high:  # how many bounds are `node` or below it
            middle = (low + high) >> 1
            if ranges[middle] <= node:
                low = middle + 1
            else:
                high = middle
        if low % 2 == 0:
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
            block = _search(first_node, block, high, node)
        while block < high and first_node[block + 1] <= node:
            block += 1
        blocks[i] = block
