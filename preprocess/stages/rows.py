"""Rows of a source into a row array of the store, in store order: never a random row write.

In the source's order: one read, one write.  In another order: the same where the array fits the
memory, else rows go to a file of buckets by range of their new places, and each bucket is put in
order in memory: two reads, two writes.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray
from blockstore.io.buffers import byte_view
from blockstore.io.files import read_exact, write_exact
from blockstore.store import numpy_dtype
from blockstore.writer import RowsWriter, StoreWriter
from preprocess.errors import BadInput
from preprocess.kernels import to_bfloat16
from preprocess.progress import Progress, Stage
from preprocess.source import Source, SourceRows

_CHUNK_BYTES = 16 << 20


def convert(rows: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Rows in the numpy form of a store dtype."""
    if dtype != "bfloat16":
        return rows.astype(numpy_dtype(dtype), copy=False)
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    out = np.empty(bits.shape, np.uint16)
    to_bfloat16(bits.reshape(-1), out.reshape(-1))
    return out


def checked_rows(
    source: Source, node_type: str, rows: SourceRows, dtype: str, allow_nan: bool, mem_bytes: int
) -> Iterator[NDArray[Any]]:
    """Rows in the source's order, converted.  Raises BadInput: NaN where it is not allowed."""
    count = max(1, min(_CHUNK_BYTES, mem_bytes // 16) // max(1, rows.row_bytes))
    done = 0
    for piece in source.rows(node_type, rows, count):
        if not allow_nan and piece.dtype.kind == "f":
            flat = piece.reshape(piece.shape[0], -1)
            if np.isnan(flat.min(initial=0)):  # NaN wins: one pass, nothing allocated
                bad = np.flatnonzero(np.isnan(flat).any(axis=1))
                raise BadInput(
                    f"{rows.where}[{done + bad[0]}]: NaN in the features, expected numbers; "
                    "--allow-nan takes them as they are"
                )
        yield convert(piece, dtype)
        done += piece.shape[0]


def write_rows(
    writer: StoreWriter,
    array: RowArray,
    pieces: Iterator[NDArray[Any]],
    rank: NDArray[Any] | None,
    mem_bytes: int,
    work: Path,
    progress: Progress,
) -> None:
    """Write `pieces` (rows in the source's order) in the order of `rank`.

    rank   new place of each row, or None: rows stay where they are
    work   an existing folder for the file of buckets
    """
    total = array.num_rows * array.row_bytes
    with writer.rows(array) as out, progress.stage(array.path, total, "B") as stage:
        if rank is None:
            for piece in pieces:
                out.append(piece)
                stage.advance(piece.nbytes)
        elif total <= mem_bytes // 2:
            dense = np.empty((array.num_rows, *array.row_shape), numpy_dtype(array.dtype))
            done = 0
            for piece in pieces:
                dense[rank[done : done + piece.shape[0]]] = piece
                done += piece.shape[0]
                stage.advance(piece.nbytes)
            out.append(dense)
        else:
            _write_buckets(array, pieces, rank, mem_bytes, work, stage, out)


def _write_buckets(
    array: RowArray,
    pieces: Iterator[NDArray[Any]],
    rank: NDArray[Any],
    mem_bytes: int,
    work: Path,
    stage: Stage,
    out: RowsWriter,
) -> None:
    width = array.row_bytes
    per_bucket = max(1, mem_bytes // 4 // (width + 8))
    num_buckets = -(-array.num_rows // per_bucket)
    filled = np.zeros(num_buckets, np.int64)
    path = work / f"rows-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    places_at = array.num_rows * width  # places stand behind all rows
    try:
        done = 0
        for piece in pieces:
            places = rank[done : done + piece.shape[0]].astype(np.int64)
            bucket = places // per_bucket
            order = np.argsort(bucket, kind="stable")
            grouped, places = piece[order], places[order]
            cuts = np.searchsorted(bucket[order], np.arange(num_buckets + 1))
            for b in np.flatnonzero(np.diff(cuts)).tolist():
                low, high = int(cuts[b]), int(cuts[b + 1])
                at = b * per_bucket + int(filled[b])
                raw = byte_view(np.ascontiguousarray(grouped[low:high]))
                write_exact(fd, raw, at * width, str(path))
                raw = byte_view(places[low:high])
                write_exact(fd, raw, places_at + 8 * at, str(path))
                filled[b] += high - low
            done += piece.shape[0]
            stage.advance(piece.nbytes // 2)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for b in range(num_buckets):
            out.append(_ordered_bucket(fd, path, array, b * per_bucket, int(filled[b]), stage))
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _ordered_bucket(
    fd: int, path: Path, array: RowArray, first: int, count: int, stage: Stage
) -> NDArray[Any]:
    """The rows of places [first, first + count), in order."""
    width = array.row_bytes
    places = np.empty(count, np.int64)
    at = array.num_rows * width + 8 * first
    read_exact(fd, [byte_view(places)], at, str(path))
    dense = np.empty((count, *array.row_shape), numpy_dtype(array.dtype))
    step = max(1, _CHUNK_BYTES // width)
    piece = np.empty((min(step, count), *array.row_shape), dense.dtype)
    for i in range(0, count, step):
        part = piece[: min(step, count - i)]
        read_exact(fd, [byte_view(part)], (first + i) * width, str(path))
        dense[places[i : i + part.shape[0]] - first] = part
        stage.advance(part.nbytes // 2)
    os.posix_fadvise(fd, first * width, count * width, os.POSIX_FADV_DONTNEED)
    return dense
