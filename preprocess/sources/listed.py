"""Rows that are read in order from one file, and rows that several files list for some nodes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile
from preprocess.files.strided import StridedRows
from preprocess.files.torchplaces import open_tensor
from preprocess.kernels.edges import first_outside
from preprocess.source import SourceRows
from preprocess.stages.array_file import ArrayFile

PIECE_ROWS = 1 << 14


class RowFile:
    """A `.npy` or `.pt` file of one array, read by rows."""

    def __init__(self, path: Path, form: str) -> None:
        self.path = path
        self._placed: StridedRows | None = None
        if form == "numpy":
            self._file = NpyFile(path)
            self.shape, self.dtype = self._file.shape, self._file.dtype
            fortran = self._file.fortran_order
        elif form == "torch":
            array = open_tensor(path)
            self.shape, self.dtype, fortran = array.shape, np.dtype(np.int64), False
            if array.shape:
                self._placed = StridedRows(path, array, str(path))
                self.dtype = self._placed.dtype
        else:
            raise BadInput.at(path, f"format {form!r}", "numpy or torch", "correct it")
        if not self.shape or 0 in self.shape[1:] or fortran or self.dtype.kind not in "biuf":
            order = " in Fortran order" if fortran else ""
            raise BadInput.at(
                f"{path}: header", f"shape {self.shape} of {self.dtype}{order}",
                "rows of numbers in C order", "save it again",
            )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Rows of the array."""
        return int(self.shape[0])

    def rows(self, name: str) -> SourceRows:
        """What it is, under a name."""
        return SourceRows(name, self.dtype, self.shape[1:], self.num_rows, "dense", str(self.path))

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order, at most `count` at a time."""
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        if self._placed is not None:
            yield from self._placed.pieces(0, self.num_rows, count)
            return
        for piece in self._file.pieces(0, self.num_rows * width, count * width):
            yield piece.reshape(-1, *self.shape[1:])


def write_listed(
    lists: Sequence[tuple[RowFile, RowFile]], form: SourceRows, path: Path, window: int
) -> None:
    """Lists of nodes and their values into one array, in order, `window` nodes at a time.

    form   what the array is; NaN, or -1, stands for every node that no list has
    path   out; "<path>-..." are temporary files

    Raises BadInput: an id out of range.
    """
    num_nodes, width = form.num_rows, form.row_bytes // form.dtype.itemsize
    parts = [path.with_name(f"{path.name}-{kind}") for kind in ("ids", "values")]
    for old in (path, *path.parent.glob(f"{path.name}-*")):
        old.unlink(missing_ok=True)
    for ids_file, values_file in lists:
        row = 0
        for ids, values in zip(
            ids_file.pieces(PIECE_ROWS), values_file.pieces(PIECE_ROWS), strict=True
        ):
            bad = int(first_outside(ids, num_nodes))
            if bad >= 0:
                raise BadInput.at(
                    f"{ids_file.path}[{row + bad}]", f"node id {ids[bad]}",
                    f"0 to {num_nodes - 1}", "correct the set",
                )  # fmt: skip
            _spread(parts, ids, values.reshape(ids.size, -1), form.dtype, window)
            row += ids.size
    none = np.nan if form.dtype.kind == "f" else -1
    buffer = np.empty((min(window, num_nodes), width), form.dtype)
    with ArrayFile(path, form.dtype) as out:
        for number in range(-(-num_nodes // window)):
            first = number * window
            labels = buffer[: min(window, num_nodes - first)]
            labels[:] = none
            for ids, values in _gather(parts, number, width, form.dtype):
                labels[ids - first] = values
            out.append(labels)


def read_list(path: Path, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
    """Rows of a file without a header, at most `count` at a time; the array is reused."""
    width = rows.row_bytes // rows.dtype.itemsize
    with ArrayFile(path, rows.dtype) as file:
        for piece in file.pieces(0, rows.num_rows * width, count * width):
            yield piece.reshape(-1, *rows.row_shape)


def _spread(
    parts: Sequence[Path],
    ids: NDArray[Any],
    values: NDArray[Any],
    dtype: np.dtype[Any],
    window: int,
) -> None:
    """Append ids and their labels to the files of their windows."""
    number = ids.astype(np.int64) // window
    order = np.argsort(number, kind="stable")
    bounds = np.flatnonzero(np.diff(number[order], prepend=-1))
    for first, stop in zip(bounds, [*bounds[1:], order.size], strict=True):
        here = order[first:stop]
        for part, array, kind in zip(parts, (ids, values), (np.int64, dtype), strict=True):
            with ArrayFile(Path(f"{part}-{number[here[0]]}"), kind) as file:
                file.append(array[here])


def _gather(
    parts: Sequence[Path], number: int, width: int, dtype: np.dtype[Any]
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Ids and labels of a window; its files are removed."""
    id_path, value_path = (Path(f"{part}-{number}") for part in parts)
    if not id_path.exists():
        return
    with ArrayFile(id_path, np.int64) as ids, ArrayFile(value_path, dtype) as values:
        yield from zip(
            ids.pieces(0, ids.size, PIECE_ROWS),
            (v.reshape(-1, width) for v in values.pieces(0, values.size, PIECE_ROWS * width)),
            strict=True,
        )
    id_path.unlink()
    value_path.unlink()
