"""Features as int8 with a scale for each column: the largest magnitude is 127."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.kernels.rows import quantize
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import QuantizationError
from preprocess.sources.source import Source, SourceRows
from preprocess.stages.rows import source_chunk

_MOST = np.float32(127)


def find_scale(
    source: Source, rows: SourceRows, share: int, progress: Progress
) -> NDArray[np.float32]:
    """max|x| / 127 of each column, float32 (columns,).  Raises BadInput: NaN or infinity."""
    most = np.zeros(int(np.prod(rows.row_shape, dtype=np.int64)), np.float32)
    done = 0
    with progress.stage(f"scale of {rows.name}", rows.num_rows * rows.row_bytes, "B") as stage:
        for piece in source.rows(rows, source_chunk(rows, share) // 2 + 1):
            values = _as_floats(piece)
            np.maximum(most, np.maximum(values.max(0), -values.min(0)), out=most)
            if not np.isfinite(most).all():
                bad, column = np.argwhere(~np.isfinite(values))[0].tolist()
                found = piece.reshape(values.shape)[bad, column]
                remedy = "--dtype float16 or float32 holds it"
                if np.isfinite(found):
                    remedy = "scale the numbers, or leave the row out"
                raise BadInput.at(
                    f"{rows.where}[{done + bad}, {column}]", f"{found}",
                    "finite numbers, less than 3.4e38, for int8", remedy,
                )  # fmt: skip
            done += piece.shape[0]
            stage.advance(piece.nbytes)
    return most / _MOST


class Quantizer:
    """Rows of one array to int8, and what that loses; for one thread."""

    def __init__(self, path: str, scale: NDArray[np.float32]) -> None:
        self._path, self.scale = path, scale
        self._errors, self._items = np.zeros(2), 0

    def pieces(self, source: Source, rows: SourceRows, share: int) -> Iterator[NDArray[np.int8]]:
        """All rows in the source's order."""
        for piece in source.rows(rows, source_chunk(rows, share) // 2 + 1):
            yield self.rows(_as_floats(piece)).reshape(piece.shape)

    def rows(self, values: NDArray[np.float32]) -> NDArray[np.int8]:
        """Some more rows, (rows, columns)."""
        out = np.empty(values.shape, np.int8)
        quantize(values, self.scale, out, self._errors)
        self._items += values.size
        return out

    def report(self) -> QuantizationError:
        rms = float(np.sqrt(self._errors[1] / max(1, self._items)))
        return QuantizationError(self._path, float(self._errors[0]), rms)


def _as_floats(piece: NDArray[Any]) -> NDArray[np.float32]:
    """Rows of any shape as float32 (rows, columns); too large a value becomes inf."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(piece.reshape(piece.shape[0], -1), np.float32)
