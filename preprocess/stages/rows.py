"""Bring rows into another order without random writes.

If rows keep their order, or the array fits in the share, this takes one read and one write.
Otherwise rows go to buckets by ranges of their new positions, and each bucket is put in order in
memory: two reads, two writes.

Features are converted at the same time; to int8 with a scale for each column, which maps its
largest magnitude to 127.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray
from blockstore.store import numpy_dtype
from preprocess.errors import BadInput
from preprocess.files.ahead import read_ahead
from preprocess.files.buckets import Buckets
from preprocess.kernels.rows import group_places, quantize, to_bfloat16
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import QuantizationError
from preprocess.sources.source import Source, SourceRows

_MAX_CHUNK_BYTES = 8 << 20
# magnitudes from here on round to infinity: half a step above the largest finite number
_INFINITE = {
    "float16": 65520.0,
    "bfloat16": (2 - 2**-8) * 2.0**127,
    "float32": (2 - 2**-24) * 2.0**127,
}
_CHUNKS = 8  # chunks in memory while rows are placed: read, converted, read ahead, positions

Emit = Callable[[NDArray[Any]], None]


def scatter_bytes(num_rows: int, row_bytes: int, place: int, share: int) -> int:
    """Temporary bytes of rows that are brought into another order."""
    return num_rows * (row_bytes + place) if num_rows * row_bytes > dense_bytes(share) else 0


def chunk_rows(row_bytes: int, share: int) -> int:
    """Number of rows to read at a time, such that the copies of a chunk fit."""
    return max(1, min(_MAX_CHUNK_BYTES, share // 16) // max(1, row_bytes))


def dense_bytes(share: int) -> int:
    """Bytes available for rows that are put in order in memory, beside the chunks being read."""
    return share - _CHUNKS * min(_MAX_CHUNK_BYTES, share // 16)


def source_chunk(rows: SourceRows, share: int) -> int:
    """Number of rows of a source to read at a time."""
    items = int(np.prod(rows.row_shape, dtype=np.int64))
    return chunk_rows(max(rows.row_bytes, items * 4), share)


def convert(rows: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Rows in the numpy form of a store dtype."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return rows.astype(numpy_dtype(dtype), copy=False)
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    out = np.empty(bits.shape, np.uint16)
    to_bfloat16(bits.reshape(-1), out.reshape(-1))
    return out


def checked_sums(rows: NDArray[np.float32], dtype: str, where: str, first: int) -> NDArray[Any]:
    """Convert computed rows.  Raises BadInput: a number that float16 cannot hold.

    where, first   name of the array and number of its first row here, for the message
    """
    if dtype == "float16":
        _check_overflow(rows, (rows.min(initial=0), rows.max(initial=0)), dtype, where, first)
    return convert(rows, dtype)


def checked_features(
    source: Source,
    rows: SourceRows,
    dtype: str,
    allow_nan: bool,
    share: int,
    span: range | None = None,
) -> Iterator[NDArray[Any]]:
    """Converted features in the source's order; those of a span, or all.

    Raises BadInput: NaN if it is not allowed, a number that the dtype cannot hold.
    """
    done = 0 if span is None else span.start
    for piece in source.rows(rows, source_chunk(rows, share), span):
        if piece.dtype.kind == "f" or dtype == "float16":
            # both are NaN if the piece has one; this allocates nothing
            minimum, maximum = piece.min(initial=0), piece.max(initial=0)
            if not allow_nan and (np.isnan(minimum) or np.isnan(maximum)):
                bad = np.argwhere(np.isnan(piece))[0][0]
                raise BadInput.at(
                    f"{rows.where}[{done + bad}]", "NaN", "numbers",
                    "--allow-nan takes them as they are",
                )  # fmt: skip
            if piece.dtype != np.float32 or dtype != "float32":
                _check_overflow(piece, (minimum, maximum), dtype, rows.where, done)
        yield convert(piece, dtype)
        done += piece.shape[0]


def _check_overflow(
    piece: NDArray[Any], bounds: tuple[Any, Any], dtype: str, where: str, first: int
) -> None:
    """Raises BadInput if a finite number becomes infinite in a dtype of floats.

    bounds  the smallest and the largest number of the piece; NaN if it contains one
    first   row of the source that the piece begins with, for the message
    """
    limit = _INFINITE.get(dtype)
    if limit is None:
        return
    rounded, (low, high) = piece, map(float, bounds)
    with np.errstate(over="ignore"):
        if dtype == "bfloat16" and piece.dtype == np.float64:  # it is rounded to float32 first
            rounded = piece.astype(np.float32)
            low, high = float(np.float32(low)), float(np.float32(high))
        if -limit < low <= high < limit:
            return
        lost = np.isfinite(piece) & (np.abs(rounded) >= limit)
    if lost.any():
        at = np.argwhere(lost)[0].tolist()
        place = ", ".join(map(str, [first + at[0], *at[1:]]))
        remedy = "scale the numbers, or leave the row out"
        if dtype == "float16":
            remedy = "--dtype bfloat16 or float32 holds it"
        raise BadInput.at(
            f"{where}[{place}]", f"{piece[tuple(at)]:g}", f"less than {limit:.5g} for {dtype}",
            remedy,
        )  # fmt: skip


def place_rows(
    pieces: Iterator[NDArray[Any]],
    array: RowArray,
    rank: NDArray[Any] | None,
    share: int,
    work: Path,
    emit: Emit,
    progress: Progress,
) -> None:
    """Pass the rows of `pieces` to `emit` in the order of their new positions, some at a time.

    pieces  rows of the array's dtype, in chunks of at most `chunk_rows`
    rank    new position of each row, a permutation; None: rows keep their order
    work    an existing folder for the file of buckets

    `emit` must not keep its argument.
    """
    if rank is not None:
        placed = with_ranks(pieces, rank)
        scatter_rows(placed, array, rank.dtype, share, work, emit, progress)
        return
    with (
        progress.stage(array.path, array.num_rows * array.row_bytes, "B") as stage,
        closing(read_ahead(pieces)) as ahead,
    ):
        for piece in ahead:
            emit(piece)
            stage.advance(piece.nbytes)


def with_ranks(
    pieces: Iterator[NDArray[Any]], rank: NDArray[Any]
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """(rows, their new positions), read ahead."""
    done = 0
    with closing(read_ahead(pieces)) as ahead:
        for piece in ahead:
            yield piece, rank[done : done + piece.shape[0]]
            done += piece.shape[0]


def scatter_rows(
    placed: Iterator[tuple[NDArray[Any], NDArray[Any]]],
    array: RowArray,
    place_dtype: np.dtype[Any],
    share: int,
    work: Path,
    emit: Emit,
    progress: Progress,
) -> None:
    """As `place_rows`, for (rows, their positions); every position must occur exactly once.

    place_dtype  dtype of positions, uint32 or uint64
    """
    total = array.num_rows * array.row_bytes
    with progress.stage(array.path, total, "B") as stage:
        if total <= dense_bytes(share):
            dense = np.empty((array.num_rows, *array.row_shape), numpy_dtype(array.dtype))
            for piece, places in placed:
                dense[places] = piece
                stage.advance(piece.nbytes)
            emit(dense)
        else:
            _place_by_bucket(placed, array, place_dtype, share, work, emit, stage.advance)


def _place_by_bucket(
    placed: Iterator[tuple[NDArray[Any], NDArray[Any]]],
    array: RowArray,
    place_dtype: np.dtype[Any],
    share: int,
    work: Path,
    emit: Emit,
    advance: Callable[[int], None],
) -> None:
    width = array.row_items
    per_bucket = max(1, share // 4 // (array.row_bytes + 8))
    num_buckets = -(-array.num_rows // per_bucket)
    sizes = np.full(num_buckets, per_bucket, np.int64)
    sizes[-1] = array.num_rows - per_bucket * (num_buckets - 1)
    dtype = numpy_dtype(array.dtype)
    parts = [(dtype, width), (place_dtype, 1)]
    with Buckets(work / "rows", sizes, parts, False, share // 8) as buckets:
        fill_row_buckets(placed, per_bucket, buckets, lambda size: advance(size // 2))
        step = chunk_rows(array.row_bytes, share)
        shape = (int(sizes[0]), *array.row_shape)
        dense = [np.empty(shape, dtype) for _ in range(min(2, num_buckets))]  # one is being emitted
        giving: Future[None] | None = None
        filled = 0
        with (
            ThreadPoolExecutor(1, thread_name_prefix="emit") as pool,
            closing(read_ahead(_bucket_rows(buckets, sizes, step))) as ahead,
        ):
            for rows, places in ahead:
                local = places % places.dtype.type(per_bucket)
                dense[0][local] = rows.reshape(-1, *array.row_shape)
                filled += places.size
                advance(rows.nbytes - rows.nbytes // 2)
                if filled % per_bucket == 0 or filled == array.num_rows:
                    if giving is not None:
                        giving.result()
                    giving = pool.submit(emit, dense[0][: (filled - 1) % per_bucket + 1])
                    dense.reverse()
            assert giving is not None
            giving.result()


def fill_row_buckets(
    placed: Iterator[tuple[NDArray[Any], NDArray[Any]]],
    per_bucket: int,
    buckets: Buckets,
    advance: Callable[[int], None],
) -> None:
    """Put (rows, their positions) into buckets of `per_bucket` consecutive positions each."""
    starts = np.empty(len(buckets) + 1, np.int64)
    for piece, places in placed:
        order = np.empty(places.size, np.int64)
        group_places(places, per_bucket, starts, order)
        buckets.append_grouped(starts, [piece, places], order)
        advance(piece.nbytes)
    buckets.finish()


def _bucket_rows(
    buckets: Buckets, sizes: NDArray[np.int64], step: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """(flat rows, their positions) of each bucket in order, at most `step` rows at a time."""
    for b, size in enumerate(sizes.tolist()):
        assert buckets.filled(b) == size
        for first in range(0, size, step):
            count = min(step, size - first)
            yield buckets.take(b, 0, first, count), buckets.take(b, 1, first, count)


def find_scale(
    source: Source, rows: SourceRows, share: int, progress: Progress
) -> NDArray[np.float32]:
    """max|x| / 127 of each column, float32 (columns,).  Raises BadInput: NaN or infinity."""
    maximum = np.zeros(int(np.prod(rows.row_shape, dtype=np.int64)), np.float32)
    done = 0
    with progress.stage(f"scale of {rows.name}", rows.num_rows * rows.row_bytes, "B") as stage:
        for piece in source.rows(rows, source_chunk(rows, share) // 2 + 1):
            values = _as_floats(piece)
            np.maximum(maximum, np.maximum(values.max(0), -values.min(0)), out=maximum)
            if not np.isfinite(maximum).all():
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
    return maximum / np.float32(127)


class Quantizer:
    """Converts the rows of one array to int8, and measures the error; for one thread."""

    def __init__(self, path: str, scale: NDArray[np.float32]) -> None:
        self._path, self.scale = path, scale
        self._errors, self._items = np.zeros(2), 0

    def pieces(self, source: Source, rows: SourceRows, share: int) -> Iterator[NDArray[np.int8]]:
        """All rows in the source's order."""
        for piece in source.rows(rows, source_chunk(rows, share) // 2 + 1):
            yield self.rows(_as_floats(piece)).reshape(piece.shape)

    def rows(self, values: NDArray[np.float32]) -> NDArray[np.int8]:
        """Convert some more rows, (rows, columns)."""
        out = np.empty(values.shape, np.int8)
        quantize(values, self.scale, out, self._errors)
        self._items += values.size
        return out

    def report(self) -> QuantizationError:
        rms = float(np.sqrt(self._errors[1] / max(1, self._items)))
        return QuantizationError(self._path, float(self._errors[0]), rms)


def _as_floats(piece: NDArray[Any]) -> NDArray[np.float32]:
    """Rows of any shape as float32 (rows, columns); values that are too large become inf."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(piece.reshape(piece.shape[0], -1), np.float32)
