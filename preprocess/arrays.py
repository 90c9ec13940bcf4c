"""The stages of row arrays: features with their scale, labels, splits, ids."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray, crc_path
from blockstore.store import numpy_dtype
from preprocess.contents import Rows
from preprocess.plan import scale_stage
from preprocess.result import QuantizationError
from preprocess.run import Facts, Run
from preprocess.stages.array_file import load_array, save_array
from preprocess.stages.quantize import Quantizer, find_scale
from preprocess.stages.rows import Emit, checked_features, source_chunk

_SCALE = "scale"  # temporary file
_QUANTIZATION = "quantization"  # in the facts of a stage
_PIECE_ROWS = 1 << 16

Place = Callable[[Iterator[NDArray[Any]], RowArray, Emit], None]


def write_features(run: Run, rows: Rows, place: Place, spent: Iterable[str] = ()) -> None:
    """An array of features, its rows brought into order by `place`."""
    array = rows.array
    if rows.is_stored:
        pieces = run.source.rows(rows.source, source_chunk(rows.source, run.memory.share))
        write_placed(run, array, pieces, place, spent)
        return
    if not array.scale_path:
        pieces = checked_features(
            run.source, rows.source, array.dtype, run.options.allow_nan, run.memory.share
        )
        write_placed(run, array, pieces, place, spent)
        return
    run.stage(scale_stage(array), lambda: _save_scale(run, rows), made=[_SCALE])

    def body() -> Facts:
        scale = load_array(run.path(_SCALE), np.float32)
        run.writer.side(array.scale_path, scale)
        quantizer = Quantizer(array.path, scale)
        with run.writer.rows(array) as out:
            pieces = quantizer.pieces(run.source, rows.source, run.memory.share)
            place(pieces, array, out.append)
        return {_QUANTIZATION: msgspec.to_builtins(quantizer.report())}

    arrays = [*_paths(array), array.scale_path]
    run.stage(array.path, body, spent=[*spent, _SCALE], arrays=arrays)


def write_placed(
    run: Run,
    array: RowArray,
    pieces: Iterator[NDArray[Any]],
    place: Place,
    spent: Iterable[str] = (),
) -> None:
    """Rows of the array's dtype, brought into order by `place`."""

    def body() -> None:
        with run.writer.rows(array) as out:
            place(pieces, array, out.append)

    run.stage(array.path, body, spent=spent, arrays=_paths(array))


def write_in_order(
    run: Run, array: RowArray, pieces: Iterator[NDArray[Any]], spent: Iterable[str] = ()
) -> None:
    """Numbers that stay where they are."""
    dtype = numpy_dtype(array.dtype)

    def body() -> None:
        with run.writer.rows(array) as out:
            for piece in pieces:
                out.append(piece.astype(dtype, copy=False))

    run.stage(array.path, body, spent=spent, arrays=_paths(array))


def write_split(run: Run, rows: Rows) -> None:
    """Ids as the source lists them."""
    write_in_order(run, rows.array, run.source.rows(rows.source, _PIECE_ROWS))


def write_ids(
    run: Run, name: str, original: RowArray, order: Any, store: RowArray, rank: Any, first: int
) -> None:
    """Both id arrays of a type; `order`, `rank` None: nodes keep their numbers.

    order, rank   uint32 (num_nodes,)   of the type, in ids that count through all types
    first         store id of the type's first node
    """

    def body() -> None:
        for array, values, minus, plus in ((original, order, first, 0), (store, rank, 0, first)):
            dtype = numpy_dtype(array.dtype)
            with run.writer.rows(array) as out:
                for low in range(0, array.num_rows, _PIECE_ROWS):
                    high = min(low + _PIECE_ROWS, array.num_rows)
                    if values is None:
                        piece = np.arange(low + plus, high + plus, dtype=dtype)
                    else:
                        piece = (values[low:high] - values.dtype.type(minus)).astype(dtype)
                    out.append(piece)

    run.stage(name, body, arrays=[*_paths(original), *_paths(store)])


def quantization_errors(run: Run) -> tuple[QuantizationError, ...]:
    """What int8 lost, of every array, also of those that an earlier run has written."""
    return tuple(
        msgspec.convert(s.facts[_QUANTIZATION], QuantizationError)
        for s in run.work.stages
        if _QUANTIZATION in s.facts
    )


def _save_scale(run: Run, rows: Rows) -> None:
    scale = find_scale(run.source, rows.source, run.memory.share, run.progress)
    save_array(run.path(_SCALE), scale)


def _paths(array: RowArray) -> list[str]:
    return [array.path, crc_path(array.path)]
