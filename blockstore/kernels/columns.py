"""Where things are in a graph block (FORMAT.md, "Graph blocks"): of its header, and of a column.

arena32   uint32 view of the arena; words are places in it
"""

import numpy as np

from blockstore.format import (
    BLOCK_HEADER,
    EDGES_START_OFFSET,
    LAST_DEGREE_OFFSET,
    NUM_CARRIED_OFFSET,
    NUM_EDGES_OFFSET,
    NUM_NODES_OFFSET,
)
from blockstore.kernels.jit import leaf

HEADER_WORDS = BLOCK_HEADER.size // 4  # the offsets follow
FIRST_NODE = 2  # this and the others in words of four bytes
LAST_DEGREE = LAST_DEGREE_OFFSET // 4
NUM_NODES = NUM_NODES_OFFSET // 4
NUM_EDGES = NUM_EDGES_OFFSET // 4
NUM_CARRIED = NUM_CARRIED_OFFSET // 4
EDGES_START = EDGES_START_OFFSET // 4


@leaf
def wide(words, word):
    """A field of eight bytes."""
    return np.int64(words[word]) + (np.int64(words[word + 1]) << 32)


@leaf
def column_word(node, block, first_node, slot_of_block, slot_bytes):
    """Word of the offset of a column; its block is present."""
    base = np.int64(slot_of_block[block]) * (slot_bytes // 4)
    return base + HEADER_WORDS + np.int64(node) - np.int64(first_node[block])


@leaf
def column_degree(arena32, word, base, capacity):
    """Total degree of the column whose offset is at `word`, of the block at word `base`."""
    degree = np.int64(arena32[word + 1]) - np.int64(arena32[word])
    if degree == capacity:  # alone in its block: it may go on in the next
        degree = max(degree, wide(arena32, base + LAST_DEGREE))
    return degree


@leaf
def sections(arena32, slot, slot_bytes, id_bytes, edge_bytes, weight_bytes):
    """Where a block's edges begin: indices, in their views, of the first source, id, weight, time.

    edge_bytes, weight_bytes   of one; 0 where blocks hold none: their index means nothing then
    """
    base = slot * (slot_bytes // 4)
    start, edges = np.int64(arena32[base + EDGES_START]), np.int64(arena32[base + NUM_EDGES])
    at = slot * slot_bytes + ((start + edges) * id_bytes + 7) // 8 * 8
    edge_at = at // max(edge_bytes, 1)
    at += (edges * edge_bytes + 7) // 8 * 8
    weight_at = at // 4
    at += (edges * weight_bytes + 7) // 8 * 8
    return slot * (slot_bytes // id_bytes) + start, edge_at, weight_at, at // 8
