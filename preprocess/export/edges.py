"""Edges of a relation, and their arrays, out of graph blocks into npy files.

With edge ids: in the source's order, without what ingest dropped or added.  Without: all of them,
by (target, source), equal ones as they are stored.  Arrays stand in the order of the edges.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import TIME_DTYPE, WEIGHT_DTYPE, Relation, RowArray
from blockstore.store import Store, numpy_dtype, scan_blocks, scan_rows
from blockstore.unpack import GraphBlock, unpack_block
from preprocess.export.rows import SCAN_BYTES, ExportRun, copy_rows, write_dense
from preprocess.files.npy import NpyWriter
from preprocess.plan import too_little_memory
from preprocess.sources.plain_names import PlainNames
from preprocess.stages.array_file import ArrayFile
from preprocess.stages.csc import COLUMN_BYTES, Columns, Records, Widths, sorted_columns
from preprocess.stages.edge_list import Identified, Part, Pieces, rows_by_id
from preprocess.stages.edge_places import EdgePlaces
from preprocess.stages.rows import Emit

_IDS = "edge_ids"  # temporary file
_PIECE_IDS = 1 << 18


class TypeIds(NamedTuple):
    """A node type: store id of its first node, and the original id of each."""

    first: int
    original: NDArray[Any]


class Written(NamedTuple):
    """What an export of edges has found."""

    num_edges: int
    most_node: int  # the largest id, -1 without edges


def columns_of(
    store: Store, relation: Relation
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any] | None]]:
    """(targets, sources, edge ids) of each graph block, by store id."""
    for targets, block in blocks_of(store, relation):
        yield targets, block.sources, block.edge_ids


def blocks_of(store: Store, relation: Relation) -> Iterator[tuple[NDArray[np.int64], GraphBlock]]:
    """Each graph block, taken apart, and the target of each of its edges, by store id."""
    file = store.graph(relation)
    last = -1  # the column that carried edges belong to
    for first, blocks in scan_blocks(file, SCAN_BYTES):
        for i in range(blocks.shape[0]):
            block = unpack_block(blocks[i], f"{store.path / relation.path}, block {first + i}")
            header = block.header
            here = np.arange(header.first_node, header.first_node + header.num_nodes)
            carried = np.full(header.num_carried, last)
            last = int(here[-1]) if header.num_nodes else last
            yield np.concatenate([carried, np.repeat(here, block.degrees_here())]), block


class EdgeExport:
    """One relation.  Raises BudgetTooSmall, OutOfSpace, CorruptBlock."""

    def __init__(
        self, run: ExportRun, relation: Relation, src: TypeIds, dst: TypeIds, names: PlainNames
    ) -> None:
        self._run, self._relation, self._names = run, relation, names
        self._src, self._dst = src, dst
        self._ends = (relation.src, relation.name, relation.dst)
        self._path = run.folder / f"{names.edges(self._ends)}.npy"
        self._has_ids = relation.edge_id_dtype is not None
        self._num_ids = relation.num_source_edges if self._has_ids else relation.num_edges
        self._id_dtype = relation.edge_id_dtype or _place_dtype(relation.num_edges)
        self._most_node = -1

    def write(self) -> Written:
        """Edges, then their arrays and splits."""
        relation, path = self._relation, self._run.work / _IDS
        lists = any(not a.row_shape for a in relation.splits.values())
        rows = relation.has_weights or relation.has_times or bool(relation.features)
        wanted = rows or (lists and self._has_ids)
        try:
            count = self._write_by_id(wanted) if self._has_ids else self._write_sorted(wanted)
            with ArrayFile(path, self._id_dtype) as ids:
                self._write_rows(ids, count)
                self._write_splits(ids, count)
        finally:
            path.unlink(missing_ok=True)
        return Written(count, self._most_node)

    def _records(self) -> Iterator[Records]:
        """Edges of each graph block, by original id."""
        none = np.empty(0, np.int64)
        src, dst = self._src, self._dst
        for targets, sources, edge_ids in columns_of(self._run.store, self._relation):
            if src.first:
                sources = sources - sources.dtype.type(src.first)
            yield Records(
                dst.original[targets - dst.first].astype(np.int64),
                src.original[sources].astype(np.int64),
                none if edge_ids is None else edge_ids.astype(np.int64),
            )

    def _write_by_id(self, wanted: bool) -> int:
        """By edge id; where they are wanted, ids in the order of the store go to a file."""
        relation, run = self._relation, self._run

        def identified() -> Iterator[Identified]:
            with ArrayFile(run.work / _IDS, self._id_dtype) as ids:
                for dst, src, edge_ids in self._records():
                    if wanted:
                        ids.append(edge_ids)
                    yield Identified(edge_ids, (src, dst))

        ends = [Part(t.original.dtype) for t in (self._src, self._dst)]
        count, pieces = rows_by_id(
            identified(), self._num_ids, ends, relation.num_edges, run.share, run.work,
            run.progress,
        )  # fmt: skip
        self._write_ends(count, ((row, values.reshape(-1)) for row, values in pieces))
        return count

    def _write_sorted(self, wanted: bool) -> int:
        """By (target, source); where they are wanted, places of all edges, in the order of the
        store, go to a file.
        """
        relation, run = self._relation, self._run
        num_edges = relation.num_edges
        counts = np.zeros(self._dst.original.size, np.uint32)
        with run.progress.stage("count edges", num_edges, "edges") as stage:
            for records in self._records():
                np.add.at(counts, records.dst, np.uint32(1))
                stage.advance(records.dst.size)
        most = max(self._src.original.size, self._dst.original.size)
        edge = self._id_dtype if wanted else None
        widths = Widths.of(run.store.manifest.id_dtype, most, edge, num_edges)
        share = run.share // 4 * 3 if wanted else run.share
        longest = int(counts.max(initial=0)) * widths.sort_bytes + COLUMN_BYTES
        if longest > share // 4 * 3:
            least = run.mem_bytes + 2 * longest
            raise too_little_memory(run.mem_bytes, least, "sorting the in-edges of one node")
        edges = self._counted() if wanted else self._records()
        columns = sorted_columns(edges, counts, widths, False, share, run.work, run.progress)
        if not wanted:
            self._write_ends(num_edges, _ends(columns, None))
            return num_edges
        with EdgePlaces(num_edges, self._id_dtype, run.share // 4, run.work) as places:
            self._write_ends(num_edges, _ends(columns, places))
            places.write(run.work / _IDS)
        return num_edges

    def _counted(self) -> Iterator[Records]:
        """Edges, with their places in the store as ids."""
        done = 0
        for dst, src, _ in self._records():
            yield Records(dst, src, np.arange(done, done + dst.size))
            done += dst.size

    def _write_ends(self, count: int, pieces: Pieces) -> None:
        """Sources, numbered 0, and targets, numbered 1, in turn."""
        done = 0
        with NpyWriter(self._path, (2, count), np.int64) as out:
            for row, values in pieces:
                out.put(row * count + done, values)
                self._most_node = max(self._most_node, int(values.max(initial=0)))
                done += values.size if row == 1 else 0
        assert done == count

    def _write_rows(self, ids: ArrayFile, count: int) -> None:
        """Weights, times and arrays, each in the order of the edges."""
        run, relation = self._run, self._relation

        def weights(block: GraphBlock) -> NDArray[Any] | None:
            return block.weights

        def times(block: GraphBlock) -> NDArray[Any] | None:
            return block.times

        held: tuple[tuple[str, str, bool, Callable[[GraphBlock], NDArray[Any] | None]], ...] = (
            ("weight", WEIGHT_DTYPE, relation.has_weights, weights),
            ("time", TIME_DTYPE, relation.has_times, times),
        )
        for name, dtype, there, section in held:
            if there:
                array = RowArray(name, dtype, relation.num_edges)
                pieces = (section(block) for _, block in blocks_of(run.store, relation))
                self._write_array(name, array, pieces, ids, count)
        for name, array in relation.features.items():
            rows = (rows for _, rows in scan_rows(run.store, array, SCAN_BYTES))
            self._write_array(name, array, rows, ids, count)

    def _write_array(
        self,
        name: str,
        array: RowArray,
        pieces: Iterator[NDArray[Any] | None],
        ids: ArrayFile,
        count: int,
    ) -> None:
        run = self._run

        def identified() -> Iterator[Identified]:
            done = 0
            for piece in pieces:
                assert piece is not None
                yield Identified(ids.read(done, piece.shape[0]), (piece,))
                done += piece.shape[0]

        def place(emit: Emit) -> None:
            part = Part(numpy_dtype(array.dtype), array.row_items)
            found, ordered = rows_by_id(
                identified(), self._num_ids, [part], array.num_rows, run.share, run.work,
                run.progress,
            )  # fmt: skip
            assert found == count
            for _, rows in ordered:
                emit(rows.reshape(-1, *array.row_shape))

        write_dense(run, self._names.edge_rows(self._ends, name), array, count, place)

    def _write_splits(self, ids: ArrayFile, count: int) -> None:
        """Pairs as they are; positions as those of the edges that are written."""
        run = self._run
        for name, array in self._relation.splits.items():
            stem = self._names.edge_split(self._ends, name)
            if array.row_shape or (self._has_ids and count == self._num_ids):
                copy_rows(run, stem, array)
            elif not self._has_ids:
                run.progress.line(
                    f"{array.path}: left out: positions of edges mean nothing in a store without "
                    "edge ids; ingest with --edge-ids keeps them"
                )
            else:
                self._write_positions(run.folder / f"{stem}.npy", array, ids)

    def _write_positions(self, path: Path, array: RowArray, ids: ArrayFile) -> None:
        """Positions among the edges that were not dropped; those that were are left out."""
        run = self._run
        need = 16 * (self._num_ids // 64 + 1)
        if need > run.share // 2:
            least = run.mem_bytes + 2 * need
            raise too_little_memory(run.mem_bytes, least, "a quarter of a byte an edge of a split")
        kept = _KeptIds(self._num_ids)
        for piece in ids.pieces(0, ids.size, _PIECE_IDS):
            kept.add(piece)
        kept.finish()
        with NpyWriter(path, None, np.int64) as out:
            for _, listed in scan_rows(run.store, array, SCAN_BYTES):
                out.append(kept.places(listed))


class _KeptIds:
    """Which ids there are, and how many of them before each: 16 bytes for 64 ids."""

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids
        self._words = np.zeros(num_ids // 64 + 1, np.uint64)
        self._before = np.zeros(0, np.int64)

    def add(self, ids: NDArray[Any]) -> None:
        """More ids; those that are too large are left out."""
        ids = ids[ids < self._num_ids].astype(np.int64)
        np.bitwise_or.at(self._words, ids >> 6, np.uint64(1) << (ids & 63).astype(np.uint64))

    def finish(self) -> None:
        """All are there."""
        counts = np.bitwise_count(self._words).astype(np.int64)
        self._before = np.cumsum(counts) - counts

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each id that is there, how many smaller ones are."""
        word, bit = ids >> 6, np.uint64(1) << (ids & 63).astype(np.uint64)
        there = (self._words[word] & bit) != 0
        word, bit = word[there], bit[there]
        below = np.bitwise_count(self._words[word] & (bit - np.uint64(1)))
        found: NDArray[np.int64] = self._before[word] + below
        return found


def _ends(columns: Iterator[Columns], places: EdgePlaces | None) -> Pieces:
    """Sources, numbered 0, and targets, numbered 1, in turn; edge ids go to `places`."""
    for c in columns:
        if places is not None:
            assert c.edge_ids is not None
            places.append(c.edge_ids)
        yield 0, c.sources
        yield 1, np.repeat(np.arange(c.first, c.first + c.degrees.size), c.degrees)


def _place_dtype(num_edges: int) -> str:
    return "uint32" if num_edges < 2**32 - 1 else "uint64"
