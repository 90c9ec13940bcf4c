"""A graph block taken apart, for verification, export and tests."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import (
    BLOCK_HEADER,
    HAS_EDGE_IDS,
    HAS_TIMES,
    HAS_WEIGHTS,
    TIME_DTYPE,
    WEIGHT_DTYPE,
    WIDE_EDGE_IDS,
    WIDE_NODE_IDS,
    BlockHeader,
    section_offsets,
)


class GraphBlock(NamedTuple):
    """Views into the block's bytes."""

    header: BlockHeader
    offsets: NDArray[np.uint32]  # (num_nodes + 1,) as stored
    sources: NDArray[Any]  # id_dtype (num_edges,): carried ones first
    edge_ids: NDArray[Any] | None  # (num_edges,)
    weights: NDArray[np.float32] | None = None  # (num_edges,)
    times: NDArray[np.int64] | None = None  # (num_edges,)

    def degrees_here(self) -> NDArray[np.int64]:
        """Edges of each column that lie in this block, int64 (num_nodes,)."""
        offsets = self.offsets.astype(np.int64)
        return offsets[1:] - offsets[:-1]

    def edge_words(self) -> NDArray[np.uint32]:
        """All that the block has of each edge, section by section: uint32 (num_edges, words)."""
        held = (self.sources, self.edge_ids, self.weights, self.times)
        words = [
            np.ascontiguousarray(part).view(np.uint32).reshape(part.size, part.itemsize // 4)
            for part in held
            if part is not None
        ]
        return words[0] if len(words) == 1 else np.hstack(words)


def unpack_block(block: NDArray[np.uint8], where: str) -> GraphBlock:
    """Take a block apart.

    block   uint8 (block_bytes,)
    where   path and byte offset: opens every error message

    Raises CorruptBlock, UnsupportedVersion: the header does not fit the block.
    """
    header = BlockHeader.unpack(block[: BLOCK_HEADER.size].tobytes(), where)
    flags = header.flags
    dtypes = [
        np.dtype(np.uint64 if flags & WIDE_NODE_IDS else np.uint32),
        np.dtype(np.uint64 if flags & WIDE_EDGE_IDS else np.uint32),
        np.dtype(WEIGHT_DTYPE),
        np.dtype(TIME_DTYPE),
    ]
    held = [True, *(bool(flags & bit) for bit in (HAS_EDGE_IDS, HAS_WEIGHTS, HAS_TIMES))]
    widths = [d.itemsize * h for d, h in zip(dtypes, held, strict=True)]
    places = section_offsets(header.num_nodes, header.num_edges, widths)
    if header.edges_start * widths[0] != places[0]:
        raise CorruptBlock(
            f"{where}: edges start at {header.edges_start * widths[0]}, expected {places[0]} for "
            f"{header.num_nodes} columns"
        )
    if places[-1] > block.size or header.num_carried > header.num_edges:
        raise CorruptBlock(
            f"{where}: {header.num_edges} edges, {header.num_carried} of them carried, do not fit "
            f"a block of {block.size} bytes"
        )
    offsets = block[BLOCK_HEADER.size : BLOCK_HEADER.size + 4 * (header.num_nodes + 1)]
    sections = [
        block[at : at + header.num_edges * width].view(dtype) if width else None
        for at, width, dtype in zip(places, widths, dtypes, strict=False)
    ]
    sources, edge_ids, weights, times = sections
    assert sources is not None
    return GraphBlock(header, offsets.view(np.uint32), sources, edge_ids, weights, times)
