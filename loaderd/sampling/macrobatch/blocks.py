"""Graph blocks that a macro-batch reads: runs of adjacent ones, and parts of those it shares.

A block that holds columns of other partitions too is read in part: its head, which says where the
columns lie, then the pages of the edges that are wanted.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from blockstore.format import (
    BLOCK_HEADER,
    PAGE_BYTES,
    BlockGeometry,
    BlockHeader,
    EdgeLayout,
    edges_start_bytes,
)
from blockstore.io.reader import Parts
from loaderd.sampling.macrobatch.files import RelationBlocks

Span = tuple[int, int]  # columns [low, high)
_PAGE_BITS = 8 * PAGE_BYTES


def cut_blocks(
    columns: RelationBlocks, wanted: Iterable[tuple[int, int, int]], pages: int
) -> dict[int, Span]:
    """Blocks that are to be read in part, with the span of columns that is wanted of each.

    wanted   columns [low, high) of a part, and its row in `columns`
    pages    of a block
    """
    spans: dict[int, Span] = {}
    for low, high, row in wanted:
        first, stop = int(columns.low[row]), int(columns.high[row])
        for block in {first, stop - 1} if first < stop else ():
            others = spans.get(block, (low, high))
            spans[block] = min(low, others[0]), max(high, others[1])
    return {
        block: (low, high)
        for block, (low, high) in spans.items()
        if (columns.first_node[block] < low or high < columns.first_node[block + 1])
        and 2 * head_pages(columns, block) <= pages
    }


def head_pages(columns: RelationBlocks, block: int) -> int:
    """Pages of a block's header and offsets."""
    num_nodes = int(columns.first_node[block + 1] - columns.first_node[block])
    return -(-edges_start_bytes(num_nodes) // PAGE_BYTES)


def block_runs(
    blocks: NDArray[np.int64], geometry: BlockGeometry, maximum: int, alone: Collection[int] = ()
) -> NDArray[np.int64]:
    """Ascending blocks as runs of adjacent ones, `maximum` at most in each.

    alone   blocks that are runs of their own

    int64 (runs, 4): shard, first page, pages, first block.
    """
    if not blocks.size:
        return np.empty((0, 4), np.int64)
    per_shard, pages = geometry.blocks_per_shard, geometry.pages_per_block
    shard = blocks // per_shard
    new = (np.diff(blocks, prepend=-2) != 1) | (np.diff(shard, prepend=-1) != 0)
    single = np.isin(blocks, list(alone))
    new |= single
    new[1:] |= single[:-1]
    since = np.arange(blocks.size) - np.maximum.accumulate(np.where(new, np.arange(new.size), 0))
    heads = np.flatnonzero(new | (since % maximum == 0))
    counts = np.diff(heads, append=blocks.size)
    runs = np.empty((heads.size, 4), np.int64)
    runs[:, 0] = shard[heads]
    runs[:, 1] = (blocks[heads] - shard[heads] * per_shard) * pages
    runs[:, 2], runs[:, 3] = counts * pages, blocks[heads]
    return runs


def cut_parts(
    runs: NDArray[np.int64],
    columns: RelationBlocks,
    cuts: Mapping[int, Span],
    layout: EdgeLayout,
    last: int,
) -> Parts:
    """What to read of the runs that are not read whole.

    last   number of the last section of a block that is wanted
    """
    heads = [head_pages(columns, b) if b in cuts else 0 for b in runs[:, 3].tolist()]
    choose = partial(_edge_pages, runs, columns, cuts, layout, last)
    return Parts(np.array(heads, np.int64), choose)


def _edge_pages(
    runs: NDArray[np.int64],
    columns: RelationBlocks,
    cuts: Mapping[int, Span],
    layout: EdgeLayout,
    last: int,
    run: int,
    head: NDArray[np.uint8],
) -> list[tuple[int, int]]:
    """Pages [first, stop) of each section of a block with the edges that are wanted of it."""
    block = int(runs[run, 3])
    (low, high), first = cuts[block], int(columns.first_node[block])
    header = BlockHeader.unpack(head[: BLOCK_HEADER.size].tobytes(), f"graph block {block}")
    offsets = head[BLOCK_HEADER.size :].view(np.uint32)
    begin, end = 0, header.num_edges
    if low >= first:
        begin = int(offsets[low - first])
    if high < first + header.num_nodes:
        end = int(offsets[high - first])
    if end <= begin:
        return []
    places = layout.sections(header.num_nodes, header.num_edges)
    return [
        ((8 * at + begin * bits) // _PAGE_BITS, -(-(8 * at + end * bits) // _PAGE_BITS))
        for at, bits in zip(places[: last + 1], layout.bits, strict=False)
        if bits
    ]
