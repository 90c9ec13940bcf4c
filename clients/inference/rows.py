"""Rows on their way between layers: arrays of blocks in a folder, read in order as numbers."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import FORMAT_VERSION, Manifest, Relation, RowArray, gapless_rows
from blockstore.store import Store
from blockstore.writer import RowsWriter, StoreWriter
from preprocess.files.ahead import read_ahead
from preprocess.files.store import rows_ahead, to_floats
from preprocess.stages.stored_columns import stored_columns

SCAN_BYTES = 2 << 20
STEP_ROWS = 4096  # fixed, as products of matrices may round otherwise by how many rows they have
_STEP_EDGES = 1 << 18


def row_array(path: str, dtype: Any, num_rows: int, width: int, block_bytes: int) -> RowArray:
    """An array of rows without gaps between them, of a dtype of numpy."""
    kind = np.dtype(dtype)
    per_block = gapless_rows(kind.itemsize * width, block_bytes, max(1, num_rows))
    return RowArray(path, kind.name, num_rows, (width,), rows_per_block=per_block)


class RowFolder:
    """Arrays that a writer makes, with checksums as those of a store, and reads of those made."""

    def __init__(self, writer: StoreWriter, folder: Path) -> None:
        self.writer, self._folder = writer, folder

    def write(self, array: RowArray) -> RowsWriter:
        return self.writer.rows(array)

    @property
    def store(self) -> Store:
        """What has been made so far."""
        manifest = Manifest(
            format=FORMAT_VERSION, block_bytes=self.writer.block_bytes, id_dtype="uint64", types=(),
            relations=(), files=self.writer.digests,
        )  # fmt: skip
        return Store(self._folder, manifest)


class RowCursor(AbstractContextManager["RowCursor"]):
    """Rows of arrays side by side, in order, as many at a time as are asked for."""

    def __init__(self, store: Store, arrays: Sequence[RowArray], dtype: Any) -> None:
        self._dtype, self._width = np.dtype(dtype), sum(array.row_items for array in arrays)
        self._held = ExitStack()
        self._columns = [_Column(store, array, self._dtype, self._held) for array in arrays]

    def take(self, count: int) -> NDArray[Any]:
        """The next rows, (count, columns of all arrays).  Raises CorruptBlock."""
        out, at = np.empty((count, self._width), self._dtype), 0
        for column in self._columns:
            column.take_into(out[:, at : at + column.width])
            at += column.width
        return out

    def __exit__(self, *_: object) -> None:
        self._held.close()


class _Column:
    """Rows of one array."""

    def __init__(self, store: Store, array: RowArray, dtype: Any, held: ExitStack) -> None:
        scale = store.scale(array) if array.scale_path else None

        def changed(rows: NDArray[Any]) -> NDArray[Any]:
            flat = rows.reshape(-1, array.row_items)
            exact = array.dtype == "float64"
            return (flat if exact else to_floats(flat, array, scale)).astype(dtype, copy=False)

        self.width = array.row_items
        self._pieces = held.enter_context(closing(rows_ahead(store, array, SCAN_BYTES, 1, changed)))
        self._left: NDArray[Any] = np.empty((0, self.width), dtype)

    def take_into(self, out: NDArray[Any]) -> None:
        done = 0
        while done < out.shape[0]:
            if not self._left.shape[0]:
                self._left = next(self._pieces)
            count = min(out.shape[0] - done, self._left.shape[0])
            out[done : done + count] = self._left[:count]
            self._left = self._left[count:]
            done += count


Columns = tuple[NDArray[np.int64], NDArray[np.int64]]


def whole_columns(
    store: Store, relation: Relation, first: int, num_nodes: int
) -> Iterator[Columns]:
    """(degrees, sources): all columns of a relation in order, some at a time, each of them whole.

    first, num_nodes   store ids of the sources' type: `sources` count from 0

    Read and unpacked by another thread; valid until the next step.  Raises CorruptBlock.
    """
    dst = next(t for t in store.manifest.types if t.name == relation.dst)
    done = 0  # columns that were given
    degrees, sources = np.empty(0, np.int64), np.empty(0, np.int64)
    with closing(read_ahead(stored_columns(store, relation, SCAN_BYTES))) as pieces:
        for head, more, edges in pieces:
            goes_on = int(head[1]) > 0
            assert goes_on or int(head[0]) - dst.first == done + degrees.size
            if goes_on:
                degrees[-1] += more[0]
            degrees = np.concatenate([degrees, more[1:] if goes_on else more])
            ids = edges.astype(np.int64) - first
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes:
                raise CorruptBlock(
                    f"{store.path / relation.path}: sources {ids.min() + first} to "
                    f"{ids.max() + first}, expected {first} to {first + num_nodes - 1}; ingest "
                    "again"
                )
            sources = np.concatenate([sources, ids])
            whole = max(0, degrees.size - 1)  # the last may go on
            at = 0
            for low, high, count in _spans(degrees[:whole]):
                yield degrees[low:high], sources[at : at + count]
                at += count
            done += whole
            degrees, sources = degrees[whole:].copy(), sources[at:].copy()
    missing = np.zeros(dst.num_nodes - done - degrees.size, np.int64)
    at, degrees = 0, np.concatenate([degrees, missing])
    for low, high, count in _spans(degrees):
        yield degrees[low:high], sources[at : at + count]
        at += count


def _spans(degrees: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """(first, stop, edges) of some columns at a time."""
    ends, low = np.cumsum(degrees), 0
    while low < degrees.size:
        before = int(ends[low - 1]) if low else 0
        high = int(np.searchsorted(ends, before + _STEP_EDGES, "right"))
        high = min(max(high, low + 1), low + STEP_ROWS, degrees.size)
        yield low, high, int(ends[high - 1]) - before
        low = high
