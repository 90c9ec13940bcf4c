"""Places in a graph block (FORMAT.md, "Graph blocks"): of header fields, and of columns."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import BLOCK_HEADER, FIELD_OFFSETS, EdgeLayout
from blockstore.kernels.jit import inner, njit
from blockstore.kernels.packed import PackedIds
from blockstore.kernels.records import EdgeRecord, RecordPlaces

HEADER_BYTES = BLOCK_HEADER.size  # the offsets follow
HEADER_WORDS = HEADER_BYTES // 4
# fields, in words of four bytes
FIRST_NODE, LAST_DEGREE, NUM_NODES, NUM_EDGES, NUM_CARRIED, SOURCE_BITS, SOURCE_BASE = (
    at // 4 for at in FIELD_OFFSETS.values()
)


class BlockView(NamedTuple):
    """Graph blocks of one relation in slots of an arena; each array but the tables is all of it."""

    words: NDArray[np.uint32]
    sources: PackedIds
    edge_ids: NDArray[Any]
    floats: NDArray[np.float32]
    longs: NDArray[np.int64]
    slots: NDArray[np.int32]  # (num_blocks,) slot of each block, -1 if it is absent
    first_node: NDArray[np.uint64]  # (num_blocks + 1,)
    slot_bytes: int
    edge_bytes: int  # of an edge id in a block; 0: the blocks hold none
    weight_bytes: int  # likewise
    time_bytes: int  # likewise
    # edges of one column that fill a block; a longer one is a multi-block column
    capacity: int


def view_blocks(
    arena: NDArray[np.uint8],
    layout: EdgeLayout,
    slots: NDArray[np.int32],
    first_node: NDArray[np.uint64],
    slot_bytes: int,
    capacity: int,
) -> BlockView:
    """A view of an arena."""
    edge_ids = np.dtype(np.uint64 if layout.edge_id_bytes == 8 else np.uint32)
    return BlockView(
        arena.view(np.uint32), view_sources(arena, layout), arena.view(edge_ids),
        arena.view(np.float32), arena.view(np.int64), slots, first_node, slot_bytes,
        layout.edge_id_bytes, layout.weight_bytes, layout.time_bytes, capacity,
    )  # fmt: skip


def view_sources(data: NDArray[np.uint8], layout: EdgeLayout) -> PackedIds:
    """Sources of graph blocks that lie in `data`."""
    return PackedIds(data, layout.source_bits, np.uint64(layout.source_base))


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
def edges_start(num_nodes):
    """Byte of a block with so many columns at which its edges begin."""
    return (HEADER_BYTES + 4 * (num_nodes + 1) + 7) & -8


@inner
def first_bit(view, block):
    """Bit at which the sources of a block that is present begin, without reading the block."""
    num_nodes = np.int64(view.first_node[block + 1]) - np.int64(view.first_node[block])
    return 8 * (np.int64(view.slots[block]) * view.slot_bytes + edges_start(num_nodes))


@inner
def packed_size(count, bits):
    """Bytes of a stream of so many sources: `format.packed_bytes`."""
    return ((((count * bits + 7) >> 3) + 7) & -8) + 8 if count else 0


@inner
def sections(view, slot):
    """Where a block's edges begin: the bit of the first source, and indices, in their views, of the
    first edge id, weight and time.

    An index means nothing if the blocks hold no such section.
    """
    words = view.words
    base = slot * (view.slot_bytes // 4)
    edges = np.int64(words[base + NUM_EDGES])
    start = slot * view.slot_bytes + edges_start(np.int64(words[base + NUM_NODES]))
    at = start + packed_size(edges, view.sources.bits)
    edge_at = at // view.edge_ids.itemsize
    at += (edges * view.edge_bytes + 7) & -8
    weight_at = at // 4
    at += (edges * view.weight_bytes + 7) & -8
    return 8 * start, edge_at, weight_at, at // 8


@inner
def words_of_edge(view):
    """EdgeRecord: of an edge in a block; its item is not told there."""
    return EdgeRecord(view.edge_bytes // 4, view.weight_bytes // 4, view.time_bytes // 4, 0)


@inner
def record_places(view, block, edge, first_item):
    """RecordPlaces of an edge of a block, which is present: its number there.

    first_item   as in `picks.Draws`
    """
    _, edge_at, weight_at, time_at = sections(view, np.int64(view.slots[block]))
    item = edge + (first_item[block] if first_item.size else 0)
    ids = view.edge_bytes // 4
    return RecordPlaces((edge_at + edge) * ids, weight_at + edge, 2 * (time_at + edge), item)


@njit(nogil=True, cache=True)
def count_fitting(degrees, at, num_nodes, num_edges, block_bytes, bits, capacity):
    """Columns from `at` on that fit into a block that has num_nodes columns and num_edges edges.

    degrees   int64 (columns,)
    bits      of an edge in each section: `EdgeLayout.bits`
    capacity  a longer column is a multi-block column and never fits

    Returns (columns, edges), int64.  Sizes as in `EdgeLayout.sections`.
    """
    columns = edges = 0
    for j in range(at, degrees.size):
        if degrees[j] > capacity:
            break
        nodes, total = num_nodes + columns + 1, num_edges + edges + degrees[j]
        fill = (
            edges_start(nodes) + packed_size(total, bits[0]) + (total * bits[1] // 8 + 7) // 8 * 8
        )
        fill += (total * bits[2] // 8 + 7) // 8 * 8 + total * bits[3] // 8
        if fill > block_bytes:
            break
        columns += 1
        edges += degrees[j]
    return columns, edges
