"""Pins, ages and eviction: examples, then any sequence of calls against a model of dicts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.memory.residency import BlockPool, PinnedBlocks

NUM_SLOTS = 6


def ids(*blocks: int):
    return np.array(blocks, np.int64)


def bring(pool: BlockPool, file: int, *blocks: int) -> PinnedBlocks:
    """PinnedBlocks blocks and have them loaded."""
    held = pool.hold(file, ids(*blocks))
    n = held.num_present
    pool.loaded(file, held.blocks[n:], held.slots[n:])
    return held


@pytest.fixture
def pool() -> BlockPool:
    """Two slots, 2 and 5, for files of 6, 3 and no blocks."""
    pool = BlockPool((6, 3, 0), 9)
    pool.add_slots([2, 5])
    return pool


def test_blocks_show_once_they_are_loaded(pool):
    held = pool.hold(0, ids(4, 1))
    assert (held.blocks.tolist(), held.slots.tolist(), held.num_present) == ([4, 1], [2, 5], 0)
    assert (pool.slot_of_block[0] == -1).all()
    assert pool.present_mask(0, ids(0, 1, 4)).tolist() == [False, True, True]
    pool.loaded(0, held.blocks, held.slots)
    assert pool.slot_of_block[0].tolist() == [-1, 5, -1, -1, 2, -1]
    assert pool.num_present(0) == 2


def test_a_block_is_read_once_however_many_hold_it(pool):
    first = bring(pool, 0, 3)
    second = pool.hold(0, ids(0, 3))
    assert second.blocks.tolist() == [3, 0]  # present ones first
    assert second.num_present == 1
    assert second.slots[0] == first.slots[0]


def test_pinned_blocks_stay_and_what_finds_no_slot_is_left_out(pool):
    bring(pool, 0, 0)
    held = bring(pool, 0, 1, 2, 3)
    assert held.blocks.tolist() == [1]
    assert held.left_out.tolist() == [2, 3]
    assert pool.hold(1, ids(0)).left_out.tolist() == [0]
    pool.drop(held.slots)
    assert bring(pool, 1, 0).slots.tolist() == held.slots.tolist()
    assert pool.slot_of_block[0].tolist() == [2, -1, -1, -1, -1, -1]


def test_every_holder_must_drop_before_a_block_goes(pool):
    first, second = bring(pool, 0, 0, 1), bring(pool, 0, 0, 1)
    pool.drop(first.slots)
    assert pool.hold(0, ids(2)).blocks.size == 0
    pool.drop(second.slots)
    assert pool.hold(0, ids(2)).blocks.size == 1


def test_the_longest_unused_goes_first(pool):
    for block in (0, 1):
        pool.tick += 1
        pool.drop(bring(pool, 0, block).slots)
    pool.tick += 1
    pool.drop(bring(pool, 0, 0).slots)  # used again
    bring(pool, 0, 2)
    assert (pool.slot_of_block[0][:3] >= 0).tolist() == [True, False, True]


def test_a_block_that_has_left_is_read_again(pool):
    for block in (0, 1, 2):
        pool.tick += 1
        pool.drop(bring(pool, 0, block).slots)
    assert pool.present_mask(0, ids(0, 1)).tolist() == [False, True]
    held = pool.hold(0, ids(0))
    assert (held.blocks.tolist(), held.num_present) == ([0], 0)


def test_only_blocks_of_an_age_make_room(pool):
    pool.tick = 7
    pool.drop(bring(pool, 0, 0, 1).slots)
    for tick, room in ((7, 0), (9, 0), (10, 2)):
        pool.tick = tick
        assert pool.hold(1, ids(0, 1), min_age=3).blocks.size == room


def test_free_slots_have_any_age(pool):
    assert pool.hold(0, ids(0, 1), min_age=1000).slots.tolist() == [2, 5]


def test_a_failed_read_leaves_nothing_behind(pool):
    held = pool.hold(0, ids(0, 1))
    pool.failed(0, held.blocks, held.slots)
    assert pool.lost(held.slots).all()
    pool.drop(held.slots)
    assert not pool.present_mask(0, ids(0, 1)).any()
    assert not pool.pinned().any()
    assert bring(pool, 0, 1).num_present == 0


def test_a_slot_of_a_lost_block_is_kept_for_whoever_waits_for_it(pool):
    reader, waiter = pool.hold(0, ids(0)), pool.hold(0, ids(0))
    pool.failed(0, reader.blocks, reader.slots)
    pool.drop(reader.slots)
    again = bring(pool, 0, 0)  # a third caller reads the block again, into another slot
    assert again.slots.tolist() != waiter.slots.tolist()
    assert pool.lost(waiter.slots).all()
    assert pool.settled(0, waiter.slots)
    assert pool.hold(0, ids(1)).blocks.size == 0
    pool.drop(waiter.slots)
    assert pool.hold(0, ids(1)).blocks.size == 1
    assert not pool.lost(again.slots).any()


def test_a_complete_file_is_pinned_as_a_whole(pool):
    pool.add_slots([7])
    assert not pool.hold_file(1)
    pool.drop(bring(pool, 1, 0, 1, 2).slots)
    assert pool.complete(1)
    assert pool.hold_file(1)
    assert pool.hold_file(1)
    for _ in range(2):
        assert pool.hold(0, ids(0)).blocks.size == 0
        assert pool.pinned().sum() == 3
        pool.drop_file(1)
    assert pool.hold(0, ids(0)).blocks.size == 1
    assert not pool.complete(1)


def test_what_is_there_of_a_file_is_pinned_if_all_files_have_room(pool):
    pool.add_slots([0, 1, 3, 4, 6, 7])
    assert not pool.hold_file(0, whole=False)  # 8 slots for 9 blocks
    pool.add_slots([8])
    pool.drop(bring(pool, 0, 0, 1).slots)
    assert pool.hold_file(0, whole=False)
    assert not pool.hold_file(0)
    assert pool.pinned().sum() == 2
    pool.drop(bring(pool, 0, 2).slots)
    assert pool.pinned().sum() == 3
    pool.drop_file(0)
    assert not pool.pinned().any()


def test_a_file_without_blocks_is_complete(pool):
    assert pool.complete(2)
    assert pool.hold_file(2)
    pool.drop_file(2)
    nothing = pool.hold(2, ids())
    assert nothing.blocks.size == nothing.slots.size == nothing.left_out.size == 0


def test_slots_are_given_up_together_and_not_while_one_is_pinned(pool):
    pool.add_slots([3, 4])
    held = bring(pool, 0, 0)  # in slot 2
    assert not pool.remove_slots(ids(4, 2, 3))
    assert pool.owned().sum() == 4
    pool.drop(held.slots)
    assert pool.remove_slots(ids(4, 2, 3))
    assert np.flatnonzero(pool.owned()).tolist() == [5]
    assert pool.num_present(0) == 0
    assert not pool.remove_slots(ids(5, 6))  # slot 6 is not of this pool


class PoolMachine(RuleBasedStateMachine):
    """Any calls that callers may make; `blocks` maps (file, block) to where it should be."""

    num_blocks = (9, 3, 0)  # of each file

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.num_blocks, NUM_SLOTS)
        self.owned: set[int] = set()
        self.blocks: dict[tuple[int, int], int] = {}  # to its slot; present or being read
        self.loaded: set[tuple[int, int]] = set()
        self.pins = dict.fromkeys(range(NUM_SLOTS), 0)
        self.used: dict[int, int] = {}  # by slot of `blocks`
        self.holds: list[tuple[int, dict[int, int]]] = []  # what each caller has to drop
        self.reads: list[tuple[int, dict[int, int]]] = []  # what each has yet to read
        self.files = [0] * len(self.num_blocks)

    def evictable(self) -> set[int]:
        """Slots that may get another block."""
        kept = {slot for (file, _), slot in self.blocks.items() if self.files[file]}
        return {slot for slot in self.owned - kept if self.pins[slot] == 0}

    def forget(self, slots: Any) -> None:
        """The blocks in these slots are gone."""
        for place in [place for place, slot in self.blocks.items() if slot in slots]:
            del self.used[self.blocks.pop(place)]
            self.loaded.discard(place)

    @initialize(slots=st.sets(st.integers(0, NUM_SLOTS - 1)))
    def begin(self, slots):
        self.add_slots(slots)

    @rule(slots=st.sets(st.integers(0, NUM_SLOTS - 1), max_size=2))
    def add_slots(self, slots):
        self.pool.add_slots(slots - self.owned)
        self.owned |= slots

    @rule(slots=st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=3))
    def remove_slots(self, slots):
        free = slots <= self.evictable()
        assert self.pool.remove_slots(ids(*slots)) == free
        if free:
            self.forget(slots)
            self.owned -= slots

    @rule(ticks=st.integers(1, 3))
    def time_goes_on(self, ticks):
        self.pool.tick += ticks

    @rule(data=st.data(), file=st.integers(0, 2), min_age=st.sampled_from([0, 0, 1, 2, 5]))
    def hold(self, data, file, min_age):
        wanted = data.draw(st.lists(st.integers(0, 8), unique=True, max_size=5))
        wanted = [block for block in wanted if block < self.num_blocks[file]]
        known = [block for block in wanted if (file, block) in self.blocks]
        absent = [block for block in wanted if (file, block) not in self.blocks]
        for block in known:
            self.pins[self.blocks[file, block]] += 1
            self.used[self.blocks[file, block]] = self.pool.tick
        room = {s: self.used.get(s, -1) for s in self.evictable()}
        room = {s: t for s, t in room.items() if t < 0 or t <= self.pool.tick - min_age}
        found = self.pool.hold(file, ids(*wanted), min_age)
        taken, n = absent[: len(room)], len(known)
        assert found.num_present == n
        assert found.blocks.tolist() == known + taken
        assert found.left_out.tolist() == absent[len(taken) :]
        assert found.slots[:n].tolist() == [self.blocks[file, block] for block in known]
        fresh = found.slots[n:].tolist()
        assert len(set(fresh)) == len(fresh)
        assert sorted(room[slot] for slot in fresh) == sorted(room.values())[: len(fresh)]
        self.took(file, known, dict(zip(taken, fresh, strict=True)))

    def took(self, file, known, fresh):
        """The pool has given these slots to blocks that were absent."""
        self.forget(set(fresh.values()))
        for block, slot in fresh.items():
            self.blocks[file, block], self.used[slot], self.pins[slot] = slot, self.pool.tick, 1
        self.holds.append((file, {block: self.blocks[file, block] for block in [*known, *fresh]}))
        if fresh:
            self.reads.append((file, fresh))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def a_read_ends_well(self, data):
        file, fresh = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        self.pool.loaded(file, ids(*fresh), ids(*fresh.values()))
        self.loaded |= {(file, block) for block in fresh}

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def a_read_fails(self, data):
        """The blocks are gone; their slots stay until every holder has dropped them."""
        file, fresh = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        self.pool.failed(file, ids(*fresh), ids(*fresh.values()))
        self.forget(set(fresh.values()))
        assert self.pool.lost(ids(*fresh.values())).all()
        assert self.pool.settled(file, ids(*fresh.values()))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def drop(self, data):
        """Callers drop blocks after they are read."""
        file, held = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        reading = {slot for _, fresh in self.reads for slot in fresh.values()}
        later = {block: slot for block, slot in held.items() if slot in reading}
        if later:
            self.holds.append((file, later))
        done = [slot for slot in held.values() if slot not in reading]
        self.pool.drop(ids(*done))
        for slot in done:
            self.pins[slot] -= 1

    @rule(file=st.integers(0, 2), whole=st.booleans())
    def hold_file(self, file, whole):
        complete = sum(place[0] == file for place in self.loaded) == self.num_blocks[file]
        roomy = len(self.owned) >= sum(self.num_blocks) and not whole
        assert self.pool.hold_file(file, whole) == (complete or roomy)
        self.files[file] += complete or roomy

    @precondition(lambda self: any(self.files))
    @rule()
    def drop_a_file(self):
        file = next(f for f, pins in enumerate(self.files) if pins)
        self.pool.drop_file(file)
        self.files[file] -= 1

    @invariant()
    def blocks_are_where_they_should_be(self):
        for file, num_blocks in enumerate(self.num_blocks):
            places = [(file, block) for block in range(num_blocks)]
            slots = [self.blocks[p] if p in self.loaded else -1 for p in places]
            assert self.pool.slot_of_block[file].tolist() == slots
            here = self.pool.present_mask(file, np.arange(num_blocks))
            assert here.tolist() == [p in self.blocks for p in places]
            assert self.pool.num_present(file) == sum(p in self.loaded for p in places)
            assert self.pool.complete(file) == (-1 not in slots)

    @invariant()
    def slots_are_owned_and_pinned_as_they_should_be(self):
        assert set(np.flatnonzero(self.pool.owned()).tolist()) == self.owned
        pinned = self.owned - self.evictable()
        assert set(np.flatnonzero(self.pool.pinned()).tolist()) == pinned


class RoomyMachine(PoolMachine):
    """All blocks have room, unless slots are taken away."""

    num_blocks = (3, 2, 0)


for machine in (PoolMachine, RoomyMachine):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestAnySequenceOfCalls = PoolMachine.TestCase
TestWithRoomForAll = RoomyMachine.TestCase
