"""Packs columns of a CSC, in order, into graph blocks; and takes a block apart."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import (
    BLOCK_HEADER,
    HAS_EDGE_IDS,
    HAS_TIMES,
    HAS_WEIGHTS,
    MAX_ID_BITS,
    TIME_DTYPE,
    WEIGHT_DTYPE,
    WIDE_EDGE_IDS,
    WIDE_NODE_IDS,
    BlockHeader,
    EdgeLayout,
)
from blockstore.kernels.columns import count_fitting, view_sources
from blockstore.kernels.packed import pack_ids, unpack_ids

Emit = Callable[[NDArray[np.uint8]], None]
EdgeArrays = tuple[NDArray[Any] | None, ...]  # sources, edge ids, weights, times


class GraphPacker:
    """Fills blocks with columns and hands each full one to `emit`, which must not keep it.

    A column that does not fit into what is left of a block opens a new one.  One that is longer
    than the capacity of the layout starts in a fresh block, fills it and the following ones, and
    the block with its last edges takes further columns.
    """

    def __init__(self, block_bytes: int, layout: EdgeLayout, first: int, emit: Emit) -> None:
        """`first`: store id of the first column."""
        self._block_bytes, self._layout, self._emit = block_bytes, layout, emit
        self._capacity = layout.capacity(block_bytes)
        self._degrees = np.empty(block_bytes // 4, np.int64)
        self._sources = np.zeros(block_bytes // 8 + 1, np.uint64)  # a stream of bits
        maximum = 8 * block_bytes // sum(layout.bits)
        held = [f"uint{8 * layout.edge_id_bytes}" if layout.edge_id_bytes else None]
        held += [WEIGHT_DTYPE * bool(layout.weight_bytes), TIME_DTYPE * bool(layout.time_bytes)]
        self._sections = [np.empty(maximum if d else 0, np.dtype(d or "uint32")) for d in held]
        self._block = np.zeros(block_bytes, np.uint8)
        self._num_nodes = self._num_edges = self._num_carried = 0
        self._next, self._packed = first, 0
        self._first_nodes: list[int] = []
        self._first_edges: list[int] = []

    def append(
        self,
        degrees: NDArray[np.int64],
        sources: NDArray[Any],
        edge_ids: NDArray[Any] | None = None,
        weights: NDArray[np.float32] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Append the next consecutive columns, whole.

        degrees   int64 (columns,)
        sources   id_dtype (sum of degrees,)
        edge_ids, weights, times  the same length, if the layout has them
        """
        edges_of = (sources, edge_ids, weights, times)
        at = edge = 0
        while at < degrees.size:
            columns, edges = count_fitting(
                degrees, at, self._num_nodes, self._num_edges, self._block_bytes,
                self._layout.bits, self._capacity,
            )  # fmt: skip
            if columns:
                self._add(degrees[at : at + columns], edges_of, edge, edges)
                at, edge = at + columns, edge + edges
            elif self._num_nodes or self._num_carried:
                self._flush()
            else:
                self._add_multi_block(int(degrees[at]), edges_of, edge)
                at, edge = at + 1, edge + int(degrees[at])

    def close(self) -> NDArray[np.uint64]:
        """Emit the last block; returns first_node, uint64 (num_blocks + 1,): the object index."""
        if self._num_nodes or self._num_carried:
            self._flush()
        return np.array([*self._first_nodes, self._next], np.uint64)

    def first_edges(self) -> NDArray[np.uint64]:
        """After `close`: edges before each block, then all, uint64 (num_blocks + 1,)."""
        return np.array([*self._first_edges, self._packed], np.uint64)

    def _take_edges(self, edges_of: EdgeArrays, edge: int, count: int) -> None:
        if not self._num_nodes and not self._num_edges:
            self._first_nodes.append(self._next)
            self._first_edges.append(self._packed)
        layout, at = self._layout, self._num_edges
        sources, *others = edges_of
        assert sources is not None
        base, bits = np.uint64(layout.source_base), layout.source_bits
        fit = pack_ids(sources[edge : edge + count], base, bits, self._sources, at * bits)
        assert fit, f"a source is not of {bits} bits from {base} on"
        for section, values in zip(self._sections, others, strict=True):
            if section.size:
                assert values is not None
                section[at : at + count] = values[edge : edge + count]
        self._num_edges += count
        self._packed += count

    def _add(self, degrees: NDArray[np.int64], edges_of: EdgeArrays, edge: int, edges: int) -> None:
        self._take_edges(edges_of, edge, edges)
        self._degrees[self._num_nodes : self._num_nodes + degrees.size] = degrees
        self._num_nodes += degrees.size
        self._next += degrees.size

    def _add_multi_block(self, degree: int, edges_of: EdgeArrays, edge: int) -> None:
        """A column over several blocks; the last of them stays open."""
        done = 0
        while done < degree:
            count = min(self._capacity, degree - done)
            self._take_edges(edges_of, edge + done, count)
            if done == 0:
                self._degrees[0] = degree
                self._num_nodes, self._next = 1, self._next + 1
            else:
                self._num_carried = count
            done += count
            if done < degree:
                self._flush()

    def _flush(self) -> None:
        nodes, edges = self._num_nodes, self._num_edges
        layout, block = self._layout, self._block
        places = layout.sections(nodes, edges)
        last_degree = int(self._degrees[nodes - 1]) if nodes else 0
        header = BlockHeader(
            layout.flags, self._first_nodes[-1], last_degree, nodes, edges, self._num_carried,
            layout.source_bits, layout.source_base,
        )  # fmt: skip
        block[:] = 0
        block[: BLOCK_HEADER.size] = np.frombuffer(header.pack(), np.uint8)
        offsets = block[BLOCK_HEADER.size : BLOCK_HEADER.size + 4 * (nodes + 1)].view(np.uint32)
        offsets[0] = self._num_carried
        # of a multi-block column, what lies here
        held = np.minimum(self._degrees[:nodes], self._capacity)
        offsets[1:] = self._num_carried + np.cumsum(held)
        words = self._sources[: -(-edges * layout.source_bits // 64)]
        sections = [words, *(section[:edges] for section in self._sections)]
        for at, section in zip(places, sections, strict=False):
            raw = section.view(np.uint8)
            block[at : at + raw.size] = raw
        words[:] = 0
        self._emit(block)
        self._num_nodes = self._num_edges = self._num_carried = 0


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
    """The edge layout that a header describes.  Raises CorruptBlock."""
    flags, bits, base = header.flags, header.source_bits, header.source_base
    id_dtype = "uint64" if flags & WIDE_NODE_IDS else "uint32"
    if not 1 <= bits <= MAX_ID_BITS or base + (1 << bits) > 1 << 64:
        raise CorruptBlock(
            f"{where}: sources of {bits} bits from {base} on, expected 1 to {MAX_ID_BITS} bits"
        )
    edge_id_bytes = (8 if flags & WIDE_EDGE_IDS else 4) * bool(flags & HAS_EDGE_IDS)
    beside = 4 * bool(flags & HAS_WEIGHTS), 8 * bool(flags & HAS_TIMES)
    return EdgeLayout(id_dtype, bits, base, edge_id_bytes, *beside)
