"""Map edges between the order of the source and that of the blocks, by edge id.

`EdgePlaces` takes edge ids in block order, and writes the position of each edge by id.
`rows_by_id` brings edges and their arrays back into the order of ids.  Both use buckets by range of
ids, each put in order in memory, so nothing is written at random.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.files.ahead import read_ahead
from preprocess.files.array_file import ArrayFile
from preprocess.files.buckets import Buckets, passing_bytes
from preprocess.kernels.rows import group_places
from preprocess.pipeline.progress import Progress

_STEP = 1 << 18  # edges processed together
_LOCAL = np.dtype(np.uint32)  # dtype of an id inside its bucket


class EdgePlaces(ExitStack):
    """Collects the positions of edges, then writes them by id.  A context manager."""

    def __init__(self, num_ids: int, dtype: str, share: int, work: Path) -> None:
        """`dtype`: of positions, uint32 or uint64; its largest number means "not stored"."""
        super().__init__()
        self._num_ids, self._dtype = num_ids, np.dtype(dtype)
        each = 4 + 2 * self._dtype.itemsize  # an entry of a bucket, and its position in order
        self._step = max(1, min(_STEP, share // 4 // 40))
        self._per_bucket = max(1, min(share // 2 // each, max(num_ids, 1), 2**32 - 1))
        self._num_buckets = -(-num_ids // self._per_bucket)
        sizes = np.full(self._num_buckets, self._per_bucket, np.int64)
        self._buckets = Buckets(
            work / "places.buckets", sizes, [(np.uint32, 1), (self._dtype, 1)], False, share // 4
        )
        self.enter_context(self._buckets)
        self._starts = np.empty(self._num_buckets + 1, np.int64)
        self._done = 0

    def append(self, edge_ids: NDArray[Any]) -> None:
        """Append the ids of the next edges in block order."""
        for first in range(0, edge_ids.size, self._step):
            ids = edge_ids[first : first + self._step]
            order = np.empty(ids.size, np.int64)
            group_places(ids, self._per_bucket, self._starts, order)
            local = (ids[order] % ids.dtype.type(self._per_bucket)).astype(np.uint32)
            order += self._done
            self._buckets.append_grouped(self._starts, [local, order.astype(self._dtype)])
            self._done += ids.size

    def write(self, path: Path) -> None:
        """Write the file of positions, one for each id."""
        path.unlink(missing_ok=True)
        self._buckets.finish()
        with ArrayFile(path, self._dtype) as file:
            for b in range(self._num_buckets):
                count = min(self._per_bucket, self._num_ids - b * self._per_bucket)
                places = np.full(count, np.iinfo(self._dtype).max, self._dtype)
                places[self._buckets.take(b, 0)] = self._buckets.take(b, 1)
                file.append(places)


def placed_rows(
    pieces: Iterator[NDArray[Any]], places: ArrayFile, num_edges: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """(rows, their positions) of an edge array of a source.

    places   positions by edge id: of the source's edges, then of added reverses if there are any

    A row is yielded for its edge and for its reverse, if they are stored: 0, 1 or 2 times.
    """
    nowhere = np.iinfo(places.dtype).max
    done = 0
    with closing(read_ahead(pieces)) as ahead:
        for piece in ahead:
            for first in range(0, places.size, max(num_edges, 1)):
                to = places.read(first + done, piece.shape[0])
                stored = to != nowhere
                if stored.all():
                    yield piece, to
                else:
                    yield piece[stored], to[stored]
            done += piece.shape[0]


# (ids, rows of each part: (rows,) or (rows, width)); valid until the next step
Identified = Iterator[tuple[NDArray[Any], Sequence[NDArray[Any]]]]
RowParts = Sequence[tuple[np.dtype[Any], int]]  # dtype and width of each part
Pieces = Iterator[tuple[int, NDArray[Any]]]


def rows_by_id(
    pieces: Identified,
    num_ids: int,
    parts: RowParts,
    num_rows: int,
    share: int,
    work: Path,
    progress: Progress,
) -> tuple[int, Pieces]:
    """Rows with an id below `num_ids`, ascending by id, each id at most once.

    num_rows  of `pieces`, for progress
    work      an existing folder for the file of buckets

    Returns the number of rows, and a generator of (part, (rows, width)): for each range of ids each
    part in turn.  The generator must be started, as it closes the buckets.
    """
    sizes = [dtype.itemsize * width for dtype, width in parts]
    each = _LOCAL.itemsize + sum(sizes)
    in_memory = not passing_bytes(num_ids, each, share)
    room = share // 4 if in_memory else share // 2
    taken = 8 + sum(sizes) + 2 * max(sizes)  # memory of a row while its bucket is put in order
    per_bucket = max(1, min(room // taken, max(num_ids, 1), 2**32 - 1))
    bounds = np.minimum(np.arange(-(-num_ids // per_bucket) + 1) * per_bucket, num_ids)
    kinds = [(_LOCAL, 1), *parts]
    buckets = Buckets(work / "edges", np.diff(bounds), kinds, in_memory, share // 8)
    try:
        count = _fill(pieces, num_ids, num_rows, per_bucket, parts, buckets, progress)
    except BaseException:
        buckets.close()
        raise
    return count, _ordered(buckets, np.diff(bounds).tolist(), parts, count, progress)


def _fill(
    pieces: Identified,
    num_ids: int,
    num_rows: int,
    per_bucket: int,
    parts: RowParts,
    buckets: Buckets,
    progress: Progress,
) -> int:
    starts, kept = np.empty(-(-num_ids // per_bucket) + 1, np.int64), 0
    with progress.stage("bucket edges", num_rows, "edges") as stage:
        for ids, values in pieces:
            listed = np.flatnonzero(ids < num_ids)  # added reverses have ids from `num_ids` on
            order = np.empty(listed.size, np.int64)
            group_places(ids[listed], per_bucket, starts, order)
            local = (ids % ids.dtype.type(per_bucket)).astype(_LOCAL)
            rows = [v.astype(d, copy=False) for v, (d, _) in zip(values, parts, strict=True)]
            buckets.append_grouped(starts, [local, *rows], listed[order])
            kept += listed.size
            stage.advance(ids.size)
    buckets.finish()
    return kept


def _ordered(
    buckets: Buckets, sizes: list[int], parts: RowParts, count: int, progress: Progress
) -> Pieces:
    with buckets, progress.stage("order edges", count, "edges") as stage:
        for b, size in enumerate(sizes):
            places = buckets.take(b, 0)
            present = np.zeros(size, np.bool_)
            present[places] = True
            whole = places.size == size
            for number, (dtype, width) in enumerate(parts):
                dense = np.empty((size, width), dtype)
                dense[places] = buckets.take(b, number + 1).reshape(-1, width)
                yield number, dense if whole else dense[present]
            stage.advance(places.size)
