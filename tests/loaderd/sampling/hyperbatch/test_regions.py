"""Rows that stay, shared by sessions: each is read once, and is where each session looks for it."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from blockstore.errors import CorruptBlock
from loaderd.monitoring.devicecost import FLASH
from loaderd.sampling.hyperbatch.entries import Needs, table_bytes
from loaderd.sampling.hyperbatch.regions import (
    CacheShare,
    StayingMember,
    StayingRegions,
    area_slots_of,
    region_rows,
    rows_by_type,
)
from loaderd.sampling.hyperbatch.rowcache import RowCache
from loaderd.sampling.rows import ServedFiles
from tests.effort import tries
from tests.loaderd.sampling.hyperbatch.test_rowcache import (
    BATCHES,
    BLOCK,
    SERVED,
    SLOT,
    Reader,
    check,
    needs_of,
)

TYPES = rows_by_type(SERVED)
REGIONS = region_rows(TYPES[0])
SLOTS = 400
REGION_SETS = st.sets(st.integers(0, REGIONS.size - 1), max_size=5)


class Arena:
    """Memory, and which of its slots are free."""

    def __init__(self) -> None:
        self.data = np.zeros(SLOTS * SLOT, np.uint8)
        self.free = set(np.random.default_rng(0).permutation(SLOTS).tolist())

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def give(self, slots: Sequence[int]) -> None:
        assert not self.free.intersection(slots), "slots are given back twice"
        assert len(set(slots)) == len(slots)
        self.data.reshape(-1, SLOT)[list(slots)] = 0xAA
        self.free.update(slots)


class Session:
    """A row cache, its member, and the batches that its client holds."""

    def __init__(
        self,
        arena: Arena,
        regions: StayingRegions,
        reader: Reader,
        entries: int,
        stay: Sequence[int],
    ) -> None:
        self.arena, self.member = arena, regions.join()
        kept = regions.kept()[0]
        own = np.array([r for r in sorted(stay) if not kept[r]], np.int64)
        share = CacheShare(own, int(REGIONS[own].sum()), entries)
        self.slots = arena.take(area_slots_of(TYPES, [entries], SLOT))
        self.member.add([own], arena.take(area_slots_of(TYPES, [share.stay_rows], SLOT)))
        transit = [np.zeros(2 * SLOT, np.uint8) for _ in range(4)]
        self.cache = RowCache(
            ServedFiles(SERVED, reader, 0, arena.data, SLOT, BLOCK, "uint32"),  # type: ignore[arg-type]
            [share], np.zeros(table_bytes(TYPES, "uint32", [share]), np.uint8), self.slots, transit,
            FLASH, self.member,
        )  # fmt: skip
        self.next, self.held = 0, dict[int, Needs]()
        self.cache.begin_run()

    def bring(self, batches: Sequence[Any]) -> None:
        """As many of these as fit together, once all before them are released."""
        group = [needs_of(self.next + i, nodes) for i, nodes in enumerate(batches)]
        group = group[: self.cache.count_fitting(group)]
        if group:
            self.held.clear()
            self.next += len(group)
            self.cache.bring(group, [], lambda _known: group[0].batch)
            self.held = {needs.batch: needs for needs in group}

    def close(self) -> None:
        self.held.clear()
        self.arena.give(self.slots)
        self.arena.give(self.member.leave())


class Model(RuleBasedStateMachine):
    """Sessions come and go, read, and meet pages that cannot be read."""

    @initialize()
    def open(self) -> None:
        self.arena, self.reader = Arena(), Reader()
        self.regions, self.sessions = StayingRegions(SERVED, SLOT), list[Session]()

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(entries=st.integers(9, 20), stay=REGION_SETS)
    def join(self, entries: int, stay: set[int]) -> None:
        self.sessions.append(Session(self.arena, self.regions, self.reader, entries, sorted(stay)))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), batches=BATCHES, fails=st.sampled_from([-1, -1, -1, 0, 1, 3]))
    def bring(self, data: st.DataObject, batches: list[set[int]], fails: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.reader.fail_after = fails
        with suppress(*[CorruptBlock] if fails >= 0 else []):
            session.bring(batches)
        self.reader.fail_after = -1

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session)
        session.close()

    @invariant()
    def rows_are_where_sessions_look_for_them(self) -> None:
        for session in getattr(self, "sessions", []):
            for needs in session.held.values():
                check(session.cache, needs)

    @invariant()
    def each_slot_has_one_owner(self) -> None:
        if hasattr(self, "arena"):
            taken = [*self.regions._slots, *(slot for s in self.sessions for slot in s.slots)]
            assert sorted([*taken, *self.arena.free]) == list(range(SLOTS))
            parts = sum(s.member.num_slots for s in self.sessions)
            assert 0 <= parts - len(self.regions._slots) < max(1, len(self.sessions))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=tries(12, 50), stateful_step_count=40, deadline=None)


def two(stay: Sequence[int], more: Sequence[int]) -> tuple[Arena, StayingRegions, list[Session]]:
    arena, regions = Arena(), StayingRegions(SERVED, SLOT)
    return arena, regions, [Session(arena, regions, Reader(), 9, own) for own in (stay, more)]


def test_what_one_session_has_read_another_one_does_not_read() -> None:
    _, _, (first, second) = two([0, 2], [2, 5])
    assert [s.cache.stay_rows for s in (first, second)] == [32, 48]
    first.bring([{10, 11}, {42}])
    assert first.cache.rows_read == 32
    second.bring([{10, 43}, {90}])
    assert second.cache.rows_read == 16  # of region 5
    first.bring([{91, 92}, {44}])  # which the first one finds there
    assert first.cache.rows_read == 32
    assert first.cache.stay_rows == first.cache.stay_read == 48
    for session in (first, second):
        for needs in session.held.values():
            check(session.cache, needs)


def test_rows_that_passed_and_stay_now_leave_no_trace() -> None:
    """What a session has among its own rows it finds among those that stay, from its next group."""
    arena, regions = Arena(), StayingRegions(SERVED, SLOT)
    first = Session(arena, regions, Reader(), 9, [])
    first.bring([{10, 11, 12}, {30}])
    assert first.cache.rows_read == 4
    second = Session(arena, regions, Reader(), 9, [0])
    second.bring([{10}, {12}])
    before = first.held
    first.bring([{10, 13}, {31}])
    for needs in before.values():  # what was handed out is still right
        check(first.cache, needs)
    assert first.cache.rows_read == 5  # row 21 alone
    for nodes in ({40, 41, 42}, {50, 51, 52}, {60, 61, 62}, {70, 71, 72}):  # all nine entries
        first.bring([nodes, nodes])
    first.bring([{10, 11, 12}, {14}])
    for needs in first.held.values():
        check(first.cache, needs)


def test_the_last_one_gives_all_back() -> None:
    arena, regions, (first, second) = two([0, 2], [5])
    first.bring([{10}, {42}])
    first.close()
    assert second.member.num_slots == sum(area_slots_of(TYPES, [n], SLOT) for n in (32, 16))
    second.bring([{10}, {42}])
    assert second.cache.rows_read == 16
    second.close()
    assert second.member.leave() == []
    assert len(arena.free) == SLOTS
    assert not regions.kept()[0].any()


def test_regions_that_nobody_read_are_read_by_who_stays() -> None:
    _, _, (first, second) = two([0, 2], [5])
    second.bring([{90}, {91}])
    first.close()  # it has read nothing; the second one knew of its regions
    second.bring([{10}, {42}])
    assert second.cache.rows_read == 48
    for needs in second.held.values():
        check(second.cache, needs)


def test_regions_of_one_that_came_later_and_left_are_taken_over() -> None:
    _, _, (first, second) = two([0], [5])
    first.bring([{10}, {90}])  # 5 is the second one's yet, so this row passes
    assert first.cache.rows_read == 17
    second.close()
    first.bring([{91}, {92}])
    assert first.cache.stay_rows == first.cache.stay_read == 32
    assert first.cache.rows_read == 33


class Gated(Reader):
    """Reads when it is told to, and says when somebody wants to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go, self.fails = threading.Event(), threading.Event(), False

    def stream(self, *args: Any, **options: Any) -> Any:
        self.asked.set()
        assert self.go.wait(30)
        if self.fails:
            raise CorruptBlock("a page is wrong")
        return super().stream(*args, **options)


@pytest.mark.parametrize("fails", [False, True])
def test_one_waits_for_what_another_one_reads(fails: bool) -> None:
    """If that one fails, who waits reads the regions."""
    arena, regions, slow = Arena(), StayingRegions(SERVED, SLOT), Gated()
    first, second = (Session(arena, regions, r, 9, [0, 1]) for r in (slow, Reader()))
    slow.fails = fails
    looked = threading.Event()

    def read() -> None:
        with suppress(*[CorruptBlock] if fails else []):
            first.bring([{10}, {30}])

    def oldest(_known: int) -> int:
        looked.set()
        return 0

    thread = threading.Thread(target=read)
    thread.start()
    assert slow.asked.wait(30)
    group = [needs_of(0, {11, 12}), needs_of(1, {31})]
    waiter = threading.Thread(target=lambda: second.cache.bring(group, [], oldest))
    waiter.start()
    assert looked.wait(30)  # it waits, and looks whether its run has ended
    assert second.cache.rows_read == 0
    slow.go.set()
    thread.join(30)
    waiter.join(30)
    assert not waiter.is_alive()
    assert second.cache.rows_read == (32 if fails else 0)
    for needs in group:
        check(second.cache, needs)


def test_who_waits_goes_when_its_run_ends() -> None:
    arena, regions, slow = Arena(), StayingRegions(SERVED, SLOT), Gated()
    first, second = (Session(arena, regions, r, 9, [0]) for r in (slow, Reader()))
    thread = threading.Thread(target=lambda: first.bring([{10}, {11}]))
    thread.start()
    assert slow.asked.wait(30)

    def ended(_known: int) -> int:
        raise ValueError("the run has ended")

    with pytest.raises(ValueError, match="has ended"):
        second.cache.bring([needs_of(0, {12}), needs_of(1, {13})], [], ended)
    second.close()
    slow.go.set()
    thread.join(30)
    check(first.cache, first.held[0])


def test_slots_are_charged_to_members_to_come() -> None:
    arena, regions = Arena(), StayingRegions(SERVED, SLOT)
    members = [regions.join(4)]
    members[0].add([np.array([3, 4])], slots := arena.take(area_slots_of(TYPES, [32], SLOT)))
    assert regions.num_slots == len(slots)
    for count in range(1, 6):
        charged = [member.num_slots for member in members]
        assert charged == [-(-len(slots) // max(4, count))] * count
        members.append(regions.join(4 - count % 2))
    for member in members:
        arena.give(member.leave())
    assert regions.num_slots == 0


def test_a_region_that_two_add_has_the_entries_of_the_first() -> None:
    arena, regions = Arena(), StayingRegions(SERVED, SLOT)
    members: list[StayingMember] = [regions.join(), regions.join()]
    for member in members:
        member.add([np.array([3])], arena.take(area_slots_of(TYPES, [16], SLOT)))
        if member is members[0]:
            before = regions.entries(0, 0).first[3]
    assert regions.entries(0, 0).first[3] == before
    for member in members:
        arena.give(member.leave())
    assert len(arena.free) == SLOTS
