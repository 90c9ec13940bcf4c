"""Where things are in a graph block (FORMAT.md, "Graph blocks"): of its header, and of a column."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import (
    BLOCK_HEADER,
    EDGES_START_OFFSET,
    LAST_DEGREE_OFFSET,
    NUM_CARRIED_OFFSET,
    NUM_EDGES_OFFSET,
    NUM_NODES_OFFSET,
)
from blockstore.kernels.jit import inner

HEADER_WORDS = BLOCK_HEADER.size // 4  # the offsets follow
FIRST_NODE = 2  # this and the others in words of four bytes
LAST_DEGREE = LAST_DEGREE_OFFSET // 4
NUM_NODES = NUM_NODES_OFFSET // 4
NUM_EDGES = NUM_EDGES_OFFSET // 4
NUM_CARRIED = NUM_CARRIED_OFFSET // 4
EDGES_START = EDGES_START_OFFSET // 4


class BlockView(NamedTuple):
    """Graph blocks of one relation in slots of an arena; each array but the tables is all of it."""

    words: NDArray[np.uint32]
    ids: NDArray[Any]  # id_dtype
    edge_ids: NDArray[Any]
    floats: NDArray[np.float32]
    longs: NDArray[np.int64]
    slots: NDArray[np.int32]  # (num_blocks,) slot of each block, -1 if it is absent
    first_node: NDArray[np.uint64]  # (num_blocks + 1,)
    slot_bytes: int
    edge_bytes: int  # of an edge id in a block; 0: the blocks hold none
    weight_bytes: int  # likewise
    # edges of one column that fill a block; a longer one is a multi-block column
    capacity: int


def view_blocks(
    arena: NDArray[np.uint8],
    id_dtype: str,
    edge_id_dtype: str | None,
    slots: NDArray[np.int32],
    first_node: NDArray[np.uint64],
    *sizes: int,
) -> BlockView:
    """A view of an arena; `sizes` are the last four fields."""
    return BlockView(
        arena.view(np.uint32), arena.view(np.dtype(id_dtype)),
        arena.view(np.dtype(edge_id_dtype or "uint32")), arena.view(np.float32),
        arena.view(np.int64), slots, first_node, *sizes,
    )  # fmt: skip


@inner
def wide(words, word):
    """A field of eight bytes."""
    return np.int64(words[word]) + (np.int64(words[word + 1]) << 32)


@inner
def slot_word(view, block):
    return np.int64(view.slots[block]) * (view.slot_bytes // 4)


@inner
def column_word(view, node, block):
    """Word of the offset of a column; its block is present."""
    return slot_word(view, block) + HEADER_WORDS + np.int64(node) - np.int64(view.first_node[block])


@inner
def column_degree(view, word, base):
    """Total degree of the column whose offset is at `word`, of the block at word `base`."""
    degree = np.int64(view.words[word + 1]) - np.int64(view.words[word])
    if degree == view.capacity:  # alone in its block: it may go on in the next
        degree = max(degree, wide(view.words, base + LAST_DEGREE))
    return degree


@inner
def sections(view, slot):
    """Where a block's edges begin: indices, in their views, of the first source, id, weight, time.

    An index means nothing if the blocks hold no such section.
    """
    words, id_bytes = view.words, view.ids.itemsize
    base = slot * (view.slot_bytes // 4)
    start, edges = np.int64(words[base + EDGES_START]), np.int64(words[base + NUM_EDGES])
    at = slot * view.slot_bytes + ((start + edges) * id_bytes + 7) // 8 * 8
    edge_at = at // view.edge_ids.itemsize
    at += (edges * view.edge_bytes + 7) // 8 * 8
    weight_at = at // 4
    at += (edges * view.weight_bytes + 7) // 8 * 8
    return slot * (view.slot_bytes // id_bytes) + start, edge_at, weight_at, at // 8
