"""Copies of nodes and of their columns: read in the order of the store, never a row at random."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Relation, RowArray
from blockstore.pack import GraphPacker
from blockstore.store import Store, scan_rows
from preprocess.kernels.reach import spread_columns
from preprocess.progress import Progress
from preprocess.stages.ahead import read_ahead
from preprocess.stages.rows import Emit, chunk_rows, scatter_rows
from preprocess.stages.stored_columns import relation_columns, scan_size

SLOT_BYTES = 28  # of a slot, while rows or columns are copied: node, order, degree, start, ...
_PACKED_EDGES = 1 << 18  # at a time


class SlotCopies:
    """Slots of one type, each a copy of a node; what belongs to it is copied in their order."""

    def __init__(
        self, store: Store, nodes: NDArray[np.uint64], share: int, work: Path, progress: Progress
    ) -> None:
        """`nodes`: uint64 (slots,), store ids in the order of the slots."""
        self._store, self._share, self._work, self._progress = store, share, work, progress
        self.num_slots = nodes.size
        self._order = np.argsort(nodes, kind="stable")
        self._nodes = nodes[self._order].astype(np.int64)  # ascending
        self._scan_bytes = scan_size(share, store.manifest.block_bytes)
        self._place_dtype = np.dtype(np.uint32)

    def rows(self, array: RowArray, first: int, copy: RowArray, emit: Emit) -> None:
        """Rows of an array of the type, whose first node is `first`, a row a slot."""
        placed = self._placed_rows(array, first)
        scatter_rows(placed, copy, self._place_dtype, self._share, self._work, emit, self._progress)

    def columns(self, relation: Relation, packer: GraphPacker) -> int:
        """In-edges of a relation into the type, a column a slot; returns how many edges."""
        degrees = self._degrees(relation)
        starts = np.zeros(degrees.size + 1, np.int64)
        np.cumsum(degrees, out=starts[1:])
        total = int(starts[-1])
        places = np.dtype(np.uint32 if total < 2**32 else np.uint64)
        widths = relation.item_bytes(self._store.manifest.id_dtype)
        array = RowArray(f"{relation.path} of slots", "uint32", total, (sum(widths) // 4,))
        feed = _ColumnFeed(packer, degrees, relation, self._store.manifest.id_dtype)
        placed = self._placed_edges(relation, starts, places)
        scatter_rows(placed, array, places, self._share, self._work, feed.append, self._progress)
        feed.finish()
        return total

    def _placed_rows(
        self, array: RowArray, first: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        most = chunk_rows(array.row_bytes, self._share)
        for row, rows in scan_rows(self._store, array, self._scan_bytes):
            ends = np.array([row, row + rows.shape[0]]) + first
            low, high = np.searchsorted(self._nodes, ends).tolist()
            for at in range(low, high, most):
                some = slice(at, min(at + most, high))
                yield rows[self._nodes[some] - int(ends[0])], self._places(some)

    def _places(self, some: slice) -> NDArray[Any]:
        return self._order[some].astype(self._place_dtype)

    def _pieces(self, relation: Relation, records: bool) -> Iterator[Any]:
        """(first column, its edges before, degrees, edges, copies low, high) of each piece."""
        pieces = relation_columns(self._store, relation, self._scan_bytes, records=records)
        with closing(read_ahead(pieces)) as ahead:
            for (first, skipped), degrees, edges in ahead:
                ends = np.array([first, first + degrees.size])
                low, high = np.searchsorted(self._nodes, ends).tolist()
                yield int(first), int(skipped), degrees, edges, low, high

    def _degrees(self, relation: Relation) -> NDArray[np.int64]:
        """Of each slot."""
        found = np.zeros(self.num_slots, np.int64)
        name = f"{relation.path}: degrees of slots"
        with self._progress.stage(name, relation.num_edges, "edges") as stage:
            for first, _, degrees, edges, low, high in self._pieces(relation, False):
                found[self._order[low:high]] += degrees[self._nodes[low:high] - first]
                stage.advance(edges.shape[0])
        return found

    def _placed_edges(
        self, relation: Relation, starts: NDArray[np.int64], places_dtype: np.dtype[Any]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        width = sum(relation.item_bytes(self._store.manifest.id_dtype))
        most = chunk_rows(width + 16, self._share)
        for first, skipped, degrees, edges, low, high in self._pieces(relation, True):
            begins = np.zeros(degrees.size + 1, np.int64)
            np.cumsum(degrees, out=begins[1:])
            ends = np.cumsum(degrees[self._nodes[low:high] - first])
            at, done = low, 0
            while at < high:
                cut = int(np.searchsorted(ends, done + most, "right")) + low
                cut = min(max(cut, at + 1), high)
                size = int(ends[cut - low - 1]) - done
                index, places = np.empty(size, np.int64), np.empty(size, places_dtype)
                spread_columns(
                    self._nodes[at:cut], self._order[at:cut], first, skipped, begins, starts,
                    index, places,
                )  # fmt: skip
                yield edges[index], places
                at, done = cut, done + size


class _ColumnFeed:
    """Edges in the order of slots, in any pieces, to a packer as whole columns."""

    def __init__(
        self, packer: GraphPacker, degrees: NDArray[np.int64], relation: Relation, id_dtype: str
    ) -> None:
        dtypes = [id_dtype, relation.edge_id_dtype, "float32", "int64"]
        widths = relation.item_bytes(id_dtype)
        self._sections = [
            (width // 4, np.dtype(d)) if width else None
            for width, d in zip(widths, dtypes, strict=True)
        ]
        self._packer, self._degrees = packer, degrees
        self._next = 0  # slot
        self._held: list[NDArray[np.uint32]] = []  # edges of it that came before
        self._held_edges = 0

    def append(self, records: NDArray[np.uint32]) -> None:
        """More edges, uint32 (edges, words); it is not kept."""
        at = 0
        while at < records.shape[0]:
            low = self._next
            ends = np.cumsum(self._degrees[low : low + _PACKED_EDGES])
            there = self._held_edges + records.shape[0] - at
            most = max(int(ends[0]), min(there, _PACKED_EDGES))
            count = int(np.searchsorted(ends, min(most, there), "right"))
            if count == 0:
                break
            size = int(ends[count - 1]) - self._held_edges
            self._pack(count, [*self._held, records[at : at + size]])
            self._held, self._held_edges, at = [], 0, at + size
        if at < records.shape[0]:
            self._held.append(records[at:].copy())
            self._held_edges += records.shape[0] - at

    def finish(self) -> None:
        """Slots without edges may be left."""
        assert not self._held_edges
        while self._next < self._degrees.size:
            left = self._degrees[self._next :][:_PACKED_EDGES]
            assert not left.any()
            self._pack(left.size, [])

    def _pack(self, count: int, parts: list[NDArray[np.uint32]]) -> None:
        words = sum(s[0] for s in self._sections if s)
        records = np.concatenate([np.empty((0, words), np.uint32), *parts])
        values: list[NDArray[Any] | None] = []
        at = 0
        for section in self._sections:
            if section is None:
                values.append(None)
                continue
            part = np.ascontiguousarray(records[:, at : at + section[0]])
            values.append(part.view(section[1]).reshape(-1))
            at += section[0]
        sources, edge_ids, weights, times = values
        assert sources is not None
        degrees = self._degrees[self._next : self._next + count]
        self._packer.append(degrees, sources, edge_ids, weights, times)
        self._next += count
