"""Export rows, dense or sparse, and the edges of a relation, to npy files.

With edge ids, edges are in the source's order, without those that ingest dropped or added.  Without
ids, all edges are in the order of (target, source), then of the store.  So are their arrays.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import TIME_DTYPE, WEIGHT_DTYPE, Relation, RowArray
from blockstore.store import Store, numpy_dtype, read_rows, scan_rows
from preprocess.files.array_file import ArrayFile
from preprocess.files.npy import NpyWriter
from preprocess.files.store import graph_blocks, stored_blocks, to_floats
from preprocess.ingest.contents import place_dtype
from preprocess.ingest.plan import too_little_memory
from preprocess.kernels.edges import Records
from preprocess.pipeline.stage import Cost, Facts, PipelineRun, Stage
from preprocess.sources.plain_names import CSR, CSR_PARTS, PlainNames
from preprocess.stages.csc import (
    COLUMN_BYTES,
    RawEdges,
    WholeColumns,
    Widths,
    ready,
    sorted_columns,
)
from preprocess.stages.edge_places import EdgePlaces, Identified, Pieces, rows_by_id
from preprocess.stages.rows import Emit

SCAN_BYTES = 4 << 20
_STEP_BYTES = 1 << 20  # converted, or searched for zeros, at a time
_IDS = "edge_ids"  # temporary file
_PIECE_IDS = 1 << 18
_EDGE_TEMPORARY = 40  # temporary bytes of an edge: sorted, with its id, its place and its row's

Read = Callable[[Store], Iterator[NDArray[Any]]]


class TypeIds(NamedTuple):
    """Ids of a node type: the store id of its first node, and all original ids."""

    first: int
    original: NDArray[Any]


@dataclass(eq=False)
class ExportRun(PipelineRun):
    """The run of an export: the store that is read, and the memory budget."""

    store: Store
    mem_bytes: int
    share: int  # part of `mem_bytes` for chunks and buckets
    _ids: dict[str, TypeIds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.result.mkdir(exist_ok=True)

    def ids(self, name: str) -> TypeIds:
        """Ids of a type, which are loaded once and stay in memory."""
        if name not in self._ids:
            t = next(t for t in self.store.manifest.types if t.name == name)
            self._ids[name] = TypeIds(t.first, read_rows(self.store, t.original_id))
        return self._ids[name]


ExportStage = Stage[ExportRun]


def written_dtype(array: RowArray) -> np.dtype[Any]:
    """Dtype of an array in its npy file: bfloat16 and scaled int8 become float32."""
    wide = array.dtype == "bfloat16" or array.scale_path
    return np.dtype(np.float32) if wide else numpy_dtype(array.dtype)


def written_bytes(array: RowArray) -> int:
    """Bytes of the array as a dense npy file."""
    return array.num_rows * array.row_items * written_dtype(array).itemsize


Place = Callable[[ExportRun, Emit], None]  # passes rows in their order to `Emit`


def write_dense(stem: str, array: RowArray, num_rows: int, place: Place, run: ExportRun) -> None:
    """Write rows to `<stem>.npy`."""
    shape = (num_rows, *array.row_shape)
    with NpyWriter(run.result / f"{stem}.npy", shape, written_dtype(array)) as out:
        steps = _steps(run, array)

        def emit(rows: NDArray[Any]) -> None:
            for part in steps(rows):
                out.append(part)

        place(run, emit)


def write_csr(stem: Callable[[str], str], array: RowArray, place: Place, run: ExportRun) -> None:
    """Write dense rows as the CSR matrix that they came from, without zeros.

    stem   part -> name of its file
    """
    nnz = 0
    paths = [run.result / f"{stem(part)}.npy" for part in CSR_PARTS]
    with (
        NpyWriter(paths[0], (array.num_rows + 1,), np.int64) as indptr,
        NpyWriter(paths[1], None, np.int32) as indices,
        NpyWriter(paths[2], None, written_dtype(array)) as data,
    ):
        indptr.append(np.zeros(1, np.int64))
        steps = _steps(run, array)

        def emit(rows: NDArray[Any]) -> None:
            nonlocal nnz
            for part in steps(rows):
                row, column = np.nonzero(part)
                indptr.append(nnz + np.cumsum(np.bincount(row, minlength=part.shape[0])))
                indices.append(column.astype(np.int32))
                data.append(part[row, column])
                nnz += row.size

        place(run, emit)
    meta = {"shape": [array.num_rows, array.row_shape[0]], "nnz": nnz}
    (run.result / f"{stem(CSR)}.json").write_bytes(msgspec.json.encode(meta))


def copy_rows(stem: str, array: RowArray, run: ExportRun) -> None:
    """Write rows in the order in which they are stored."""

    def place(run: ExportRun, emit: Emit) -> None:
        for rows in _rows_of(array, run.store):
            emit(rows)

    write_dense(stem, array, array.num_rows, place, run)


def _steps(run: ExportRun, array: RowArray) -> Callable[[NDArray[Any]], Iterator[NDArray[Any]]]:
    """A function that converts rows to the written dtype, some at a time."""
    dtype = written_dtype(array)
    step = max(1, _STEP_BYTES // max(1, array.row_items * dtype.itemsize))
    scale = run.store.scale(array).reshape(array.row_shape) if array.scale_path else None

    def steps(rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
        for first in range(0, rows.shape[0], step):
            some = rows[first : first + step]
            yield some if some.dtype == dtype else to_floats(some, array, scale)

    return steps


class EdgeExport:
    """The export of one relation.  Stages raise BudgetTooSmall, OutOfSpace, CorruptBlock."""

    def __init__(self, relation: Relation, names: PlainNames) -> None:
        self._relation, self._names = relation, names
        self._ends = (relation.src, relation.name, relation.dst)
        self.stem = names("edges", self._ends, "")
        self._has_ids = relation.edge_id_dtype is not None
        self._num_ids = relation.num_source_edges if self._has_ids else relation.num_edges
        self._id_dtype = relation.edge_id_dtype or place_dtype(relation.num_edges)
        lists = any(not a.row_shape for a in relation.splits.values())
        rows = relation.has_weights or relation.has_times or bool(relation.features)
        self._wanted = rows or (lists and self._has_ids)  # whether later stages need edge ids

    def stages(self) -> list[ExportStage]:
        """Edges, then their arrays and splits."""
        relation, edges = self._relation, self._relation.num_edges
        size = edges * np.dtype(self._id_dtype).itemsize
        files = {_IDS: size} if self._wanted else {}
        graph, passing = 16 * edges, _EDGE_TEMPORARY * edges
        cost = Cost(graph + passing, graph + passing + sum(files.values()), passing)
        made = [ExportStage(self.stem, cost, self._write_edges, files, (), [f"{self.stem}.npy"])]
        for name, dtype, there in (
            ("weight", WEIGHT_DTYPE, relation.has_weights),
            ("time", TIME_DTYPE, relation.has_times),
        ):
            if there:
                array = RowArray(name, dtype, edges)
                pieces = partial(_section, relation, name)
                made.append(self._array_stage(name, array, pieces))
        for name, array in relation.features.items():
            made.append(self._array_stage(name, array, partial(_rows_of, array)))
        for name, array in relation.splits.items():
            stem = self._names("split", self._ends, name)
            cost = Cost(array.num_rows * array.row_bytes, written_bytes(array))
            made.append(ExportStage(
                stem, cost, partial(self._write_split, stem, array), arrays=[f"{stem}.npy"]
            ))  # fmt: skip
        return [*made[:-1], replace(made[-1], spent=[_IDS])] if len(made) > 1 else made

    def _array_stage(self, name: str, array: RowArray, pieces: Read) -> ExportStage:
        stem, size = self._names("rows", self._ends, name), written_bytes(array)
        passing = array.num_rows * (array.row_bytes + 8)
        cost = Cost(array.num_rows * array.row_bytes + passing, size + passing, passing)
        body = partial(self._write_array, stem, array, pieces)
        return ExportStage(stem, cost, body, arrays=[f"{stem}.npy"])

    def _write_edges(self, run: ExportRun) -> Facts:
        count, most_node = self._write_by_id(run) if self._has_ids else self._write_sorted(run)
        return {"count": count, "most_node": most_node}

    def _count(self, run: ExportRun) -> int:
        found: int = run.facts(self.stem)["count"]
        return found

    def _records(self, run: ExportRun) -> Iterator[Records]:
        """Edges of each graph block, by original id."""
        none = np.empty(0, np.int64)
        src, dst = run.ids(self._relation.src), run.ids(self._relation.dst)
        for targets, block in stored_blocks(run.store, self._relation, SCAN_BYTES):
            sources, ids = block.sources, block.edge_ids
            yield Records(
                dst.original[targets - targets.dtype.type(dst.first)].astype(np.int64),
                src.original[sources - sources.dtype.type(src.first)].astype(np.int64),
                none if ids is None else ids.astype(np.int64),
            )

    def _write_by_id(self, run: ExportRun) -> tuple[int, int]:
        """Write edges by edge id and, if wanted, a file of the ids in the order of the store.

        Returns the number of edges, and the largest number of a node.
        """
        relation = self._relation

        def identified() -> Identified:
            with ArrayFile(run.path(_IDS), self._id_dtype) as ids:
                for dst, src, edge_ids in self._records(run):
                    if self._wanted:
                        ids.append(edge_ids)
                    yield edge_ids, (src, dst)

        ends = [(run.ids(name).original.dtype, 1) for name in (relation.src, relation.dst)]
        count, pieces = rows_by_id(
            identified(), self._num_ids, ends, relation.num_edges, run.share, run.folder,
            run.progress,
        )  # fmt: skip
        flat = ((row, values.reshape(-1)) for row, values in pieces)
        return count, self._write_ends(run, count, flat)

    def _write_sorted(self, run: ExportRun) -> tuple[int, int]:
        """Write edges by (target, source) and, if wanted, a file of the new positions of edges in
        the order of the store.  Returns the same as `_write_by_id`.
        """
        relation, wanted = self._relation, self._wanted
        num_edges = relation.num_edges
        sizes = [run.ids(name).original.size for name in (relation.src, relation.dst)]
        counts = np.zeros(sizes[1], np.uint32)
        with run.progress.stage("count edges", num_edges, "edges") as stage:
            for records in self._records(run):
                np.add.at(counts, records.dst, np.uint32(1))
                stage.advance(records.dst.size)
        edge = self._id_dtype if wanted else None
        widths = Widths.of(run.store.manifest.id_dtype, max(sizes), edge, num_edges)
        share = run.share // 4 * 3 if wanted else run.share
        longest = int(counts.max(initial=0)) * widths.sort_bytes + COLUMN_BYTES
        if longest > share // 4 * 3:
            minimum = run.mem_bytes + 2 * longest
            raise too_little_memory(run.mem_bytes, minimum, "sorting the in-edges of one node")
        columns = sorted_columns(
            self._counted(run), counts, widths, False, share, run.folder, run.progress
        )
        if not wanted:
            return num_edges, self._write_ends(run, num_edges, _ends(columns, None))
        with EdgePlaces(num_edges, self._id_dtype, run.share // 4, run.folder) as places:
            most_node = self._write_ends(run, num_edges, _ends(columns, places))
            places.write(run.path(_IDS))
        return num_edges, most_node

    def _counted(self, run: ExportRun) -> Iterator[RawEdges]:
        """Edges, with their positions in the store as ids."""
        done = 0
        for dst, src, _ in self._records(run):
            yield ready(Records(dst, src, np.arange(done, done + dst.size)))
            done += dst.size

    def _write_ends(self, run: ExportRun, count: int, pieces: Pieces) -> int:
        """Write (0, sources) and (1, targets), in turn; returns the largest id, or -1."""
        done, most_node = 0, -1
        with NpyWriter(run.result / f"{self.stem}.npy", (2, count), np.int64) as out:
            for row, values in pieces:
                out.put(row * count + done, values)
                if values.size:
                    most_node = max(most_node, int(values.max()))
                done += values.size if row == 1 else 0
        if done != count:
            raise CorruptBlock(
                f"{run.store.path / self._relation.path}: {count - done} edge ids stand twice, "
                "expected each once; ingest again"
            )
        return most_node

    def _write_array(self, stem: str, array: RowArray, read: Read, run: ExportRun) -> None:
        """Write an edge array in the order of the written edges."""
        count = self._count(run)

        def identified(ids: ArrayFile) -> Identified:
            done = 0
            for piece in read(run.store):
                yield ids.read(done, piece.shape[0]), (piece,)
                done += piece.shape[0]

        def place(run: ExportRun, emit: Emit) -> None:
            part = (numpy_dtype(array.dtype), array.row_items)
            with ArrayFile(run.path(_IDS), self._id_dtype) as ids:
                found, ordered = rows_by_id(
                    identified(ids), self._num_ids, [part], array.num_rows, run.share, run.folder,
                    run.progress,
                )  # fmt: skip
                assert found == count
                for _, rows in ordered:
                    emit(rows.reshape(-1, *array.row_shape))

        write_dense(stem, array, count, place, run)

    def _write_split(self, stem: str, array: RowArray, run: ExportRun) -> None:
        """Write a split: pairs as they are, positions as those in the written edges."""
        if array.row_shape or (self._has_ids and self._count(run) == self._num_ids):
            copy_rows(stem, array, run)
        elif not self._has_ids:
            run.progress.line(
                f"{array.path}: left out: positions of edges mean nothing in a store without "
                "edge ids; ingest with --edge-ids keeps them"
            )
        else:
            self._write_positions(stem, array, run)

    def _write_positions(self, stem: str, array: RowArray, run: ExportRun) -> None:
        """Write positions counted among the edges that ingest kept, without those it dropped."""
        need = 16 * (self._num_ids // 64 + 1)
        if need > run.share // 2:
            minimum = run.mem_bytes + 2 * need
            raise too_little_memory(
                run.mem_bytes, minimum, "a quarter of a byte an edge of a split"
            )
        kept = _KeptIds(self._num_ids)
        with ArrayFile(run.path(_IDS), self._id_dtype) as ids:
            for piece in ids.pieces(0, ids.size, _PIECE_IDS):
                kept.add(piece)
        kept.finish()
        with NpyWriter(run.result / f"{stem}.npy", None, np.int64) as out:
            for _, listed in scan_rows(run.store, array, SCAN_BYTES):
                out.append(kept.places(listed))


def _section(relation: Relation, name: str, store: Store) -> Iterator[NDArray[Any]]:
    """Weights or times, block by block."""
    return (getattr(block, f"{name}s") for _, block in graph_blocks(store, relation, SCAN_BYTES))


def _rows_of(array: RowArray, store: Store) -> Iterator[NDArray[Any]]:
    return (rows for _, rows in scan_rows(store, array, SCAN_BYTES))


class _KeptIds:
    """A set of ids that gives the rank of each in it, in 16 bytes for 64 ids."""

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids
        self._words = np.zeros(num_ids // 64 + 1, np.uint64)
        self._before = np.zeros(0, np.int64)

    def add(self, ids: NDArray[Any]) -> None:
        """Add ids; those that are too large are ignored."""
        ids = ids[ids < self._num_ids].astype(np.int64)
        np.bitwise_or.at(self._words, ids >> 6, np.uint64(1) << (ids & 63).astype(np.uint64))

    def finish(self) -> None:
        counts = np.bitwise_count(self._words).astype(np.int64)
        self._before = np.cumsum(counts) - counts

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank of each id that is in the set; other ids are left out."""
        word, bit = ids >> 6, np.uint64(1) << (ids & 63).astype(np.uint64)
        there = (self._words[word] & bit) != 0
        word, bit = word[there], bit[there]
        below = np.bitwise_count(self._words[word] & (bit - np.uint64(1)))
        found: NDArray[np.int64] = self._before[word] + below
        return found


def _ends(columns: Iterator[WholeColumns], places: EdgePlaces | None) -> Pieces:
    """(0, sources) and (1, targets) of columns, in turn; edge ids go to `places`."""
    for c in columns:
        if places is not None:
            assert c.edge_ids is not None
            places.append(c.edge_ids)
        yield 0, c.sources
        yield 1, np.repeat(np.arange(c.first, c.first + c.degrees.size), c.degrees)
