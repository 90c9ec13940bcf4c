"""Rows of a batch, in place or staged, against the rows themselves; and reads that fail."""

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import CorruptBlock
from blockstore.format import NodeType, RowArray, row_geometry
from blockstore.kernels.rows import ABSENT, NO_ROW
from loaderd.memory.ledger import ServedRows
from loaderd.memory.residency import BlockPool, Residency
from loaderd.memory.workspace import RowName
from loaderd.sampling import rows
from loaderd.sampling.rows import RowAssembler, ServedFiles

BLOCK, SLOT, FIRST, NODES, WIDTHS = 4096, 4096, 10, 60, (1500, 700, 24)
IDS = RowArray("ids", "uint32", NODES)
NODE = NodeType("node", FIRST, NODES, IDS, IDS)
SERVED = [
    ServedRows(str(w), NODE, RowArray(str(w), "uint8", NODES, (w,)), i)
    for i, w in enumerate(WIDTHS)
]
GEOMETRY = [row_geometry(s.array, BLOCK) for s in SERVED]
TOP = FIRST + NODES + 10  # store ids of all types


def row(node: int, width: int) -> Any:
    return (np.arange(width) + 7 * node + width).astype(np.uint8)


class Reader:
    """Blocks made up as they are read; of files in `bad` none can be."""

    def __init__(self, data: Any) -> None:
        self.data, self.bad = data, set[int]()
        self.files = [
            SimpleNamespace(
                geometry=SimpleNamespace(locate=lambda b: (0, b)),
                shards=["shard"],
                holes=None,
                pages=None,
            )
            for _ in SERVED
        ]

    def read(self, file: int, blocks: Any, slots: Any) -> None:
        assert (np.diff(blocks) > 0).all()
        for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
            self.data[slot * SLOT :][:SLOT] = self.block(file, block)

    def block(self, file: int, block: int) -> Any:
        if file in self.bad:
            raise CorruptBlock("a page is wrong")
        width, per = WIDTHS[file], GEOMETRY[file].rows_per_block
        found = np.zeros(SLOT, np.uint8)
        for i, node in enumerate(range(block * per, min(NODES, (block + 1) * per))):
            found[i * width : (i + 1) * width] = row(node, width)
        return found

    def stream(self, file: int, runs: Any, transit: Any, consume: Any, rows: Any = None) -> Any:
        """A block is a page; a reader thread has one run at a time."""
        assert rows is None  # no file has holes
        for i, (_, first, pages, *_) in enumerate(runs.tolist()):
            assert pages <= transit.pages
            with transit.buffer() as buffer:
                for page in range(pages):
                    buffer[page * SLOT :][:SLOT] = self.block(file, first + page)
                consume(i, i + 1, buffer)
        return SimpleNamespace(wait=lambda: None)


class Parts:
    """An assembler with a pool of some slots; others for transit and for rows."""

    def __init__(self, pool_slots: int) -> None:
        self.data = np.zeros(200 * SLOT, np.uint8)
        self.pool = BlockPool([g.num_blocks for g in GEOMETRY], 200)
        self.pool.add_slots(range(pool_slots))
        self.reader = Reader(self.data)
        residency = Residency(self.pool, self.reader, 0, threading.Condition())  # type: ignore[arg-type]
        files = ServedFiles(SERVED, self.reader, 0, self.data, SLOT, BLOCK, "uint32")  # type: ignore[arg-type]
        self.assembler = RowAssembler(files, residency, SimpleNamespace(known=None))  # type: ignore[arg-type]
        finest = min(g.rows_per_block for g in GEOMETRY)
        maximum = max(TOP // finest + 1, *(g.num_blocks for g in GEOMETRY))
        self.work: Any = SimpleNamespace(
            items=np.zeros(TOP, np.uint32), marks=np.zeros(maximum, np.uint8),
            rows=[RowName(s.number, s.name) for s in SERVED],
            addresses=[np.zeros(TOP, np.uint64) for _ in SERVED], blocks=np.zeros(TOP, np.int32),
            block_starts=np.zeros(maximum + 1, np.int64), order=np.zeros(TOP, np.uint32),
        )  # fmt: skip

    def put(self, nodes: Any) -> int:
        self.work.items[: len(nodes)] = nodes
        return len(nodes)

    def area(self, num: int) -> list[list[int]]:
        """Slots for all rows of each array, where no row lies yet."""
        arrays = [array[:num] for array in self.work.addresses]
        used = {int(a) // SLOT for array in arrays for a in array if a < NO_ROW}
        free, found = [slot for slot in range(70, 200) if slot not in used], []
        for width in WIDTHS:
            count = -(-NODES // (SLOT // width))
            found.append(free[:count])
            free = free[count:]
        return found


@settings(deadline=None, max_examples=60)
@given(
    nodes=st.lists(st.integers(0, TOP - 1), max_size=50),
    pool_slots=st.integers(0, 60),
    transit=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 50), max_size=2),
    held=st.booleans(),
    most=st.sampled_from([0, 1, 16]),
)
def test_every_row_is_where_its_address_says(nodes, pool_slots, transit, cuts, held, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_MOST", most)
        check_addresses(nodes, pool_slots, transit, cuts, held)


def check_addresses(nodes, pool_slots, transit, cuts, held):
    parts = Parts(pool_slots)
    num = parts.put(nodes)
    if held:  # blocks that another batch uses stay
        other = parts.assembler.address(parts.work, num, 0)
        parts.put(nodes)
    found = parts.assembler.address(parts.work, num, 0)
    missing = [int((a[:num] == ABSENT).sum()) for a in parts.work.addresses]
    assert list(found.missing_rows) == missing
    in_place = parts.assembler.in_place(parts.work, num) if found.num_missing else range(num)
    assert len(in_place) == num - found.num_missing
    bounds = sorted({0, found.num_missing, *(min(c, found.num_missing) for c in cuts)})
    copied = 0
    for low, high in itertools.pairwise(bounds):
        area = parts.area(num)
        copied += parts.assembler.stage(parts.work, low, high, area, np.arange(60, 60 + transit))
        check(parts, parts.work.order[low:high], nodes)
    assert copied == sum(missing)
    check(parts, range(num), nodes)
    assert not parts.work.marks.any()
    parts.assembler.drop(found.pins)
    if held:
        parts.assembler.drop(other.pins)
    assert not parts.pool.pinned().any()


def test_a_large_batch_holds_files_that_have_room_and_reads_what_is_absent(monkeypatch):
    monkeypatch.setattr(rows, "_MOST", 1)
    parts = Parts(60)
    half = parts.put(range(FIRST, FIRST + NODES // 2))
    parts.assembler.drop(parts.assembler.address(parts.work, half, 0).pins)
    before = parts.pool.num_present(0)
    assert 0 < before < GEOMETRY[0].num_blocks
    nodes = list(range(FIRST, FIRST + NODES - 2))  # a block stays absent
    found = parts.assembler.address(parts.work, parts.put(nodes), 0)
    assert found.pins.files == (0, 1, 2)
    assert found.pins.held[0].num_present == 0  # the others need no pins of their own
    assert parts.pool.num_present(0) == before + found.pins.held[0].slots.size
    assert not parts.pool.complete(0)
    assert found.num_missing == 0
    check(parts, range(len(nodes)), nodes)
    again = parts.assembler.address(parts.work, parts.put(nodes), 0)
    assert not again.pins.held
    for pins in (found.pins, again.pins):
        parts.assembler.drop(pins)
    assert not parts.pool.pinned().any()


def test_a_block_that_comes_after_it_was_left_out_is_not_addressed(monkeypatch):
    """Another batch brings it before addresses are looked up; this one would not keep it there."""
    parts = Parts(2)
    residency, came = parts.assembler._residency, []
    hold, other = residency.hold, residency.hold(0, np.array([20]))

    def late(file: int, *arguments: Any) -> Any:
        found = hold(file, *arguments)
        if file == 0:
            residency.drop(other)
            came.append(hold(0, found.left_out[:1]))
        return found

    monkeypatch.setattr(residency, "hold", late)
    per = GEOMETRY[0].rows_per_block
    nodes = [FIRST + block * per for block in range(4)]
    found = parts.assembler.address(parts.work, parts.put(nodes), 0)
    there = np.flatnonzero(parts.pool.slot_of_block[0] >= 0).tolist()
    addressed = np.flatnonzero(parts.work.addresses[0][:4] != ABSENT).tolist()
    assert there == sorted([*addressed, *came[0].blocks.tolist()])
    assert addressed == found.pins.held[0].blocks.tolist()
    assert found.missing_rows[0] == 3
    residency.drop(came[0])
    parts.assembler.drop(found.pins)


def test_those_blocks_stay_of_which_a_batch_wants_most():
    """Hot rows need not be the first: a store may stand partition by partition."""
    per, last = GEOMETRY[0].rows_per_block, GEOMETRY[0].num_blocks - 1
    one_of_each = [FIRST + block * per for block in range(last + 1)]
    whole = range(FIRST + (last - 1) * per, FIRST + last * per)
    parts = Parts(2)
    num = parts.put([*one_of_each, *whole, FIRST + 1])
    found = parts.assembler.address(parts.work, num, 0)
    assert np.flatnonzero(parts.pool.slot_of_block[0] >= 0).tolist() == [0, last - 1]
    parts.assembler.drop(found.pins)


def check(parts: Parts, positions: Any, nodes: Any) -> None:
    for i in positions:
        for a, width in enumerate(WIDTHS):
            address = int(parts.work.addresses[a][i])
            if not FIRST <= nodes[i] < FIRST + NODES:
                assert address == int(NO_ROW)
                continue
            found = parts.data[address : address + width]
            assert (found == row(nodes[i] - FIRST, width)).all(), f"node {nodes[i]}, {width} B"


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_nothing_is_held_after_a_read_that_fails(bad, whole):
    """Blocks of arrays before it were there, or were read; `whole`: an array is held as a file."""
    parts = Parts(60)
    if whole:
        every = range(FIRST, FIRST + NODES)
        parts.assembler.drop(parts.assembler.address(parts.work, parts.put(every), 0).pins)
        blocks = np.arange(GEOMETRY[bad].num_blocks)
        slots = parts.pool.slot_of_block[bad][blocks].astype(np.int64)
        assert parts.pool.remove_slots(slots)
        parts.pool.add_slots(slots.tolist())
    num = parts.put(range(FIRST, FIRST + 30))
    parts.reader.bad = {bad}
    with pytest.raises(CorruptBlock, match="a page is wrong"):
        parts.assembler.address(parts.work, num, 0)
    assert not parts.pool.pinned().any()
    assert not parts.work.marks.any()
    parts.reader.bad = set()
    found = parts.assembler.address(parts.work, num, 0)
    assert found.num_missing == 0
    check(parts, range(num), list(range(FIRST, FIRST + 30)))
    parts.assembler.drop(found.pins)
    assert not parts.pool.pinned().any()
