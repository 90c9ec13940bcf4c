"""Hop-wise arrays that are in memory whole: read once, page by page, shared by all sessions."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import PAGE_BYTES
from blockstore.io.arena import Arena
from blockstore.io.reader import BlockReader, Reading, wait_all
from loaderd.hopwise.files import HopArray
from loaderd.memory.slots import LOOK_WAIT_S, SlotBroker
from loaderd.protocol import LedgerEntry

_PIECE_PAGES = 4096  # of each array, at a time, where all is read
_PIECES = 2  # on their way at once
_ABSENT, _COMING, _HERE = range(3)


@dataclass(slots=True)
class Arrival:
    """What a batch waits for."""

    readings: list[Reading] = field(default_factory=list)
    after: list[Callable[[bool], None]] = field(default_factory=list)  # told how it went, once

    def wait(self) -> None:
        """Until nothing is on its way any more.  Raises the first error met."""
        good = False
        try:
            wait_all(self.readings)
            good = True
        finally:
            for tell in self.after:
                tell(good)
            self.readings, self.after = [], []


class Held:
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

    def fetch(self, low: int, high: int, arrival: Arrival) -> None:
        """Have pages [low, high) brought where they are not, and `arrival` wait for them."""
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
            self._state[absent] = _COMING  # now that they are: an error leaves them absent
            self._coming.append(entry)
        arrival.readings.append(entry[2])

        def settle(good: bool) -> None:
            with self._lock:
                self._state[absent] = _HERE if good else _ABSENT
                self._left -= absent.size * good
                self._coming.remove(entry)

        arrival.after.append(settle)


def held_bytes(array: HopArray) -> int:
    """Memory of an array: its pages, and a byte of each."""
    return array.num_pages * (PAGE_BYTES + 1)


def load_all(arrays: Sequence[Held], stopped: Callable[[], bool]) -> Iterator[None]:
    """Bring all pages of all arrays, piece by piece; ends early where `stopped`.

    Raises CorruptBlock, OSError.
    """
    most = max(held.array.num_pages for held in arrays)
    coming: deque[Arrival] = deque()
    try:
        for low in range(0, most, _PIECE_PAGES):
            if stopped():
                return
            arrival = Arrival()
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


class Shelf:
    """The arrays that are held, each for as long as a session uses it."""

    def __init__(
        self, broker: SlotBroker, arena: Arena, reader: BlockReader, slot_bytes: int
    ) -> None:
        self._broker, self._arena, self._reader = broker, arena, reader
        self._slot_bytes = slot_bytes
        self._held: dict[str, tuple[Held, list[int]]] = {}  # by path; and its slots
        self._users: dict[str, int] = {}
        self._lock = concurrency.Lock()

    def _slots(self, array: HopArray) -> int:
        return -(-held_bytes(array) // self._slot_bytes)

    def missing_slots(self, arrays: Sequence[HopArray]) -> int:
        """Slots that it would take to hold those which are not held."""
        with self._lock:
            return sum(self._slots(a) for a in arrays if a.array.path not in self._held)

    def take(self, arrays: Sequence[HopArray]) -> list[Held]:
        """Hold arrays.  Raises Refused, and holds none of them then."""
        taken: list[Held] = []
        try:
            for array in arrays:
                taken.append(self._take(array))
        except BaseException:
            self.give(taken)
            raise
        return taken

    def _take(self, array: HopArray) -> Held:
        path = array.array.path
        with self._lock:
            if path not in self._held:
                count = self._slots(array)
                first = self._broker.take_run(count, LOOK_WAIT_S)
                start, size = first * self._slot_bytes, count * self._slot_bytes
                memory = self._arena.data[start : start + size]
                held = Held(array, self._reader, start, memory)
                self._held[path] = held, list(range(first, first + count))
                self._users[path] = 0
            self._users[path] += 1
            return self._held[path][0]

    def give(self, held: Sequence[Held]) -> None:
        """One user less of each; what has none leaves.  Nothing of the user is on its way."""
        with self._lock:
            for one in held:
                path = one.array.array.path
                self._users[path] -= 1
                if self._users[path] == 0:
                    self._broker.give(self._held.pop(path)[1])
                    del self._users[path]

    def ledger_entries(self) -> list[LedgerEntry]:
        """What is held, which no session's entry counts."""
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
