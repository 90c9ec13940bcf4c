"""Edges, rows and lists of ids in text without a header, for the layouts of OGB and GraphBolt."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.arrow import INTEGER, ColumnType
from preprocess.files.tables import Table, joined
from preprocess.sources.source import NODE, EdgePieces, SourceRows, check_ids

_FLOAT32, _INT64 = np.dtype(np.float32), np.dtype(np.int64)


class TextEdges:
    """A line "source,target" for each edge.  Raises BadInput."""

    def __init__(self, path: Path, num_edges: int | None = None, says: str = "") -> None:
        """`num_edges`: the number given in the file `says`; None: count the lines."""
        self.path, self.where, self._says = path, str(path), says
        self._table = Table(path, "csv", ",", header=False)
        self._known = num_edges if path.stat().st_size or num_edges is not None else 0
        if self._known != 0:
            _check_columns(self._table, 2, "source and target")
            next(self.pieces(1))  # a header is refused

    @cached_property
    def num_edges(self) -> int:
        return self._table.num_rows() if self._known is None else self._known

    def pieces(self, count: int) -> EdgePieces:
        if self._known == 0:
            return
        done = 0
        for src, dst in self._table.arrays({"0": INTEGER, "1": INTEGER}, count):
            done += src.size
            _check_count(self._table, done, self._known, self._says)
            yield src, dst
        _check_count(self._table, done, self._known, self._says, ended=True)

    def place(self, end: int, row: int) -> str:
        return self._table.place(row)


class TextRows:
    """A line of numbers for each row: int64 if all columns are integers, else float32."""

    def __init__(
        self,
        name: str,
        path: Path,
        num_rows: int,
        says: str,
        main: bool = False,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """`says`: file with the number of rows; `main`: a single column has row_shape (1,)."""
        self.name, self.path, self._says = name, path, says
        self._table = Table(path, header=False)
        width = len(self._table.names)
        row_shape = (width,) if main or width > 1 else ()
        self.form = SourceRows(
            name, dtype or self._seen_dtype(), row_shape, num_rows, "dense", str(path)
        )

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        done, form = 0, self.form
        columns = dict.fromkeys(self._table.names, ColumnType(form.dtype))
        for piece in joined(self._table.arrays(columns, count), form.row_shape, form.dtype):
            done += piece.shape[0]
            _check_count(self._table, done, form.num_rows, self._says)
            yield piece
        _check_count(self._table, done, form.num_rows, self._says, ended=True)

    def _seen_dtype(self) -> np.dtype[Any]:
        """The dtype inferred from the first piece of the text."""
        held = self._table.look()
        for name, kind in held.items():
            if kind not in (INTEGER, ColumnType(_FLOAT32)):
                next(self._table.arrays({name: ColumnType(_FLOAT32)}, 1))  # which names the line
                raise BadInput.at(f"{self.path}: column {name}", kind, "numbers", "correct it")
        return _INT64 if set(held.values()) == {INTEGER} else _FLOAT32


class TextIds:
    """A split: a node id on each line."""

    def __init__(self, name: str, path: Path, num_nodes: int, owner: str = NODE) -> None:
        self.name, self.path, self._num_nodes, self._owner = name, path, num_nodes, owner
        self._table = Table(path, header=False)
        _check_columns(self._table, 1, "of ids")

    @cached_property
    def form(self) -> SourceRows:
        """Shape and dtype; the text is parsed once to count the ids."""
        return SourceRows(self.name, _INT64, (), self._table.num_rows(), "dense", str(self.path))

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Checked ids in order; error messages name the line."""
        done = 0
        for (ids,) in self._table.arrays({"0": INTEGER}, count):
            check_ids(ids, self._num_nodes, self._owner, lambda _, row: self._table.place(row),
                      done=done)  # fmt: skip
            yield ids
            done += ids.size


def _check_columns(table: Table, expected: int, what: str) -> None:
    found = len(table.names)
    if found != expected:
        raise BadInput.at(
            f"{table.path}:1", f"{found} columns", f"{expected}, {what}", "correct it"
        )


def _check_count(
    table: Table, done: int, num_rows: int | None, says: str, ended: bool = False
) -> None:
    if num_rows is None:
        return
    expected = f"{num_rows}, as {says} says"
    if done > num_rows:
        raise BadInput.at(table.place(num_rows), "one more row", expected, "are they of one graph?")
    if ended and done < num_rows:
        raise BadInput.at(f"{table.path}: end", f"{done} rows", expected, "copy it again")
