"""Blocks read into slots: across shards, with errors among good ones, and what is waited for."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import CorruptBlock
from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.io.arena import Arena
from blockstore.io.reader import BlockReader
from blockstore.io.reading import ReadingQueue, wait_all
from blockstore.io.threads import ReadThreads
from blockstore.kernels.crc import page_crcs
from blockstore.store import BlockedFile

BLOCKS, PER_SHARD, SLOTS = 8, 3, 6
SIZE = 2 * PAGE_BYTES  # of a block


class _Asked:
    """Notes that it was waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waited = error, False

    def wait(self) -> None:
        self.waited = True
        if self.error is not None:
            raise self.error


def test_all_are_waited_for_and_the_first_error_is_told():
    asked = [_Asked(), _Asked(OSError("first")), _Asked(), _Asked(OSError("second"))]
    with pytest.raises(OSError, match="first"):
        wait_all(asked)
    assert all(one.waited for one in asked)
    wait_all([_Asked()])
    wait_all([])


def test_a_queue_waits_for_the_first_where_it_is_full_and_for_all_at_its_end():
    asked, done = [_Asked() for _ in range(4)], list[int]()
    with ReadingQueue(2) as queue:
        for number, one in enumerate(asked):
            queue.make_room()
            assert [a.waited for a in asked].count(True) == max(0, number - 1) == len(done)
            queue.add([one], lambda number=number: done.append(number))
    assert done == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["on the way", "at the end", "inside"])
def test_a_queue_tells_the_first_error_and_leaves_nothing_on_the_way(where):
    asked, done = [_Asked(), _Asked(OSError("read")), _Asked(OSError("later"))], list[str]()

    def use() -> None:
        with ReadingQueue(3) as queue:
            for one in asked:
                queue.add([one], lambda: done.append("done"))
            if where == "on the way":
                queue.make_room(2)
            elif where == "inside":
                raise OSError("inside")

    with pytest.raises(OSError, match="inside" if where == "inside" else "read"):
        use()
    assert all(one.waited for one in asked)
    assert done == ["done"] * (where != "inside")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> tuple[BlockedFile, np.ndarray]:
    """Eight blocks of two pages in shards of three, each with a page of rubbish at its end."""
    folder = tmp_path_factory.mktemp("file")
    return make_file(folder)


def make_file(folder: Path) -> tuple[BlockedFile, np.ndarray]:
    content = np.random.default_rng(1).integers(0, 256, (BLOCKS, SIZE)).astype(np.uint8)
    shards = []
    for first in range(0, BLOCKS, PER_SHARD):
        shards.append(folder / str(first))
        rubbish = bytes([0xEE]) * SIZE
        shards[-1].write_bytes(content[first : first + PER_SHARD].tobytes() + rubbish)
    crcs = np.empty(content.size // PAGE_BYTES, np.uint32)
    page_crcs(content.reshape(-1), crcs.size, crcs)
    geometry = BlockGeometry(SIZE, SIZE, BLOCKS, PER_SHARD, 1)
    return BlockedFile("array", geometry, tuple(shards), crcs), content


@pytest.fixture(scope="module")
def arena():
    with Arena(SLOTS, 2 * SIZE) as made:
        yield made


@settings(deadline=None)
@given(
    blocks=st.sets(st.integers(0, BLOCKS - 1), max_size=SLOTS),
    order=st.permutations(range(SLOTS)),
    threads=st.sampled_from([1, 3]),
)
def test_blocks_come_to_their_slots_over_all_shards(file, arena, blocks, order, threads):
    stored, content = file
    wanted = np.array(sorted(blocks), np.int64)
    slots = np.array(order[: wanted.size], np.int64)
    with BlockReader([stored], arena.data, 2 * SIZE, threads=threads) as reader:
        reader.read(0, wanted, slots)
        assert reader.blocks_read == wanted.size
    for block, slot in zip(wanted, slots, strict=True):
        assert (arena.data[2 * SIZE * slot :][:SIZE] == content[block]).all(), f"block {block}"


@pytest.mark.parametrize("bad", [0, 2, 7])
def test_an_error_among_blocks_that_can_be_read_is_told(tmp_path, arena, bad):
    """Blocks 0, 2, 4 and 7 are read together; good ones come, whichever is bad."""
    stored, content = make_file(tmp_path)
    shard, offset = stored.geometry.locate(bad)
    with stored.shards[shard].open("r+b") as raw:
        raw.seek(offset + PAGE_BYTES + 5)
        byte = raw.read(1)[0]
        raw.seek(offset + PAGE_BYTES + 5)
        raw.write(bytes([byte ^ 1]))
    wanted = np.array([0, 2, 4, 7])
    with BlockReader([stored], arena.data, 2 * SIZE, threads=1) as reader:
        with pytest.raises(CorruptBlock, match=rf"{stored.shards[shard]}\+{offset + PAGE_BYTES}"):
            reader.read(0, wanted, np.arange(4))
        assert (reader.errors, reader.retries) == (1, 1)
        assert reader.bytes_read == 3 * SIZE
        for slot in np.flatnonzero(wanted != bad):
            assert (arena.data[2 * SIZE * slot :][:SIZE] == content[wanted[slot]]).all()
        good = wanted[wanted != bad]
        reader.read(0, good, np.arange(good.size))


def test_what_is_urgent_comes_before_what_waits_and_all_is_done_before_the_end():
    threads, order, go = ReadThreads(1), list[str](), threading.Event()
    begun = threading.Event()

    def wait(_queue: Any) -> None:
        begun.set()
        go.wait(10)

    threads.put(wait)
    assert begun.wait(10)
    for name, urgent in (("a", False), ("b", False), ("c", True), ("d", False), ("e", True)):
        threads.put(lambda _queue, name=name: order.append(name), urgent)
    go.set()
    threads.close()
    assert "".join(order) == "ceabd"
