"""The stages of row arrays: features with their scale, labels, splits, ids."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray, crc_path
from blockstore.store import numpy_dtype
from preprocess.files.array_file import load_array, save_array
from preprocess.ingest.contents import ArrayContent, row_disk_bytes
from preprocess.ingest.graph import IngestRun, IngestStage
from preprocess.ingest.plan import IngestJob
from preprocess.pipeline.result import QuantizationError
from preprocess.pipeline.stage import Cost, Facts
from preprocess.sources.stored import StoredSource
from preprocess.stages.rows import (
    Emit,
    Quantizer,
    checked_features,
    find_scale,
    scatter_bytes,
    source_chunk,
)

_SCALE = "scale"  # temporary file
_QUANTIZATION = "quantization"  # in the facts of a stage
_PIECE_ROWS = 1 << 16

Pieces = Iterator[NDArray[Any]]


class RowStages:
    """The row arrays of a type or a relation; a subclass knows the order of their rows."""

    place_bytes = 0  # of the new place of a row; 0: rows stay where they are

    def __init__(self, job: IngestJob) -> None:
        self.job = job

    def place(self, run: IngestRun, pieces: Pieces, array: RowArray, emit: Emit) -> None:
        """Bring rows into their order."""
        raise NotImplementedError

    def spread(self, run: IngestRun, rows: ArrayContent) -> bool:  # noqa: ARG002
        """Have rows written by tasks, if they can be; whether that was done."""
        return False

    def sized(self, array: RowArray, run: IngestRun | None) -> RowArray:  # noqa: ARG002
        """An array as other stages have found that it will be; before a run, an upper bound."""
        return array

    def features(self, rows: ArrayContent, spent: Sequence[str] = ()) -> list[IngestStage]:
        """`spent`: temporary files that nobody needs once the array is written."""
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
        """Rows of the array's dtype, brought into their order, here or by tasks."""

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
        """Ids as the source lists them."""
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
    """Numbers that stay where they are; `sized`: if their count is found out by other stages."""
    dtype = numpy_dtype(array.dtype)

    def body(run: IngestRun) -> None:
        with run.writer.rows(sized(run) if sized else array) as out:
            for piece in pieces(run):
                out.append(piece.astype(dtype, copy=False))

    return IngestStage(array.path, cost, body, spent=spent, arrays=array_files(array))


def write_ids(run: IngestRun, array: RowArray, values: Any, minus: int, plus: int) -> None:
    """An array of ids: `values - minus`, or `plus` and on if nodes keep their numbers.

    values   uint32 (num_nodes,)   of the type, in ids that count through all types; or None
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
    """What int8 lost, of every array, also of those that an earlier run has written."""
    return tuple(
        msgspec.convert(s.facts[_QUANTIZATION], QuantizationError)
        for s in run.work.stages
        if _QUANTIZATION in s.facts
    )


def array_files(array: RowArray) -> list[str]:
    """Paths in the store of rows and their checksums."""
    return [array.path, crc_path(array.path)]
