"""Where each edge of the source has gone: places in the order of the blocks, by edge id.

Edge ids come in the order of the blocks.  They go to buckets by range of ids, and each bucket is
put in order in memory: nothing is written at random.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.files.ahead import read_ahead
from preprocess.files.array_file import ArrayFile
from preprocess.files.buckets import Buckets
from preprocess.kernels.rows import group_places

_STEP = 1 << 18  # edges looked at together


class EdgePlaces(ExitStack):
    """Collects places, then writes them.  A context manager."""

    def __init__(self, num_ids: int, dtype: str, share: int, work: Path) -> None:
        """`dtype`: of places, uint32 or uint64; its largest number means: not stored."""
        super().__init__()
        self._num_ids, self._dtype = num_ids, np.dtype(dtype)
        each = 4 + 2 * self._dtype.itemsize  # a bucket, and its places in order
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
        """Ids of the edges that come next."""
        for first in range(0, edge_ids.size, self._step):
            ids = edge_ids[first : first + self._step]
            order = np.empty(ids.size, np.int64)
            group_places(ids, self._per_bucket, self._starts, order)
            local = (ids[order] % ids.dtype.type(self._per_bucket)).astype(np.uint32)
            order += self._done
            self._buckets.append_grouped(self._starts, [local, order.astype(self._dtype)])
            self._done += ids.size

    def write(self, path: Path) -> None:
        """The file of places: one for each id."""
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
    """Rows of a source, one an edge, each with the places that it goes to.

    places   by edge id: of the source's edges, then of their added reverses where there are any

    A row may come twice, with its edge and with its reverse, or not at all.
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
