"""Edges in any order -> edges by their id: what brings an edge list back out of columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.kernels.rows import group_places
from preprocess.progress import Progress
from preprocess.stages.buckets import Buckets
from preprocess.stages.csc import Records

Pieces = Iterator[tuple[int, NDArray[Any]]]


def edges_by_id(
    records: Iterator[Records],
    num_ids: int,
    num_edges: int,
    dtype: np.dtype[Any],
    share: int,
    work: Path,
    progress: Progress,
) -> tuple[int, Pieces]:
    """Edges with an id below `num_ids`, ascending by id, each id at most once.

    num_edges  of `records`, for progress
    dtype      of node ids

    Returns how many there are, and for each range of ids (0, sources) and then (1, targets).
    """
    each = 4 + 2 * dtype.itemsize
    in_memory = num_ids * each <= share // 2
    room = share // 4 if in_memory else share // 2
    per_bucket = max(1, min(room // (6 + 2 * dtype.itemsize), max(num_ids, 1), 2**32 - 1))
    num_buckets = -(-num_ids // per_bucket)
    sizes = np.full(num_buckets, per_bucket, np.int64)
    parts: list[tuple[Any, int]] = [(np.uint32, 1), (dtype, 1), (dtype, 1)]
    buckets = Buckets(work / "edges", sizes, parts, in_memory, share // 8)
    try:
        count = _fill(records, num_ids, num_edges, per_bucket, dtype, buckets, progress)
    except BaseException:
        buckets.__exit__(None, None, None)
        raise
    return count, _pieces(buckets, num_buckets, per_bucket, count, progress)


def _fill(
    records: Iterator[Records],
    num_ids: int,
    num_edges: int,
    per_bucket: int,
    dtype: np.dtype[Any],
    buckets: Buckets,
    progress: Progress,
) -> int:
    starts, kept = np.empty(-(-num_ids // per_bucket) + 1, np.int64), 0
    with progress.stage("bucket edges", num_edges, "edges") as stage:
        for dst, src, ids in records:
            listed = np.flatnonzero(ids < num_ids)  # added reverses have ids from there on
            ids = ids[listed]
            order = np.empty(ids.size, np.int64)
            group_places(ids, per_bucket, starts, order)
            grouped = listed[order]
            local = (ids[order] % per_bucket).astype(np.uint32)
            buckets.append_grouped(
                starts, [local, src[grouped].astype(dtype), dst[grouped].astype(dtype)]
            )
            kept += ids.size
            stage.advance(dst.size)
    buckets.finish()
    return kept


def _pieces(
    buckets: Buckets, num_buckets: int, per_bucket: int, count: int, progress: Progress
) -> Pieces:
    with buckets, progress.stage("order edges", count, "edges") as stage:
        for b in range(num_buckets):
            places = buckets.take(b, 0)
            present = np.zeros(per_bucket, np.bool_)
            present[places] = True
            for row, part in enumerate((1, 2)):
                values = buckets.take(b, part)
                dense = np.empty(per_bucket, values.dtype)
                dense[places] = values
                yield row, dense[present]
            stage.advance(places.size)
