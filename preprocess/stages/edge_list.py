"""Rows in any order -> rows by their id: what brings edges and their arrays back out of columns."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preprocess.files.buckets import Buckets
from preprocess.kernels.rows import group_places
from preprocess.pipeline.progress import Progress

_LOCAL = np.dtype(np.uint32)  # an id in its bucket


class Identified(NamedTuple):
    """Rows of several parts, each with an id; valid until the next step."""

    ids: NDArray[Any]  # (rows,)
    parts: Sequence[NDArray[Any]]  # (rows,) or (rows, width)


class RowPart(NamedTuple):
    """What a row of a part is."""

    dtype: np.dtype[Any]
    width: int = 1

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * self.width


Pieces = Iterator[tuple[int, NDArray[Any]]]


def rows_by_id(
    pieces: Iterator[Identified],
    num_ids: int,
    parts: Sequence[RowPart],
    num_rows: int,
    share: int,
    work: Path,
    progress: Progress,
) -> tuple[int, Pieces]:
    """Rows with an id below `num_ids`, ascending by id, each id at most once.

    num_rows  of `pieces`, for progress
    work      an existing folder for the file of buckets

    Returns how many there are, and for each range of ids each part in turn: (its number, (rows,
    width)).  The generator must be begun.
    """
    sizes = [p.row_bytes for p in parts]
    each = _LOCAL.itemsize + sum(sizes)
    in_memory = num_ids * each <= share // 2
    room = share // 4 if in_memory else share // 2
    taken = 8 + sum(sizes) + 2 * max(sizes)  # of a bucket, while it is put in order
    per_bucket = max(1, min(room // taken, max(num_ids, 1), 2**32 - 1))
    bounds = np.minimum(np.arange(-(-num_ids // per_bucket) + 1) * per_bucket, num_ids)
    kinds: list[tuple[Any, int]] = [(_LOCAL, 1), *((p.dtype, p.width) for p in parts)]
    buckets = Buckets(work / "edges", np.diff(bounds), kinds, in_memory, share // 8)
    try:
        count = _fill(pieces, num_ids, num_rows, per_bucket, parts, buckets, progress)
    except BaseException:
        buckets.close()
        raise
    return count, _ordered(buckets, np.diff(bounds).tolist(), parts, count, progress)


def _fill(
    pieces: Iterator[Identified],
    num_ids: int,
    num_rows: int,
    per_bucket: int,
    parts: Sequence[RowPart],
    buckets: Buckets,
    progress: Progress,
) -> int:
    starts, kept = np.empty(-(-num_ids // per_bucket) + 1, np.int64), 0
    with progress.stage("bucket edges", num_rows, "edges") as stage:
        for ids, values in pieces:
            listed = np.flatnonzero(ids < num_ids)  # added reverses have ids from there on
            order = np.empty(listed.size, np.int64)
            group_places(ids[listed], per_bucket, starts, order)
            local = (ids % ids.dtype.type(per_bucket)).astype(_LOCAL)
            rows = [v.astype(p.dtype, copy=False) for v, p in zip(values, parts, strict=True)]
            buckets.append_chosen(starts, listed[order], [local, *rows])
            kept += listed.size
            stage.advance(ids.size)
    buckets.finish()
    return kept


def _ordered(
    buckets: Buckets, sizes: list[int], parts: Sequence[RowPart], count: int, progress: Progress
) -> Pieces:
    with buckets, progress.stage("order edges", count, "edges") as stage:
        for b, size in enumerate(sizes):
            places = buckets.take(b, 0)
            present = np.zeros(size, np.bool_)
            present[places] = True
            whole = places.size == size
            for number, part in enumerate(parts):
                dense = np.empty((size, part.width), part.dtype)
                dense[places] = buckets.take(b, number + 1).reshape(-1, part.width)
                yield number, dense if whole else dense[present]
            stage.advance(places.size)
