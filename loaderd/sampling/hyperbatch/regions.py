"""Regions of adjacent rows, and those that stay in memory for all sessions of a store.

Each member, a session, brings arena slots, and says which regions get them.  A member that uses one
of the regions reads it if nobody has, and waits while another one reads it.

    absent --add--> kept --claim--> being read --arrived--> there
                     ^                  |
                     +--given up--------+

Nothing leaves before the last member does: rows of batches that were handed out stay in place.
Until then an equal part of the slots is charged to each member, and to those that are to join.
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
_MIN_REGIONS, _MAX_REGIONS, _MIN_SHIFT = 64, 1 << 16, 4
_ABSENT, _KEPT, _READING, _THERE = range(4)
_POLL_S = 0.05  # between two checks whether a waiting member still wants to wait


class TypeRows(NamedTuple):
    """The served row arrays of one node type."""

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
    """The rows of one node type that a session brings into memory."""

    stay: NDArray[np.int64] = np.empty(0, np.int64)  # regions that stay from now on, once read
    stay_rows: int = 0  # of these
    entries: int = 0  # rows of regions that do not stay, at a time

    @property
    def rows(self) -> int:
        return self.stay_rows + self.entries


def region_shift(t: TypeRows) -> int:
    """A region has 2**shift adjacent rows: about `_REGION_BYTES`, but neither too few nor too many.

    Reading one costs no more per page than longer runs do; and it has many times the rows that some
    minibatches want of a cold one, so that the counts tell how cold it is.
    """
    rows = min(_REGION_BYTES // max(1, sum(t.row_bytes)), t.num_nodes // _MIN_REGIONS)
    return max(_MIN_SHIFT, rows.bit_length(), (t.num_nodes // _MAX_REGIONS).bit_length())


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
        self.orphans = np.zeros(self.rows.size, np.bool_)  # unread, their member has left
        self.entries = [
            StayingEntries(np.full(self.rows.size, ABSENT_ROW), np.empty(0, np.int64))
            for _ in self.widths
        ]


class StayingRegions:
    """The staying regions of row arrays that several sessions serve.  Any thread may call."""

    def __init__(self, served: Sequence[ServedRows], slot_bytes: int) -> None:
        """No region stays yet."""
        self._slot_bytes = slot_bytes
        self._types = [_TypeRegions(t) for t in rows_by_type(served)]
        self._members, self._slots = list[StayingMember](), list[int]()
        self.changed = concurrency.Condition()

    def join(self, alike: int = 1) -> "StayingMember":
        """Add a session, which has brought no slots yet; `alike` are to be members in all."""
        with self.changed:
            member = StayingMember(self, [np.empty(0, np.int64) for _ in self._types], alike)
            self._members.append(member)
            return member

    def kept(self) -> list[NDArray[np.bool_]]:
        """For each node type, a mask of the regions that have entries."""
        with self.changed:
            return [t.state != _ABSENT for t in self._types]

    @property
    def num_slots(self) -> int:
        """Arena slots of the regions that have entries."""
        with self.changed:
            return len(self._slots)

    def entries(self, number: int, array: int) -> StayingEntries:
        """Places of a type's regions in one of its arrays, including those of `take_over`."""
        return self._types[number].entries[array]

    def _add(
        self, regions: Sequence[NDArray[np.int64]], slots: Sequence[int]
    ) -> list[NDArray[np.int64]]:
        """Give these slots to the regions of each type that have no entries; returns these regions.

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
                # the slots first: a thread that finds an entry finds its slot
                t.entries[a] = StayingEntries(first, np.concatenate([before, more]))
                first[own] = before.size * each + np.cumsum(rows) - rows
            t.state[own] = _KEPT
            added.append(own)
        return added

    def take_over(self, number: int, known: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Regions of a type that a member may use in addition to those that it knows."""
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
        """Claim the regions that nobody has read or is reading; the caller reads them inside.

        Regions that it does not report by `arrived` are left for others to read.
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
        """Wait while others read these regions; returns those that are still unread then.

        check   is called now and then, and may raise
        """
        state = self._types[number].state
        while True:
            with self.changed:
                if not (state[regions] == _READING).any():
                    unread: NDArray[np.int64] = regions[state[regions] != _THERE]
                    return unread
                self.changed.wait(_POLL_S)
            check()

    def _part(self) -> int:
        """Slots that are charged to each member; under `changed`."""
        planned = max((member.alike for member in self._members), default=1)
        return -(-len(self._slots) // max(planned, len(self._members)))

    def _leave(self, member: "StayingMember") -> list[int]:
        """Remove a member; returns slots that nobody needs any more.  Under `changed`."""
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

    def __init__(self, regions: StayingRegions, added: list[NDArray[np.int64]], alike: int) -> None:
        """Bring nothing yet.

        added   regions of each type that it brought into memory
        alike   members that the slots are charged to, including those that are to join
        """
        self.regions, self.added, self.alike = regions, added, alike
        self._left = False

    def add(self, regions: Sequence[NDArray[np.int64]], slots: Sequence[int]) -> None:
        """Give regions of each type, ascending, the slots that were taken for them."""
        with self.regions.changed:
            self.added = self.regions._add(regions, slots)

    @property
    def num_slots(self) -> int:
        """Arena slots that are charged to it: its part, rounded up."""
        with self.regions.changed:
            return self.regions._part()

    def leave(self) -> list[int]:
        """Leave; returns slots to give back, as nobody needs them any more."""
        with self.regions.changed:
            if self._left:
                return []
            self._left = True
            return self.regions._leave(self)
