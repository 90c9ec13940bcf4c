"""Which memory takes which macro-batch: what is needed or lent stays."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.macro.shelf import Hold, Memory, Reader, Shelf

KEYS = st.tuples(st.integers(0, 1), st.integers(0, 3))


def memory(key: Any = None, **fields: Any) -> Memory:
    return Memory(None, key=key, ready=key is not None, **fields)  # type: ignore[arg-type]


def reader(*wanted: Any, live: bool = True) -> Reader:
    return Reader(None, list(wanted), live=live)  # type: ignore[arg-type]


def test_the_next_one_goes_where_nobody_needs_what_is_there():
    shelf = Shelf([memory((0, 0)), memory((0, 1))], [reader((0, 1), (0, 2))], 2)
    chosen = shelf.next()
    assert chosen is not None
    assert (chosen[0].key, chosen[1]) == ((0, 0), (0, 2))


@pytest.mark.parametrize("fields", [{"users": 1}, {"loading": True}])
def test_what_is_lent_or_being_read_stays(fields):
    shelf = Shelf([memory((0, 0), **fields), memory((0, 1))], [reader((0, 1), (0, 2))], 2)
    assert shelf.next() is None
    assert shelf.surplus() is None


def test_nothing_is_read_into_a_memory_that_another_session_needs():
    shelf = Shelf([memory((0, 0)), memory((0, 1))], [reader((0, 1)), reader((0, 0), (0, 3))], 2)
    assert shelf.next() is None
    shelf.readers[1].live = False
    assert shelf.next() is None  # both are there, and the wish of the other one with them
    shelf.readers[1].wanted = [(0, 3)]
    chosen = shelf.next()
    assert chosen is not None
    assert chosen[1] == (0, 3)


def test_a_second_one_of_the_same_is_free():
    shelf = Shelf([memory((0, 0)), memory((0, 0)), memory()], [reader((0, 0), (0, 1))], 2)
    surplus = shelf.surplus()
    assert surplus is None  # (0, 1) is to be read first
    shelf.memories[2].key = (0, 1)
    assert shelf.surplus() is shelf.memories[1]


@given(
    st.lists(st.tuples(st.none() | KEYS, st.integers(0, 1), st.booleans()), min_size=1, max_size=4),
    st.lists(st.tuples(st.lists(KEYS, max_size=3, unique=True), st.booleans()), max_size=3),
    st.integers(1, 2),
)
def test_whatever_is_chosen_is_free_and_wanted(memories, readers, depth):
    held = [memory(key, users=users, loading=loading) for key, users, loading in memories]
    sessions = [reader(*sorted(wanted), live=live) for wanted, live in readers]
    shelf = Shelf(held, sessions, depth)
    needed = {key for r in sessions for key in shelf.near(r)}
    chosen = shelf.next()
    if chosen is not None:
        place, key = chosen
        assert not place.users
        assert not place.loading
        assert key not in {m.key for m in held}
        assert key in {key for r in sessions for key in r.wanted}
        assert place.key not in needed or shelf.find(place.key) is not place
        firsts = {r.wanted[0] for r in shelf.live} - {m.key for m in held}
        assert not firsts or key == min(firsts)
    surplus = shelf.surplus()
    if surplus is not None:
        assert len(held) > depth
        assert not surplus.users
        assert not surplus.loading
    for session in sessions:
        assert len(shelf.near(session)) <= min(depth, len(held))
        assert session.live or not shelf.near(session)


def test_obstacles_are_memories_of_others():
    waits, other = reader((0, 2)), reader((0, 0))
    waits.waiting_since = 1
    mine = memory((0, 1), users=1)
    waits.held[0, 1] = Hold(mine, 1)
    shelf = Shelf([memory((0, 0)), mine], [waits, other], 1)
    assert [(o.memory.key, o.needed_by) for o in shelf.obstacles(waits)] == [((0, 0), [other])]
    assert shelf.obstacles(other) == []
    other.live = False
    assert shelf.obstacles(waits) == []  # it can be read there now
