"""Arrays held in memory: pages are brought once, and again where that failed."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.format import PAGE_BYTES, BlockGeometry, RowArray
from loaderd.api.errors import Refused
from loaderd.sampling.propagated.source import (
    ArrayCache,
    PendingRead,
    ResidentArray,
    held_bytes,
    load_all,
)

PAGES, PER_BLOCK, PER_SHARD = 11, 2, 2  # four pages a shard
GEOMETRY = BlockGeometry(PER_BLOCK * PAGE_BYTES, PER_BLOCK * PAGE_BYTES, 6, PER_SHARD, 1)


class Array:
    """Eleven pages, each of its own number."""

    def __init__(self, path: str = "hops") -> None:
        self.array = RowArray(path, "uint8", PAGES, (PAGE_BYTES,))
        self.file, self.num_pages, self.geometry = 3, PAGES, GEOMETRY

    def runs(self, low: int, high: int) -> Any:
        """Shard, first page in it, pages: of pages [low, high)."""
        cuts = sorted({low, high, *range(0, high, PER_BLOCK * PER_SHARD)} - set(range(low)))
        per = PER_BLOCK * PER_SHARD
        return np.array(
            [[a // per, a % per, b - a] for a, b in itertools.pairwise(cuts)], np.int64
        ).reshape(-1, 3)


class Reader:
    """Writes the number of each page; a read that is to fail writes rubbish."""

    def __init__(self, data: Any) -> None:
        self.data, self.fails, self.read = data, False, 0

    def fetch(self, file: int, runs: Any, places: Any) -> Any:
        assert file == 3
        for (shard, page, pages), place in zip(runs.tolist(), places.tolist(), strict=True):
            for i in range(pages):
                number = 0xEE if self.fails else 1 + shard * PER_BLOCK * PER_SHARD + page + i
                self.data[place + i * PAGE_BYTES :][:PAGE_BYTES] = number
            self.read += pages
        fails = self.fails

        def wait() -> None:
            if fails:
                raise OSError("cannot read")

        return SimpleNamespace(wait=wait)


def make_held() -> tuple[ResidentArray, Reader]:
    base = 2 * PAGE_BYTES
    data = np.zeros(base + held_bytes(Array()), np.uint8)  # type: ignore[arg-type]
    reader = Reader(data)
    return ResidentArray(Array(), reader, base, data[base:]), reader  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, PAGES), st.integers(0, PAGES), st.booleans(), st.booleans()),
        max_size=8,
    )
)
def test_what_was_waited_for_without_an_error_is_there(asked):
    """`together`: two ask for the same before either waits."""
    held, reader = make_held()
    there: set[int] = set()
    for a, b, fails, together in asked:
        low, high = sorted((a, b))
        reader.fails, before = fails, reader.read
        arrivals = [PendingRead() for _ in range(1 + together)]
        for arrival in arrivals:
            held.fetch(low, high, arrival)
        assert reader.read - before == len(set(range(low, high)) - there), "pages are read once"
        good = set(range(low, high)) <= there or not fails
        for arrival in arrivals:
            if good:
                arrival.wait()
            else:
                with pytest.raises(OSError, match="cannot read"):
                    arrival.wait()
        there |= set(range(low, high)) if good else set()
        for page in there:
            found = reader.data[held.base + page * PAGE_BYTES :][:PAGE_BYTES]
            assert (found == page + 1).all(), f"page {page}"


def test_all_is_loaded_piece_by_piece(monkeypatch):
    monkeypatch.setattr("loaderd.sampling.propagated.source._PIECE_PAGES", 3)
    held, reader = make_held()
    assert len(list(load_all([held], lambda: False))) == 3
    assert reader.read == PAGES
    arrival = PendingRead()
    held.fetch(0, PAGES, arrival)
    assert not arrival.readings
    reader.fails = True
    other, reader = make_held()
    reader.fails = True
    with pytest.raises(OSError, match="cannot read"):
        list(load_all([other], lambda: False))


class Broker:
    """Slots that are taken in turn."""

    def __init__(self, maximum: int) -> None:
        self.left, self.first = maximum, 0

    def take_run(self, count: int, wait_s: float) -> int:
        if count > self.left:
            raise Refused(f"{count} arena slots are not free")
        self.left, self.first = self.left - count, self.first + count
        return self.first - count

    def give(self, slots: Any) -> None:
        self.left += len(slots)


@contextmanager
def array_cache(maximum: int) -> Iterator[tuple[ArrayCache, Broker]]:
    slot = 4 * PAGE_BYTES
    broker, data = Broker(maximum), np.zeros(40 * slot, np.uint8)
    yield ArrayCache(broker, SimpleNamespace(data=data), Reader(data), slot), broker  # type: ignore[arg-type]


def test_arrays_are_held_once_and_leave_with_their_last_user():
    a, b = Array("a"), Array("b")
    each = -(-PAGES * (PAGE_BYTES + 1) // (4 * PAGE_BYTES))
    with array_cache(20) as (held, broker):
        first, second = held.take([a, b]), held.take([a])  # type: ignore[list-item]
        assert first[0] is second[0]
        (entry,) = held.ledger_entries()
        assert entry.num_bytes == 2 * each * 4 * PAGE_BYTES
        assert held.missing_slots([a, Array("c")]) == each  # type: ignore[list-item]
        held.give(first)
        assert broker.left == 20 - each
        held.give(second)
        assert (held.ledger_entries(), broker.left) == ([], 20)


def test_what_has_no_room_leaves_nothing_behind():
    with array_cache(4) as (held, broker):
        with pytest.raises(Refused, match="not free"):
            held.take([Array("a"), Array("b")])  # type: ignore[list-item]
        assert (held.ledger_entries(), broker.left) == ([], 4)
        held.give(held.take([Array("b")]))  # type: ignore[list-item]
        assert broker.left == 4


def test_pages_whose_read_could_not_begin_are_read_by_the_next(monkeypatch):
    held, reader = make_held()
    fetch = reader.fetch

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(reader, "fetch", no_memory)
    with pytest.raises(MemoryError):
        held.fetch(2, 5, PendingRead())
    monkeypatch.setattr(reader, "fetch", fetch)
    arrival = PendingRead()
    held.fetch(2, 5, arrival)
    assert reader.read == 3
    arrival.wait()


def test_what_was_begun_before_an_error_is_waited_for(monkeypatch):
    (one, first), (other, second) = make_held(), make_held()

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(second, "fetch", no_memory)
    with pytest.raises(MemoryError):
        list(load_all([one, other], lambda: False))
    assert first.read == PAGES
    one.fetch(0, PAGES, again := PendingRead())
    assert first.read == PAGES
    assert not again.readings  # all that was on its way is known to be here
