"""Slots taken out of the pools and put back: examples, then any sequence of calls."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from loaderd.api.errors import Refused, Shortage
from loaderd.memory import slots
from loaderd.memory.ledger import MIN_SESSION
from loaderd.memory.residency import BlockPool, GraphPool
from loaderd.memory.slots import SlotBroker
from tests.effort import tries

ARENA, LEAST = 48, 2


class Store:
    """A broker over two pools, of some slots of an arena; the first six are the graph's."""

    def __init__(self, own: range, changed: threading.Condition | None = None) -> None:
        self.changed = changed or threading.Condition()
        self.graph, self.rows = GraphPool([20], ARENA, workers=0), BlockPool([60], ARENA)
        assert self.graph.minimum == LEAST
        self.broker = SlotBroker(
            self.graph, self.rows, self.changed, list(own), 6, lambda n: f"{n} more"
        )

    def owned(self) -> set[int]:
        return set(np.flatnonzero(self.graph.owned() | self.rows.owned()).tolist())


class Watched(threading.Condition):
    """Tells when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.set()
        return super().wait(timeout)


@pytest.mark.parametrize("run", [False, True])
def test_who_waits_for_slots_gets_them_as_soon_as_they_are_back(monkeypatch, run):
    monkeypatch.setattr(slots, "SHORT_WAIT_S", 30.0)
    changed = Watched()
    store = Store(range(40), changed)
    taken = store.broker.take(36)
    ask: Any = store.broker.take_run if run else store.broker.take
    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(ask, 10)
        assert changed.waiting.wait(10)
        store.broker.give(taken)
        waiter.result(10)


@pytest.mark.parametrize("fails", range(1, 4))
@pytest.mark.parametrize("what", ["take", "take_run", "cede", "cede_run", "retire"])
def test_slots_that_are_not_all_to_be_had_stay_where_they_are(monkeypatch, what, fails):
    store, calls = Store(range(12)), 0
    real = BlockPool.remove_slots

    def remove_slots(pool: BlockPool, slots: NDArray[np.int64]) -> bool:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise MemoryError
        return real(pool, slots)

    monkeypatch.setattr(BlockPool, "remove_slots", remove_slots)
    before, graph = store.owned(), store.graph.num_owned
    try:
        getattr(store.broker, what)(*[] if what == "retire" else [8])
    except MemoryError:
        assert (store.owned(), store.graph.num_owned) == (before, graph)
    else:
        assert calls < fails


def test_the_graph_keeps_its_least_and_rows_go_first():
    store = Store(range(20))
    first = store.broker.take(14)
    assert set(first) == set(range(6, 20))
    assert store.broker.available() == 4
    assert len(store.broker.take(4)) == 4
    assert store.broker._graph.num_owned == LEAST
    with pytest.raises(Refused, match="needs 1 arena slots side by side, 0 are free"):
        store.broker.take(1)


def test_the_memory_that_a_shortage_names_is_enough():
    """Of slots that lie apart none is counted for a run."""
    store = Store(range(14))
    store.broker.take(12)
    store.broker.give([6, 8, 10, 12])
    named = "4 are free.*at least --mem 3 more"
    with pytest.raises(Shortage, match=f"needs 3 arena slots side by side, {named}"):
        store.broker.take_run(3, 0)
    with pytest.raises(Shortage, match=f"needs 7 arena slots, {named}"):
        store.broker.take(7)
    store.broker.accept([20, 21, 22], 0)
    assert store.broker.take_run(3) == 20
    store.broker.give([20, 21, 22])
    assert len(store.broker.take(7)) == 7


def test_a_store_that_gives_slots_away_can_still_serve_a_session():
    store, other = Store(range(40)), Store(range(40, 48))
    given = store.broker.cede(100)
    assert len(given) == 40 - LEAST - MIN_SESSION
    assert store.broker.available() == MIN_SESSION
    assert store.broker.num_slots == LEAST + MIN_SESSION
    assert store.broker.cede(100) == []
    other.broker.accept(given, 10)
    assert other.broker._graph.num_owned == 10
    assert other.owned() == set(given) | set(range(40, 48))
    assert other.broker.whole
    assert store.broker.whole


def test_a_share_counts_what_is_taken_and_given_within_it():
    broker = Store(range(40)).broker
    with broker.at_most(10):
        with broker.at_most(6):
            kept = broker.take(4)
            assert broker.available() == 2
            with pytest.raises(Refused, match="3 arena slots are needed, 2 are left"):
                broker.take(3)
        assert broker.available() == 6
        broker.give(kept)
        assert broker.available() == 10
        with broker.at_most(100):
            assert broker.available() == 10
    assert broker.available() == 38


def test_what_is_taken_for_others_counts_for_the_user_and_not_for_the_session():
    broker = Store(range(40)).broker
    with broker.at_most(20), broker.at_most(6, of_session=True):
        assert (broker.row_slots(), broker.row_slots(more=50)) == (6, 6)
        with broker.for_others():
            taken = broker.take(15)
            assert broker.available() == 5
            with pytest.raises(Refused, match="6 arena slots are needed, 5 are left"):
                broker.take(6)
        assert broker.available() == 5
        broker.take(2)
        with broker.for_others():
            broker.give(taken)
            assert broker.available() == 18
        assert broker.available() == 4
    assert broker.available() == 36


def test_a_range_is_taken_only_if_all_of_it_is_free():
    store = Store(range(40))
    first = store.broker.take_run(8)
    above, below = range(first + 4, first + 12), range(first - 4, first)
    for slots_ in (above, range(first - 1, first + 1), range(36, ARENA + 4)):
        assert not store.broker.take_range(slots_)
        assert store.broker.free() == 40 - 8 - LEAST
    with store.broker.at_most(3):
        assert not store.broker.take_range(below)
    with store.broker.at_most(5):
        assert store.broker.take_range(below)
        assert store.broker.free() == 1
    assert not store.owned() & {*below}
    store.broker.give([*below, *range(first, first + 8)])
    assert store.owned() == {*range(40)}


def test_the_graph_gives_back_what_was_lent_to_it():
    store = Store(range(40))
    taken = store.broker.take(22)
    broker = store.broker
    with broker.lent_to_graph():  # 12 row slots are free, 14 blocks have no slot
        assert (store.graph.num_owned, broker.graph_missing) == (18, 2)
        # who asks meanwhile finds what there will be afterwards
        assert (broker.graph_preferred, broker.row_slots(), broker.pooled_rows()) == (6, 12, 12)
        assert broker.take_now(1, 0) == []
        assert broker.num_slots == 40
        held = store.graph.hold(0, np.arange(18))
        store.graph.loaded(0, held.blocks, held.slots)
        store.graph.drop(held.slots)
        inside = store.broker.take(4)  # the graph's, as no others are free
    assert store.graph.num_owned + len({*inside} & {*range(6)}) == store.broker.graph_preferred == 6
    store.broker.give(taken + inside)
    assert (store.graph.num_owned, store.rows.num_owned) == (6, 34)
    assert store.broker.whole


def test_no_more_is_lent_than_the_graph_lacks():
    store = Store(range(40))
    with store.broker.lent_to_graph():
        assert (store.graph.num_owned, store.rows.num_owned) == (20, 20)
        with store.broker.lent_to_graph():
            assert store.graph.num_owned == 20
    assert (store.graph.num_owned, store.rows.num_owned) == (6, 34)


@pytest.mark.parametrize("is_dropped", [True, False])
def test_what_is_lent_may_be_in_use_for_a_while(monkeypatch, is_dropped):
    monkeypatch.setattr(slots, "SHORT_WAIT_S", 30.0 if is_dropped else 0.0)
    changed = Watched()
    store = Store(range(40), changed)

    def drop() -> None:
        assert changed.waiting.wait(10)
        with changed:
            store.graph.drop(held.slots)
            changed.notify_all()

    with ThreadPoolExecutor(1) as threads, store.broker.lent_to_graph():
        held = store.graph.hold(0, np.arange(20))
        store.graph.loaded(0, held.blocks, held.slots)
        if is_dropped:
            threads.submit(drop)
    kept = 6 if is_dropped else 20
    assert store.graph.num_owned == store.broker.graph_preferred == kept
    assert store.rows.num_owned == 40 - kept
    assert store.broker.num_slots == 40


def test_slots_that_hold_blocks_in_use_are_not_taken():
    store = Store(range(20))
    held = store.rows.hold(0, np.arange(10))
    store.rows.loaded(0, held.blocks, held.slots)
    assert store.broker.take_now(5, 0) == []  # ten of the twenty are free, six of them the graph's
    taken = set(store.broker.take_now(4, 0))
    assert len(taken) == 4
    assert not taken & (set(held.slots.tolist()) | set(range(6)))
    assert store.broker.pinned() == 10
    assert not store.broker.whole


class Model(RuleBasedStateMachine):
    """Every slot is in one place: a pool of one of both stores, or with somebody who took it."""

    def __init__(self) -> None:
        super().__init__()
        self.stores = [Store(range(30)), Store(range(30, ARENA))]
        self.taken: list[tuple[int, list[int]]] = []
        self.held: list[tuple[Any, Any]] = []

    @rule(which=st.integers(0, 1), count=st.integers(0, 20), spare=st.integers(0, 6))
    def take_now(self, which, count, spare):
        broker = self.stores[which].broker
        free = np.flatnonzero(broker._free_mask() & self.stores[which].rows.owned())
        found = broker.take_now(count, spare)
        assert len(found) == (count if count + spare <= free.size else 0)
        assert set(found) <= set(free.tolist())
        self.taken.append((which, found))

    @rule(which=st.integers(0, 1), count=st.integers(1, 8))
    def take_run(self, which, count):
        try:
            first = self.stores[which].broker.take_run(count, 0.0)
        except Refused:
            return
        self.taken.append((which, list(range(first, first + count))))

    @rule(data=st.data())
    def give(self, data):
        if self.taken:
            at = data.draw(st.integers(0, len(self.taken) - 1))
            which, found = self.taken.pop(at)
            self.stores[which].broker.give(found)

    @rule(
        which=st.integers(0, 1), graph=st.booleans(), first=st.integers(0, 19), n=st.integers(0, 6)
    )
    def hold(self, which, graph, first, n):
        store = self.stores[which]
        pool = store.graph if graph else store.rows
        held = pool.hold(0, np.arange(first, min(20, first + n)))
        here = held.num_present
        pool.loaded(0, held.blocks[here:], held.slots[here:])
        self.held.append((pool, held.slots))

    @rule(data=st.data())
    def drop(self, data):
        if self.held:
            pool, held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            pool.drop(held)

    @rule(
        which=st.integers(0, 1), first=st.integers(0, 19), n=st.integers(0, 9), some=st.booleans()
    )
    def lend(self, which, first, n, some):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slots, "SHORT_WAIT_S", 0.0)
            broker = self.stores[which].broker
            before = broker.graph_preferred, broker.pooled_rows()
            with broker.lent_to_graph():
                assert (broker.graph_preferred, broker.pooled_rows()) == before
                self.each_slot_is_in_one_place()
                self.hold(which, True, first, n)
                if some:
                    self.take_now(which, n, 0)
                    self.take_run(which, max(1, n))

    @rule(which=st.integers(0, 1), count=st.integers(0, 30), wish=st.integers(0, 10))
    def move(self, which, count, wish):
        ceded = self.stores[which].broker.cede(count)
        assert len(ceded) <= count
        self.stores[1 - which].broker.accept(ceded, wish)

    @invariant()
    def each_slot_is_in_one_place(self):
        places = [sorted(store.owned()) for store in self.stores] + [t for _, t in self.taken]
        assert sorted(slot for place in places for slot in place) == list(range(ARENA))
        for which, store in enumerate(self.stores):
            taken = sum(len(t) for w, t in self.taken if w == which)
            assert not (store.graph.owned() & store.rows.owned()).any()
            assert store.broker.num_slots == len(store.owned()) + taken
            assert store.broker._graph.num_owned >= LEAST
            for pool in (store.graph, store.rows):
                mine = np.concatenate([[], *(s for p, s in self.held if p is pool)])
                assert pool.pinned().sum() == np.unique(mine).size


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=tries(30, 120), stateful_step_count=25, deadline=None)
