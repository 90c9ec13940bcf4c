"""Which columns of tables are nodes, edges, arrays and splits, and how they are read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.arrow import FLAG, TEXT, ColumnType, Texts
from preprocess.files.tables import Table, joined
from preprocess.ingest.contents import SPLITS
from preprocess.sources.source import SourceRows

_FLOAT64 = np.dtype(np.float64)
_WORDS = {
    "train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test",
    "": "", "none": "",
}  # fmt: skip
_SPLIT_ROWS = 1 << 16


class Columns(NamedTuple):
    """An array, made of columns side by side."""

    name: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Splits:
    """Which split a row is in: a word in one column, or truth in the column of a split."""

    word: str = ""
    masks: tuple[tuple[str, str], ...] = ()  # (split, column)

    def __bool__(self) -> bool:
        return bool(self.word or self.masks)


class TableSequence:
    """Tables that follow each other, with the same columns."""

    def __init__(self, tables: Sequence[Table], remedy: str) -> None:
        """`remedy` is what to do where a column is missing."""
        assert tables
        self._tables, self._remedy = tuple(tables), remedy
        self._types: dict[str, ColumnType] = {}
        self._seen: list[dict[str, ColumnType]] = []

    @property
    def paths(self) -> list[Path]:
        return [t.path for t in self._tables]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns, by the first table."""
        return self._tables[0].names

    @property
    def where(self) -> str:
        return str(self._tables[0].path)

    def num_rows(self) -> int:
        """Of all; text is parsed once."""
        return sum(t.num_rows() for t in self._tables)

    def guess_rows(self) -> int:
        return sum(t.guess_rows() for t in self._tables)

    def type_of(self, name: str) -> ColumnType:
        """What a column holds.  Raises BadInput: it is missing, or its width varies."""
        if name not in self._types:
            for table in self._tables:
                table.check_has(name, self._remedy)
            self._seen = self._seen or [t.look() for t in self._tables]
            held = self._seen[0][name]
            for table, seen in zip(self._tables, self._seen, strict=True):
                held = self._common(table, name, held, seen[name])
            self._types[name] = held
        return self._types[name]

    def arrays(self, columns: Mapping[str, ColumnType], count: int) -> Iterator[list[NDArray[Any]]]:
        for table in self._tables:
            yield from table.arrays(columns, count)

    def texts(self, name: str, count: int) -> Iterator[Texts]:
        for table in self._tables:
            yield from table.texts(name, count)

    def words(self, name: str, words: Sequence[str], count: int) -> Iterator[NDArray[np.int32]]:
        for table in self._tables:
            yield from table.words(name, words, count)

    def place(self, row: int) -> str:
        for table in self._tables[:-1]:
            num_rows = table.num_rows()
            if row < num_rows:
                return table.place(row)
            row -= num_rows
        return self._tables[-1].place(row)

    def _common(self, table: Table, name: str, a: ColumnType, b: ColumnType) -> ColumnType:
        if a == b:
            return a
        if a.dtype is None or b.dtype is None:
            return TEXT  # numbers may be read as text
        if a.width != b.width:
            raise BadInput.at(
                f"{table.path}: column {name!r}", b, f"{a} as in {self.where}", "correct it"
            )
        return ColumnType(np.result_type(a.dtype, b.dtype), a.width)


@dataclass(frozen=True, slots=True)
class NodeTables:
    """The nodes of a type, a row each; without tables, those that edges name."""

    name: str
    tables: TableSequence | None
    key: str = ""  # column of ids; "": a node's id is the number of its row, from 0
    kind: str = ""  # of ids: "integer", "text", or "": what they seem
    features: tuple[Columns, ...] = ()
    label: Columns | None = None
    splits: Splits = Splits()


@dataclass(frozen=True, slots=True)
class EdgeTables:
    """The edges of a relation, a row each."""

    src: str
    name: str
    dst: str
    tables: TableSequence
    src_key: str
    dst_key: str
    features: tuple[Columns, ...] = ()
    splits: Splits = Splits()

    @property
    def ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(type, column of ids) of sources and of targets."""
        return (self.src, self.src_key), (self.dst, self.dst_key)


class TableArray:
    """An array whose rows lie in columns of tables, a row a row."""

    path = None  # the source names the files of its tables

    def __init__(
        self,
        tables: TableSequence,
        array: Columns,
        num_rows: Callable[[], int],
        label: bool = False,
    ) -> None:
        """A label of one column is read as float64: NaN where there is none.  Raises BadInput."""
        types = {name: tables.type_of(name) for name in array.columns}
        text = next((n for n, t in types.items() if t.dtype is None), None)
        if text is not None:
            raise BadInput.at(
                f"{tables.where}: column {text}", "text", "numbers, or numbers between commas",
                "make numbers of it, or leave the column out",
            )  # fmt: skip
        single = len(types) == 1 and not next(iter(types.values())).width
        dtypes = [t.dtype for t in types.values() if t.dtype is not None]
        dtype = _FLOAT64 if label and single else np.result_type(*dtypes)
        width = sum(t.width or 1 for t in types.values())
        shape = () if single else (width,)
        self.name, self._tables, self._num_rows = array.name, tables, num_rows
        self._types = {n: ColumnType(dtype, t.width) for n, t in types.items()}
        where = f"{tables.where}: column {', '.join(array.columns)}"
        self._form = SourceRows(array.name, dtype, shape, 0, "dense", where)

    @property
    def form(self) -> SourceRows:
        """What it is; its rows are those that its owner has by now."""
        return self._form._replace(num_rows=self._num_rows())

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        return joined(
            self._tables.arrays(self._types, count), self._form.row_shape, self._form.dtype
        )


def split_rows(tables: TableSequence, splits: Splits) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """(split, numbers of rows that are in it), some rows at a time, in order.  Raises BadInput."""
    for split, column in splits.masks:
        row = 0
        for (flags,) in tables.arrays({column: FLAG}, _SPLIT_ROWS):
            yield split, np.flatnonzero(flags) + row
            row += flags.size
    if not splits.word:
        return
    words, names = list(_WORDS), np.array(list(_WORDS.values()))
    row = 0
    for found in tables.words(splits.word, words, _SPLIT_ROWS):
        if (found < 0).any():
            raise BadInput.at(
                tables.place(row + int(np.argmax(found < 0))),
                f"another word in column {splits.word!r}", "train, valid, test, or nothing",
                "correct the line",
            )  # fmt: skip
        for split in SPLITS:
            yield split, np.flatnonzero(names[found] == split) + row
        row += found.size
