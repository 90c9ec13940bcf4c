"""Holding blocks from several threads while reads fail: nobody works on what is not there."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockstore.errors import CorruptBlock
from loaderd.memory.residency import BlockPool, Residency


class Reader:
    """Reads that wait to be let through, and fail where told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.fail_next = False
        self.files = [SimpleNamespace(where=lambda block: f"shard+{4096 * block}")]

    def read(self, file: int, blocks: Any, slots: Any) -> None:
        fail, self.fail_next = self.fail_next, False
        self.begun.set()
        assert self.gate.wait(10)
        if fail:
            raise CorruptBlock("a page is wrong")


def ids(*blocks: int):
    return np.array(blocks, np.int64)


@pytest.fixture
def parts():
    pool, reader = BlockPool([6], 3), Reader()
    pool.add_slots(range(3))
    return pool, reader, Residency(pool, reader, 0, threading.Condition())  # type: ignore[arg-type]


def test_who_waits_for_a_read_that_fails_hears_of_it_and_holds_nothing(parts):
    pool, reader, residency = parts
    with ThreadPoolExecutor(2) as threads:
        reader.fail_next = True
        first = threads.submit(residency.hold, 0, ids(5))
        assert reader.begun.wait(10)
        waiter = threads.submit(residency.hold, 0, ids(5))
        reader.gate.set()
        for future in (first, waiter):
            try:
                held = future.result(10)
            except CorruptBlock:
                continue
            residency.drop(held)  # it came too late to wait, and read the block itself
    assert not pool.pinned().any()
    held = residency.hold(0, ids(5, 4))
    assert pool.slot_of_block[0][[5, 4]].tolist() == held.slots.tolist()


def test_a_second_read_that_succeeds_does_not_hide_the_first_one_from_its_waiter(parts):
    pool, reader, residency = parts
    reader.gate.set()
    reading, waiting = pool.hold(0, ids(5)), pool.hold(0, ids(5))
    pool.failed(0, reading.blocks, reading.slots)
    pool.drop(reading.slots)
    other, again = residency.hold(0, ids(1)), residency.hold(0, ids(5))
    with residency._changed, pytest.raises(CorruptBlock, match="block 5 could not be read"):
        residency._wait(0, waiting)
    assert pool.hold(0, ids(2)).blocks.tolist() == [2]  # the slot of the lost block is free
    residency.drop(other)
    residency.drop(again)
    assert pool.slot_of_block[0][5] == again.slots[0]
