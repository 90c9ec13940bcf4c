"""The tables of a row cache for each node type, and the memory that they take."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.rowcache import CacheTable, num_slots
from blockstore.kernels.rows import RowLayout
from loaderd.memory.workspace import Carver
from loaderd.plans.base import Unit
from loaderd.sampling.hyperbatch.regions import CacheShare, TypeRows, region_rows, region_shift

CHUNK_ROWS = 1 << 16  # most rows brought in between two looks at what may leave
RUNS_HELD = 2  # chunks in flight at a time


class Needs(NamedTuple):
    """The items of one batch, in any number of pieces: store ids of nodes, items of edges.

    An edge may occur several times, if it was drawn several times.
    """

    batch: int  # its number in the run
    pieces: tuple[NDArray[Any], ...]
    unit: Unit | None = None  # what the batch is
    # copies ids to where they are kept as long as the batch is; raises AreaFull
    keep: Callable[[NDArray[Any]], NDArray[Any]] | None = None


class CachedArray(NamedTuple):
    """One row array of a type and the part of the arena that its entries take."""

    file: int  # of the reader
    layout: RowLayout
    area: NDArray[np.int64]  # arena slots of rows that do not stay


@dataclass(slots=True)
class CachedType:
    """The rows of one node type; one entry holds a node's row of every array."""

    number: int  # index among the types of the cache
    first: int
    num_nodes: int
    sizes: NDArray[np.int64]  # rows of each region
    missing: set[int]  # regions that stay and had not been read when last checked
    arrays: list[CachedArray]
    served: list[int]  # index of each of `arrays` among the served row arrays
    table: CacheTable
    bits: NDArray[np.uint64]
    listed: NDArray[Any]
    num_listed: int = 0
    hand: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))  # an entry

    def rows_of(self, region: int) -> NDArray[np.int64]:
        return (region << int(self.table.shift)) + np.arange(self.sizes[region])

    def count(self, regions: Iterable[int]) -> int:
        """Rows of these regions."""
        return int(self.sizes[list(regions)].sum())


def entry_bytes(id_bytes: int) -> int:
    """Bytes of an entry beside its rows: slots, node, last, coming, uses, its place in a list."""
    return 2 * 8 + 2 * id_bytes + 4 + 4 + 1


def table_bytes(types: Sequence[TypeRows], id_dtype: str, shares: Sequence[CacheShare]) -> int:
    carver = Carver(None)
    for t, share in zip(types, shares, strict=True):
        carve_type(carver, t, share.entries, np.dtype(id_dtype))
    carve_chunks(carver, types, shares)
    return carver.used


def carve_type(carver: Carver, t: TypeRows, entries: int, ids: np.dtype[Any]) -> tuple[Any, ...]:
    array = carver.array
    return (
        array(np.uint8, region_rows(t).size), array(np.uint64, num_slots(entries)),
        array(ids, entries),
        array(np.int32, entries), array(np.int32, entries), array(np.uint8, entries),
        array(np.uint64, t.num_nodes // 64 + 1),
        array(ids, max(entries, RUNS_HELD << region_shift(t))),
    )  # fmt: skip


def carve_chunks(
    carver: Carver, types: Sequence[TypeRows], shares: Sequence[CacheShare]
) -> tuple[Any, Any]:
    """Entries chosen for chunks of rows, and the runs of pages by which one is read."""
    entries = max((share.entries for share in shares), default=1)
    region = max((1 << region_shift(t) for t in types), default=1)
    rows = max(min(CHUNK_ROWS, entries), region)
    return carver.array(np.int64, RUNS_HELD * rows), carver.array(np.int64, 5 * rows)
