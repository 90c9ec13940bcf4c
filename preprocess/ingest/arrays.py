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
from preprocess.ingest.plan import IngestJob, placed_bytes, rows_bytes
from preprocess.pipeline.result import QuantizationError
from preprocess.pipeline.stage import Cost, Facts
from preprocess.sources.stored import StoredSource
from preprocess.stages.quantize import Quantizer, find_scale
from preprocess.stages.rows import Emit, checked_features, source_chunk

_SCALE = "scale"  # temporary file
_QUANTIZATION = "quantization"  # in the facts of a stage
_PIECE_ROWS = 1 << 16

Pieces = Iterator[NDArray[Any]]
Place = Callable[[IngestRun, Pieces, RowArray, Emit], None]  # brings rows into their order
Spread = Callable[[IngestRun, ArrayContent], bool]  # by tasks, if it can be
Sized = Callable[[IngestRun], RowArray]  # an array once it is known how many rows it has


def feature_stages(
    job: IngestJob,
    rows: ArrayContent,
    place: Place,
    place_bytes: int,
    sized: Sized,
    spent: Sequence[str],
    spread: Spread | None = None,
) -> list[IngestStage]:
    """An array of features, its rows brought into order by `place`.

    place_bytes   of the new place of a row; 0: rows stay where they are
    spent         temporary files that nobody needs once it is written
    spread        has it written by tasks, where there is an executor
    """
    array, source = rows.array, rows.source

    def plain(_: IngestRun) -> Pieces:
        if rows.is_stored:
            return job.source.rows(source, source_chunk(source, job.share))
        return checked_features(job.source, source, array.dtype, job.options.allow_nan, job.share)

    def quantized(run: IngestRun) -> Facts:
        scale = load_array(run.path(_SCALE), np.float32)
        run.writer.side(array.scale_path, scale)
        quantizer = Quantizer(array.path, scale)
        with run.writer.rows(sized(run)) as out:
            pieces = quantizer.pieces(job.source, source, job.share)
            place(run, pieces, sized(run), out.append)
        return {_QUANTIZATION: msgspec.to_builtins(quantizer.report())}

    if not array.scale_path:
        return [placed_stage(job, rows, plain, place, place_bytes, sized, spent, spread)]
    if rows.is_stored:
        return [
            _copied_scale(job, array),
            placed_stage(job, rows, plain, place, place_bytes, sized, spent),
        ]

    def find(run: IngestRun) -> None:
        save_array(run.path(_SCALE), find_scale(job.source, source, job.share, run.progress))

    cost = _placed_cost(job, rows, place_bytes)
    return [
        IngestStage(
            f"{array.path}: scale", Cost(rows_bytes(source)), find,
            files={_SCALE: 4 * array.row_items},
        ),
        IngestStage(
            array.path, cost, quantized, spent=[*spent, _SCALE],
            arrays=[*array_files(array), array.scale_path],
        ),
    ]  # fmt: skip


def _copied_scale(job: IngestJob, array: RowArray) -> IngestStage:
    source = job.source
    assert isinstance(source, StoredSource)
    return IngestStage(
        f"{array.path}: scale", Cost(4 * array.row_items),
        lambda run: run.writer.side(array.scale_path, source.scale(array)),
        arrays=[array.scale_path],
    )  # fmt: skip


def placed_stage(
    job: IngestJob,
    rows: ArrayContent,
    pieces: Callable[[IngestRun], Pieces],
    place: Place,
    place_bytes: int,
    sized: Sized,
    spent: Sequence[str] = (),
    spread: Spread | None = None,
) -> IngestStage:
    """Rows of the array's dtype, brought into order by `place`, or by tasks."""

    def body(run: IngestRun) -> None:
        if spread is not None and spread(run, rows):
            return
        array = sized(run)
        with run.writer.rows(array) as out:
            place(run, pieces(run), array, out.append)

    cost = _placed_cost(job, rows, place_bytes)
    return IngestStage(rows.array.path, cost, body, spent=spent, arrays=array_files(rows.array))


def _placed_cost(job: IngestJob, rows: ArrayContent, place_bytes: int) -> Cost:
    array, passing = rows.array, 0
    num_rows = array.num_rows
    if place_bytes:
        passing = placed_bytes(num_rows, array.row_bytes, place_bytes, job.share)
    if job.spread:
        passing = num_rows * (array.row_bytes + 8)
    written = num_rows * array.row_bytes * 1025 // 1024
    return Cost(rows_bytes(rows.source) + passing, written + passing, passing)


def list_stage(
    array: RowArray,
    cost: Cost,
    pieces: Callable[[IngestRun], Pieces],
    sized: Sized | None = None,
    spent: Sequence[str] = (),
) -> IngestStage:
    """Numbers that stay where they are; `sized`: if their count is found out by other stages."""
    dtype = numpy_dtype(array.dtype)

    def body(run: IngestRun) -> None:
        with run.writer.rows(sized(run) if sized else array) as out:
            for piece in pieces(run):
                out.append(piece.astype(dtype, copy=False))

    return IngestStage(array.path, cost, body, spent=spent, arrays=array_files(array))


def split_stage(job: IngestJob, rows: ArrayContent) -> IngestStage:
    """Ids as the source lists them."""
    written = row_disk_bytes(rows.array, job.options.block_bytes)
    cost = Cost(rows_bytes(rows.source), written)
    return list_stage(rows.array, cost, lambda _: job.source.rows(rows.source, _PIECE_ROWS))


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
