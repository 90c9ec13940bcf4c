"""Sources of rows of propagated features: arrays in memory, or pages read for each batch.

Arrays that are in memory whole are read once, page by page, and shared by all sessions of a store.
No source copies rows of ranges: pages go from disk to where a client reads them.  Rows that are
wanted one by one are copied once while their pages pass by, and not at all if arrays are in memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import PAGE_BYTES
from blockstore.io.arena import Arena
from blockstore.io.reader import BlockReader, make_transit
from blockstore.io.reading import Reading, wait_all
from blockstore.kernels.rows import row_layout, spread_rows
from loaderd.api.protocol import LedgerEntry
from loaderd.memory.slots import SHORT_WAIT_S, SlotBroker
from loaderd.memory.workspace import Carver
from loaderd.monitoring.devicecost import DeviceCost
from loaderd.plans.base import Unit
from loaderd.plans.chunks import HopPlan
from loaderd.sampling.propagated.files import HopArray

_PIECE_PAGES = 4096  # of each array, read at a time if all is read
_PIECES = 2  # in flight at once
_ABSENT, _COMING, _HERE = range(3)


@dataclass(slots=True)
class PendingRead:
    """The readings that a batch waits for."""

    readings: list[Reading] = field(default_factory=list)
    after: list[Callable[[bool], None]] = field(default_factory=list)  # told once: did it succeed?

    def wait(self) -> None:
        """Wait until nothing is in flight.  Raises the first error met."""
        good = False
        try:
            wait_all(self.readings)
            good = True
        finally:
            for tell in self.after:
                tell(good)
            self.readings, self.after = [], []


class ResidentArray:
    """One array in memory: page p lies at `base + p * PAGE_BYTES` of the arena."""

    def __init__(self, array: HopArray, reader: BlockReader, base: int, memory: NDArray[np.uint8]):
        """`memory`: at `base`, for `held_bytes(array)`."""
        self.array, self.base = array, base
        self._reader = reader
        size = array.num_pages * PAGE_BYTES
        self._state = memory[size : size + array.num_pages]
        self._state[:] = _ABSENT
        self._left = array.num_pages
        self._coming: list[tuple[int, int, Reading]] = []
        self._lock = concurrency.Lock()

    def fetch(self, low: int, high: int, arrival: PendingRead) -> None:
        """Begin to read those of pages [low, high) that are absent; `arrival` waits for all."""
        if self._left == 0:
            return
        with self._lock:
            for first, stop, reading in self._coming:
                if first < high and low < stop:
                    arrival.readings.append(reading)
            absent = np.flatnonzero(self._state[low:high] == _ABSENT) + low
            if absent.size == 0:
                return
            gaps = np.flatnonzero(np.diff(absent) != 1) + 1
            pieces = [self.array.runs(p[0], p[-1] + 1) for p in np.split(absent, gaps)]
            runs = np.concatenate(pieces)
            geometry = self.array.geometry
            per_shard = geometry.blocks_per_shard * geometry.pages_per_block
            places = self.base + (runs[:, 0] * per_shard + runs[:, 1]) * PAGE_BYTES
            entry = (low, high, self._reader.fetch(self.array.file, runs, places))
            self._state[absent] = _COMING  # only now: an error has left them absent
            self._coming.append(entry)
        arrival.readings.append(entry[2])

        def settle(good: bool) -> None:
            with self._lock:
                self._state[absent] = _HERE if good else _ABSENT
                self._left -= absent.size * good
                self._coming.remove(entry)

        arrival.after.append(settle)


def held_bytes(array: HopArray) -> int:
    """Memory of an array: its pages, and a state byte for each."""
    return array.num_pages * (PAGE_BYTES + 1)


def load_all(arrays: Sequence[ResidentArray], stopped: Callable[[], bool]) -> Iterator[None]:
    """Read all pages of all arrays, piece by piece; ends early when `stopped`.

    Raises CorruptBlock, OSError.
    """
    maximum = max(held.array.num_pages for held in arrays)
    coming: deque[PendingRead] = deque()
    try:
        for low in range(0, maximum, _PIECE_PAGES):
            if stopped():
                return
            arrival = PendingRead()
            coming.append(arrival)  # before an array of several is refused
            for held in arrays:
                if low < held.array.num_pages:
                    high = min(low + _PIECE_PAGES, held.array.num_pages)
                    held.fetch(low, high, arrival)
            if len(coming) == _PIECES:
                coming.popleft().wait()
                yield
    finally:
        while coming:
            coming.popleft().wait()


class ArrayCache:
    """The arrays that are held, each for as long as a session uses it."""

    def __init__(
        self, broker: SlotBroker, arena: Arena, reader: BlockReader, slot_bytes: int
    ) -> None:
        self._broker, self._arena, self._reader = broker, arena, reader
        self._slot_bytes = slot_bytes
        self._held: dict[str, tuple[ResidentArray, list[int]]] = {}  # by path; and its slots
        self._users: dict[str, int] = {}
        self._lock = concurrency.Lock()

    def _slots(self, array: HopArray) -> int:
        return -(-held_bytes(array) // self._slot_bytes)

    def missing_slots(self, arrays: Sequence[HopArray]) -> int:
        """Slots needed to hold those of the arrays that are not held yet."""
        with self._lock:
            return sum(self._slots(a) for a in arrays if a.array.path not in self._held)

    def take(self, arrays: Sequence[HopArray]) -> list[ResidentArray]:
        """Hold arrays.  Raises Refused, and holds none of them then."""
        taken: list[ResidentArray] = []
        try:
            for array in arrays:
                taken.append(self._take(array))
        except BaseException:
            self.give(taken)
            raise
        return taken

    def _take(self, array: HopArray) -> ResidentArray:
        path = array.array.path
        with self._lock:
            if path not in self._held:
                count = self._slots(array)
                first = self._broker.take_run(count, SHORT_WAIT_S)
                start, size = first * self._slot_bytes, count * self._slot_bytes
                memory = self._arena.data[start : start + size]
                held = ResidentArray(array, self._reader, start, memory)
                self._held[path] = held, list(range(first, first + count))
                self._users[path] = 0
            self._users[path] += 1
            return self._held[path][0]

    def give(self, held: Sequence[ResidentArray]) -> None:
        """End one use of each; unused arrays are freed.  The user has no reading in flight."""
        with self._lock:
            for one in held:
                path = one.array.array.path
                self._users[path] -= 1
                if self._users[path] == 0:
                    self._broker.give(self._held.pop(path)[1])
                    del self._users[path]

    def ledger_entries(self) -> list[LedgerEntry]:
        """The entry of the held arrays, which no session's entry counts."""
        with self._lock:
            slots = sum(len(slots) for _, slots in self._held.values())
            if not slots:
                return []
            return [
                LedgerEntry(
                    "session memory, hop-wise arrays",
                    slots * self._slot_bytes,
                    f"{len(self._held)} arrays held, for all sessions that use them",
                )
            ]


class Answer(NamedTuple):
    """The places of a batch, as `ChunkReady` describes them."""

    form: str
    first: tuple[int, ...]
    counts: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    numbers: int  # place of the row numbers: `ChunkReady.index`


class RowSource(Protocol):
    """Brings the rows of a batch."""

    def ask(self, unit: Unit, buffer: int, arrival: PendingRead) -> Answer:
        """Begin to bring a batch through buffer number `buffer`, which nobody uses.

        The answer holds once the arrival has been waited for.  Raises CorruptBlock, OSError: even
        then the buffer is free only after the arrival has been waited for.
        """


class CachedRanges:
    """Ranges of arrays that are held; pages are read when they are first wanted."""

    def __init__(self, plan: HopPlan, arrays: Sequence[ResidentArray]) -> None:
        self._plan, self._arrays = plan, arrays

    def ask(self, unit: Unit, buffer: int, arrival: PendingRead) -> Answer:
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


class CachedRows:
    """Rows by number of arrays that are held; all of them are read before the first batch."""

    def __init__(
        self,
        plan: HopPlan,
        arrays: Sequence[ResidentArray],
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

    def ask(self, unit: Unit, buffer: int, arrival: PendingRead) -> Answer:
        del arrival  # everything is loaded when this returns
        if not self._loaded:
            for _ in load_all(self._arrays, self._stopped):
                pass
            self._loaded = not self._stopped()
        self._plan.rows(unit, self._index[buffer][: unit.num_seeds])
        return Answer("index", (), (), self._places, self._at[buffer])


class PassingRanges:
    """Ranges that are read for one batch: their pages go straight to its buffer."""

    def __init__(
        self, plan: HopPlan, arrays: Sequence[HopArray], reader: BlockReader, places: Sequence[int]
    ) -> None:
        """`places`: of the buffers in the arena, page-aligned, `passing_bytes` each."""
        self._plan, self._arrays, self._reader, self._at = plan, arrays, reader, places

    def ask(self, unit: Unit, buffer: int, arrival: PendingRead) -> Answer:
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
    order: NDArray[np.int64]  # row numbers in the order of the batch
    ascending: NDArray[np.int64]
    places: NDArray[np.int64]  # in the batch, of each of `ascending`
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
        cost: DeviceCost,
    ) -> None:
        """`buffers`: `gathered_bytes` each; `transit`: pages pass through these."""
        self._plan, self._arrays, self._reader = plan, arrays, reader
        self._place_of, self._cost = place_of, cost
        self._buffers = [self._carve(b) for b in buffers]
        self._max_pages = min(b.size for b in transit) // PAGE_BYTES
        self._transit = make_transit(transit)

    def _carve(self, memory: NDArray[np.uint8]) -> _Gathered:
        rows, carver = self._plan.max_rows, Carver(memory)
        size = sum(-(-rows * a.row_bytes // 64) * 64 for a in self._arrays)
        held = carver.array(np.uint8, size)
        order, ascending, places = (carver.array(np.int64, rows) for _ in range(3))
        runs = carver.array(np.int64, 5 * rows * len(self._arrays))
        return _Gathered(held, order, ascending, places, runs.reshape(len(self._arrays), rows, 5))

    def ask(self, unit: Unit, buffer: int, arrival: PendingRead) -> Answer:
        memory, num = self._buffers[buffer], unit.num_seeds
        order = memory.order[:num]
        self._plan.rows(unit, order)
        memory.places[:num] = np.argsort(order)
        np.take(order, memory.places[:num], out=memory.ascending[:num])
        places, at = [], 0
        for a, array in enumerate(self._arrays):
            out = memory.rows[at : at + num * array.row_bytes]
            places.append((self._place_of(out),))
            count = self._cost.plan_runs(
                memory.ascending, 0, num, row_layout(array.geometry, array.row_bytes),
                self._max_pages, memory.runs[a],
            )  # fmt: skip
            runs = memory.runs[a][:count]
            copy = self._copier(array, memory, runs, out)
            arrival.readings.append(self._reader.stream(array.file, runs, self._transit, copy))
            at += -(-self._plan.max_rows * array.row_bytes // 64) * 64
        index = self._place_of(memory.order)
        return Answer("rows", (), (), tuple(places), index)

    def _copier(
        self, array: HopArray, memory: _Gathered, runs: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> Callable[[int, int, NDArray[np.uint8]], None]:
        shard_bytes = array.geometry.blocks_per_shard * array.geometry.slot_bytes

        def copy(low: int, high: int, pages: NDArray[np.uint8]) -> None:
            spread_rows(
                pages, runs[low:high], shard_bytes, memory.ascending, memory.places,
                array.row_bytes, out,
            )  # fmt: skip

        return copy
