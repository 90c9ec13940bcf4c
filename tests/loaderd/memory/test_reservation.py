"""Slots of the graph pool: the rule by example, then any sequence of pins against the pool."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockstore.errors import CorruptBlock, PoolBroken
from loaderd.api.errors import Refused
from loaderd.memory.residency import (
    Account,
    BlockPool,
    GraphPool,
    PinnedBlocks,
    Residency,
    min_slots,
)
from loaderd.memory.slots import SlotBroker
from tests.effort import tries
from tests.loaderd.harness import WAIT_S

WORKERS = 2


class Reader:
    """Reads at once; fails where told to."""

    def __init__(self, num_files):
        self.fail = False
        self.files = [SimpleNamespace(where=lambda block: f"shard+{4096 * block}")] * num_files

    def read(self, file, blocks, slots):
        if self.fail:
            raise CorruptBlock("a page is wrong")


class Never(threading.Condition):
    """Instead of waiting for what no other thread will do, it is said that one would wait."""

    def wait_for(self, predicate, timeout=None):
        if predicate():
            return True
        if timeout is not None:
            return False
        raise TimeoutError


class Parts:
    """A graph pool, beside a row pool of as many slots."""

    def __init__(self, num_blocks, owned, changed=None):
        self.changed = Never() if changed is None else changed
        self.graph = GraphPool(num_blocks, 2 * owned, WORKERS)
        rows = BlockPool([1], 2 * owned)
        self.broker = SlotBroker(self.graph, rows, self.changed, range(2 * owned), owned, str)
        self.reader = Reader(len(num_blocks))
        self.residency = Residency(
            self.graph,
            self.reader,
            0,
            self.changed,  # type: ignore[arg-type]
        )

    def hold(self, account, file, *blocks):
        return self.residency.hold(file, np.array(sorted(blocks), np.int64), account=account)


def worker(parts, file, *blocks):
    return parts.hold(Account.WORKER, file, *blocks)


def shared(parts, file, *blocks):
    return parts.hold(Account.SHARED, file, *blocks)


@pytest.fixture
def parts():
    """Slots for 10 of 30 blocks: 4 are the workers', 6 are for sampling together."""
    return Parts([20, 10], 10)


def test_who_samples_together_gets_what_the_workers_do_not_need(parts):
    assert parts.residency.shared_room() == 6
    first = shared(parts, 0, *range(8))
    assert first.left_out.tolist() == [6, 7]
    with pytest.raises(TimeoutError):
        shared(parts, 0, 9)
    held = [worker(parts, 0, 10, 11), worker(parts, 1, 0, 1)]
    with pytest.raises(TimeoutError):
        worker(parts, 1, 5)  # there is no third worker
    parts.residency.drop(first)
    assert shared(parts, 0, 9).left_out.size == 0
    for h in held:
        parts.residency.drop(h)


def test_slots_that_are_reserved_are_not_taken(parts):
    held = shared(parts, 0, *range(4))
    assert parts.broker.take(parts.broker.available() - 2)  # two may go: 4 + 4 stay
    with pytest.raises(Refused, match="1 arena slots"):
        parts.broker.take(1)
    parts.residency.drop(held)
    assert parts.broker.take(2)
    assert parts.broker._graph.num_owned == min_slots(30, WORKERS) == 6
    assert shared(parts, 0, *range(4)).left_out.tolist() == [2, 3]
    assert worker(parts, 0, 5, 6).slots.size == worker(parts, 0, 7, 8).slots.size == 2


def test_a_file_is_pinned_only_where_the_reserve_stays(parts):
    for first in range(0, 10, 5):
        parts.residency.drop(shared(parts, 1, *range(first, first + 5)))
    assert parts.graph.complete(1)
    assert not parts.residency.hold_file(1)  # all 10 slots: nobody could read the other file
    small = Parts([20, 3], 10)
    small.residency.drop(shared(small, 1, 0, 1, 2))
    assert small.residency.hold_file(1)
    assert small.residency.hold_file(1)
    assert small.residency.shared_room() == 3
    assert shared(small, 0, *range(6)).left_out.size == 3
    assert worker(small, 0, 10, 11).slots.size == worker(small, 0, 12, 13).slots.size == 2
    small.residency.drop_file(1)
    assert small.graph.file_blocks == 3
    small.residency.drop_file(1)
    assert small.graph.file_blocks == 0


def test_a_pool_with_a_slot_for_every_block_has_no_reserve():
    parts = Parts([3, 4], 7)
    held = [shared(parts, 0, 0, 1, 2), shared(parts, 1, 0, 1, 2, 3)]
    assert worker(parts, 0, 1, 2).slots.size == 2
    assert parts.residency.hold_file(0)
    with pytest.raises(Refused):
        parts.broker.take(parts.broker.available())
    for h in held:
        parts.residency.drop(h)


def test_loading_takes_empty_slots_and_waits_for_nobody(parts):
    held = shared(parts, 0, *range(4))
    parts.residency.load(0)
    assert parts.graph.num_present(0) == 10
    assert parts.graph.on_account[Account.SHARED] == 4
    parts.residency.load(1)  # no slot is empty: nothing has to leave
    assert parts.graph.num_present(0) == 10
    assert parts.graph.num_present(1) == 0
    parts.residency.drop(held)
    whole = Parts([6], 8)
    whole.residency.load(0)
    assert whole.graph.complete(0)
    assert not whole.graph.pinned().any()
    assert whole.graph.on_account[Account.SHARED] == 0


def test_who_waits_for_slots_is_let_in_before_more_is_pinned():
    """Sampling together holds a group and wants the next: a taker comes between."""
    parts = Parts([30], 10, threading.Condition())
    groups = [shared(parts, 0, 0, 1, 2), shared(parts, 0, 3, 4, 5)]
    took = threading.Event()
    everything = parts.broker.available()

    def take():
        parts.broker.take(everything)
        took.set()

    taker = threading.Thread(target=take)
    taker.start()
    with parts.changed:
        assert parts.changed.wait_for(lambda: parts.graph.wanted, WAIT_S)
    parts.residency.drop(groups.pop())
    assert parts.residency.shared_room() == 2
    parts.residency.drop(groups.pop())
    assert took.wait(WAIT_S)
    taker.join()
    assert parts.graph.wanted == 0
    assert shared(parts, 0, 6, 7, 8).left_out.tolist() == [8]


@pytest.mark.parametrize("account", Account)
def test_a_read_that_fails_gives_back_each_pin_once(parts, account):
    """Blocks that were present are held by others, too: their pins stay."""
    first = parts.hold(account, 0, 1)
    parts.reader.fail = True
    with pytest.raises(CorruptBlock):
        parts.hold(account, 0, 1, 2)
    assert parts.graph.on_account[account] == 1
    assert parts.graph.pinned().sum() == 1
    parts.reader.fail = False
    parts.residency.drop(shared(parts, 0, *range(3, 9)))
    assert parts.graph.slot_of_block[0][1] == first.slots[0]
    parts.residency.drop(first)
    assert not any(parts.graph.on_account.values())
    assert not parts.graph.pinned().any()


def test_pins_that_nobody_has_are_not_given_back(parts):
    held = worker(parts, 0, 1)
    parts.residency.drop(held)
    with pytest.raises(PoolBroken, match="nobody holds"):
        parts.residency.drop(held)
    with pytest.raises(PoolBroken, match="at most 2"):
        worker(parts, 0, 1, 2, 3)
    with pytest.raises(PoolBroken, match="nobody holds"):
        parts.residency.drop_file(0)


def test_pins_beside_the_reservation_are_found_out(parts):
    parts.graph.hold(0, np.arange(9))
    with pytest.raises(PoolBroken, match="find no slot though they are reserved"):
        worker(parts, 0, 10, 11)


class ReservationMachine(RuleBasedStateMachine):
    """Whatever is pinned, taken, given back or lost: a worker's blocks find their slots."""

    @initialize(
        num_blocks=st.lists(st.integers(0, 9), min_size=1, max_size=3), more=st.integers(0, 20)
    )
    def begin(self, num_blocks, more):
        self.num_blocks = num_blocks
        minimum = min_slots(sum(num_blocks), WORKERS)
        self.parts = Parts(num_blocks, minimum + more)
        self.workers: list[PinnedBlocks] = []
        self.shared: list[PinnedBlocks] = []
        self.files: list[int] = []
        self.taken: list[int] = []

    def blocks(self, data, maximum):
        file = data.draw(st.integers(0, len(self.num_blocks) - 1))
        assume(self.num_blocks[file])
        numbers = st.integers(0, self.num_blocks[file] - 1)
        return file, data.draw(st.sets(numbers, min_size=1, max_size=maximum))

    @precondition(lambda self: len(self.workers) < WORKERS)
    @rule(data=st.data())
    def a_worker_holds(self, data):
        """Never refused, never told to wait."""
        file, blocks = self.blocks(data, 2)
        held = worker(self.parts, file, *blocks)
        assert held.slots.size == len(blocks)
        self.workers.append(held)

    @rule(data=st.data(), fail=st.booleans())
    def many_are_sampled(self, data, fail):
        file, blocks = self.blocks(data, 9)
        room = self.parts.residency.shared_room()
        left = room - self.parts.graph.on_account[Account.SHARED]
        self.parts.reader.fail = fail
        try:
            held = shared(self.parts, file, *blocks)
        except TimeoutError:
            assert left <= 0
        except CorruptBlock:
            assert fail
        else:
            assert held.slots.size == min(left, len(blocks))
            self.shared.append(held)
        finally:
            self.parts.reader.fail = False

    @rule()
    def someone_samples_in_the_end(self):
        """After others have dropped theirs there always is room for two blocks."""
        assert self.parts.residency.shared_room() >= min(2, sum(self.num_blocks))

    @rule(data=st.data())
    def hold_file(self, data):
        file = data.draw(st.integers(0, len(self.num_blocks) - 1))
        if self.parts.residency.hold_file(file):
            self.files.append(file)

    @rule(data=st.data())
    def load(self, data):
        self.parts.residency.load(data.draw(st.integers(0, len(self.num_blocks) - 1)))

    @precondition(lambda self: self.workers or self.shared or self.files)
    @rule(data=st.data())
    def drop(self, data):
        kind = data.draw(st.sampled_from([k for k in (self.workers, self.shared) if k] or [None]))
        if kind is None or (self.files and data.draw(st.booleans())):
            assume(self.files)
            self.parts.residency.drop_file(self.files.pop())
        else:
            self.parts.residency.drop(kind.pop(data.draw(st.integers(0, len(kind) - 1))))

    @rule(count=st.integers(1, 12), cede=st.booleans())
    def take(self, count, cede):
        before = self.parts.broker._graph.num_owned
        try:
            self.taken += self.parts.broker.take(count)
        except Refused:
            assert self.parts.broker._graph.num_owned == before

    @precondition(lambda self: self.taken)
    @rule()
    def give(self):
        self.parts.broker.give(self.taken)
        self.taken = []

    @invariant()
    def the_rule_holds(self):
        if not hasattr(self, "parts"):
            return
        graph = self.parts.graph
        assert graph.num_owned == graph.owned().sum() >= graph.required()
        assert graph.on_account[Account.WORKER] == sum(h.slots.size for h in self.workers)
        assert graph.on_account[Account.SHARED] == sum(h.slots.size for h in self.shared)
        assert graph.file_blocks == sum(self.num_blocks[f] for f in set(self.files))


TestAnySequenceOfPins = ReservationMachine.TestCase
TestAnySequenceOfPins.settings = settings(
    max_examples=tries(60, 400), stateful_step_count=40, deadline=None
)
