"""Checks graph blocks against the object index, so that other kernels need not.

Layout: FORMAT.md, "Graph blocks".
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import BLOCK_MAGIC, BLOCK_VERSION, PAGE_BYTES
from blockstore.kernels.columns import (
    FIRST_NODE,
    HEADER_WORDS,
    LAST_DEGREE,
    NUM_CARRIED,
    NUM_EDGES,
    NUM_NODES,
    SOURCE_BASE,
    SOURCE_BITS,
    edges_start,
    wide,
)
from blockstore.kernels.crc import find_bad_page
from blockstore.kernels.jit import inner, leaf, njit
from blockstore.kernels.locate import first_above
from blockstore.kernels.packed import PackedIds, id_at

_TOGETHER = 4  # pages: 16 KiB stay in the nearest cache
MAGIC = int.from_bytes(BLOCK_MAGIC, "little")
# what `check_head` returns; the first ones are about fields of the header, in this order
FIELDS = (
    "magic", "version and flags", "first_node", "num_nodes", "num_edges", "source_bits",
    "source_base",
)  # fmt: skip
GOOD, BAD_CARRIED, BAD_LAST_DEGREE, BAD_OFFSETS = -1, 7, 8, 9


class Expected(NamedTuple):
    """What the blocks of a relation, or of its copies, must say."""

    first_node: NDArray[np.uint64]  # (num_blocks + 1,)   ascending
    first_edge: NDArray[np.uint64]  # (num_blocks + 1,)   ascending; a block has room for its edges
    flags: int
    capacity: int  # edges of one column in a block of its own
    source_bits: int
    source_base: int
    num_sources: int  # nodes of the type that sources are of, from the base on


@inner
def _bad_field(words, block, expected):
    """Number of the first field that is not as the object index has it, or GOOD."""
    first_node, first_edge = expected.first_node, expected.first_edge
    if words[0] != MAGIC:
        return 0
    if words[1] != BLOCK_VERSION + (expected.flags << 16):
        return 1
    if wide(words, FIRST_NODE) != np.int64(first_node[block]):
        return 2
    if np.int64(words[NUM_NODES]) != np.int64(first_node[block + 1] - first_node[block]):
        return 3
    if np.int64(words[NUM_EDGES]) != np.int64(first_edge[block + 1] - first_edge[block]):
        return 4
    if np.int64(words[SOURCE_BITS]) != expected.source_bits:
        return 5
    return GOOD if wide(words, SOURCE_BASE) == expected.source_base else 6


@inner
def _is_carried(carried, block, first_node, first_edge, capacity):
    """Whether the edges before a block's columns can be those of a column that goes on here."""
    num_edges = np.int64(first_edge[block + 1] - first_edge[block])
    if carried > min(num_edges, capacity):
        return False
    if first_node[block + 1] == first_node[block] and carried != num_edges:
        return False  # edges of no column
    if carried == 0:
        return True
    # the last column before this block starts in a block that it fills alone, as those between
    head = first_above(first_node, np.int64(0), block, np.int64(first_node[block]) - 1) - 1
    return (
        head >= 0
        and first_node[head + 1] - first_node[head] == 1
        and np.int64(first_edge[block] - first_edge[head]) == (block - head) * capacity
    )


@inner
def _is_continued(degree, carried, block, first_node, first_edge, capacity):
    """Whether the blocks after one hold the rest of its only column, of so many edges in all."""
    parts = (degree + capacity - 1) // capacity
    last = block + parts - 1
    if carried or parts < 2 or last >= first_node.size - 1:
        return False
    if first_node[block + 1] - first_node[block] != 1 or first_node[last] != first_node[block + 1]:
        return False
    rest = degree - (parts - 1) * capacity
    return (
        np.int64(first_edge[last] - first_edge[block]) == (parts - 1) * capacity
        and np.int64(first_edge[last + 1] - first_edge[last]) >= rest
    )


@inner
def _bad_offset(words, num_nodes, begin, end):
    """Whether offsets do not ascend from the first edge that is not carried to the end."""
    offsets, falls = words[HEADER_WORDS : HEADER_WORDS + num_nodes + 1], 0
    for i in range(num_nodes):
        falls += offsets[i + 1] < offsets[i]
    return falls > 0 or offsets[0] != begin or offsets[num_nodes] != end


@leaf
def check_head(words, block, expected):
    """Header and offsets of a graph block: GOOD, the number of a field, or a BAD_ number, int64.

    words        uint32   the block, or as much of it as its offsets need

    Time: O(columns), O(log blocks) more where edges are carried.
    """
    bad = _bad_field(words, block, expected)
    if bad >= 0:
        return bad
    first_node, first_edge, capacity = (
        expected.first_node, expected.first_edge, expected.capacity
    )  # fmt: skip
    num_nodes = np.int64(words[NUM_NODES])
    carried = np.int64(words[NUM_CARRIED])
    if not _is_carried(carried, block, first_node, first_edge, capacity):
        return BAD_CARRIED
    if _bad_offset(words, num_nodes, carried, np.int64(words[NUM_EDGES])):
        return BAD_OFFSETS
    degree, here = wide(words, LAST_DEGREE), np.int64(0)
    if num_nodes:
        end = HEADER_WORDS + num_nodes
        here = np.int64(words[end]) - np.int64(words[end - 1])
    if degree != here and (
        here != capacity
        or degree < 0
        or not _is_continued(degree, carried, block, first_node, first_edge, capacity)
    ):
        return BAD_LAST_DEGREE
    return GOOD


@leaf
def check_sources(data, start, low, high, expected):
    """Whether sources [low, high) of a block are nodes of their type.

    data    uint8 (any,)   a block
    start   byte at which its sources begin
    """
    bits, last, below = expected.source_bits, expected.num_sources - 1, np.int64(0)
    if last == (1 << bits) - 1:
        return True
    ids = PackedIds(data, bits, np.uint64(0))
    for k in range(low, high):  # no branch: the sign stays
        below |= last - np.int64(id_at(ids, 8 * start + k * bits))
    return below >= 0


@leaf
def find_bad_block(data, size, block, expected):
    """The first of adjacent blocks that does not say what it must, counted from 0 on, or -1; int64.

    data   uint8 (blocks * size,)
    """
    first_node, first_edge = expected.first_node, expected.first_edge
    for k in range(data.size // size):
        part, b = data[k * size : (k + 1) * size], block + k
        if check_head(part.view(np.uint32), b, expected) != GOOD:
            return k
        start = edges_start(np.int64(first_node[b + 1] - first_node[b]))
        count = np.int64(first_edge[b + 1] - first_edge[b])
        if not check_sources(part, start, 0, count, expected):
            return k
    return -1


@njit(nogil=True, cache=True)
def check_pages(data, crcs, block, expected):
    """Check checksums and sources of a graph block page by page, while the page is in the cache.

    data   uint8    the block, aligned to 8 bytes
    crcs   uint32   crc32c of each of its pages

    Returns (the first page whose checksum is wrong, or -1, whether all sources are in range), and
    checks no more sources once a page is wrong.
    """
    first_node, first_edge = expected.first_node, expected.first_edge
    start = edges_start(np.int64(first_node[block + 1] - first_node[block]))
    count, done, sound = np.int64(first_edge[block + 1] - first_edge[block]), np.int64(0), True
    for page in range(0, crcs.size, _TOGETHER):
        end = min(page + _TOGETHER, crcs.size)
        part = data[page * PAGE_BYTES : end * PAGE_BYTES]
        bad = find_bad_page(part, end - page, crcs[page:end])
        if bad >= 0:
            return page + bad, sound
        # those that lie in these pages as a whole
        here = min(count, max(0, 8 * (end * PAGE_BYTES - start)) // expected.source_bits)
        sound &= check_sources(data, start, done, here, expected)
        done = here
    return np.int64(-1), sound
