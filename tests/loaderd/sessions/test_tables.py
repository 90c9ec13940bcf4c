"""Tables of all nodes that sessions share: their memory, and what is in them."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.io.arena import Arena
from blockstore.kernels.renumber import NodeTable
from loaderd.api.errors import Refused
from loaderd.memory.ledger import session_entry_name
from loaderd.memory.residency import BlockPool, GraphPool
from loaderd.memory.slots import SlotBroker
from loaderd.memory.tables import RenumberingTables
from loaderd.memory.workspace import WorkspaceFull
from loaderd.sampling.renumbering import Renumbering
from loaderd.sessions.engine import Engine
from loaderd.sessions.tables import SharedTables
from tests.graphs import make_csc
from tests.loaderd.opened import held, serve, sessions_of, wait_held
from tests.loaderd.sampling.hyperbatch.test_single import make_work
from tests.stores import write_store

SLOT, SLOTS, NODES = 4096, 24, 3000  # a table takes three slots


@pytest.fixture
def made():
    """Tables of two workers, and the broker that they take slots from."""
    with Arena(SLOTS, SLOT) as arena:
        arena.data[:] = 7
        pools = GraphPool([1], SLOTS, workers=0), BlockPool([60], SLOTS)
        broker = SlotBroker(*pools, threading.Condition(), range(SLOTS), 1, str)
        yield SharedTables(broker, arena, NODES, 2), broker


def test_memory_is_taken_for_as_many_as_number_at_a_time_and_charged_in_equal_parts(made):
    tables, broker = made
    free = broker.free()
    assert tables.slots_to_come() == 6
    first = tables.join("a", 1)
    assert (broker.free(), tables.num_slots("a"), tables.num_slots("b")) == (free - 3, 3, 0)
    assert tables.slots_to_come() == 3
    assert tables.join("b", 3) is first
    assert (broker.free(), tables.num_slots("a"), tables.num_slots("b")) == (free - 6, 3, 3)
    assert tables.join("a", 1) is first
    tables.join("c", 1)
    assert broker.free() == free - 6
    assert tables.num_slots("c") == 2
    own = [first.take() for _ in range(2)]
    for table in own:
        assert table.keys is None
        assert table.values.shape == (NODES,)
        assert (table.values == -1).all()
    assert not np.shares_memory(own[0].values, own[1].values)
    for table in own:
        first.give(table)
    for member in "acb":
        assert broker.free() == free - 6
        tables.leave(member)
        tables.leave(member)
    assert broker.free() == free
    assert tables.slots_to_come() == 6


def test_tables_stay_if_the_last_other_session_leaves_while_one_joins(made, monkeypatch):
    tables, broker = made
    free, take = broker.free(), broker.take_run
    assert tables.join("a", 1) is not None

    def leave_then_take(count: int, wait_s: float) -> int:
        tables.leave("a")
        return int(take(count, wait_s))

    monkeypatch.setattr(broker, "take_run", leave_then_take)
    joined = tables.join("b", 1)
    assert (tables.num_slots("a"), tables.num_slots("b")) == (0, 6)
    assert broker.free() == free - 6
    own = [joined.take() for _ in range(2)]
    assert not np.shares_memory(own[0].values, own[1].values)
    tables.leave("b")
    assert broker.free() == free


def test_one_table_is_enough_where_there_is_no_room_for_two(made, monkeypatch):
    monkeypatch.setattr("loaderd.sessions.tables.SHORT_WAIT_S", 0.0)
    tables, broker = made
    taken = broker.take(broker.free() - 4)
    assert tables.join("a", 2).take() is not None
    assert tables.num_slots("a") == 3
    tables.leave("a")
    more = broker.take(2)
    with pytest.raises(Refused):
        tables.join("a", 2)
    assert tables.num_slots("a") == 0
    broker.give(more)
    broker.give(taken)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_table_is_clean_after_a_batch_and_after_one_that_failed(hashed):
    work: Any = make_work(4)
    keys = np.full(16, 3, np.uint32) if hashed else None
    table = NodeTable(keys, np.full(50 if keys is None else 16, 5, np.int32))
    work.tables = RenumberingTables()
    work.tables.add(table)
    work.n_id[:2] = 8, 9

    def number(nodes: list[int]) -> list[int]:
        with Renumbering(work, 2) as numbers:
            draws, counts = np.array(nodes, np.uint32), np.array([len(nodes)], np.uint32)
            edges = numbers.add(draws, np.zeros(1, np.int64), counts, 0, counts)
            return work.local[:edges].tolist()  # type: ignore[no-any-return]

    assert number([9, 20, 8]) == [1, 2, 0]
    with pytest.raises(WorkspaceFull):
        number([20, 21, 22])  # with the seeds five nodes
    assert number([22, 9, 20]) == [2, 1, 3]
    assert work.tables.take() is table
    assert (table.values == -1).all() if keys is None else (keys == 2**32 - 1).all()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = make_csc(np.random.default_rng(3).integers(0, 30, 200_000), 3)
    path = tmp_path_factory.mktemp("tables") / "store"
    write_store(path, graph, np.arange(0, 200_000, 400), 4096)
    return path


def _basis(engine: Engine, number: int) -> str:
    """What the ledger says of a session."""
    entries, _, _ = engine.status()
    (found,) = [e.basis for e in entries if e.name == session_entry_name([number])]
    return found


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch"])
def test_sessions_share_tables_and_build_the_same_batches(store, plan):
    """A hash table of these batches is smaller than one of all nodes."""
    found = {}
    for mem, shares in ((8 << 20, False), (64 << 20, True)):
        with sessions_of(store, mem, 2) as sessions:
            before, tables = held(sessions.engine), sessions.engine.resources.shared_tables()
            none = tables.slots_to_come()
            some = [sessions.attach(plan, seed=seed) for seed in range(3)]
            assert tables.slots_to_come() == (0 if shares else none)
            part = f", {-(-none // 3)} slots of tables that sessions share, seeds"
            for number in [one.session for one in some]:
                basis = _basis(sessions.engine, number)
                assert (part in basis) == shares, basis
                if shares:  # rows are cached: handing out takes no workspace
                    assert basis.startswith(f"{1 if plan == 'hyperbatch' else 2} workspaces"), basis
            seen: list[list[str]] = [[] for _ in some]
            for one, digests in zip(some, seen, strict=True):
                assert serve(one, 1, 3, digests) is None
            found[shares] = seen
            for one in some:
                sessions.engine.detach(one.session)
            wait_held(sessions.engine, before)
            assert tables.slots_to_come() == none > 0
    assert found[False] == found[True]
    assert len({digest for digests in found[True] for digest in digests}) == 9
