"""Delimited text and Parquet in bounded pieces."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files import arrow
from preprocess.files.arrow import INTEGER, TEXT, ColumnType, Texts

PIECE_BYTES = 1 << 20  # of text parsed at once, and of a Parquet column read at once
_MAX_LINE_BYTES = 64 << 20
_SUFFIXES = {
    ".csv": ("csv", ","),
    ".tsv": ("csv", "\t"),
    ".txt": ("csv", ","),
    ".parquet": ("parquet", ""),
    ".pq": ("parquet", ""),
}
_PACKED = (".gz", ".bz2", ".zst", ".lz4")
_CELL = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (.*?): (.*)", re.S)
_IN_UTF8 = "write the table again in UTF-8"
_ROW = re.compile(r"CSV parse error: Row #(\d+): Expected (\d+) columns?, got (\d+): ?(.*)", re.S)
_GUESS_BYTES, _PACKING = 1 << 16, 4  # assumed compression ratio of packed text
_MAX_SHOWN = 60  # characters of a value, in a message


class BadCell(BadInput):
    """A value does not have the type requested for its column."""


class Table:
    """A file of rows, read in order in pieces: delimited text, compressed or not, or Parquet.

    If text has no header the columns are named "0", "1", ...  Empty lines are not rows.
    Raises BadInput from all methods, which names the line of text, or the row of Parquet.
    """

    def __init__(
        self, path: Path, form: str = "", delimiter: str = "", header: bool = True
    ) -> None:
        """`form`: "csv" or "parquet"; if "", it and the delimiter follow from the suffix."""
        self.path = path
        known = _form_of(path)
        if not form and known is None:
            raise BadInput.at(
                path, "a name that says no format", f"one of {', '.join(_SUFFIXES)}", "say which"
            )
        if form not in ("", "csv", "parquet"):
            raise BadInput.at(path, f"format {form!r}", "csv or parquet", "convert the table")
        self.form = form or (known[0] if known else "")
        self._delimiter = delimiter or (known[1] if known else "") or ","
        self._header = header
        self._piece_bytes = PIECE_BYTES
        if not path.is_file():
            what = "a folder" if path.exists() else "no file: it is missing"
            raise BadInput.at(path, what, "a table", "is the path right?")
        self._infinite: set[str] = set()  # columns whose text was checked for overflow

    @cached_property
    def names(self) -> tuple[str, ...]:
        if self.form == "parquet":
            with self._translated(), self._parquet() as file:
                names = tuple(file.schema_arrow.names)
        else:
            names = self._csv_names()
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise BadInput.at(
                self.path, f"two columns {twice!r}", "names that differ", "rename one"
            )
        return names

    def num_rows(self) -> int:
        """Number of rows, from Parquet's metadata, or by parsing text once."""
        if self.form == "parquet":
            with self._translated(), self._parquet() as file:
                return int(file.metadata.num_rows)
        first = self.names[0]
        return sum(batch.num_rows for batch in self._csv_batches({first: TEXT}))

    def guess_rows(self) -> int:
        """Estimated number of rows: exact for Parquet, from the first lines for text."""
        if self.form == "parquet":
            return self.num_rows()
        with self._translated(), self._stream() as stream:
            head = stream.read(_GUESS_BYTES)
        packing = _PACKING if self.path.suffix in _PACKED else 1
        lines = int(head.count(b"\n"))
        return self.path.stat().st_size * packing * lines // max(1, len(head))

    def look(self) -> dict[str, ColumnType]:
        """The type of each column, from the schema of Parquet or the first piece of text.

        Floats of text become float32.
        """
        if self.form == "parquet":
            with self._translated(), self._parquet() as file:
                schema = file.schema_arrow
                head = next(file.iter_batches(1, use_threads=False), None)
            return {
                name: self._type_of(name, schema.field(name).type, head) for name in schema.names
            }
        batch = next(self._csv_batches(None), None)
        if batch is None:
            return dict.fromkeys(self.names, INTEGER)
        return {n: arrow.seen_type(batch.column(i)) for i, n in enumerate(self.names)}

    def arrays(self, columns: Mapping[str, ColumnType], count: int) -> Iterator[list[NDArray[Any]]]:
        """Columns of numbers, in the order of `columns`, at most `count` rows at a time.

        (rows,) or (rows, width) each.  Empty cells become NaN; in integer columns they are refused.
        """
        for row, batch in self._batches(columns, count):
            yield [self._numbers(batch.column(name), name, columns[name], row) for name in columns]

    def texts(self, name: str, count: int) -> Iterator[Texts]:
        """A column as text, at most `count` rows at a time; integers are written in decimal."""
        for row, batch in self._batches({name: TEXT}, count):
            column = batch.column(name)
            if column.null_count:
                self._refuse_null(column, name, row, "a text")
            yield arrow.as_texts(self._as_text(column, name, row))

    def words(self, name: str, words: Sequence[str], count: int) -> Iterator[NDArray[np.int32]]:
        """Position of each row's text in `words`; -1 for any other text and for empty cells."""
        known = pa.array(words, pa.large_string())
        for row, batch in self._batches({name: TEXT}, count):
            column = self._as_text(batch.column(name), name, row)
            yield pc.index_in(column, known).fill_null(-1).to_numpy()

    def place(self, row: int) -> str:
        """The place of a row (from 0) for messages: file and line of text, or row of Parquet."""
        if self.form == "parquet":
            return f"{self.path}[{row}]"
        return f"{self.path}:{self._line_of(row + self._header)}"

    def check_has(self, name: str, remedy: str) -> None:
        """Raises BadInput if there is no column of that name."""
        if name not in self.names:
            raise BadInput.at(
                f"{self.path}: header", f"columns {', '.join(self.names)}", f"one {name!r}", remedy
            )

    def _batches(self, columns: Mapping[str, ColumnType], count: int) -> Iterator[tuple[int, Any]]:
        """(first row, at most `count` rows of some columns)."""
        for name in columns:
            self.check_has(name, "name one of those")
        row, count, is_csv = 0, max(count, 1), self.form == "csv"
        held = self._csv_batches(columns) if is_csv else self._parquet_batches([*columns], count)
        for batch in held:
            for first in range(0, batch.num_rows, count):
                part = batch.slice(first, count)
                yield row, part
                row += part.num_rows

    def _parquet(self) -> Any:
        return pq.ParquetFile(
            self.path, buffer_size=PIECE_BYTES, pre_buffer=False, memory_map=False
        )

    def _parquet_batches(self, names: list[str], count: int) -> Iterator[Any]:
        with self._translated(), self._parquet() as file:
            yield from file.iter_batches(count, columns=names, use_threads=False)

    def _csv_names(self) -> tuple[str, ...]:
        with self._translated(), self._stream() as stream:
            line = io.BufferedReader(stream).readline(_MAX_LINE_BYTES)
            if len(line) > PIECE_BYTES >> 3:
                self._piece_bytes = len(line) << 3
        with self._translated(), self._csv(None) as reader:
            names = tuple(reader.schema.names)
        return names if self._header else tuple(str(i) for i in range(len(names)))

    def _stream(self) -> Any:
        return pa.input_stream(str(self.path), compression="detect", buffer_size=PIECE_BYTES)

    @contextmanager
    def _csv(self, columns: Mapping[str, ColumnType] | None) -> Iterator[Any]:
        """A reader of given columns with their types, or of all columns with inferred types."""
        before = "" if self._header else "f"  # arrow names columns without a header f0, f1, ...
        wanted = {f"{before}{name}": kind for name, kind in (columns or {}).items()}
        convert = pa_csv.ConvertOptions(
            include_columns=list(wanted),
            column_types={name: arrow.parsed_as(kind) for name, kind in wanted.items()},
            null_values=[""],  # "NA" may be the id of a node
        )
        with self._stream() as stream:
            reader = pa_csv.open_csv(
                stream,
                read_options=pa_csv.ReadOptions(
                    use_threads=False,
                    block_size=self._piece_bytes,
                    autogenerate_column_names=not self._header,
                ),
                parse_options=pa_csv.ParseOptions(delimiter=self._delimiter),
                convert_options=convert,
            )
            with reader:
                yield reader

    def _csv_batches(self, columns: Mapping[str, ColumnType] | None) -> Iterator[Any]:
        names = self.names
        with self._translated(), self._csv(columns) as reader:
            for batch in reader:
                if batch.num_rows:
                    yield batch.rename_columns(list(names if columns is None else columns))

    def _as_text(self, column: Any, name: str, row: int) -> Any:
        """The column as large_string, without a copy if it is text already."""
        column = arrow.decoded(column)
        try:
            return column.cast(pa.large_string())
        except pa.ArrowNotImplementedError as error:
            raise BadInput.at(
                f"{self.path}: schema", f"{column.type} in column {name!r}", "text or integers",
                "convert it",
            ) from error  # fmt: skip
        except pa.ArrowInvalid as error:
            raw = (value.as_py() or b"" for value in column.cast(pa.large_binary()))
            bad = ((i, r) for i, r in enumerate(raw) if r.decode(errors="ignore").encode() != r)
            at, found = next(bad)
            raise self._bad(row + at, name, shown(repr(found)), "UTF-8", _IN_UTF8) from error

    def _numbers(self, column: Any, name: str, kind: ColumnType, row: int) -> NDArray[Any]:
        """A column as (rows,) or (rows, width) of the dtype of `kind`."""
        assert kind.dtype is not None
        if kind.width:
            return self._vectors(column, name, kind, row)
        column = arrow.decoded(column)
        if pa.types.is_temporal(column.type):
            column = column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
        if not arrow.is_number(column.type):
            raise self._bad(row, name, column.type, kind, "convert it")
        if column.null_count:
            if kind.dtype.kind != "f":
                self._refuse_null(column, name, row, str(kind))
            if not pa.types.is_floating(column.type):
                column = column.cast(pa.float64())
        array = column.to_numpy(zero_copy_only=False)
        return self._cast(array, name, kind, row)

    def _cast(self, array: NDArray[Any], name: str, kind: ColumnType, row: int) -> NDArray[Any]:
        """Cast to the dtype of `kind`; values may change by rounding of floats only."""
        assert kind.dtype is not None
        if kind.dtype.kind == "f":
            with np.errstate(over="ignore"):
                cast = array.astype(kind.dtype, copy=False)
            infinite = np.isinf(cast)
            if infinite.any():
                self._check_infinite(array, infinite, name, kind, row)
            return cast
        if array.dtype == kind.dtype or array.dtype.kind == "b":
            return array.astype(kind.dtype, copy=False)
        with np.errstate(invalid="ignore"):
            cast = array.astype(kind.dtype)
        bad = cast != array
        if bad.any():
            at = int(np.argmax(bad.reshape(bad.shape[0], -1).any(axis=1)))
            raise self._bad(row + at, name, array[at], kind, error=BadCell)
        return cast

    def _check_infinite(
        self,
        array: NDArray[Any],
        infinite: NDArray[np.bool_],
        name: str,
        kind: ColumnType,
        row: int,
    ) -> None:
        """Raises BadCell if a number became infinite, in a cast or when text was parsed."""
        lost = infinite & np.isfinite(array)
        if lost.any():
            self._refuse_large(array, lost, name, kind, row)
        elif self.form == "csv" and not kind.width and name not in self._infinite:
            self._infinite.add(name)  # the pass below checks all rows of the file
            done = 0
            for batch in self._csv_batches({name: ColumnType(np.dtype(np.float64))}):
                values = batch.column(name).to_numpy(zero_copy_only=False)
                with np.errstate(over="ignore", invalid="ignore"):
                    lost = np.isinf(values.astype(kind.dtype)) & np.isfinite(values)
                if lost.any():
                    self._refuse_large(values, lost, name, kind, done)
                done += batch.num_rows

    def _refuse_large(
        self, array: NDArray[Any], lost: NDArray[np.bool_], name: str, kind: ColumnType, row: int
    ) -> None:
        at = np.argwhere(lost)[0].tolist()
        found, expected = f"{array[tuple(at)]:g}", f"less than 3.4e38 for {kind.dtype}"
        remedy = "scale the numbers, or leave the row out"
        raise self._bad(row + at[0], name, found, expected, remedy, BadCell)

    def _vectors(self, column: Any, name: str, kind: ColumnType, row: int) -> NDArray[Any]:
        if column.null_count:
            self._refuse_null(column, name, row, str(kind))
        if arrow.is_text(column.type):
            return self._parsed_vectors(column, name, kind, row)
        if not arrow.is_list(column.type):
            raise self._bad(row, name, column.type, kind, "convert it")
        self._check_lengths(column, name, kind, row)
        values = column.flatten()
        if values.null_count or not arrow.is_number(values.type):
            found = "an empty number" if values.null_count else f"a list of {values.type}"
            raise self._bad(row, name, found, kind)
        array = values.to_numpy(zero_copy_only=False).reshape(-1, kind.width)
        return self._cast(array, name, kind, row)

    def _parsed_vectors(self, column: Any, name: str, kind: ColumnType, row: int) -> NDArray[Any]:
        parts = arrow.split_numbers(column)
        self._check_lengths(parts, name, kind, row)
        try:
            values = pc.cast(parts.flatten(), arrow.parsed_as(ColumnType(kind.dtype)))
        except pa.ArrowInvalid as error:
            at = next(i for i in range(len(parts)) if not arrow.parses(parts[i].values, kind))
            raise self._bad(row + at, name, shown(column[at].as_py()), kind) from error
        array = values.to_numpy(zero_copy_only=False).reshape(-1, kind.width)
        if array.dtype.kind == "f" and np.isinf(array).any():
            array = pc.cast(parts.flatten(), pa.float64()).to_numpy(zero_copy_only=False)
            array = array.reshape(-1, kind.width)
        return self._cast(array, name, kind, row)

    def _check_lengths(self, lists: Any, name: str, kind: ColumnType, row: int) -> None:
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        bad = lengths != kind.width
        if bad.any():
            at = int(np.argmax(bad))
            found, remedy = f"{lengths[at]} numbers", "all rows have the same width"
            raise self._bad(row + at, name, found, kind.width, remedy)

    def _type_of(self, name: str, held: Any, head: Any) -> ColumnType:
        """Type of a Parquet column; `head`: a batch of one row, or None."""
        if pa.types.is_dictionary(held):
            held = held.value_type
        if arrow.is_list(held):
            width = 0 if head is None else int(pc.list_value_length(head.column(name))[0].as_py())
            if pa.types.is_fixed_size_list(held):
                width = held.list_size
            if width and arrow.is_number(held.value_type):
                return ColumnType(arrow.dtype_of(held.value_type), width)
            raise BadInput.at(
                f"{self.path}: schema", f"{held} in column {name!r}", "lists of numbers",
                "convert it",
            )  # fmt: skip
        if pa.types.is_temporal(held):
            return INTEGER
        return ColumnType(arrow.dtype_of(held)) if arrow.is_number(held) else TEXT

    def _refuse_null(self, column: Any, name: str, row: int, expected: str) -> None:
        at = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise self._bad(row + at, name, "nothing", expected, "fill it, or drop the row")

    def _bad(
        self,
        row: int,
        name: str,
        found: object,
        expected: object,
        remedy: str = "correct it",
        error: type[BadInput] = BadInput,
    ) -> BadInput:
        """Build the error for the value of a row in a column."""
        return error.at(self.place(row), f"{found} in column {name!r}", expected, remedy)

    def _line_of(self, row: int) -> int:
        """Line number (from 1) of the non-empty line number `row` (from 0); 0 if there is none."""
        with self._stream() as stream:
            for line, text in enumerate(io.BufferedReader(stream), 1):
                row -= bool(text.strip(b"\r\n"))
                if row < 0:
                    return line
        return 0

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
            raise self._said(str(error)) from error
        except UnicodeDecodeError as error:
            found = shown(repr(error.object))
            raise BadInput.at(f"{self.path}: header", found, "names in UTF-8", _IN_UTF8) from error
        except (OSError, EOFError, pa.ArrowException) as error:
            whole = f"a whole {self.form} file"
            raise BadInput.at(self.path, shown(str(error)), whole, "copy it again") from error

    def _said(self, text: str) -> BadInput:
        if cell := _CELL.search(text):
            name = self.names[int(cell[1])] if "names" in vars(self) else cell[1]
            row = int(cell[2]) - 1 - self._header
            if "invalid UTF8" in cell[4]:
                return self._bad(row, name, "bytes that are not UTF-8", "UTF-8", _IN_UTF8)
            value = shown(cell[4].removeprefix("invalid value "))
            return self._bad(row, name, value, cell[3], "correct the line", BadCell)
        if line := _ROW.search(text):
            where = f"{self.path}:{self._line_of(int(line[1]) - 1)}"
            found = f"{line[3]} columns in {shown(line[4])}"
            return BadInput.at(where, found, line[2], "correct the line")
        if "straddling" in text:
            return BadInput.at(
                self.path, f"a line longer than {self._piece_bytes >> 1} bytes", "shorter ones",
                "is the file text, with lines that end?",
            )  # fmt: skip
        what = "an empty file" if "Empty CSV" in text else shown(text)
        return BadInput.at(self.path, what, f"a {self.form} table", "write it again")


def joined(
    pieces: Iterator[list[NDArray[Any]]], row_shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Iterator[NDArray[Any]]:
    """Join columns side by side, (rows, *row_shape); the array is reused."""
    out = np.empty((0, *row_shape), dtype)
    for arrays in pieces:
        size, at = arrays[0].shape[0], 0
        if len(arrays) == 1:
            yield arrays[0].reshape(size, *row_shape)
            continue
        if out.shape[0] < size:
            out = np.empty((size, *row_shape), dtype)
        for array in arrays:
            flat = array.reshape(size, -1)
            out[:size, at : at + flat.shape[1]] = flat
            at += flat.shape[1]
        yield out[:size]


def is_table(path: Path) -> bool:
    """Whether a file's name says that it is a table."""
    return _form_of(path) is not None


def _form_of(path: Path) -> tuple[str, str] | None:
    suffix = path.with_suffix("").suffix if path.suffix in _PACKED else path.suffix
    return _SUFFIXES.get(suffix)


def shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
