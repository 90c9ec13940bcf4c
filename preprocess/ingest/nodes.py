"""The stages of row arrays, and those of one node type.

Arrays are features with their scale, labels, splits and ids, and the partition offsets of a type.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import NodeType, RowArray, crc_path
from blockstore.store import numpy_dtype
from preprocess.files.array_file import load_array, save_array
from preprocess.ingest.contents import SPLITS, ArrayContent, row_disk_bytes, split_sizes
from preprocess.ingest.graph import RANK, IngestRun, IngestStage
from preprocess.ingest.plan import CHECK, ORDER, IngestJob, looks_at_label, seeded_splits
from preprocess.pipeline.result import QuantizationError
from preprocess.pipeline.stage import Cost, Facts
from preprocess.pipeline.tasks import SavedArray, TaskFolder
from preprocess.sources.stored import StoredSource
from preprocess.stages.labels import (
    are_whole,
    label_dtype,
    label_pieces,
    labelled_bits,
    seeded_ids,
    split_key,
)
from preprocess.stages.rows import (
    Emit,
    Quantizer,
    checked_features,
    find_scale,
    place_rows,
    scatter_bytes,
    source_chunk,
)
from preprocess.stages.scan import check_splits
from preprocess.stages.spread import FeaturePlaces, spread_rows

_SCALE = "scale"  # temporary file
_QUANTIZATION = "quantization"  # in the facts of a stage
_PIECE_ROWS = 1 << 16

Pieces = Iterator[NDArray[Any]]


class RowStages:
    """The row arrays of a type or a relation; a subclass knows the order of their rows."""

    place_bytes = 0  # bytes of a row's new position; 0: rows keep their order

    def __init__(self, job: IngestJob) -> None:
        self.job = job

    def place(self, run: IngestRun, pieces: Pieces, array: RowArray, emit: Emit) -> None:
        """Bring rows into their order."""
        raise NotImplementedError

    def spread(self, run: IngestRun, rows: ArrayContent) -> bool:  # noqa: ARG002
        """Write the rows by tasks if possible; returns whether that was done."""
        return False

    def sized(self, array: RowArray, run: IngestRun | None) -> RowArray:  # noqa: ARG002
        """The array with what other stages have found out; before a run, an upper bound."""
        return array

    def features(self, rows: ArrayContent, spent: Sequence[str] = ()) -> list[IngestStage]:
        """`spent`: temporary files that are not needed after the array is written."""
        job, array, source = self.job, rows.array, rows.source

        def plain(_: IngestRun) -> Pieces:
            if rows.is_stored:
                return job.source.rows(source, source_chunk(source, job.share))
            return checked_features(
                job.source, source, array.dtype, job.options.allow_nan, job.share
            )

        def find_scale_of(run: IngestRun) -> None:
            save_array(run.path(_SCALE), find_scale(job.source, source, job.share, run.progress))

        def quantized(run: IngestRun) -> Facts:
            scale = load_array(run.path(_SCALE), np.float32)
            run.writer.side(array.scale_path, scale)
            quantizer = Quantizer(array.path, scale)
            self._write(run, array, quantizer.pieces(job.source, source, job.share))
            return {_QUANTIZATION: msgspec.to_builtins(quantizer.report())}

        def copy_scale(run: IngestRun) -> None:
            assert isinstance(job.source, StoredSource)
            run.writer.side(array.scale_path, job.source.scale(array))

        if not array.scale_path:
            return [self.placed(rows, plain, spent)]
        name, size = f"{array.path}: scale", 4 * array.row_items
        if rows.is_stored:
            copied = IngestStage(name, Cost(size), copy_scale, arrays=[array.scale_path])
            return [copied, self.placed(rows, plain, spent)]
        files = [*array_files(array), array.scale_path]
        return [
            IngestStage(name, Cost(source.num_bytes), find_scale_of, files={_SCALE: size}),
            IngestStage(
                array.path, self._cost(rows), quantized, spent=[*spent, _SCALE], arrays=files
            ),
        ]

    def placed(
        self,
        rows: ArrayContent,
        pieces: Callable[[IngestRun], Pieces],
        spent: Sequence[str] = (),
    ) -> IngestStage:
        """Stage that brings rows of the array's dtype into their order, here or by tasks."""

        def body(run: IngestRun) -> None:
            if not self.spread(run, rows):
                self._write(run, rows.array, pieces(run))

        cost = self._cost(rows)
        return IngestStage(rows.array.path, cost, body, spent=spent, arrays=array_files(rows.array))

    def _write(self, run: IngestRun, array: RowArray, pieces: Pieces) -> None:
        array = self.sized(array, run)
        with run.writer.rows(array) as out:
            self.place(run, pieces, array, out.append)

    def _cost(self, rows: ArrayContent) -> Cost:
        job, array, passing = self.job, self.sized(rows.array, None), 0
        num_rows = array.num_rows
        if self.place_bytes:
            passing = scatter_bytes(num_rows, array.row_bytes, self.place_bytes, job.share)
        if job.spread:
            passing = num_rows * (array.row_bytes + 8)
        written = num_rows * array.row_bytes * 1025 // 1024
        return Cost(rows.source.num_bytes + passing, written + passing, passing)

    def split(self, rows: ArrayContent) -> IngestStage:
        """Stage that copies the ids of a split as the source lists them."""
        written = row_disk_bytes(rows.array, self.job.options.block_bytes)
        cost = Cost(rows.source.num_bytes, written)
        return list_stage(
            rows.array, cost, lambda _: self.job.source.rows(rows.source, _PIECE_ROWS)
        )


def list_stage(
    array: RowArray,
    cost: Cost,
    pieces: Callable[[IngestRun], Pieces],
    sized: Callable[[IngestRun], RowArray] | None = None,
    spent: Sequence[str] = (),
) -> IngestStage:
    """Stage that copies numbers in order; `sized`: the array, if other stages find its size."""
    dtype = numpy_dtype(array.dtype)

    def body(run: IngestRun) -> None:
        with run.writer.rows(sized(run) if sized else array) as out:
            for piece in pieces(run):
                out.append(piece.astype(dtype, copy=False))

    return IngestStage(array.path, cost, body, spent=spent, arrays=array_files(array))


def write_ids(run: IngestRun, array: RowArray, values: Any, minus: int, plus: int) -> None:
    """Write an array of ids: `values - minus`, or plus, plus + 1, ... if nodes keep their numbers.

    values   uint32 (num_nodes,)   ids of the type's nodes, numbered across all types; or None
    """
    dtype = numpy_dtype(array.dtype)
    with run.writer.rows(array) as out:
        for low in range(0, array.num_rows, _PIECE_ROWS):
            high = min(low + _PIECE_ROWS, array.num_rows)
            if values is None:
                piece = np.arange(low + plus, high + plus, dtype=dtype)
            else:
                piece = (values[low:high] - values.dtype.type(minus)).astype(dtype)
            out.append(piece)


def quantization_errors(run: IngestRun) -> tuple[QuantizationError, ...]:
    """Quantization errors of all int8 arrays, those that an earlier run wrote included."""
    return tuple(
        msgspec.convert(s.facts[_QUANTIZATION], QuantizationError)
        for s in run.work.stages
        if _QUANTIZATION in s.facts
    )


def array_files(array: RowArray) -> list[str]:
    """Paths in the store of an array and its checksums."""
    return [array.path, crc_path(array.path)]


class TypeStages(RowStages):
    """The stages of one node type."""

    def __init__(self, job: IngestJob, number: int) -> None:
        super().__init__(job)
        self._number, self.type = number, job.contents.types[number]
        self.place_bytes = 4 if job.options.renames else 0

    def stages(self) -> list[IngestStage]:
        job, t = self.job, self.type
        cost = Cost(0, 2 * row_disk_bytes(t.original_id, job.options.block_bytes))
        ids = [*array_files(t.original_id), *array_files(t.store_id)]
        found = [IngestStage(f"ids of {t.name}", cost, self._write_ids, arrays=ids)]
        for rows in t.features:
            found += self.features(rows)
        if t.label is not None:
            found.append(self.placed(t.label, self._label_pieces))
        found += [self.split(rows) for rows in t.splits]
        seeded = seeded_splits(t, t.num_nodes, job.options)
        for i, array in enumerate(seeded):
            cost = Cost(0, row_disk_bytes(array, job.options.block_bytes))
            spent = [self.bits_file] if i == len(seeded) - 1 else []
            sized = partial(self._seeded_split, i)
            found.append(list_stage(array, cost, partial(self.seeded, i), sized, spent))
        if job.options.partition:
            path = t.partition_path
            found.append(IngestStage(path, Cost(), self._write_partitions, arrays=[path]))
        return found

    def _write_ids(self, run: IngestRun) -> None:
        t, nodes = self.type, run.nodes
        order = nodes and nodes.order[t.first : t.stop]
        rank = nodes and nodes.rank[t.first : t.stop]
        write_ids(run, t.original_id, order, t.first, 0)
        write_ids(run, t.store_id, rank, 0, t.first)

    def place(
        self, run: IngestRun, pieces: Iterator[NDArray[Any]], array: RowArray, emit: Emit
    ) -> None:
        """Bring rows of the type into the order of its nodes."""
        t, nodes = self.type, run.nodes
        rank = nodes and nodes.rank[t.first : t.stop]
        local = rank - np.uint32(t.first) if rank is not None and t.first else rank
        place_rows(pieces, array, local, self.job.share, run.folder, emit, run.progress)

    def spread(self, run: IngestRun, rows: ArrayContent) -> bool:
        job, first = self.job, self.type.first
        is_label = rows is self.type.label
        if (
            run.executor is None
            or is_label
            or rows.is_stored
            or not job.source.divides(rows.source)
        ):
            return False
        rank = SavedArray(run.path(RANK), np.uint32) if job.options.renames else None
        of = FeaturePlaces(job.source, rows.source, rows.array, job.options.allow_nan, rank, first)
        with TaskFolder(run.executor, run.folder, run.progress) as folder:
            spread_rows(of, job.share, folder, run.writer, job.buffer)
        return True

    def sized(self, array: RowArray, run: IngestRun | None) -> RowArray:
        """The array; the dtype of labels is the one found by reading all of them."""
        label = self.type.label
        if run is None or label is None or array is not label.array:
            return array
        facts = run.facts(CHECK)["labels"].get(self.type.name)
        return msgspec.structs.replace(array, dtype=facts["dtype"]) if facts else array

    def _label_pieces(self, run: IngestRun) -> Iterator[NDArray[Any]]:
        label = self.type.label
        assert label is not None
        dtype = self.sized(label.array, run).dtype
        return label_pieces(self.job.source, label.source, dtype, self.job.share)

    @property
    def splits_seeded(self) -> bool:
        """Whether a seeded split is to be made."""
        return bool(seeded_splits(self.type, 0, self.job.options))

    @property
    def bits_file(self) -> str:
        """Name of the temporary file of the labelled nodes."""
        return f"labelled-{self._number}"

    def check(self, run: IngestRun) -> Facts | None:
        """Check the splits; read the labels if their dtype, or a seeded split, depends on them."""
        job, label = self.job, self.type.label
        check_splits(job.source, self.type.name, job.options.leave_out)
        if label is None or not looks_at_label(label, job.options):
            return None
        rows = label.source
        dtype = label_dtype(rows, rows.dtype.kind == "f" and are_whole(job.source, rows, job.share))
        facts: Facts = {"dtype": dtype}
        if self.splits_seeded:
            bits = labelled_bits(job.source, rows, dtype, job.share)
            facts["labelled"] = int(np.bitwise_count(bits).sum(dtype=np.int64))
            save_array(run.path(self.bits_file), bits)
        return facts

    def _labelled(self, run: IngestRun | None) -> int:
        """Number of nodes with a label; before a run, an upper bound."""
        if run is None:
            return self.type.num_nodes
        found: int = run.facts(CHECK)["labels"][self.type.name]["labelled"]
        return found

    def _seeded_split(self, split: int, run: IngestRun | None) -> RowArray:
        return seeded_splits(self.type, self._labelled(run), self.job.options)[split]

    def seeded(self, split: int, run: IngestRun) -> Iterator[NDArray[np.int64]]:
        options, total = self.job.options, self._labelled(run)
        bits = load_array(run.path(self.bits_file), np.uint8)
        places = split_sizes(options.split, total)[split]
        key = split_key(options.seed, self._number)
        return seeded_ids(bits, self.type.num_nodes, total, places, key)

    def _write_partitions(self, run: IngestRun) -> None:
        starts, count = run.facts(ORDER)["starts"], self._num_partitions(run)
        first = self._number * count
        offsets = np.array(starts[first : first + count + 1], np.uint64)
        run.writer.side(self.type.partition_path, offsets)

    def _num_partitions(self, run: IngestRun | None) -> int:
        settings = self.job.options.partition
        return settings.num_partitions if run and settings else 0

    def node_type(self, run: IngestRun | None) -> NodeType:
        """The type's manifest entry, after all stages; before a run, with upper bounds."""
        t = self.type
        splits = {r.source.name: r.array for r in t.splits}
        if self.splits_seeded:
            splits = {name: self._seeded_split(i, run) for i, name in enumerate(SPLITS)}
        return NodeType(
            name=t.name,
            first=t.first,
            num_nodes=t.num_nodes,
            original_id=t.original_id,
            store_id=t.store_id,
            label=self.sized(t.label.array, run) if t.label else None,
            features={r.source.name: r.array for r in t.features},
            splits=splits,
            num_partitions=self._num_partitions(run),
            partition_offsets_path=t.partition_path if self.job.options.partition else "",
        )
