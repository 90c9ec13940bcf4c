"""Columns of a CSC, in order, into graph blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import (
    BLOCK_HEADER,
    HAS_EDGE_IDS,
    ITEM_BYTES,
    WIDE_EDGE_IDS,
    WIDE_NODE_IDS,
    BlockHeader,
    align,
    edges_start_bytes,
    giant_capacity,
)
from blockstore.kernels.pack import count_fitting

Emit = Callable[[NDArray[np.uint8]], None]


class GraphPacker:
    """Fills blocks with columns and hands each full one to `emit`, which must not keep it.

    A column that does not fit into what is left of a block opens a new one.  One that is longer
    than `giant_capacity` starts in a fresh block, fills it and the following ones, and the block
    with its last edges takes further columns.
    """

    def __init__(
        self, block_bytes: int, id_dtype: str, edge_id_dtype: str | None, first: int, emit: Emit
    ) -> None:
        """`first`: store id of the first column."""
        self._block_bytes, self._emit = block_bytes, emit
        self._id_bytes = ITEM_BYTES[id_dtype]
        self._edge_id_bytes = ITEM_BYTES[edge_id_dtype] if edge_id_dtype else 0
        self._capacity = giant_capacity(block_bytes, self._id_bytes, self._edge_id_bytes)
        self._flags = (
            HAS_EDGE_IDS * bool(edge_id_dtype)
            | WIDE_NODE_IDS * (self._id_bytes == 8)
            | WIDE_EDGE_IDS * (self._edge_id_bytes == 8)
        )
        most = block_bytes // self._id_bytes
        self._degrees = np.empty(block_bytes // 4, np.int64)
        self._sources = np.empty(most, np.dtype(id_dtype))
        self._edge_ids = np.empty(most if edge_id_dtype else 0, np.dtype(edge_id_dtype or "uint32"))
        self._block = np.zeros(block_bytes, np.uint8)
        self._num_nodes = self._num_edges = self._num_carried = 0
        self._next = first
        self._first_nodes: list[int] = []

    def append(
        self,
        degrees: NDArray[np.int64],
        sources: NDArray[Any],
        edge_ids: NDArray[Any] | None = None,
    ) -> None:
        """The next consecutive columns, whole.

        degrees   int64 (columns,)
        sources   id_dtype (sum of degrees,)
        edge_ids  the same length, where the packer keeps them
        """
        at = edge = 0
        while at < degrees.size:
            columns, edges = count_fitting(
                degrees, at, self._num_nodes, self._num_edges, self._block_bytes, self._id_bytes,
                self._edge_id_bytes, self._capacity,
            )  # fmt: skip
            if columns:
                self._add(degrees[at : at + columns], sources, edge_ids, edge, edges)
                at, edge = at + columns, edge + edges
            elif self._num_nodes or self._num_carried:
                self._flush()
            else:
                self._add_giant(int(degrees[at]), sources, edge_ids, edge)
                at, edge = at + 1, edge + int(degrees[at])

    def close(self) -> NDArray[np.uint64]:
        """Emit the last block; returns first_node, uint64 (num_blocks + 1,): the object index."""
        if self._num_nodes or self._num_carried:
            self._flush()
        return np.array([*self._first_nodes, self._next], np.uint64)

    def _take_edges(
        self, sources: NDArray[Any], edge_ids: NDArray[Any] | None, edge: int, count: int
    ) -> None:
        if not self._num_nodes and not self._num_edges:
            self._first_nodes.append(self._next)
        at = self._num_edges
        self._sources[at : at + count] = sources[edge : edge + count]
        if self._edge_id_bytes:
            assert edge_ids is not None
            self._edge_ids[at : at + count] = edge_ids[edge : edge + count]
        self._num_edges += count

    def _add(
        self,
        degrees: NDArray[np.int64],
        sources: NDArray[Any],
        edge_ids: NDArray[Any] | None,
        edge: int,
        edges: int,
    ) -> None:
        self._take_edges(sources, edge_ids, edge, edges)
        self._degrees[self._num_nodes : self._num_nodes + degrees.size] = degrees
        self._num_nodes += degrees.size
        self._next += degrees.size

    def _add_giant(
        self, degree: int, sources: NDArray[Any], edge_ids: NDArray[Any] | None, edge: int
    ) -> None:
        """A column over several blocks; the last of them stays open."""
        done = 0
        while done < degree:
            count = min(self._capacity, degree - done)
            self._take_edges(sources, edge_ids, edge + done, count)
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
        start = edges_start_bytes(nodes)
        last_degree = int(self._degrees[nodes - 1]) if nodes else 0
        header = BlockHeader(
            self._flags, self._first_nodes[-1], last_degree, nodes, edges, self._num_carried,
            start // self._id_bytes,
        )  # fmt: skip
        block = self._block
        block[:] = 0
        block[: BLOCK_HEADER.size] = np.frombuffer(header.pack(), np.uint8)
        offsets = block[BLOCK_HEADER.size : BLOCK_HEADER.size + 4 * (nodes + 1)].view(np.uint32)
        offsets[0] = header.edges_start + self._num_carried
        held = np.minimum(self._degrees[:nodes], self._capacity)  # of a giant, what lies here
        offsets[1:] = offsets[0] + np.cumsum(held)
        end = start + edges * self._id_bytes
        block[start:end] = self._sources[:edges].view(np.uint8)
        if self._edge_id_bytes:
            at = align(end, 8)
            block[at : at + edges * self._edge_id_bytes] = self._edge_ids[:edges].view(np.uint8)
        self._emit(block)
        self._num_nodes = self._num_edges = self._num_carried = 0
