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
    MOST_ID_BITS,
    TIME_DTYPE,
    WEIGHT_DTYPE,
    WIDE_EDGE_IDS,
    WIDE_NODE_IDS,
    BlockHeader,
    EdgeLayout,
)
from blockstore.kernels.columns import view_sources
from blockstore.kernels.packed import unpack_ids


class GraphBlock(NamedTuple):
    """Views into the block's bytes, and its sources."""

    header: BlockHeader
    offsets: NDArray[np.uint32]  # (num_nodes + 1,) as stored: edges of the block
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
    layout = _layout_of(header, where)
    places = layout.sections(header.num_nodes, header.num_edges)
    if places[-1] > block.size or header.num_carried > header.num_edges:
        raise CorruptBlock(
            f"{where}: {header.num_edges} edges, {header.num_carried} of them carried, do not fit "
            f"a block of {block.size} bytes"
        )
    offsets = block[BLOCK_HEADER.size : BLOCK_HEADER.size + 4 * (header.num_nodes + 1)]
    sources = np.empty(header.num_edges, np.dtype(layout.id_dtype))
    unpack_ids(view_sources(block, layout), 8 * places[0], sources)
    dtypes = f"uint{8 * layout.edge_id_bytes or 32}", WEIGHT_DTYPE, TIME_DTYPE
    edge_ids, weights, times = (
        block[at : at + header.num_edges * bits // 8].view(np.dtype(dtype)) if bits else None
        for at, bits, dtype in zip(places[1:], layout.bits[1:], dtypes, strict=False)
    )
    return GraphBlock(header, offsets.view(np.uint32), sources, edge_ids, weights, times)


def _layout_of(header: BlockHeader, where: str) -> EdgeLayout:
    """What a header says of the edges.  Raises CorruptBlock."""
    flags, bits, base = header.flags, header.source_bits, header.source_base
    id_dtype = "uint64" if flags & WIDE_NODE_IDS else "uint32"
    if not 1 <= bits <= MOST_ID_BITS or base + (1 << bits) > 1 << 64:
        raise CorruptBlock(
            f"{where}: sources of {bits} bits from {base} on, expected 1 to {MOST_ID_BITS} bits"
        )
    edge_id_bytes = (8 if flags & WIDE_EDGE_IDS else 4) * bool(flags & HAS_EDGE_IDS)
    beside = 4 * bool(flags & HAS_WEIGHTS), 8 * bool(flags & HAS_TIMES)
    return EdgeLayout(id_dtype, bits, base, edge_id_bytes, *beside)
