"""Whether a graph block says what the object index says of it, so that other kernels need not ask.

Layout: FORMAT.md, "Graph blocks".
"""

import numpy as np

from blockstore.format import BLOCK_HEADER, BLOCK_MAGIC, BLOCK_VERSION, PAGE_BYTES
from blockstore.kernels.columns import (
    EDGES_START,
    FIRST_NODE,
    HEADER_WORDS,
    LAST_DEGREE,
    NUM_CARRIED,
    NUM_EDGES,
    NUM_NODES,
    wide,
)
from blockstore.kernels.crc import find_bad_page
from blockstore.kernels.jit import inner, leaf, njit

_TOGETHER = 4  # pages: 16 KiB stay in the nearest cache
MAGIC = int.from_bytes(BLOCK_MAGIC, "little")
HEADER_BYTES = BLOCK_HEADER.size
# what `check_head` returns; the first ones are about fields of the header, in this order
FIELDS = ("magic", "version and flags", "first_node", "num_nodes", "num_edges", "edges_start")
GOOD, BAD_CARRIED, BAD_LAST_DEGREE, BAD_OFFSETS = -1, 6, 7, 8


@inner
def _edges_start(num_nodes, id_bytes):
    """Where edges begin in a block with so many columns, in units of the id width."""
    return (HEADER_BYTES + 4 * (num_nodes + 1) + 7) // 8 * 8 // id_bytes


@inner
def _bad_field(words, block, first_node, first_edge, flags, start):
    """Number of the first field that is not as the object index has it, or GOOD."""
    if words[0] != MAGIC:
        return 0
    if words[1] != BLOCK_VERSION + (flags << 16):
        return 1
    if wide(words, FIRST_NODE) != np.int64(first_node[block]):
        return 2
    if np.int64(words[NUM_NODES]) != np.int64(first_node[block + 1] - first_node[block]):
        return 3
    if np.int64(words[NUM_EDGES]) != np.int64(first_edge[block + 1] - first_edge[block]):
        return 4
    return GOOD if np.int64(words[EDGES_START]) == start else 5


@inner
def _head_of(first_node, block):
    """The block in which the last column before those of `block` starts; -1: there is none."""
    low, high = np.int64(-1), np.int64(block) - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if first_node[middle] < first_node[block]:
            low = middle
        else:
            high = middle - 1
    return low


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
    head = _head_of(first_node, block)  # it holds one column and is full, as are those between
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
def check_head(words, block, first_node, first_edge, flags, id_bytes, capacity):
    """Header and offsets of a graph block: GOOD, the number of a field, or a BAD_ number, int64.

    words        uint32   the block, or as much of it as its offsets need
    first_node   uint64 (num_blocks + 1,)   ascending
    first_edge   uint64 (num_blocks + 1,)   ascending; no block has more edges than have room in it
    flags        that the relation's blocks have
    capacity     edges of one column in a block of its own

    Time: O(columns), O(log blocks) more where edges are carried.
    """
    num_nodes = np.int64(first_node[block + 1] - first_node[block])
    start = _edges_start(num_nodes, id_bytes)
    bad = _bad_field(words, block, first_node, first_edge, flags, start)
    if bad >= 0:
        return bad
    carried = np.int64(words[NUM_CARRIED])
    if not _is_carried(carried, block, first_node, first_edge, capacity):
        return BAD_CARRIED
    if _bad_offset(words, num_nodes, start + carried, start + np.int64(words[NUM_EDGES])):
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
def check_sources(ids, low, high, first, stop):
    """Whether ids[low:high] are all in [first, stop).

    ids   uint32 or uint64 (any,)   a block
    """
    if low >= high:
        return True
    part = ids[low:high]  # counted from 0 on, which makes the loop one of vectors
    least, most = part[0], part[0]
    for i in range(part.size):
        most = max(most, part[i])
    if first > 0:
        for i in range(part.size):
            least = min(least, part[i])
    return first <= np.uint64(least) and np.uint64(most) < stop


@leaf
def find_bad_block(ids, size, block, first_node, first_edge, flags, capacity, sources):
    """The first of adjacent blocks that does not say what it must, counted from 0 on, or -1; int64.

    ids       uint32 or uint64 (blocks * size,)   the blocks; or the beginning of one
    size      ids in a block, or in that beginning
    sources   uint64 (2,)   a tuple: first and stop of the range of store ids that they have

    Further arguments are those of `check_head`.
    """
    id_bytes = ids.itemsize
    for k in range(ids.size // size):
        part, b = ids[k * size : (k + 1) * size], block + k
        head = check_head(
            part.view(np.uint32), b, first_node, first_edge, flags, id_bytes, capacity
        )
        if head != GOOD:
            return k
        low = _edges_start(np.int64(first_node[b + 1] - first_node[b]), id_bytes)
        high = low + np.int64(first_edge[b + 1] - first_edge[b])
        if not check_sources(part, low, min(high, size), sources[0], sources[1]):
            return k
    return -1


@njit(nogil=True, cache=True)
def check_pages(data, expected, ids, low, high, first, stop):
    """Page by page the checksum and the sources of a graph block, while the page is in the cache.

    data          uint8    the block, aligned to 8 bytes
    expected      uint32   crc32c of each of its pages
    ids           uint32 or uint64   the block
    low, high     where its sources lie in `ids`, as the object index has it
    first, stop   uint64   range of store ids that they have

    Returns (the first page whose checksum is wrong, or -1, whether all sources are in range), and
    looks at no more sources once a page is wrong.
    """
    num_ids, sound = PAGE_BYTES // ids.itemsize, True
    for page in range(0, expected.size, _TOGETHER):
        end = min(page + _TOGETHER, expected.size)
        part = data[page * PAGE_BYTES : end * PAGE_BYTES]
        bad = find_bad_page(part, end - page, expected[page:end])
        if bad >= 0:
            return page + bad, sound
        here = max(low, page * num_ids), min(high, end * num_ids)
        sound &= check_sources(ids, here[0], here[1], first, stop)
    return np.int64(-1), sound
