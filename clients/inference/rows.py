"""Rows between layers: arrays of blocks in a folder, read in order as numbers."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import FORMAT_VERSION, Manifest, RowArray, gapless_rows
from blockstore.store import Store
from blockstore.writer import StoreWriter
from preprocess.files.store import floats_ahead, rows_ahead

SCAN_BYTES = 2 << 20
STEP_ROWS = 4096  # fixed, as a matrix product may round differently for another number of rows


def row_array(path: str, dtype: Any, num_rows: int, width: int, block_bytes: int) -> RowArray:
    """An array of rows without gaps between them, of a dtype of numpy."""
    kind = np.dtype(dtype)
    per_block = gapless_rows(kind.itemsize * width, block_bytes, max(1, num_rows))
    return RowArray(path, kind.name, num_rows, (width,), rows_per_block=per_block)


def store_of(writer: StoreWriter) -> Store:
    """A store of the arrays that a writer has written so far."""
    manifest = Manifest(
        format=FORMAT_VERSION, block_bytes=writer.block_bytes, id_dtype="uint64", types=(),
        relations=(), files=writer.digests,
    )  # fmt: skip
    return Store(writer.folder, manifest)


class RowCursor(ExitStack):
    """Reads rows of several arrays side by side, in order, any number at a time."""

    def __init__(self, store: Store, arrays: Sequence[RowArray], dtype: Any) -> None:
        """`dtype`: NumPy's, that rows are converted to."""
        super().__init__()
        self._dtype, self._widths = dtype, [array.row_items for array in arrays]
        self._pieces = [self.enter_context(closing(_numbers(store, array))) for array in arrays]
        self._left: list[NDArray[Any]] = [np.empty((0, width)) for width in self._widths]

    def take(self, count: int) -> NDArray[Any]:
        """The next rows, (count, columns of all arrays).  Raises CorruptBlock."""
        out = np.empty((count, sum(self._widths)), self._dtype)
        self.fill(out)
        return out

    def fill(self, out: NDArray[Any]) -> None:
        """As `take`, into an array."""
        stops = np.cumsum(self._widths).tolist()
        for i, (stop, width) in enumerate(zip(stops, self._widths, strict=True)):
            done = 0
            while done < out.shape[0]:
                if not self._left[i].shape[0]:
                    self._left[i] = next(self._pieces[i])
                count = min(out.shape[0] - done, self._left[i].shape[0])
                out[done : done + count, stop - width : stop] = self._left[i][:count]
                self._left[i] = self._left[i][count:]
                done += count


def _numbers(store: Store, array: RowArray) -> Generator[NDArray[Any]]:
    if array.dtype == "float64":
        return rows_ahead(store, array, SCAN_BYTES, 1, lambda rows: rows)
    return floats_ahead(store, array, SCAN_BYTES, 1)
