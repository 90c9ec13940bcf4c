"""Copies of nodes and of their columns, made by reading the store in order, not at random."""

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import TIME_DTYPE, WEIGHT_DTYPE, Relation, RowArray
from blockstore.pack import GraphPacker
from blockstore.store import Store, scan_rows
from preprocess.files.ahead import read_ahead
from preprocess.files.buckets import Buckets, passing_bytes
from preprocess.files.store import scan_size, stored_columns
from preprocess.kernels.edges import cut_ranges
from preprocess.kernels.influence import copy_runs
from preprocess.pipeline.progress import Progress
from preprocess.stages.rows import Emit, chunk_rows, scatter_rows

SLOT_BYTES = 28  # memory of a slot while data is copied: node, order, degree, start, ...
_PACKED_EDGES = 1 << 18  # edges packed at a time
_PLACE = np.dtype(np.uint32)  # dtype of the position of a slot


class SlotCopies:
    """Slots of one type, each for a copy of a node; rows and columns are copied in slot order."""

    def __init__(
        self, store: Store, nodes: NDArray[np.uint64], share: int, work: Path, progress: Progress
    ) -> None:
        """`nodes`: uint64 (slots,), store ids in the order of the slots."""
        self._store, self._share, self._work, self._progress = store, share, work, progress
        self.num_slots = nodes.size
        self._order = np.argsort(nodes, kind="stable")
        self._nodes = nodes[self._order].astype(np.int64)  # ascending
        self._scan_bytes = scan_size(share, store.manifest.block_bytes)

    def rows(self, array: RowArray, first: int, copy: RowArray, emit: Emit) -> None:
        """Copy one row for each slot from an array of the type, whose first node is `first`."""
        placed = self._placed_rows(array, first)
        scatter_rows(placed, copy, _PLACE, self._share, self._work, emit, self._progress)

    def columns(self, relation: Relation, packer: GraphPacker) -> int:
        """Pack one column of a relation's in-edges for each slot; returns the number of edges.

        Whole columns are appended to the bucket of their slot in the order of their nodes, so their
        offsets in the bucket need not be stored.
        """
        words = sum(relation.item_bytes(self._store.manifest.id_dtype)) // 4
        degrees = self._degrees(relation)
        # a bucket holds the edges of a range of slots, which are sorted together
        counts = degrees.astype(np.uint32)
        longest = int(counts.max(initial=0)) * 4 * words + SLOT_BYTES
        maximum = max(longest, self._share // 8)
        bounds, sizes = cut_ranges(counts, 4 * words, SLOT_BYTES, maximum)
        total = int(degrees.sum())
        in_memory = not passing_bytes(total, 4 * words, self._share)
        name = f"{relation.path}: columns of slots"
        with (
            Buckets(
                self._work / "slots", sizes, [(np.uint32, words)], in_memory, self._share // 8
            ) as buckets,
            self._progress.stage(name, 2 * total, "edges") as stage,
        ):
            for some, edges in self._whole_columns(relation, degrees, words):
                slots = self._order[some]
                bucket = np.searchsorted(bounds, slots, "right") - 1
                order = np.argsort(bucket, kind="stable")
                starts = _starts(degrees[slots])
                chosen = np.empty(edges.size, np.uint32)
                runs = degrees[slots][order] * words
                copy_runs(edges, starts[:-1][order] * words, runs, chosen, _starts(runs)[:-1])
                grouped = np.bincount(bucket, degrees[slots], minlength=sizes.size).astype(np.int64)
                buckets.append_grouped(_starts(grouped), [chosen])
                stage.advance(int(starts[-1]))
            buckets.finish()
            for b, (low, high) in enumerate(pairwise(bounds.tolist())):
                self._pack(buckets.take(b, 0), degrees[low:high], low, relation, packer)
                stage.advance(int(sizes[b]))
        return total

    def _whole_columns(
        self, relation: Relation, degrees: NDArray[np.int64], words: int
    ) -> Iterator[tuple[slice, NDArray[np.uint32]]]:
        """(copies in the order of their nodes, their edges flat), some whole columns at a time.

        The beginning of a column that continues in the next piece is held back until it is whole.
        """
        maximum = chunk_rows(4 * words, self._share)
        held: list[NDArray[np.uint32]] = []
        for first, skipped, here, edges, low, high in self._pieces(relation, True):
            if held and not skipped:
                held = []
            if held:
                edges = np.concatenate([*held, edges])
                here[0] += skipped
                held = []
            begins = _starts(here)
            if high > low:
                last = int(self._nodes[high - 1]) - first
                if last == here.size - 1 and here[-1] < degrees[self._order[high - 1]]:
                    held = [edges[begins[last] :].copy()]
                    high = int(np.searchsorted(self._nodes, first + last))
            columns = self._nodes[low:high] - first
            ends = np.cumsum(here[columns])
            at, done = low, 0
            while at < high:
                cut = low + int(np.searchsorted(ends, done + maximum, "right"))
                cut = min(max(cut, at + 1), high)
                size = int(ends[cut - low - 1]) - done
                chosen = columns[at - low : cut - low]
                runs, out = here[chosen] * words, np.empty(size * words, np.uint32)
                copy_runs(edges.reshape(-1), begins[chosen] * words, runs, out, _starts(runs)[:-1])
                yield slice(at, cut), out
                at, done = cut, done + size

    def _pack(
        self,
        edges: NDArray[np.uint32],
        degrees: NDArray[np.int64],
        first: int,
        relation: Relation,
        packer: GraphPacker,
    ) -> None:
        """Pack a bucket's columns, which are in node order, by slot; `first`: its first slot."""
        words = edges.size // max(1, int(degrees.sum()))
        inside = np.flatnonzero((self._order >= first) & (self._order < first + degrees.size))
        slots = self._order[inside] - first
        runs = degrees[slots] * words
        ordered = np.empty(edges.size, np.uint32)
        copy_runs(edges, _starts(runs)[:-1], runs, ordered, _starts(degrees)[:-1][slots] * words)
        begins, at = _starts(degrees), 0
        while at < degrees.size:
            stop = int(np.searchsorted(begins, begins[at] + _PACKED_EDGES, "right")) - 1
            stop = min(max(stop, at + 1), degrees.size, at + _PACKED_EDGES)
            part = ordered[begins[at] * words : begins[stop] * words].reshape(-1, max(1, words))
            packer.append(degrees[at:stop], *self._sections(part, relation))
            at = stop

    def _sections(
        self, records: NDArray[np.uint32], relation: Relation
    ) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]:
        """Sources, edge ids, weights, times of edges, uint32 (edges, words)."""
        id_dtype = self._store.manifest.id_dtype
        dtypes = (id_dtype, relation.edge_id_dtype, WEIGHT_DTYPE, TIME_DTYPE)
        found: list[NDArray[Any] | None] = []
        at = 0
        for width, dtype in zip(relation.item_bytes(id_dtype), dtypes, strict=True):
            part = None
            if width:
                part = np.ascontiguousarray(records[:, at : at + width // 4])
                part = part.reshape(-1).view(np.dtype(dtype or "uint32"))
            found.append(part)
            at += width // 4
        sources, edge_ids, weights, times = found
        assert sources is not None
        return sources, edge_ids, weights, times

    def _placed_rows(
        self, array: RowArray, first: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        maximum = chunk_rows(array.row_bytes, self._share)
        for row, rows in scan_rows(self._store, array, self._scan_bytes):
            ends = np.array([row, row + rows.shape[0]]) + first
            low, high = np.searchsorted(self._nodes, ends).tolist()
            for at in range(low, high, maximum):
                some = slice(at, min(at + maximum, high))
                yield rows[self._nodes[some] - int(ends[0])], self._places(some)

    def _places(self, some: slice) -> NDArray[Any]:
        return self._order[some].astype(_PLACE)

    def _pieces(self, relation: Relation, records: bool) -> Iterator[Any]:
        """(first column, its edges before, degrees, edges, copies low, high) of each piece."""
        pieces = stored_columns(self._store, relation, self._scan_bytes, records=records)
        with closing(read_ahead(pieces)) as ahead:
            for (first, skipped), degrees, edges in ahead:
                ends = np.array([first, first + degrees.size])
                low, high = np.searchsorted(self._nodes, ends).tolist()
                yield int(first), int(skipped), degrees, edges, low, high

    def _degrees(self, relation: Relation) -> NDArray[np.int64]:
        found = np.zeros(self.num_slots, np.int64)
        name = f"{relation.path}: degrees of slots"
        with self._progress.stage(name, relation.num_edges, "edges") as stage:
            for first, _, degrees, edges, low, high in self._pieces(relation, False):
                found[self._order[low:high]] += degrees[self._nodes[low:high] - first]
                stage.advance(edges.shape[0])
        return found


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exclusive prefix sums: the start of each, then the end, int64 (sizes + 1,)."""
    starts = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
