"""Rows and edges in arrays of any file format, checked when opened, and read in order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.files.npy import NpyFile
from preprocess.files.strided import StoredArray
from preprocess.files.torchfile import kind_of, open_tensor, read_torch
from preprocess.pipeline.stage import Facts
from preprocess.sources.source import EdgePieces, SourceRows

_PIECE = 1 << 16  # offsets at a time
_MAX_COLUMNS = 256  # maximum columns read side by side, each with an open file
_AGAIN = "write the matrix again"
_PAIRS, _LIST = (2,), ()  # shapes of a row of ids

IdShapes = Sequence[tuple[int, ...]]


class ArrayRows:
    """A named array of rows: all rows of a file, or `count` from `first` on.  Raises BadInput."""

    def __init__(
        self,
        name: str,
        file: StoredArray,
        num_rows: int | None = None,
        says: str = "one a node",
        single: bool | None = None,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Check the shape and the dtype.

        num_rows   expected number of rows, explained by `says`
        single     True: row_shape (1,) becomes (); False: () becomes (1,)
        """
        shape, self._file, self._first = file.shape, file, first
        self._by_column = file.fortran_order and len(shape) == 2
        fits = len(shape) > 0 and 0 not in shape[1:] and file.dtype.kind in "biuf"
        if file.fortran_order:
            fits = fits and self._by_column and shape[1] <= _MAX_COLUMNS
        file.check(
            fits, f"rows of numbers in C order, or at most {_MAX_COLUMNS} columns",
            "save numpy.ascontiguousarray of it",
        )  # fmt: skip
        if num_rows not in (None, shape[0]):
            raise BadInput.at(
                file.header, f"{shape[0]} rows", f"{num_rows}, {says}", "is it of this graph?"
            )
        row_shape = shape[1:]
        if single is not None and prod(row_shape) == 1:
            row_shape = () if single else row_shape or (1,)
        self.name, self.path, self.seeks = name, file.path, file.seeks
        self.form = SourceRows(
            name, file.dtype, row_shape, shape[0] if count is None else count, "dense", file.where
        )

    def pieces(self, count: int, span: range | None = None) -> Iterator[NDArray[Any]]:
        span = range(self.form.num_rows) if span is None else span
        read = self._column_pieces if self._by_column else self._file.pieces
        for piece in read(self._first + span.start, self._first + span.stop, count):
            yield piece.reshape(-1, *self.form.row_shape)

    def _column_pieces(self, first: int, stop: int, count: int) -> Iterator[NDArray[Any]]:
        """Rows of an array in Fortran order, read column by column."""
        columns = self._file.transposed()
        width = columns.shape[0]
        rows = np.empty((min(count, stop - first), width), columns.dtype)
        parts = [columns.row(i).pieces(first, stop, count) for i in range(width)]
        for values in zip(*parts, strict=True):
            piece = rows[: values[0].size]
            for i, column in enumerate(values):
                piece[:, i] = column
            yield piece


def id_rows(name: str, file: StoredArray, shapes: IdShapes = (_LIST,)) -> ArrayRows:
    """A split: ids, positions, or pairs of ids; `shapes`: allowed row shapes.  Raises BadInput."""
    words = {_LIST: "(n,)", _PAIRS: "(n, 2)"}
    fits = len(file.shape) > 0 and file.shape[1:] in shapes and file.dtype.kind in "iu"
    expected = f"{' or '.join(words[s] for s in shapes)} of integers"
    file.check(fits, expected, "save a list of ids, or pairs (source, target) of edges")
    return ArrayRows(name, file)


def read_dict(path: Path) -> dict[str, Any]:
    """Read a torch file that holds a dict with text keys.  Raises BadInput."""
    held = read_torch(path)
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        what = "names that are not text" if isinstance(held, dict) else f"a {kind_of(held)}"
        raise BadInput.at(path, what, "a dict by name", "save one")
    return held


def torch_ids(name: str, path: Path, key: str, held: Mapping[str, Any]) -> ArrayRows:
    """A split under a key of a `read_dict` result.  Raises BadInput: it is no list of ids."""
    return id_rows(name, open_tensor(path, f"{path}: {key}", held[key], "a list of node ids"))


def open_array(path: Path, form: str) -> StoredArray:
    """Open a file of one array; `form`: "numpy" or "torch".  Raises BadInput."""
    if form == "torch":
        return open_tensor(path, str(path), read_torch(path), "one tensor")
    if form != "numpy":
        raise BadInput.at(path, f"format {form!r}", "numpy or torch", "correct it")
    return NpyFile(path)


class MadeRows:
    """Rows that a preparation writes to a file of its own, without a header."""

    path = None

    def __init__(self, form: SourceRows, made: Path | None = None) -> None:
        """`made` may be set later: nothing is read before the preparation."""
        self.name, self.form, self.made = form.name, form, made

    def write(self, window: int, none: float, fill: Callable[[int, NDArray[Any]], None]) -> Facts:
        """Write the file, `window` nodes at a time: `fill(first, rows)` enters the known values.

        none   value of all other items
        """
        assert self.made is not None
        self.made.unlink(missing_ok=True)
        form = self.form
        buffer = np.empty((min(window, form.num_rows), *form.row_shape), form.dtype)
        with ArrayFile(self.made, form.dtype) as out:
            for first in range(0, form.num_rows, window):
                rows = buffer[: min(window, form.num_rows - first)]
                rows[:] = none
                fill(first, rows)
                out.append(rows)
        return {}

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        assert self.made is not None
        form = self.form
        width = form.row_bytes // form.dtype.itemsize
        with ArrayFile(self.made, form.dtype) as file:
            for piece in file.pieces(0, form.num_rows * width, count * width):
                yield piece.reshape(-1, *form.row_shape)


class EdgeArray:
    """Edges in one array, (2, edges) or, where `paired`, (edges, 2).  Raises BadInput."""

    def __init__(self, file: StoredArray, paired: bool = False) -> None:
        shape, ends = file.shape, 1 if paired else 0
        fits = len(shape) == 2 and shape[ends] == 2 and file.dtype.kind in "iu"
        expected = f"{'(edges, 2)' if paired else '(2, edges)'} of integers"
        file.check(fits, expected, "transpose or convert it")
        self.path, self.where, self.num_edges = file.path, file.where, shape[1 - ends]
        self._paired, self.seeks = paired, file.seeks
        self._together = paired != file.fortran_order  # whether ends of an edge lie side by side
        self._file = file.transposed() if file.fortran_order else file

    def pieces(self, count: int, span: range | None = None) -> EdgePieces:
        """(src, dst), at most `count` at a time; the arrays are reused."""
        span = range(self.num_edges) if span is None else span
        first, stop = span.start, span.stop
        if not self._together:
            src, dst = (self._file.row(end).pieces(first, stop, count) for end in (0, 1))
            yield from zip(src, dst, strict=True)
            return
        split = np.empty((2, min(count, len(span))), self._file.dtype)
        for pairs in self._file.pieces(first, stop, count):
            src_ids, dst_ids = split[:, : pairs.shape[0]]
            src_ids[:], dst_ids[:] = pairs[:, 0], pairs[:, 1]
            yield src_ids, dst_ids

    def place(self, end: int, row: int) -> str:
        return f"{self.where}[{row}, {end}]" if self._paired else f"{self.where}[{end}, {row}]"


class EdgeLists:
    """Edges as two arrays of ids, sources and targets, of one length."""

    def __init__(self, src: StoredArray, dst: StoredArray, where: str) -> None:
        self.path, self.where, self.num_edges = src.path, where, src.size
        self._ends, self.seeks = (src, dst), src.seeks and dst.seeks

    def pieces(self, count: int, span: range | None = None) -> EdgePieces:
        """(src, dst), at most `count` at a time, read in parallel from both arrays."""
        span = range(self.num_edges) if span is None else span
        src, dst = (end.pieces(span.start, span.stop, count) for end in self._ends)
        return zip(src, dst, strict=True)

    def place(self, end: int, row: int) -> str:
        return f"{self._ends[end].where}[{row}]"


class CompressedEdges:
    """A sparse matrix in CSR or CSC.  Raises BadInput."""

    def __init__(self, indptr: StoredArray, indices: StoredArray, major: int, where: str) -> None:
        """`major`: the end that `indptr` indexes, sources (0) or targets (1)."""
        self.path, self.where, self.num_edges = indices.path, where, indices.size
        self._indptr, self._indices, self._major = indptr, indices, major

    def pieces(self, count: int) -> EdgePieces:
        """(src, dst) in the order of the file, `count` at a time; arrays are reused."""
        indptr = self._indptr
        major = major_ids(indptr.all_pieces(_PIECE), indptr.where, self.num_edges, count)
        minor = self._indices.all_pieces(count)
        return zip(minor, major, strict=True) if self._major else zip(major, minor, strict=True)

    def place(self, end: int, row: int) -> str:
        return f"{self._indices.where}[{row}]"

    def check_ends(self) -> None:
        """Check the first and the last offset, without reading the others.  Raises BadInput."""
        indptr = self._indptr
        for at, expected in ((0, 0), (indptr.size - 1, self.num_edges)):
            found = int(indptr.read(at, 1)[0])
            if found != expected:
                raise BadInput.at(f"{indptr.where}[{at}]", f"offset {found}", expected, _AGAIN)


def major_ids(
    indptr: Iterator[NDArray[np.integer]], where: str, num_entries: int, count: int
) -> Iterator[NDArray[np.int64]]:
    """The row (column, in CSC) of every entry in order, `count` at a time; the array is reused.

    indptr       integers   in pieces; must begin with 0, and never decrease
    where        place of `indptr`, for messages
    num_entries  required last value of `indptr`

    Raises BadInput.
    """
    out = np.empty(min(count, num_entries), np.int64)
    filled, last, row = 0, 0, -1  # ids in `out`; last offset before a piece, and the row it ends
    for piece in indptr:
        ends = piece.astype(np.int64)
        starts = np.concatenate([[last], ends[:-1]])
        _check_offsets(starts, ends, row, num_entries, where)
        done = last
        while done < ends[-1]:
            stop = min(done + count - filled, int(ends[-1]))
            low = int(np.searchsorted(ends, done, "right"))
            high = int(np.searchsorted(ends, stop, "left")) + 1
            here = np.minimum(ends[low:high], stop) - np.maximum(starts[low:high], done)
            ids = np.arange(row + low, row + high, dtype=np.int64)
            out[filled : filled + stop - done] = np.repeat(ids, here)
            filled, done = filled + stop - done, stop
            if filled == count:
                yield out
                filled = 0
        last, row = int(ends[-1]), row + ends.size
    if last != num_entries:
        raise BadInput.at(f"{where}[{row}]", last, f"{num_entries}, the entries", _AGAIN)
    if filled:
        yield out[:filled]


def _check_offsets(
    starts: NDArray[np.int64], ends: NDArray[np.int64], row: int, num_entries: int, where: str
) -> None:
    bad = (ends < starts) | (ends > num_entries)
    if row < 0:
        bad[0] = ends[0] != 0
    if bad.any():
        at = int(np.argmax(bad))
        expected = "0" if row + at < 0 else f"{starts[at]} to {num_entries}, in ascending order"
        raise BadInput.at(f"{where}[{row + 1 + at}]", f"offset {ends[at]}", expected, _AGAIN)
