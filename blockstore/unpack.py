"""A graph block taken apart, for verification, export and tests."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import (
    BLOCK_HEADER,
    HAS_EDGE_IDS,
    WIDE_EDGE_IDS,
    WIDE_NODE_IDS,
    BlockHeader,
    align,
    edges_start_bytes,
)


class GraphBlock(NamedTuple):
    """Views into the block's bytes."""

    header: BlockHeader
    offsets: NDArray[np.uint32]  # (num_nodes + 1,) as stored
    sources: NDArray[Any]  # id_dtype (num_edges,): carried ones first
    edge_ids: NDArray[Any] | None  # (num_edges,)

    def degrees_here(self) -> NDArray[np.int64]:
        """Edges of each column that lie in this block, int64 (num_nodes,)."""
        offsets = self.offsets.astype(np.int64)
        return offsets[1:] - offsets[:-1]


def unpack_block(block: NDArray[np.uint8], where: str) -> GraphBlock:
    """Take a block apart.

    block   uint8 (block_bytes,)
    where   path and byte offset: opens every error message

    Raises CorruptBlock, UnsupportedVersion: the header does not fit the block.
    """
    header = BlockHeader.unpack(block[: BLOCK_HEADER.size].tobytes(), where)
    ids = np.dtype(np.uint64 if header.flags & WIDE_NODE_IDS else np.uint32)
    edge_dtype = np.dtype(np.uint64 if header.flags & WIDE_EDGE_IDS else np.uint32)
    start = edges_start_bytes(header.num_nodes)
    if header.edges_start * ids.itemsize != start:
        raise CorruptBlock(
            f"{where}: edges start at {header.edges_start * ids.itemsize}, expected {start} for "
            f"{header.num_nodes} columns"
        )
    end = start + header.num_edges * ids.itemsize
    at = align(end, 8)
    edge_bytes = header.num_edges * edge_dtype.itemsize if header.flags & HAS_EDGE_IDS else 0
    if at + edge_bytes > block.size or header.num_carried > header.num_edges:
        raise CorruptBlock(
            f"{where}: {header.num_edges} edges, {header.num_carried} of them carried, do not fit "
            f"a block of {block.size} bytes"
        )
    offsets = block[BLOCK_HEADER.size : BLOCK_HEADER.size + 4 * (header.num_nodes + 1)]
    edge_ids = block[at : at + edge_bytes].view(edge_dtype) if edge_bytes else None
    if header.flags & HAS_EDGE_IDS and edge_ids is None:
        edge_ids = np.empty(0, edge_dtype)
    return GraphBlock(header, offsets.view(np.uint32), block[start:end].view(ids), edge_ids)
