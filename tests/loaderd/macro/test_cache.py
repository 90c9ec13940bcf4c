"""Which memory takes which macro-batch: what is needed or lent stays."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.macro.cache import MacroCache, MacroLease, MacroMemory, MacroReader

KEYS = st.tuples(st.integers(0, 1), st.integers(0, 3))


def memory(key: Any = None, **fields: Any) -> MacroMemory:
    return MacroMemory(None, key=key, ready=key is not None, **fields)  # type: ignore[arg-type]


def reader(*wanted: Any, live: bool = True) -> MacroReader:
    return MacroReader(None, list(wanted), live=live)  # type: ignore[arg-type]


def test_the_next_one_goes_where_nobody_needs_what_is_there():
    cache = MacroCache([memory((0, 0)), memory((0, 1))], [reader((0, 1), (0, 2))], 2)
    chosen = cache.next()
    assert chosen is not None
    assert (chosen[0].key, chosen[1]) == ((0, 0), (0, 2))


@pytest.mark.parametrize("fields", [{"users": 1}, {"loading": True}])
def test_what_is_lent_or_being_read_stays(fields):
    cache = MacroCache([memory((0, 0), **fields), memory((0, 1))], [reader((0, 1), (0, 2))], 2)
    assert cache.next() is None
    assert cache.surplus() is None


def test_nothing_is_read_into_a_memory_that_another_session_needs():
    cache = MacroCache(
        [memory((0, 0)), memory((0, 1))], [reader((0, 1)), reader((0, 0), (0, 3))], 2
    )
    assert cache.next() is None
    cache.readers[1].live = False
    assert cache.next() is None  # both are there, and the wish of the other one with them
    cache.readers[1].wanted = [(0, 3)]
    chosen = cache.next()
    assert chosen is not None
    assert chosen[1] == (0, 3)


def test_a_second_one_of_the_same_is_free():
    cache = MacroCache([memory((0, 0)), memory((0, 0)), memory()], [reader((0, 0), (0, 1))], 2)
    surplus = cache.surplus()
    assert surplus is None  # (0, 1) is to be read first
    cache.memories[2].key = (0, 1)
    assert cache.surplus() is cache.memories[1]


@given(
    st.lists(st.tuples(st.none() | KEYS, st.integers(0, 1), st.booleans()), min_size=1, max_size=4),
    st.lists(st.tuples(st.lists(KEYS, max_size=3, unique=True), st.booleans()), max_size=3),
    st.integers(1, 2),
)
def test_whatever_is_chosen_is_free_and_wanted(memories, readers, depth):
    held = [memory(key, users=users, loading=loading) for key, users, loading in memories]
    sessions = [reader(*sorted(wanted), live=live) for wanted, live in readers]
    cache = MacroCache(held, sessions, depth)
    needed = {key for r in sessions for key in cache.near(r)}
    chosen = cache.next()
    if chosen is not None:
        place, key = chosen
        assert not place.users
        assert not place.loading
        assert key not in {m.key for m in held}
        assert key in {key for r in sessions for key in r.wanted}
        assert place.key not in needed or cache.find(place.key) is not place
        firsts = {r.wanted[0] for r in cache.live} - {m.key for m in held}
        assert not firsts or key == min(firsts)
    surplus = cache.surplus()
    if surplus is not None:
        assert len(held) > depth
        assert not surplus.users
        assert not surplus.loading
    for session in sessions:
        assert len(cache.near(session)) <= min(depth, len(held))
        assert session.live or not cache.near(session)


def test_obstacles_are_memories_of_others():
    waits, other = reader((0, 2)), reader((0, 0))
    waits.waiting_since = 1
    mine = memory((0, 1), users=1)
    waits.held[0, 1] = MacroLease(mine, 1)
    cache = MacroCache([memory((0, 0)), mine], [waits, other], 1)
    assert [(o.memory.key, o.needed_by) for o in cache.obstacles(waits)] == [((0, 0), [other])]
    assert cache.obstacles(other) == []
    other.live = False
    assert cache.obstacles(waits) == []  # it can be read there now
