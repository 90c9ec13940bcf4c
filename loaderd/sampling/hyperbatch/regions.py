"""Regions of adjacent rows, and those that stay in memory for all sessions of a store.

Each member, a session, brings slots of the arena, and says which regions get these.  Whoever has
one of the regions in use reads it if nobody has, and waits if somebody does.

    absent --add--> kept --claim--> being read --arrived--> there
                     ^                  |
                     +--given up--------+

Nothing leaves before the last member does: what batches were handed out with stays where it is.
Until then each member answers for an equal part of the slots.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.kernels.rowcache import ABSENT_ROW, StayingEntries
from loaderd.memory.ledger import ServedRows

_REGION_BYTES = 1 << 20
_LEAST_REGIONS, _MOST_REGIONS, _LEAST_SHIFT = 64, 1 << 16, 4
_ABSENT, _KEPT, _READING, _THERE = range(4)
_LOOK_S = 0.05  # between two looks at whether who waits for others still wants to


class TypeRows(NamedTuple):
    """What is served of one node type."""

    first: int
    num_nodes: int
    served: tuple[int, ...]  # places in the list of served row arrays
    row_bytes: tuple[int, ...]


def rows_by_type(served: Sequence[ServedRows]) -> list[TypeRows]:
    found: dict[str, list[int]] = {}
    for i, rows in enumerate(served):
        found.setdefault(rows.node_type.name, []).append(i)
    return [
        TypeRows(
            served[numbers[0]].node_type.first,
            served[numbers[0]].node_type.num_nodes,
            tuple(numbers),
            tuple(served[i].array.row_bytes for i in numbers),
        )
        for numbers in found.values()
    ]


class CacheShare(NamedTuple):
    """What of one node type a session brings into memory."""

    stay: NDArray[np.int64] = np.empty(0, np.int64)  # regions that stay from now on, once read
    stay_rows: int = 0  # of these
    entries: int = 0  # rows of regions that do not stay, at a time

    @property
    def rows(self) -> int:
        return self.stay_rows + self.entries


def region_shift(t: TypeRows) -> int:
    """A region has 2**shift adjacent rows: about `_REGION_BYTES`, but neither too few nor too many.

    What is read of one costs no more a page than longer runs do; and it has many times the rows
    that some minibatches want of a cold one, so that what is counted says how cold it is.
    """
    rows = min(_REGION_BYTES // max(1, sum(t.row_bytes)), t.num_nodes // _LEAST_REGIONS)
    return max(_LEAST_SHIFT, rows.bit_length(), (t.num_nodes // _MOST_REGIONS).bit_length())


def region_rows(t: TypeRows) -> NDArray[np.int64]:
    """Rows of each region, int64 (regions,); the last one may have fewer."""
    shift = region_shift(t)
    rows = np.full(-(-t.num_nodes >> shift), 1 << shift)
    rows[-1:] = t.num_nodes - (rows.size - 1 << shift)
    return rows


def area_slots_of(types: Sequence[TypeRows], rows: Sequence[int], slot_bytes: int) -> int:
    return sum(
        -(-count // (slot_bytes // width))
        for t, count in zip(types, rows, strict=True)
        for width in t.row_bytes
    )


class _TypeRegions:
    """Regions of one node type, and where they are in each array."""

    def __init__(self, t: TypeRows) -> None:
        self.rows, self.widths = region_rows(t), t.row_bytes
        self.clear()

    def clear(self) -> None:
        self.state = np.full(self.rows.size, _ABSENT, np.uint8)
        self.orphans = np.zeros(self.rows.size, np.bool_)  # kept by one that has left, not read
        self.entries = [
            StayingEntries(np.full(self.rows.size, np.int64(ABSENT_ROW)), np.empty(0, np.int64))
            for _ in self.widths
        ]


class StayingRegions:
    """The regions of the row arrays that some sessions serve alike.  Any thread may call."""

    def __init__(self, served: Sequence[ServedRows], slot_bytes: int) -> None:
        """None stays yet."""
        self._slot_bytes = slot_bytes
        self._types = [_TypeRegions(t) for t in rows_by_type(served)]
        self._members, self._slots = list[StayingMember](), list[int]()
        self.changed = concurrency.Condition()

    def join(self) -> "StayingMember":
        """A session more."""
        with self.changed:
            member = StayingMember(self, [np.empty(0, np.int64) for _ in self._types])
            self._members.append(member)
            return member

    def kept(self) -> list[NDArray[np.bool_]]:
        """For each node type, which regions have entries."""
        with self.changed:
            return [t.state != _ABSENT for t in self._types]

    def entries(self, number: int, array: int) -> StayingEntries:
        """Where the regions of a type are, in one of its arrays; those of `take_over` are in it."""
        return self._types[number].entries[array]

    def _add(
        self, regions: Sequence[NDArray[np.int64]], slots: Sequence[int]
    ) -> list[NDArray[np.int64]]:
        """Regions of each type that have no entries get these slots; returns which these are.

        Under `changed`.
        """
        self._slots += slots
        left, added = iter(slots), []
        for t, some in zip(self._types, regions, strict=True):
            own = some[t.state[some] == _ABSENT]
            rows = t.rows[own]
            for a, width in enumerate(t.widths):
                first, before = t.entries[a]
                each = self._slot_bytes // width
                count = -(-int(rows.sum()) // each)
                more = np.fromiter((next(left) for _ in range(count)), np.int64, count)
                # the slots first: who finds an entry finds its slot
                t.entries[a] = StayingEntries(first, np.concatenate([before, more]))
                first[own] = before.size * each + np.cumsum(rows) - rows
            t.state[own] = _KEPT
            added.append(own)
        return added

    def take_over(self, number: int, known: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Regions of a type that a member may use as well, beside those known to it."""
        with self.changed:
            t = self._types[number]
            found = (t.state == _THERE) | t.orphans
            t.orphans[:] = False
            regions: NDArray[np.int64] = np.flatnonzero(found & (known == 0))
            return regions

    def unread(self, number: int, regions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of these regions are not there yet."""
        with self.changed:
            unread: NDArray[np.int64] = regions[self._types[number].state[regions] != _THERE]
            return unread

    @contextmanager
    def claimed(self, number: int, regions: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Inside, who asks reads those of the regions that nobody has read, or reads.

        Those of which it does not say that they have arrived are for others to read.
        """
        state = self._types[number].state
        with self.changed:
            claimed = regions[state[regions] == _KEPT]
            state[claimed] = _READING
        try:
            yield claimed
        finally:
            with self.changed:
                state[claimed[state[claimed] == _READING]] = _KEPT
                self.changed.notify_all()

    def arrived(self, number: int, regions: Sequence[int]) -> None:
        """Claimed regions have been read."""
        with self.changed:
            self._types[number].state[np.asarray(regions, np.int64)] = _THERE
            self.changed.notify_all()

    def wait(
        self, number: int, regions: NDArray[np.int64], check: Callable[[], object]
    ) -> NDArray[np.int64]:
        """Wait while others read these regions; returns those that nobody has read then.

        check   is called now and then, and may raise
        """
        state = self._types[number].state
        while True:
            with self.changed:
                if not (state[regions] == _READING).any():
                    unread: NDArray[np.int64] = regions[state[regions] != _THERE]
                    return unread
                self.changed.wait(_LOOK_S)
            check()

    def _part(self) -> int:
        """Slots that each member answers for; under `changed`."""
        return -(-len(self._slots) // max(1, len(self._members)))

    def _leave(self, member: "StayingMember") -> list[int]:
        """The slots that nobody needs any more; under `changed`."""
        self._members.remove(member)
        if not self._members:
            for t in self._types:
                t.clear()
            slots, self._slots = self._slots, []
            return slots
        for t, own in zip(self._types, member.added, strict=True):
            t.orphans[own] |= t.state[own] == _KEPT
        return []


class StayingMember:
    """A session that shares regions that stay.  It leaves when nobody uses its batches any more."""

    def __init__(self, regions: StayingRegions, added: list[NDArray[np.int64]]) -> None:
        """`added`: regions of each type that are in memory for its sake."""
        self.regions, self.added = regions, added
        self._left = False

    def add(self, regions: Sequence[NDArray[np.int64]], slots: Sequence[int]) -> None:
        """Regions of each type, ascending, get slots that were taken for them."""
        with self.regions.changed:
            self.added = self.regions._add(regions, slots)

    @property
    def num_slots(self) -> int:
        """Of the arena, that it answers for: its part, rounded up."""
        with self.regions.changed:
            return self.regions._part()

    def leave(self) -> list[int]:
        """Returns slots to give back: nobody needs them."""
        with self.regions.changed:
            if self._left:
                return []
            self._left = True
            return self.regions._leave(self)
