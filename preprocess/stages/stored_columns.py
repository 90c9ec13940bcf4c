"""Columns of a store's graph blocks in order, in pieces that another thread may read ahead."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Relation
from blockstore.pack import GraphBlock, unpack_block
from blockstore.store import Store, scan_blocks

Piece = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]

PIECE_COPIES = 6  # of `scan_bytes`, that reading ahead of work takes in all


def stored_columns(
    store: Store,
    relation: Relation,
    scan_bytes: int,
    columns: tuple[int, int] | None = None,
    records: bool = False,
) -> Iterator[Piece]:
    """(head, degrees, edges) of consecutive columns of a relation; valid until the next step.

    head      int64 (2,)           column of the first, and its edges in earlier pieces
    degrees   int64 (columns,)     edges of each that are in this piece
    edges     id_dtype (edges,)    sources; with `records`: uint32 (edges, words), all that a block
                                   has of an edge, section by section

    columns   [first, stop) that are wanted: the blocks with them are read, others may come too

    Raises CorruptBlock.
    """
    file = store.graph(relation)
    start, stop = 0, file.geometry.num_blocks
    if columns is not None:
        first_node = store.first_node(relation)
        start = max(0, int(np.searchsorted(first_node[:-1], columns[0], "right")) - 1)
        stop = int(np.searchsorted(first_node[:-1], columns[1], "left"))
    skipped = 0  # edges of the column that goes on
    for number, blocks in scan_blocks(file, scan_bytes, start, stop):
        opened = [
            unpack_block(blocks[i], f"{store.path / file.path}, block {number + i}")
            for i in range(blocks.shape[0])
        ]
        head, degrees = _merge(opened)
        head[1] = skipped if opened[0].header.num_carried else 0
        skipped = int(degrees[-1]) if degrees.size else 0
        skipped += int(head[1]) if degrees.size == 1 else 0
        edges = [block.edge_words() if records else block.sources for block in opened]
        yield head, degrees, np.concatenate(edges) if len(edges) > 1 else edges[0]


def scan_size(share: int, block_bytes: int) -> int:
    """Bytes of blocks to read at a time: `PIECE_COPIES` of them fit `share`, if one block does."""
    return max(block_bytes, min(4 << 20, share // (2 * PIECE_COPIES)))


def _merge(blocks: list[GraphBlock]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(head, degrees) of consecutive blocks: a column that goes on is one."""
    carried = blocks[0].header.num_carried
    first = blocks[0].header.first_node - bool(carried)
    parts = [np.array([carried] if carried else [], np.int64)]
    for i, block in enumerate(blocks):
        if i and block.header.num_carried:
            last = next(part for part in reversed(parts) if part.size)
            last[-1] += block.header.num_carried
        parts.append(block.degrees_here())
    return np.array([first, 0], np.int64), np.concatenate(parts)
