"""Rows of a session: any batches, releases and failing reads against the rows themselves."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blockstore.errors import CorruptBlock
from blockstore.format import PAGE_BYTES, NodeType, RowArray, row_geometry
from blockstore.kernels.rowcache import FREE, find_entries
from blockstore.kernels.rows import NO_ROW
from loaderd.memory.ledger import ServedRows
from loaderd.monitoring.devicecost import DeviceCost
from loaderd.sampling.hyperbatch import rowcache
from loaderd.sampling.hyperbatch.areas import AreaFull
from loaderd.sampling.hyperbatch.entries import Needs, table_bytes
from loaderd.sampling.hyperbatch.regions import (
    CacheShare,
    StayingRegions,
    area_slots_of,
    region_rows,
    region_shift,
    rows_by_type,
)
from loaderd.sampling.hyperbatch.rowcache import RowCache
from loaderd.sampling.rows import ServedFiles

SLOT, BLOCK, NODES, WIDTHS = 4096, 4096, 120, (1500, 24)
IDS = RowArray("ids", "uint32", NODES)
NODE = NodeType("node", 10, NODES, IDS, IDS)
SERVED = [
    ServedRows(str(w), NODE, RowArray(str(w), "uint8", NODES, (w,)), i)
    for i, w in enumerate(WIDTHS)
]


def row(node: int, width: int) -> bytes:
    """What lies in a row."""
    return bytes([(node * 7 + width + i) % 251 for i in range(width)])


class Reading:
    """Over already."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class Reader:
    """Files of rows in memory; every run that is asked for is read at once, or fails."""

    def __init__(self, pages: Any = None) -> None:
        """`pages`: where they come from, as of a store in object storage."""
        self.raw, self.files = [], []
        for served in SERVED:
            geometry = row_geometry(served.array, BLOCK)
            width, per = served.array.row_bytes, geometry.rows_per_block
            raw = np.zeros(geometry.num_blocks * geometry.slot_bytes, np.uint8)
            for node in range(NODES):
                at = node // per * geometry.slot_bytes + node % per * width
                raw[at : at + width] = np.frombuffer(row(node, width), np.uint8)
            self.raw.append((raw, geometry.blocks_per_shard * geometry.slot_bytes))
            self.files.append(SimpleNamespace(pages=pages, path=str(width), geometry=geometry))
        self.fail_after = -1  # runs that can still be read; -1: all

    def stream(
        self, file: int, runs: Any, transit: Any, consume: Any, rows: Any = None,
        urgent: bool = False,
    ) -> Reading:  # fmt: skip
        assert (np.diff(rows.astype(np.int64)) > 0).all()  # what is asked of other servers
        raw, shard_bytes = self.raw[file]
        buffer = transit.free.get()
        try:
            for i, (shard, page, pages) in enumerate(runs[:, :3].tolist()):
                if self.fail_after == 0:
                    return Reading(CorruptBlock("a page is wrong"))
                self.fail_after -= self.fail_after > 0
                start = shard * shard_bytes + page * PAGE_BYTES
                data = buffer[: pages * PAGE_BYTES]
                data[:] = 0xEE
                piece = raw[start : start + data.size]
                data[: piece.size] = piece
                consume(i, i + 1, data)
        finally:
            transit.free.put(buffer)
        return Reading(None)


def make_cache(
    entries: int, reader: Reader, stay: Sequence[int] = (), run_s: float = 3e-6
) -> RowCache:
    """`stay`: regions that do."""
    types = rows_by_type(SERVED)
    regions = np.array(sorted(stay), np.int64)
    share = CacheShare(regions, int(region_rows(types[0])[regions].sum()), entries)
    kept, passing = (area_slots_of(types, [n], SLOT) for n in (share.stay_rows, entries))
    num_slots = kept + passing
    data = np.zeros((num_slots + 8) * SLOT, np.uint8)
    area = np.random.default_rng(entries).permutation(num_slots)
    transit = [data[(num_slots + 2 * i) * SLOT :][: 2 * SLOT] for i in range(4)]
    tables = np.zeros(table_bytes(types, "uint32", [share]), np.uint8)
    member = StayingRegions(SERVED, SLOT).join()
    member.add([regions], area[:kept].tolist())
    return RowCache(
        ServedFiles(SERVED, reader, 0, data, SLOT, BLOCK, "uint32"),  # type: ignore[arg-type]
        [share], tables, area[kept:].tolist(), transit, DeviceCost(run_s, 3e-6), member,
    )  # fmt: skip


def check(cache: RowCache, needs: Needs) -> None:
    """All rows of a batch are where the cache says."""
    nodes = np.concatenate(needs.pieces)
    for served, width in enumerate(WIDTHS):
        addresses = np.zeros(nodes.size, np.uint64)
        cache.address(served, nodes, addresses)
        for node, address in zip(nodes.tolist(), addresses.tolist(), strict=True):
            if not 10 <= node < 10 + NODES:
                assert address == int(NO_ROW)
                continue
            found = cache._data[address : address + width].tobytes()
            assert found == row(node - 10, width), f"batch {needs.batch}, node {node}, {width} B"


def needs_of(batch: int, nodes: Any) -> Needs:
    ids = np.array(sorted(nodes), np.uint32)
    return Needs(batch, (ids[: ids.size // 2], ids[ids.size // 2 :]))


BATCHES = st.lists(st.sets(st.integers(5, 20 + NODES), max_size=9), min_size=1, max_size=4)


def no_room(_ids: Any) -> Any:
    raise AreaFull


class Model(RuleBasedStateMachine):
    """Batches are brought in group by group, released in any order, and fail now and then."""

    @initialize(
        entries=st.integers(9, 20), stay=st.sets(st.integers(0, 7), max_size=4),
        listed=st.sampled_from([1, 2, rowcache._LISTED]),
    )  # fmt: skip
    def open(self, entries, stay, listed):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(rowcache, "_LISTED", listed)  # a batch has few nodes here
        self.reader = Reader()
        self.cache = make_cache(entries, self.reader, stay)
        self.entries, self.stay = entries, stay
        self.queue: list[Needs] = []
        self.held: dict[int, Needs] = {}  # batches with the client
        self.begin_run()

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    @rule()
    def begin_run(self):
        self.cache.begin_run()
        self.queue, self.held, self.next, self.oldest = [], {}, 0, 0

    @rule(batches=BATCHES, keep=st.sampled_from([np.copy, np.copy, no_room, None]))
    def sampled(self, batches, keep):
        for nodes in batches:
            self.queue.append(needs_of(self.next, nodes)._replace(keep=keep))
            self.next += 1

    @rule(fails=st.sampled_from([-1, -1, -1, 0, 1, 3]), size=st.integers(1, 4))
    def bring(self, fails, size):
        """Whatever fits together; room comes as batches are released, the oldest first."""
        if not self.queue:
            return
        count = self.cache.count_fitting(self.queue[:size])
        wanted: set[int] = set()
        expected = 0
        for needs in self.queue[:size]:
            rows = np.concatenate(needs.pieces).astype(int) - 10
            wanted |= {r for r in rows.tolist() if 0 <= r < NODES and r // 16 not in self.stay}
            if len(wanted) > self.entries:
                break
            expected += 1
        assert count == expected
        if count == 0:
            self.queue.pop(0)
            self.oldest = self.oldest if self.held else self.queue[0].batch if self.queue else 0
            return
        group, later = self.queue[:count], self.queue[count:]
        first = group[0].batch

        def oldest(known: int) -> int:
            at = min(self.held, default=first)
            if at == known:
                del self.held[at]
                at = min(self.held, default=first)
            return at

        self.reader.fail_after = fails
        self.cache.age()
        try:
            self.cache.bring(group, later, oldest)
        except CorruptBlock:
            assert fails >= 0
            return
        finally:
            self.reader.fail_after = -1
        self.queue = later
        self.held |= {needs.batch: needs for needs in group}

    @rule(data=st.data())
    def release(self, data):
        if self.held:
            del self.held[data.draw(st.sampled_from(sorted(self.held)))]

    @invariant()
    def rows_of_batches_with_the_client_stay(self):
        for needs in getattr(self, "held", {}).values():
            check(self.cache, needs)

    @invariant()
    def each_entry_is_of_one_row(self):
        if hasattr(self, "cache"):
            (t,) = self.cache.types
            entries = np.empty(NODES, np.int64)
            find_entries(np.arange(NODES), NODES, t.table, entries)
            staying = np.repeat(t.table.stays != 0, 16)[:NODES]
            assert not (staying & (entries >= 0)).any(), "a row that stays has an entry, too"
            for row in np.flatnonzero(entries >= 0).tolist():
                assert t.table.node[entries[row]] == row, f"row {row}"
            full = (t.table.node != t.table.empty).sum()
            assert (entries >= 0).sum() == full == (t.table.slots != FREE).sum()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_rows_that_could_not_be_read_are_read_again(fails):
    reader = Reader()
    cache = make_cache(12, reader)
    needs = needs_of(0, range(10, 22))
    reader.fail_after = fails
    with pytest.raises(CorruptBlock):
        cache.bring([needs], [], lambda known: known + 1)
    reader.fail_after = -1
    cache.bring([needs], [], lambda known: known + 1)
    check(cache, needs)


def test_nodes_whose_rows_stay_are_left_out_once(monkeypatch):
    """Not those of few nodes, and not where there is no room for the others."""
    looked, kernel = list[int](), rowcache.count_new

    def note(nodes: Any, size: int, *others: Any) -> None:
        looked.append(size)
        kernel(nodes, size, *others)

    monkeypatch.setattr(rowcache, "count_new", note)
    cache = make_cache(12, Reader(), range(6))  # of NODES rows in regions of 16
    few = [needs_of(i, range(12 + i, 110, 2))._replace(keep=np.copy) for i in range(2)]
    assert cache.count_fitting(few) == 2
    assert sum(looked) == sum(piece.size for needs in few for piece in needs.pieces)
    monkeypatch.setattr(rowcache, "_LISTED", 1)
    for keep, expected in ((np.copy, 2), (no_room, 50)):
        looked.clear()
        needs = needs_of(2, [*range(10, 106, 2), 110, 111])._replace(keep=keep)
        for _ in range(2):
            assert cache.count_fitting([needs]) == 1
        assert sum(looked) == 2 * expected
        cache.begin_run()


def test_batches_that_follow_a_group_do_not_change_what_is_read_for_it(monkeypatch):
    monkeypatch.setattr(rowcache, "_LISTED", 1)
    cache = make_cache(12, Reader(), [7])
    needs = [needs_of(i, range(10 + 20 * i, 20 + 20 * i))._replace(keep=np.copy) for i in range(3)]
    for i, group in enumerate(needs):
        assert cache.count_fitting([group]) == 1
        cache.bring([group], needs[i + 1 :], lambda known: known + 1)
        check(cache, group)


def test_rows_that_stay_are_not_read_again():
    cache = make_cache(12, Reader())
    for batch in range(3):
        needs = needs_of(batch, range(10 + batch, 20 + batch))
        cache.bring([needs], [], lambda _known: 9)
        check(cache, needs)
    assert cache.rows_read == 12


@pytest.mark.parametrize("sampled", [0, 1, 2])
def test_a_row_that_comes_again_waits_for_others_to_be_released(sampled):
    """Whether that is known from the beginning, or just now: the group with which it is sampled."""
    cache = make_cache(12, Reader())
    first, second, third, again = (
        needs_of(batch, range(low, high))
        for batch, (low, high) in enumerate([(10, 14), (14, 22), (22, 26), (10, 14)])
    )
    for group, later in ((0, [second, third, again]), (1, [third, again])):
        known_now = later if sampled <= group else later[:-1]
        cache.bring([[first, second][group]], known_now, lambda known: known + 1)
    asked = list[int]()

    def oldest(known: int) -> int:
        """The second batch is with the client until somebody waits for it."""
        asked.append(known)
        return 1 if known < 0 else 2

    cache.bring([third], [again], oldest)
    assert asked == [-1, 1]
    cache.bring([again], [], lambda known: known + 1)
    check(cache, again)
    assert cache.rows_read == 4 + 8 + 4


@pytest.mark.parametrize("fails", [-1, 0, 1, 5])
def test_regions_that_stay_are_read_once_whatever_fails(fails):
    reader = Reader()
    cache = make_cache(9, reader, [0, 2, 3, 7])
    for batch in range(4):
        needs = needs_of(batch, [10, 42, 60, 129, 30 + batch])
        reader.fail_after = fails if batch == 0 else -1
        if reader.fail_after >= 0:
            with pytest.raises(CorruptBlock):
                cache.bring([needs], [], lambda known: known + 1)
            continue
        cache.bring([needs], [], lambda _known: 9)
        check(cache, needs)
    assert not cache.types[0].missing
    rows, others = 16 * 3 + NODES % 16, 4 if fails < 0 else 3
    others += 4 if fails < 0 else 0  # those of the first batch, alone
    assert cache.rows_read == rows + others if fails < 0 else cache.rows_read >= rows + others


def test_a_run_that_ends_leaves_regions_for_the_next_one(caplog):
    caplog.set_level(logging.INFO, "loaderd")
    cache = make_cache(9, Reader(), range(8))
    cache._chosen = cache._chosen[:, :16]  # a region at a time
    group, asked = [needs_of(0, [10, 129]), needs_of(1, [11])], iter(range(5))

    def oldest(known: int) -> int:
        if next(asked, None) is None:
            raise ValueError("the run has ended")
        return known + 1

    with pytest.raises(ValueError, match="has ended"):
        cache.bring(group, [], oldest)
    assert 0 < len(cache.types[0].missing) < 8
    assert 0 < cache.stay_read < cache.stay_rows == NODES
    read = cache.stay_read
    cache.bring(group, [], lambda known: known + 1)
    for needs in group:
        check(cache, needs)
    assert not cache.types[0].missing
    assert cache.stay_read == NODES
    cache.bring(group, [], lambda known: known + 1)  # nothing is missing now
    told = [(record.message, record.fields["rows"]) for record in caplog.records]
    assert told == [
        ("row cache fills", NODES), ("row cache fills", NODES - read),
        ("row cache filled", NODES - read),
    ]  # fmt: skip


def test_a_first_batch_waits_for_what_it_wants_and_for_regions_of_which_it_wants_much(caplog):
    """Of region 0 it wants each row, of 2 one, of 3 two in pages apart, of 7 none."""
    caplog.set_level(logging.INFO, "loaderd")
    reader = Reader()
    cache = make_cache(9, reader, [0, 2, 3, 7], 0.0)
    first = needs_of(0, [*range(10, 26), 42, 60, 70])
    reader.fail_after = 2
    with pytest.raises(CorruptBlock):  # nobody has got a batch
        cache.bring([first], [], lambda known: known + 1)
    reader.fail_after = -1
    for later, told in ((first, (16, 40)), (needs_of(1, [129]), (40, 0))):
        cache.bring([later], [], lambda known: known + 1)
        check(cache, later)
        record = [r for r in caplog.records if r.message == "row cache fills"][-1]
        assert (record.fields["rows"], record.fields["later"]) == told
    assert cache.stay_read == cache.stay_rows == 56
    assert cache.rows_read >= 56 + 3  # those of 2 and 3 came twice
    check(cache, first)


def test_regions_cover_the_rows_of_a_type():
    (t,) = rows_by_type(SERVED)
    assert region_shift(t) == 4
    assert region_rows(t).tolist() == [16] * 7 + [8]
    assert region_rows(t._replace(num_nodes=128)).tolist() == [16] * 8
    assert region_rows(t._replace(num_nodes=3)).tolist() == [3]
    large = t._replace(num_nodes=10**6, row_bytes=(500, 20))
    assert (region_rows(large)[0], region_rows(large).sum()) == (2048, 10**6)
    assert region_rows(large._replace(num_nodes=10**9)).size <= 1 << 16
