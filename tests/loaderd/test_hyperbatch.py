"""Hyperbatches: schedules of blocks; then the row cache over real files."""

import queue
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.errors import CorruptBlock
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader
from blockstore.store import open_store, read_rows
from loaderd.memory.ledger import served_rows
from loaderd.memory.residency import BlockPool
from loaderd.monitoring.devicecost import FLASH
from loaderd.plans.hyperbatch import block_schedule
from loaderd.sampling.hyperbatch.entries import Needs, table_bytes
from loaderd.sampling.hyperbatch.regions import (
    CacheShare,
    StayingRegions,
    area_slots_of,
    rows_by_type,
)
from loaderd.sampling.hyperbatch.rowcache import RowCache
from loaderd.sampling.rows import ServedFiles
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.progress import Progress
from preprocess.sources.plain import PlainSource
from tests.heterostores import random_hetero, write_hetero_store

BLOCK = 4096


def count_reads(pool: BlockPool, groups: list[np.ndarray]) -> int:
    """Reads of a pool that is asked for groups of blocks, one after the other."""
    reads = 0
    for blocks in groups:
        held = pool.hold(0, np.asarray(blocks, np.int64))
        fresh = slice(held.num_present, None)
        pool.loaded(0, held.blocks[fresh], held.slots[fresh])
        reads += held.blocks[fresh].size
        pool.drop(held.slots)
        pool.tick += 1
    return reads


def test_twenty_reads_become_five():
    """Fig. 5 of AGNES: four targets in two minibatches, five blocks, room for two."""
    five = np.arange(5)
    one_by_one, together = BlockPool([5], 2), BlockPool([5], 2)
    one_by_one.add_slots(range(2))
    together.add_slots(range(2))
    assert count_reads(one_by_one, [[block] for _ in range(4) for block in five]) == 20
    schedule = block_schedule(np.ones(5, np.uint8), np.zeros(5, bool), True, 1)
    assert count_reads(together, schedule) == 5


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40),
    st.booleans(),
    st.integers(1, 9),
)
def test_a_schedule_has_each_needed_block_once_and_those_in_memory_first(blocks, upward, share):
    needed = np.array([n for n, _ in blocks], np.uint8)
    present = np.array([p for _, p in blocks], bool)
    groups = block_schedule(needed, present, upward, share)
    order = [int(b) for group in groups for b in group]
    assert sorted(order) == np.flatnonzero(needed).tolist()
    assert all(0 < len(group) <= share for group in groups)
    assert all((np.diff(group) > 0).all() for group in groups)
    kinds = [bool(present[b]) for b in order]
    assert kinds == sorted(kinds, reverse=True)
    absent = [int(g[0]) for g in groups if not present[g[0]]]
    assert absent == sorted(absent, reverse=not upward)


def test_directions_alternate_so_that_what_was_read_last_is_used_first():
    pool = BlockPool([10], 4)
    pool.add_slots(range(4))
    reads = []
    for hop in range(4):
        everything = np.arange(10)
        present = pool.present_mask(0, everything)
        groups = block_schedule(np.ones(10, np.uint8), present, hop % 2 == 0, 2)
        reads.append(count_reads(pool, groups))
    assert reads == [10, 6, 6, 6]  # what an optimal policy reads of a scan with room for four


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Rows of 40 and 8 bytes over several blocks."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(3)
    source = folder / "source"
    source.mkdir()
    np.save(source / "edge_index.npy", rng.integers(0, 2000, (2, 5000)))
    np.save(source / "node_feat.npy", rng.standard_normal((2000, 10), dtype=np.float32))
    np.save(source / "node_label.npy", rng.integers(0, 9, 2000))
    with (folder / "progress.txt").open("w") as stream:
        ingest(
            PlainSource(source), folder / "store", IngestOptions(block_bytes=BLOCK),
            Progress(stream),
        )  # fmt: skip
    return open_store(folder / "store")


class Kit:
    """A row cache over a store's row files, in memory of its own."""

    def __init__(self, store, *entries: int) -> None:
        """`entries`: of each node type."""
        self.store, self.served = store, served_rows(store.manifest)
        types = rows_by_type(self.served)
        shares = [CacheShare(entries=count) for count in entries]
        rows = area_slots_of(types, entries, BLOCK)
        tables = -(-table_bytes(types, "uint32", shares) // BLOCK)
        self.data = aligned_buffer((rows + tables + 2) * BLOCK)
        files = [store.rows(r.array) for r in self.served]
        self.reader = BlockReader(files, self.data, BLOCK, threads=2)
        at = rows * BLOCK
        transit = [self.data[-2 * BLOCK : -BLOCK], self.data[-BLOCK:]]
        self.cache = RowCache(
            ServedFiles(
                self.served, self.reader, 0, self.data, BLOCK, store.manifest.block_bytes, "uint32"
            ),
            shares, self.data[at : at + tables * BLOCK], list(range(rows)), transit, FLASH,
            StayingRegions(self.served, BLOCK).join(),
        )  # fmt: skip
        self.cache.begin_run()

    def check(self, nodes: np.ndarray) -> None:
        """Every row of the nodes is where the cache says."""
        for a, rows in enumerate(self.served):
            first, count = rows.node_type.first, rows.node_type.num_nodes
            own = nodes[(nodes >= first) & (nodes < first + count)]
            expected = read_rows(self.store, rows.array)[own - first]
            addresses = np.zeros(own.size, np.uint64)
            self.cache.address(a, own, addresses)
            width = rows.array.row_bytes
            for at, row in zip(addresses.tolist(), expected, strict=True):
                assert self.data[at : at + width].tobytes() == row.tobytes()


@pytest.fixture
def kit(store):
    """Makes caches, and ends their readers."""
    made: list[Kit] = []

    def make(*arguments, **named) -> Kit:
        made.append(Kit(store, *arguments, **named))
        return made[-1]

    yield make
    for kit in made:
        kit.reader.close()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_rows_of_a_group_are_there_whatever_leaves(store, data):
    kit = Kit(store, 300)
    try:
        number = 0
        for _ in range(data.draw(st.integers(1, 5))):
            batches = []
            for _ in range(data.draw(st.integers(1, 4))):
                seed = data.draw(st.integers(0, 10**6))
                nodes = np.random.default_rng(seed).choice(2000, 70, replace=False)
                batches.append(
                    Needs(number, (nodes[:30].astype(np.uint32), nodes[30:].astype(np.uint32)))
                )
                number += 1
            assert kit.cache.count_fitting(batches) == len(batches)
            kit.cache.age()
            oldest = batches[0].batch
            kit.cache.bring(batches, [], lambda known, oldest=oldest: oldest)
            for needs in batches:
                kit.check(np.concatenate(needs.pieces))
    finally:
        kit.reader.close()


def test_types_of_different_sizes_have_a_search_each(tmp_path):
    """The search goes far in the table of one type; in the small one of the other it stays."""
    rng = np.random.default_rng(2)
    sizes, widths = {"big": 900, "small": 12}, {"big": 3, "small": 5}
    graph = random_hetero(rng, sizes, [("small", "to", "big")], 2, widths, "big")
    write_hetero_store(tmp_path / "store", graph)
    kit = Kit(open_store(tmp_path / "store"), 200, 6)
    try:
        for batch in range(8):
            big = rng.choice(900, 70, replace=False)
            nodes = np.concatenate([big, 900 + rng.choice(12, 4, replace=False)]).astype(np.uint32)
            kit.cache.age()
            kit.cache.bring([Needs(batch, (nodes,))], [], lambda known, batch=batch: batch)
            kit.check(nodes)
    finally:
        kit.reader.close()


def test_a_type_whose_regions_cannot_be_read_leaves_nothing_of_the_others(tmp_path, monkeypatch):
    rng = np.random.default_rng(2)
    sizes = {"one": 90, "other": 60}
    graph = random_hetero(rng, sizes, [("one", "to", "other")], 2, {"one": 3, "other": 5}, "one")
    write_hetero_store(tmp_path / "store", graph)
    kit = Kit(open_store(tmp_path / "store"), 50, 40)
    cache, real = kit.cache, kit.cache._bring_pieces

    def fail_once(t, pieces, oldest):
        if t is cache.types[1] and calls.pop():
            raise CorruptBlock("a region")
        real(t, pieces, oldest)

    calls = [False, True]
    monkeypatch.setattr(cache, "_bring_pieces", fail_once)
    try:
        nodes = np.arange(60, 120, dtype=np.uint32)
        with pytest.raises(CorruptBlock):
            cache.bring([Needs(0, (nodes,))], [], lambda known: 0)
        assert [t.num_listed for t in cache.types] == [0, 0]
        nodes = np.arange(0, 50, dtype=np.uint32)
        cache.bring([Needs(1, (nodes,))], [], lambda known: 1)
        kit.check(nodes)
    finally:
        kit.reader.close()


def test_a_batch_that_is_not_released_keeps_its_rows(kit):
    small = kit(150)
    nodes = [np.arange(i * 100, i * 100 + 100, dtype=np.uint32) for i in range(3)]
    small.cache.bring([Needs(0, (nodes[0],))], [], lambda known: 0)
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def oldest(known: int) -> int:
        asked.put(known)
        small.check(nodes[0])  # nothing of it was overwritten before it is released
        return 0 if known < 0 else 1

    small.cache.bring([Needs(1, (nodes[1],))], [], oldest)
    assert [asked.get(), asked.get()] == [-1, 0]
    small.check(nodes[1])
    assert small.cache.count_fitting([Needs(2, (nodes[1],)), Needs(3, (nodes[2],))]) == 1
    assert small.cache.count_fitting([Needs(2, (np.arange(151, dtype=np.uint32),))]) == 0


def test_rows_that_stay_are_not_read_again(kit):
    roomy = kit(1000)
    nodes = np.arange(0, 900, dtype=np.uint32)
    for batch in range(3):
        roomy.cache.bring([Needs(batch, (nodes,))], [], lambda known, batch=batch: batch)
    assert roomy.cache.rows_read == 900
    assert roomy.cache.rows_wanted == 2700


def test_rows_used_again_soon_stay_and_others_leave(kit):
    tight = kit(200)
    a, b, c = (np.arange(i * 100, i * 100 + 100, dtype=np.uint32) for i in range(3))
    tight.cache.bring([Needs(0, (a,))], [], lambda known: 0)
    tight.cache.bring([Needs(1, (b,))], [], lambda known: 1)
    tight.cache.bring([Needs(2, (c,))], [Needs(3, (a,))], lambda known: 2)
    read = tight.cache.rows_read
    tight.cache.bring([Needs(3, (a,))], [], lambda known: 3)
    assert tight.cache.rows_read == read


def test_a_page_that_is_wrong_is_an_error_and_nothing_of_it_is_kept(store, tmp_path):
    damaged = tmp_path / "store"
    for path in sorted(store.path.rglob("*")):
        target = damaged / path.relative_to(store.path)
        target.mkdir(parents=True) if path.is_dir() else target.write_bytes(path.read_bytes())
    opened = open_store(damaged)
    shard = opened.rows(served_rows(opened.manifest)[0].array).shards[0]
    raw = bytearray(Path(shard).read_bytes())
    raw[5000] ^= 1
    Path(shard).write_bytes(raw)
    kit = Kit(opened, 1000)
    nodes = np.arange(0, 400, dtype=np.uint32)
    try:
        with pytest.raises(CorruptBlock, match="crc32c"):
            kit.cache.bring([Needs(0, (nodes,))], [], lambda known: 0)
        raw[5000] ^= 1
        Path(shard).write_bytes(raw)
        kit.cache.bring([Needs(1, (nodes,))], [], lambda known: 1)
        kit.check(nodes)
    finally:
        kit.reader.close()
