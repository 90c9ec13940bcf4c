"""Pieces: whole, in order, within credit, and nothing read that was taken back."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from blockstore.kernels.rows import NO_ROW
from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attached, BatchReady, Blob, ChunkReady, Piece, Release, RowGroup
from loaderd.memory.blob import write_blob
from loaderd.server.sender import Frames, Sender
from tests.loaderd.samples import RESOLVED

SLOT, SLOTS = 4096, 64
WAIT_S = 10
SPECS = (RowArraySpec("x", "float32", (25,), 100), RowArraySpec("y", "int64", (), 8))


class Broker:
    """Slots from the top, one run after the other."""

    def __init__(self, room: int = SLOTS) -> None:
        self.room, self.next, self.longest = room, SLOTS, SLOTS
        self.given: list[int] = []

    def available(self) -> int:
        return self.room

    def take_run(self, count: int, wait_s: float) -> int:
        del wait_s
        if count > self.longest:
            raise Refused("no slots side by side")
        self.next -= count
        if self.next < 0:
            raise Refused("no slots")
        return self.next

    def give(self, slots: list[int]) -> None:
        self.given += slots


class World:
    """A sender between an arena of random bytes and a client that the test plays."""

    def __init__(self, credit: int = 1 << 20, types: tuple[str, ...] = ("n",)):
        rng = np.random.default_rng(1)
        data = rng.integers(0, 256, SLOT * SLOTS, np.uint8)
        self.arena = SimpleNamespace(data=data, slot_bytes=SLOT)
        self.broker = Broker()
        self.sent: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.released: queue.Queue[Release] = queue.Queue()
        self.release = self.released.put
        self.frames = Frames(self)
        attached = Attached(
            request=1, session=3, resolved=RESOLVED, plan="minibatch", num_steps=9, window=2,
            rows=SPECS, types=types, relations=(("n", "to", "n"),),
        )  # fmt: skip
        self.sender = Sender(attached, credit, self, self.frames, lambda *m: self.sent.put(m))
        self.sender.begin(1)

    def receive(self) -> tuple[Any, Any]:
        return self.sent.get(timeout=WAIT_S)

    def quiet(self) -> bool:
        """Whether the sender waits."""
        try:
            self.sent.get(timeout=0.2)
        except queue.Empty:
            return True
        return False

    def batch(self, step: int, num: int, group: int = 0, last: bool = True) -> Any:
        """A batch of `num` rows anywhere in the lower half, and the bytes that are to come."""
        rng = np.random.default_rng(step)
        n_id, index = rng.integers(0, 99, num, np.uint32), np.arange(3)
        arrays = [("n_id", n_id), ("input_id", index)]
        structure = write_blob(self.arena.data, SLOT, (41, 40), arrays)
        at = rng.integers(0, 32 * SLOT - 100, (2, num), np.uint64)
        places = [(f"address:{s.name}", at[i]) for i, s in enumerate(SPECS)]
        if group:
            places.insert(0, ("positions", rng.permutation(num).astype(np.uint32)))
        blob = write_blob(self.arena.data, SLOT, (44, 43, 45, 42), places)
        rows = RowGroup(
            session=3, run=1, step=step, group=group, last=last, num_rows=num, blob=blob
        )
        expected = {"n_id": n_id, "input_id": index, "positions": places[0][1]}
        for i, spec in enumerate(SPECS):
            taken = [self.arena.data[int(a) : int(a) + spec.row_bytes] for a in at[i]]
            expected[f"rows:{spec.name}"] = np.concatenate(taken)
        if group:
            return rows, expected
        ready = BatchReady(
            session=3, run=1, epoch=0, step=step, num_seeds=3, nodes_per_hop=(3, num - 3),
            edges_per_hop=(), structure=structure, rows=rows,
        )  # fmt: skip
        return ready, expected

    def collect(self, blobs: list[Blob]) -> dict[str, Any]:
        """All bytes of a message, taken in as they come."""
        arrays = [a for blob in blobs for a in blob.arrays]
        end = max(a.offset + a.length * np.dtype(a.dtype).itemsize for a in arrays)
        raw, covered = np.zeros(end, np.uint8), 0
        while covered < end:
            piece, data = self.receive()
            assert isinstance(piece, Piece)
            assert covered <= piece.offset < covered + 64
            raw[piece.offset : piece.offset + data.size] = data
            covered = piece.offset + data.size
            self.taken = getattr(self, "taken", 0) + data.size
            del data
            self.sender.taken(1, self.taken)
        return {
            a.name: raw[a.offset : a.offset + a.length * np.dtype(a.dtype).itemsize].view(a.dtype)
            for a in arrays
        }


@pytest.fixture
def world():
    made = World()
    yield made
    made.sender.close()
    made.sender.join(WAIT_S)
    assert made.sender.ended
    assert len(made.broker.given) == SLOTS - made.broker.next


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])


def test_batches_arrive_whole_and_are_given_back(world):
    for step, num in enumerate((3, 700, 1000)):
        ready, expected = world.batch(step, num)
        world.sender.push(ready)
        header, none = world.receive()
        assert none is None
        assert header == structs.replace(
            ready,
            structure=header.structure,
            rows=structs.replace(ready.rows, blob=header.rows.blob),
        )
        assert header.structure.slots == header.rows.blob.slots == ()
        found = world.collect([header.structure, header.rows.blob])
        assert set(found) == {"n_id", "input_id", "rows:x", "rows:y"}
        check(found, expected)
        given = Release(session=3, run=1, step=step, group=0)
        assert world.released.get(timeout=WAIT_S) == given


def test_a_further_group_comes_with_its_positions(world):
    group, expected = world.batch(5, 333, group=1)
    world.sender.push(group)
    header, _ = world.receive()
    check(world.collect([header.blob]), expected)
    assert world.released.get(timeout=WAIT_S).group == 1


def test_of_several_types_rows_come_that_there_are():
    world = World(types=("n", "m"))
    ready, expected = world.batch(0, 400)
    for array in ready.rows.blob.arrays:
        slot = ready.rows.blob.slots[array.offset // SLOT]
        at = slot * SLOT + array.offset % SLOT
        world.arena.data[at : at + 80].view(np.uint64)[:] = NO_ROW  # the first ten have none
    world.sender.push(ready)
    header, _ = world.receive()
    found = world.collect([header.structure, header.rows.blob])
    for spec in SPECS:
        wanted = expected[f"rows:{spec.name}"][10 * spec.row_bytes :]
        np.testing.assert_array_equal(found[f"rows:{spec.name}"], wanted)
    world.sender.close()


@pytest.mark.parametrize("form", ["ranges", "rows", "index"])
def test_hop_wise_batches_of_every_form(world, form):
    num, data = 90, world.arena.data
    first, counts = ((7, 500), (60, 30)) if form == "ranges" else ((), ())
    places = ((4096, 30000), (64, 20000)) if form == "ranges" else ((4096,), (64,))
    ids = np.arange(num) * 3 % 50
    index = -1 if form == "ranges" else 50 * SLOT
    if index >= 0:
        data[index : index + 8 * num].view(np.int64)[:] = ids
    world.sender.push(
        ChunkReady(
            session=3, run=1, epoch=0, step=0, num_rows=num, form=form, first=first,
            counts=counts, places=places, index=index,
        )
    )  # fmt: skip
    header, _ = world.receive()
    assert (header.form, header.places, header.index) == ("pieces", (), -1)
    found = world.collect([header.pieces])
    rows = np.concatenate([np.arange(7, 67), np.arange(500, 530)]) if form == "ranges" else ids
    np.testing.assert_array_equal(found["input_id"], rows)
    for spec, at in zip(SPECS, places, strict=True):
        width = spec.row_bytes
        if form == "index":
            wanted = [data[at[0] + i * width : at[0] + (i + 1) * width] for i in ids]
        else:
            sizes = counts or (num,)
            wanted = [data[a : a + n * width] for a, n in zip(at, sizes, strict=True)]
        np.testing.assert_array_equal(found[f"rows:{spec.name}"], np.concatenate(wanted))


def test_no_more_is_on_its_way_than_the_credit():
    world = World(credit=10_000)
    world.sender.push(world.batch(0, 900)[0])
    world.receive()
    on_the_way = 0
    while not world.sent.empty() or not on_the_way:
        on_the_way += world.receive()[1].size
        threading.Event().wait(0.05)
    assert 0 < on_the_way <= 10_000
    assert world.quiet()
    world.sender.taken(1, on_the_way + 1)  # more than was sent: not believed
    world.sender.taken(7, on_the_way)  # of another run
    assert world.quiet()
    world.sender.taken(1, on_the_way)
    assert isinstance(world.receive()[0], Piece)
    world.sender.close()


def test_what_belongs_to_an_older_run_is_given_back_unread(world):
    world.sender.begin(2)
    ready, _ = world.batch(0, 50)
    world.arena.data[43 * SLOT : 46 * SLOT] = 0xFF  # written over: no addresses any more
    world.sender.push(ready)
    assert world.released.get(timeout=WAIT_S).run == 1
    assert world.sent.empty()
    world.sender.begin(1)  # a run does not come back
    world.sender.push(ready)
    assert world.released.get(timeout=WAIT_S).run == 1
    assert world.sent.empty()


def test_a_row_that_no_buffer_holds_is_refused():
    world = World()
    wide = structs.replace(SPECS[0], row_bytes=world.frames.capacity + 1)
    attached = Attached(
        request=1, session=4, resolved=RESOLVED, plan="chunks", num_steps=9, window=1,
        rows=(wide,), types=("n",), relations=(),
    )  # fmt: skip
    with pytest.raises(Refused, match="a row has"):
        Sender(attached, 1, world, world.frames, world.sent.put)
    world.sender.close()


def test_buffers_are_as_long_as_what_is_free_side_by_side():
    world = World()
    world.broker.room, world.broker.longest, world.broker.next = 10 * SLOTS, 3, 40
    assert Frames(world).capacity == 2 * SLOT
    assert 40 - world.broker.next == 2 * 8
    assert not world.broker.given
    world.sender.close()


def test_buffers_fit_what_is_free():
    world = World()
    world.broker.room = 16
    assert Frames(world).capacity == SLOT
    world.broker.next = 1
    with pytest.raises(Refused):
        Frames(world)
    assert len(world.broker.given) == 1
    world.sender.close()
