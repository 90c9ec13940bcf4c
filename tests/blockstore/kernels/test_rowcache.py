"""Kernels of the row cache against plain Python: lists, victims, runs of pages, copies."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockstore.format import PAGE_BYTES
from blockstore.kernels import rowcache as k
from blockstore.kernels.rows import RowLayout

EMPTY = np.uint64(np.iinfo(np.uint32).max)
rows_of = st.lists(st.integers(0, 99), max_size=40)


def u32(values):
    return np.array(values, np.uint32)


def home(row, num_slots):
    """Where the search for a row begins."""
    return row * 0x9E3779B97F4A7C15 % 2**64 * num_slots >> 64


def table_of(num_rows, node, last=None, coming=None, uses=None, stay=()):
    """A table in which entry e has the row node[e].

    last, coming, uses   of each entry; None: -1, NEVER, 0
    stay                 numbers of the regions of 8 rows that do
    """
    stays = np.zeros(num_rows // 8 + 1, np.uint8)
    stays[list(stay)] = 1
    filled = [
        np.array([other] * len(node) if values is None else values, dtype)
        for values, other, dtype in (
            (last, -1, np.int32), (coming, k.NEVER, np.int32), (uses, 0, np.uint8),
        )
    ]  # fmt: skip
    slots = np.full(k.num_slots(len(node)), k.FREE)
    table = k.CacheTable(stays, np.int64(3), slots, u32(node), *filled, EMPTY)
    for e, row in enumerate(node):
        if row != int(EMPTY):
            at = home(row, slots.size)
            while slots[at] != k.FREE:
                at = (at + 1) % slots.size
            slots[at] = row << 32 | e
    return table


def entries_of(table, rows):
    out = np.zeros(len(rows), np.int64)
    k.find_entries(np.array(rows, np.int64), len(rows), table, out)
    return out.tolist()


@given(st.lists(rows_of, max_size=4), st.integers(0, 30))
def test_new_rows_are_counted_once(batches, first):
    bits, seen = np.zeros(100 // 64 + 1, np.uint64), set()
    for batch in batches:
        nodes = u32(batch)
        own = {n - first for n in batch if first <= n < first + 60}
        counts = np.zeros(8, np.int64)
        k.count_new(nodes, nodes.size, first, 60, bits, 3, counts)
        assert counts.tolist() == [sum(n // 8 == r for n in own - seen) for r in range(8)]
        seen |= own


regions_of = st.sets(st.integers(0, 12), max_size=5).map(sorted)


@given(rows_of, st.integers(0, 30), regions_of, st.integers(0, 40))
def test_nodes_whose_rows_may_leave_are_listed_if_there_is_room(batch, first, stay, room):
    table, out = table_of(100, [], stay=stay), np.zeros(room, np.uint32)
    count = k.list_passing(u32(batch), len(batch), first, 60, table, out)
    expected = [n for n in batch if first <= n < first + 60 and (n - first) // 8 not in stay]
    if len(expected) > room:
        assert count == -1
    else:
        assert out[:count].tolist() == expected


@given(st.sets(st.integers(0, 199)), st.sets(st.integers(0, 199), max_size=8), regions_of)
def test_absent_rows_are_listed_in_order_and_others_stay(rows, cached, stay):
    node = sorted(cached) + [int(EMPTY)] * (8 - len(cached))
    entries = {row: e for e, row in enumerate(sorted(cached))}
    table = table_of(200, node, uses=[2] * 8, stay=stay)
    bits = np.zeros(200 // 64 + 1, np.uint64)
    for row in rows:
        bits[row // 64] |= np.uint64(1 << row % 64)
    passing = sorted(row for row in rows if row // 8 not in stay)
    out = np.zeros(len(passing), np.uint32)
    count = k.list_absent(bits, table, 5, out)
    assert out[:count].tolist() == [row for row in passing if row not in entries]
    found = {entries[row] for row in passing if row in entries}
    assert {e for e in range(8) if table.last[e] == 5} == found
    assert {e for e in range(8) if table.uses[e] == 3} == found


def score(coming, uses, now):
    """The lower, the sooner it goes: the rule in words."""
    if coming == k.NEVER:
        return min(uses, 15)
    return 1000 - min(max(coming - now, 0), 63)


entry = st.tuples(
    st.booleans(), st.integers(-1, 20), st.one_of(st.just(int(k.NEVER)), st.integers(10, 90)),
    st.integers(0, 20),
)  # fmt: skip


@given(
    st.lists(entry, min_size=1, max_size=30),
    st.integers(0, 25),
    st.integers(1, 12),
    st.integers(0, 29),
    st.booleans(),
)
def test_what_goes_is_free_or_of_the_lowest_level(entries, oldest, want, begin, waits):
    """`waits`: for others to leave than rows that come again within 32 batches."""
    node = u32([int(EMPTY) if free else 7 for free, *_ in entries])
    table = table_of(0, [], *([e[i] for e in entries] for i in (1, 2, 3)))._replace(node=node)
    out, counts = np.zeros(want, np.int64), np.zeros(k.LEVELS, np.int64)
    hand = np.array([begin % len(entries)])
    levels = k.SOON if waits else k.LEVELS
    found = k.choose_by_level(table, oldest, 10, hand, want, levels, counts, out)
    scores = {
        i: -1e9 if free else score(co, us, 10)
        for i, (free, la, co, us) in enumerate(entries)
        if free or (la < oldest and (co > 10 + 32 or not waits))
    }
    chosen = out[:found].tolist()
    assert found == min(want, len(scores))
    assert len(chosen) == len(set(chosen))
    assert sorted(scores[i] for i in chosen) == sorted(scores.values())[:found]


@given(
    st.sets(st.integers(0, 400), min_size=1, max_size=60),
    st.sampled_from([4, 24, 512, 5000]),
    st.integers(0, 5),
    st.integers(2, 9),
    st.sets(st.integers(0, 50), max_size=20),
)
def test_runs_cover_the_rows_and_copies_bring_them(rows, row_bytes, gap, maximum, stay):
    block_bytes = 2 * PAGE_BYTES
    per_block, per_shard = block_bytes // row_bytes, 3
    listed = u32(sorted(rows))
    runs = np.zeros((listed.size, 5), np.int64)
    layout = RowLayout(per_block, row_bytes, block_bytes, per_shard)
    count = k.plan_extents(listed, 0, listed.size, layout, gap, maximum, runs)
    runs = runs[:count]
    assert runs[0, 3] == 0
    assert runs[-1, 4] == listed.size
    assert (runs[1:, 3] == runs[:-1, 4]).all()
    assert (runs[:, 2] <= max(maximum, -(-row_bytes // PAGE_BYTES) + 1)).all()
    blocks = 400 // per_block + 1
    disk = np.random.default_rng(0).integers(0, 255, blocks * block_bytes).astype(np.uint8)
    slot = 8192
    stay = sorted(stay)
    kept, passing = (-(-count // (slot // row_bytes)) for count in (8 * len(stay), listed.size))
    slots = np.arange(kept + passing, dtype=np.int64)[::-1].copy()
    data = np.zeros((slots.size + 1) * slot, np.uint8)
    first = np.full(51, k.ABSENT_ROW)
    first[stay] = 8 * np.arange(len(stay))
    node = np.random.default_rng(1).permutation(listed)
    table, staying = table_of(401, node.tolist(), stay=stay), k.StayingEntries(first, slots[:kept])
    entries, area = np.array(entries_of(table, listed)), slots[kept:]
    assert (node[entries] == listed).all()
    stays = table.stays[listed >> 3] != 0
    # of all slots, those of rows that stay come first
    entries += kept * (slot // row_bytes)
    places = np.where(stays, staying.of(listed, table.shift), entries)
    pages_read = []
    for shard, page, pages, low, high in runs.tolist():
        first = shard * per_shard * block_bytes + page * PAGE_BYTES
        for row in listed[low:high].tolist():
            start = row // per_block * block_bytes + row % per_block * row_bytes
            assert row // per_block // per_shard == shard
            assert first <= start
            assert start + row_bytes <= first + pages * PAGE_BYTES
        pages_read.append(disk[first : first + pages * PAGE_BYTES])
    for cut in (slice(0, 2), slice(2, None)):  # a task, and those after it
        source = np.concatenate([disk[:0], *pages_read[cut]])
        k.copy_extents(source, runs[cut], listed, layout, places, 0, slots, data, slot)
    out = np.zeros(listed.size, np.uint64)
    cached = table, staying
    k.address_entries(listed, listed.size, 0, 401, cached, area, slot, row_bytes, out)
    assert np.unique(out).size == listed.size
    for row, at in zip(listed.tolist(), out.tolist(), strict=True):
        start = row // per_block * block_bytes + row % per_block * row_bytes
        assert data[at : at + row_bytes].tolist() == disk[start : start + row_bytes].tolist()


def test_next_uses_and_touches_follow_the_batches():
    table = table_of(9, [2, 3, 0, 8], stay=[1])
    coming, last = np.full(4, k.NEVER, np.int32), np.full(4, -1, np.int32)
    for batch, nodes in ((9, [0, 1]), (8, [0, 2]), (9, [2])):  # in any order
        k.note_use(u32([*nodes, 8]), len(nodes) + 1, 0, 9, table, batch, coming, True)
    assert coming.tolist() == [8, k.NEVER, 8, k.NEVER]
    for batch, nodes in ((3, [0, 3]), (4, [0, 1])):
        k.note_use(u32([8, *nodes]), 3, 0, 9, table, batch, last, False)
    assert last.tolist() == [-1, 3, 4, -1]


def test_rows_that_enter_push_others_out():
    table = table_of(4, [0, int(EMPTY)], [0, 0], [0, 0], [1, 1])
    k.enter_rows(u32([1, 3]), 0, 2, np.array([1, 0]), table, 6)
    assert entries_of(table, range(4)) == [k.ABSENT_ROW, 1, k.ABSENT_ROW, 0]
    assert table.node.tolist() == [3, 1]
    assert (table.last == 6).all()
    assert (table.coming == k.NEVER).all()
    assert (table.uses == 1).all()


@given(
    st.integers(0, 12),
    st.lists(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 11)), max_size=12), max_size=8),
)
def test_entries_are_found_as_in_a_dictionary(num_entries, steps):
    """Rows enter in any entries, whose rows leave, and every second time some rows leave again.

    Searches for half of the rows begin in the first slot or in the last two.
    """
    table, known = table_of(1000, [int(EMPTY)] * num_entries), dict[int, int]()
    last = table.slots.size - 1
    near = [row for row in range(1000) if home(row, last + 1) in (0, max(0, last - 1), last)]
    among = [*near[:8], *range(500, 508)]
    for number, step in enumerate(steps):
        pairs = {among[i]: e for i, e in step if among[i] not in known and e < num_entries}
        pairs = {row: e for e, row in {e: row for row, e in pairs.items()}.items()}
        rows = sorted(pairs)
        entries = np.array([pairs[row] for row in rows], np.int64)
        k.enter_rows(u32(rows), 0, len(rows), entries, table, 0)
        known = {row: e for row, e in known.items() if e not in pairs.values()} | pairs
        if number % 2:
            leaving = [among[i] for i, _ in step[::2]]
            k.remove_rows(u32(leaving), len(leaving), table)
            known = {row: e for row, e in known.items() if row not in leaving}
        assert entries_of(table, among) == [known.get(row, k.ABSENT_ROW) for row in among]
        assert (table.slots != k.FREE).sum() == len(known)
        assert (table.node != EMPTY).sum() == len(known)


def test_rows_that_are_alike_in_their_low_bits_are_told_apart():
    table, empty = table_of(9, [int(EMPTY)] * 3), np.uint64(2**64 - 1)
    table = table._replace(node=np.full(3, empty), empty=empty)
    rows = np.array([5, 5 + 2**32, 5 + 2**33], np.uint64)
    k.enter_rows(rows, 0, 3, np.array([2, 0, 1]), table, 0)
    assert entries_of(table, rows) == [2, 0, 1]
    k.remove_rows(rows[1:2], 1, table)
    assert entries_of(table, rows) == [2, k.ABSENT_ROW, 1]
