"""Where the rows of hop-wise batches come from: arrays in memory, or pages that are read for them.

No source copies rows of ranges: pages go from disk to where a client reads them.  Rows that are
wanted one by one are copied once where their pages pass by, and not at all where arrays are held.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import PAGE_BYTES
from blockstore.io.reader import BlockReader, Transit
from blockstore.kernels.hoprows import spread_rows
from blockstore.kernels.rowcache import plan_extents
from loaderd.hopwise.files import HopArray
from loaderd.hopwise.shelf import Arrival, Held, load_all
from loaderd.memory.workspace import Carver
from loaderd.plans.base import Unit
from loaderd.plans.chunks import HopPlan


class Answer(NamedTuple):
    """Where a batch lies, as `ChunkReady` says it."""

    form: str
    first: tuple[int, ...]
    counts: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    numbers: int  # of the rows: `ChunkReady.index`


class Source(Protocol):
    """Has the rows of a batch brought."""

    def ask(self, unit: Unit, buffer: int, arrival: Arrival) -> Answer:
        """Begin to bring a batch, by way of buffer number `buffer`, which nobody uses.

        The answer holds once the arrival has been waited for.  Raises CorruptBlock, OSError: also
        then the buffer is free only after the arrival has been waited for.
        """


class HeldRanges:
    """Ranges of arrays that are held; pages are read when they are first wanted."""

    def __init__(self, plan: HopPlan, arrays: Sequence[Held]) -> None:
        self._plan, self._arrays = plan, arrays

    def ask(self, unit: Unit, buffer: int, arrival: Arrival) -> Answer:
        """See `Source`."""
        del buffer
        ranges = self._plan.ranges(unit).tolist()
        for first, stop in ranges:
            for held in self._arrays:
                held.fetch(*held.array.pages(first, stop), arrival)
        places = tuple(
            tuple(held.base + first * held.array.row_bytes for first, _ in ranges)
            for held in self._arrays
        )
        first, counts = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
        return Answer("ranges", first, counts, places, -1)


class HeldRows:
    """Rows by number of arrays that are held; all of them are read before the first batch."""

    def __init__(
        self,
        plan: HopPlan,
        arrays: Sequence[Held],
        buffers: Sequence[NDArray[np.uint8]],
        place_of: Callable[[NDArray[Any]], int],
        stopped: Callable[[], bool],
    ) -> None:
        """`buffers`: room for the numbers of a batch's rows, each at `place_of` in the arena."""
        self._plan, self._arrays, self._stopped = plan, arrays, stopped
        self._index = [b.view(np.int64) for b in buffers]
        self._at = [place_of(b) for b in buffers]
        self._places = tuple((held.base,) for held in arrays)
        self._loaded = False

    def ask(self, unit: Unit, buffer: int, arrival: Arrival) -> Answer:
        """See `Source`."""
        del arrival  # nothing is on its way after what is loaded
        if not self._loaded:
            for _ in load_all(self._arrays, self._stopped):
                pass
            self._loaded = not self._stopped()
        self._plan.rows(unit, self._index[buffer][: unit.num_seeds])
        return Answer("index", (), (), self._places, self._at[buffer])


class PassingRanges:
    """Ranges that are read for one batch: their pages go straight to its buffer."""

    def __init__(
        self,
        plan: HopPlan,
        arrays: Sequence[HopArray],
        reader: BlockReader,
        places: Sequence[int],
    ) -> None:
        """`places`: of the buffers in the arena, page-aligned, `passing_bytes` each."""
        self._plan, self._arrays, self._reader, self._at = plan, arrays, reader, places

    def ask(self, unit: Unit, buffer: int, arrival: Arrival) -> Answer:
        """See `Source`."""
        ranges = self._plan.ranges(unit).tolist()
        at = self._at[buffer]
        places = []
        for array in self._arrays:
            own, runs, targets = [], [], []
            for first, stop in ranges:
                low, high = array.pages(first, stop)
                own.append(at + first * array.row_bytes - low * PAGE_BYTES)
                found = array.runs(low, high)
                before = np.cumsum(found[:, 2]) - found[:, 2]
                runs.append(found)
                targets.append(at + before * PAGE_BYTES)
                at += (high - low) * PAGE_BYTES
            reading = self._reader.fetch(array.file, np.concatenate(runs), np.concatenate(targets))
            arrival.readings.append(reading)
            places.append(tuple(own))
        first, counts = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
        return Answer("ranges", first, counts, tuple(places), -1)


class _Gathered(NamedTuple):
    """A buffer of `PassingRows`."""

    rows: NDArray[np.uint8]
    order: NDArray[np.int64]  # rows as the batch has them
    ascending: NDArray[np.int64]
    places: NDArray[np.int64]  # in the batch, of each of the above
    runs: NDArray[np.int64]  # (arrays, rows, 5)


class PassingRows:
    """Rows by number that are read for one batch, by runs of pages that hold them."""

    def __init__(
        self,
        plan: HopPlan,
        arrays: Sequence[HopArray],
        reader: BlockReader,
        buffers: Sequence[NDArray[np.uint8]],
        place_of: Callable[[NDArray[Any]], int],
        transit: Sequence[NDArray[np.uint8]],
        gap_pages: int,
    ) -> None:
        """`buffers`: `gathered_bytes` each; `transit`: pages pass through these."""
        self._plan, self._arrays, self._reader = plan, arrays, reader
        self._place_of, self._gap_pages = place_of, gap_pages
        self._buffers = [self._carve(b) for b in buffers]
        self._most_pages = min(b.size for b in transit) // PAGE_BYTES
        self._transit: Transit = concurrency.SimpleQueue()
        for piece in transit:
            self._transit.put(piece)

    def _carve(self, memory: NDArray[np.uint8]) -> _Gathered:
        rows, carver = self._plan.most_rows, Carver(memory)
        size = sum(-(-rows * a.row_bytes // 64) * 64 for a in self._arrays)
        held = carver.array(np.uint8, size)
        order, ascending, places = (carver.array(np.int64, rows) for _ in range(3))
        runs = carver.array(np.int64, 5 * rows * len(self._arrays))
        return _Gathered(held, order, ascending, places, runs.reshape(len(self._arrays), rows, 5))

    def ask(self, unit: Unit, buffer: int, arrival: Arrival) -> Answer:
        """See `Source`."""
        memory, num = self._buffers[buffer], unit.num_seeds
        order = memory.order[:num]
        self._plan.rows(unit, order)
        memory.places[:num] = np.argsort(order)
        np.take(order, memory.places[:num], out=memory.ascending[:num])
        places, at = [], 0
        for a, array in enumerate(self._arrays):
            out = memory.rows[at : at + num * array.row_bytes]
            places.append((self._place_of(out),))
            geometry = array.geometry
            count = plan_extents(
                memory.ascending, 0, num, geometry.rows_per_block, array.row_bytes,
                geometry.slot_bytes, geometry.blocks_per_shard, self._gap_pages, self._most_pages,
                memory.runs[a],
            )  # fmt: skip
            runs = memory.runs[a][:count]
            copy = self._copier(array, memory, runs, out)
            arrival.readings.append(self._reader.stream(array.file, runs, self._transit, copy))
            at += -(-self._plan.most_rows * array.row_bytes // 64) * 64
        index = self._place_of(memory.order)
        return Answer("rows", (), (), tuple(places), index)

    def _copier(
        self,
        array: HopArray,
        memory: _Gathered,
        runs: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> Callable[[int, NDArray[np.uint8]], None]:
        shard_bytes = array.geometry.blocks_per_shard * array.geometry.slot_bytes

        def copy(run: int, pages: NDArray[np.uint8]) -> None:
            shard, page, _, first, stop = runs[run].tolist()
            spread_rows(
                pages, shard * shard_bytes + page * PAGE_BYTES, memory.ascending, memory.places,
                first, stop, array.row_bytes, out,
            )  # fmt: skip

        return copy
