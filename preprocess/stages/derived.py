"""Rows of float32, as they are computed, into a new array of whatever dtype."""

from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from blockstore.extend import StoreExtender
from blockstore.format import RowArray
from preprocess.errors import BadInput
from preprocess.kernels.rows import quantize
from preprocess.progress import Progress
from preprocess.result import QuantizationError
from preprocess.stages.array_file import ArrayFile
from preprocess.stages.rows import convert

_FLOATS = "floats"  # temporary file of what becomes int8


class DerivedRows:
    """A new array of a store.  A context manager; `close` once all rows are there."""

    def __init__(
        self, extender: StoreExtender, array: RowArray, piece_rows: int, progress: Progress
    ) -> None:
        self._extender, self._array, self._progress = extender, array, progress
        self._step, self._rows = piece_rows, 0
        self._most = np.zeros(array.row_items, np.float32)
        self._file: ArrayFile | None = None
        if array.scale_path:
            self._file = ArrayFile(extender.work / _FLOATS, np.float32)
        else:
            self._writer = extender.rows(array)

    def append(self, rows: NDArray[np.float32]) -> None:
        """The next rows, (count, columns).  Raises BadInput: the dtype cannot hold a number."""
        for low in range(0, rows.shape[0], self._step):
            piece = rows[low : low + self._step]
            if self._file is None:
                self._append_converted(piece)
            else:
                self._append_floats(piece, self._file)
            self._rows += piece.shape[0]

    def close(self) -> QuantizationError | None:
        """All rows are there; returns what int8 lost."""
        if self._file is not None:
            return self._quantize(self._file)
        self._writer.close()
        return None

    def _append_converted(self, piece: NDArray[np.float32]) -> None:
        out = convert(piece, self._array.dtype)
        if self._array.dtype == "float16" and not np.isfinite(out).all():
            lost = np.isinf(out) & np.isfinite(piece)
            if lost.any():
                row, column = np.argwhere(lost)[0].tolist()
                found, expected = f"{piece[row, column]:g}", "less than 65520 for float16"
                raise self._refused(row, found, expected, "bfloat16")
        self._writer.append(out.reshape(-1, *self._array.row_shape))

    def _append_floats(self, piece: NDArray[np.float32], file: ArrayFile) -> None:
        np.maximum(self._most, np.maximum(piece.max(0), -piece.min(0)), out=self._most)
        if not np.isfinite(self._most).all():
            row, column = np.argwhere(~np.isfinite(piece))[0].tolist()
            raise self._refused(row, f"{piece[row, column]}", "finite numbers for int8", "float16")
        file.append(piece)

    def _refused(self, row: int, found: str, expected: str, other: str) -> BadInput:
        where = f"{self._array.path}[{self._rows + row}]"
        return BadInput.at(where, found, expected, f"--dtype {other} or float32 holds it")

    def _quantize(self, file: ArrayFile) -> QuantizationError:
        array, scale = self._array, self._most / np.float32(127)
        self._extender.side(array.scale_path, scale)
        errors, width, total = np.zeros(2), array.row_items, file.size
        with (
            self._extender.rows(array) as writer,
            self._progress.stage("quantize", 4 * total, "B") as stage,
        ):
            for piece in file.pieces(0, total, self._step * width):
                values = piece.reshape(-1, width)
                out = np.empty(values.shape, np.int8)
                quantize(values, scale, out, errors)
                writer.append(out.reshape(-1, *array.row_shape))
                stage.advance(piece.nbytes)
        rms = float(np.sqrt(errors[1] / max(1, total)))
        return QuantizationError(array.path, float(errors[0]), rms)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file.path.unlink()
