"""Columns of Arrow: their types, and their values as numpy arrays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from blockstore.io.files import naming

_BRACKETS = " []()"
_GROUP_BYTES = 4 << 20  # of rows that are written as one row group


class ColumnType(NamedTuple):
    """The type of a column's cells: numbers, vectors of numbers, or text."""

    dtype: np.dtype[Any] | None  # None: text
    width: int = 0  # length of the vectors; 0 if a cell is a single number

    def __str__(self) -> str:
        if self.dtype is None:
            return "text"
        return f"{self.width} x {self.dtype}" if self.width else str(self.dtype)


TEXT = ColumnType(None)
INTEGER = ColumnType(np.dtype(np.int64))
FLAG = ColumnType(np.dtype(np.bool_))


class Texts(NamedTuple):
    """Strings, concatenated in UTF-8."""

    offsets: NDArray[np.int64]  # (count + 1,) in bytes of `data`
    data: NDArray[np.uint8]

    def __len__(self) -> int:
        return self.offsets.size - 1

    def at(self, i: int) -> str:
        return bytes(self.data[self.offsets[i] : self.offsets[i + 1]]).decode(errors="replace")


def seen_type(column: Any) -> ColumnType:
    """Infer the type of a column of a text file from its first piece."""
    if pa.types.is_integer(column.type):
        return INTEGER
    if pa.types.is_boolean(column.type):
        return FLAG
    if pa.types.is_floating(column.type) or pa.types.is_null(column.type):
        return ColumnType(np.dtype(np.float32))
    if pa.types.is_binary(column.type):  # arrow's type for text that is not UTF-8
        return TEXT
    parts = split_numbers(column.cast(pa.string()))
    width = len(parts[0].values)
    for dtype in (np.int64, np.float32):
        kind = ColumnType(np.dtype(dtype), width)
        if width and parses(parts.flatten(), kind):
            return kind
    return TEXT


def split_numbers(column: Any) -> Any:
    """Split a text column of comma-separated numbers, in brackets or not, into lists of text."""
    return pc.split_pattern_regex(pc.utf8_trim(column, _BRACKETS), r"\s*,\s*")


def parses(values: Any, kind: ColumnType) -> bool:
    try:
        pc.cast(values, parsed_as(ColumnType(kind.dtype)))
    except pa.ArrowInvalid:
        return False
    return True


def parsed_as(kind: ColumnType) -> Any:
    """The arrow type that text is parsed as."""
    if kind.dtype is None or kind.width:
        return pa.string()
    return pa.from_numpy_dtype(kind.dtype)


def is_number(held: Any) -> bool:
    return bool(
        pa.types.is_integer(held) or pa.types.is_floating(held) or pa.types.is_boolean(held)
    )


def is_text(held: Any) -> bool:
    return bool(pa.types.is_string(held) or pa.types.is_large_string(held))


def is_list(held: Any) -> bool:
    return bool(
        pa.types.is_list(held) or pa.types.is_large_list(held) or pa.types.is_fixed_size_list(held)
    )


def dtype_of(held: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(held.to_pandas_dtype())
    return dtype


def decoded(column: Any) -> Any:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def as_texts(column: Any) -> Texts:
    """The texts of a column of large_string, without a copy."""
    _, offsets, data = column.buffers()
    at = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    return Texts(at, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8))


@contextmanager
def writing_keys(path: Path) -> Iterator[Callable[[Texts], None]]:
    """Yield a function that appends to a Parquet file of one column "key", one row per node."""
    kind = pa.large_string()
    with naming(path, 0):
        schema = pa.schema([("key", kind)])
        writer = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False)

    def append(keys: Texts) -> None:
        first = int(keys.offsets[0])
        data = np.ascontiguousarray(keys.data[first : int(keys.offsets[-1])])
        buffers = [None, pa.py_buffer(keys.offsets - first), pa.py_buffer(data)]
        column = pa.Array.from_buffers(kind, len(keys), buffers)
        with naming(path, column.nbytes):
            writer.write_batch(pa.record_batch([column], ["key"]))

    try:
        yield append
    finally:
        with naming(path, 0):
            writer.close()


def write_parquet(
    path: Path,
    ids: NDArray[Any] | None,
    width: int,
    dtype: str,
    place: Callable[[Callable[[NDArray[Any]], None]], None],
) -> None:
    """Write a file with the columns `id`, int64, and `rows`, lists of `width` numbers.

    ids     of the rows; None: 0, 1, ...
    place   passes the rows in order to the function that it is given

    Raises OutOfSpace.
    """
    item = pa.from_numpy_dtype(np.dtype(dtype))
    schema = pa.schema([("id", pa.int64()), ("rows", pa.list_(item, width))])
    step = max(1, _GROUP_BYTES // (np.dtype(dtype).itemsize * width + 8))
    done = 0
    with naming(path, 0), pq.ParquetWriter(path, schema) as out:

        def emit(rows: NDArray[Any]) -> None:
            nonlocal done
            for first in range(0, rows.shape[0], step):
                some = np.ascontiguousarray(rows[first : first + step])
                names = (
                    np.arange(done, done + some.shape[0])
                    if ids is None
                    else ids[done:][: len(some)]
                )
                lists = pa.FixedSizeListArray.from_arrays(pa.array(some.reshape(-1)), width)
                columns = [pa.array(names.astype(np.int64)), lists]
                out.write_table(pa.Table.from_arrays(columns, schema=schema))
                done += some.shape[0]

        place(emit)
