"""Work in block order, rows in transit, and small copies, against plain Python."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.order import (
    compact_records,
    count_nodes,
    distinct,
    map_range,
    mark_missing,
    missing_keys,
    order_by_block,
    prefix_starts,
    stage_rows,
    stride_starts,
    take_ids,
)
from blockstore.kernels.rows import ABSENT, NO_ROW, RowView, address_rows, gather_rows
from tests.graphs import FILL, ID_DTYPES

HERE = np.uint64(5)  # the address of a row that is in memory


@given(blocks=st.lists(st.integers(-2, 9), max_size=80), spare=st.integers(0, 3))
def test_entries_are_ordered_by_block_and_those_without_one_left_out(blocks, spare):
    num_blocks = 10 + spare
    starts = np.full(num_blocks + 1, 99, np.int64)
    order = np.full(len(blocks), 99, np.uint32)
    count = order_by_block(
        np.array([*blocks, 3], np.int32), len(blocks), starts, order
    )  # one entry more than is meant
    expected = sorted((b, i) for i, b in enumerate(blocks) if b >= 0)
    assert count == len(expected)
    assert order[:count].tolist() == [i for _, i in expected]
    assert (order[count:] == 99).all()
    assert starts.tolist() == [sum(b < block for b, _ in expected) for block in range(len(starts))]


@given(
    nodes=st.lists(st.integers(0, 2**32 - 1), max_size=40), divisor=st.integers(1, 2**31),
    id_dtype=ID_DTYPES, data=st.data(),
)  # fmt: skip
def test_rows_without_an_address_get_a_key(nodes, divisor, id_dtype, data):
    # the engine's keys are blocks, which fit 31 bits
    nodes = [node % (divisor * 2**30) for node in nodes]
    sort = st.sampled_from([int(ABSENT), int(NO_ROW), int(HERE)])
    addresses = [data.draw(sort) for _ in nodes]
    keys = np.full(len(nodes) + 1, -7, np.int32)
    missing_keys(
        np.array(nodes, id_dtype), len(nodes), divisor, np.array(addresses, np.uint64), keys
    )
    asked = zip(nodes, addresses, strict=True)
    assert keys.tolist() == [*(n // divisor if a == ABSENT else -7 for n, a in asked), -7]


class Passing:
    """Rows of one array that pass through some slots of an arena into a row area."""

    def __init__(self, rows, first, per_block, row_bytes, num_blocks, id_dtype, seed):
        """`rows` are what the nodes want; those outside the blocks' are of another type."""
        rng = np.random.default_rng(seed)
        self.first, self.per_block, self.row_bytes = first, per_block, row_bytes
        self.num_rows = num_blocks * per_block
        self.table = rng.integers(0, 256, (self.num_rows, row_bytes), np.uint8)
        self.nodes = np.array([first + row for row in rows], id_dtype)
        self.slot_bytes = per_block * row_bytes + 5
        self.per_slot = self.slot_bytes // row_bytes
        slots = 3 + len(rows) // self.per_slot + 1
        self.transit = rng.permutation(slots)[:2]
        self.area = np.setdiff1d(np.arange(slots), self.transit)
        self.arena = np.full(slots * self.slot_bytes, FILL, np.uint8)
        self.slots = np.full(num_blocks, -1, np.int32)
        self.addresses = np.empty(len(rows), np.uint64)
        self.view = RowView(first, self.num_rows, per_block, row_bytes, self.slots, self.slot_bytes)
        address_rows(self.nodes, len(rows), self.view, self.addresses)
        self.order = rng.permutation(len(rows)).astype(np.uint32)

    def pass_through(self, blocks, low, high, cursor):
        """Put blocks into transit, and take what entries order[low:high] want; the new cursor."""
        for block, slot in zip(blocks, self.transit, strict=False):
            rows = self.table[block * self.per_block : (block + 1) * self.per_block].reshape(-1)
            self.arena[slot * self.slot_bytes :][: rows.size] = rows
            self.slots[block] = slot
        cursor = stage_rows(
            self.arena, self.nodes, self.order, low, high, self.view, self.addresses, self.area,
            cursor,
        )  # fmt: skip
        for block, slot in zip(blocks, self.transit, strict=False):
            self.arena[slot * self.slot_bytes :][: self.slot_bytes] = FILL
            self.slots[block] = -1
        return int(cursor)

    def gathered(self):
        """The nodes' rows by their addresses; zeros for nodes of another type."""
        out = np.empty((self.nodes.size, self.row_bytes), np.uint8)
        gather_rows(self.arena, self.addresses, 0, self.nodes.size, self.row_bytes, out.reshape(-1))
        return out


@st.composite
def passings(draw):
    """Rows 1 to 12 to a block, some wanted twice, some of another type."""
    per_block, num_blocks = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    id_dtype = draw(ID_DTYPES)
    first = draw(st.sampled_from([3, 2**31, 2**33 if id_dtype == "uint64" else 2**30]))
    rows = draw(st.lists(st.integers(-3, per_block * num_blocks + 2), max_size=40))
    row_bytes = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 512]))
    seed = draw(st.integers(0, 2**16))
    return rows, Passing(rows, first, per_block, row_bytes, num_blocks, id_dtype, seed)


@given(passing=passings())
def test_every_row_is_taken_as_its_block_passes(passing):
    rows, state = passing
    cursor, wanted = 0, [row for row in rows if 0 <= row < state.num_rows]
    for low in range(0, state.slots.size, 2):
        blocks = range(low, min(low + 2, state.slots.size))
        cursor = state.pass_through(blocks, 0, len(rows), cursor)
        assert cursor == sum(row // state.per_block < low + 2 for row in wanted)
    expected = [
        state.table[row].tolist() if 0 <= row < state.num_rows else [0] * state.row_bytes
        for row in rows
    ]
    assert state.gathered().tolist() == expected
    assert cursor == len(wanted)


@given(passing=passings(), cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_only_entries_of_the_range_and_without_an_address_are_marked_and_staged(passing, cuts):
    rows, state = passing
    low, high = sorted(min(cut, len(rows)) for cut in cuts)
    state.pass_through([0], 0, len(rows), 0)  # rows of block 0 have addresses now
    before, marks = state.addresses.copy(), np.zeros(state.slots.size, np.uint8)
    mark_missing(state.nodes, state.order, low, high, state.view, state.addresses, marks)
    meant = [i for i in state.order[low:high].tolist() if before[i] == ABSENT]
    marked = np.flatnonzero(marks).tolist()
    assert marked == sorted({rows[i] // state.per_block for i in meant})
    state.pass_through(marked[:1], low, high, 0)
    changed = np.flatnonzero(state.addresses != before).tolist()
    assert changed == sorted(i for i in meant if rows[i] // state.per_block in marked[:1])


@given(
    ids=st.lists(st.integers(0, 60)), first=st.integers(0, 50), size=st.integers(0, 20),
    id_dtype=ID_DTYPES, out_dtype=ID_DTYPES,
)  # fmt: skip
def test_ids_are_mapped_piece_by_piece_of_a_table(ids, first, size, id_dtype, out_dtype):
    table = (np.arange(size) * 7 + 1).astype(id_dtype)
    out = np.full(len(ids), 99, out_dtype)
    map_range(np.array(ids, np.int64), first, table, out)
    assert out.tolist() == [(i - first) * 7 + 1 if first <= i < first + size else 99 for i in ids]


@given(index=st.lists(st.integers(0, 29)), id_dtype=ID_DTYPES)
def test_seeds_are_taken_by_index(index, id_dtype):
    seeds, out = np.arange(100, 130, dtype=id_dtype), np.full(len(index) + 1, 7, id_dtype)
    take_ids(seeds, np.array(index, np.int64), len(index), out)
    assert out.tolist() == [*(i + 100 for i in index), 7]


@given(counts=st.lists(st.integers(0, 2**32 - 1), max_size=30), fanout=st.integers(0, 2**31))
def test_columns_start_after_the_room_of_those_before(counts, fanout):
    starts = np.full(len(counts) + 2, 99, np.int64)
    stride_starts(len(counts), fanout, starts)
    assert starts.tolist() == [*(i * fanout for i in range(len(counts) + 1)), 99]
    total = prefix_starts(np.array([*counts, 5], np.uint32), len(counts), starts)
    assert starts.tolist() == [*accumulate(counts, initial=0), 99]
    assert total == sum(counts)


@pytest.mark.parametrize("words", [1, 3])
def test_records_are_brought_together(words):
    draws = np.arange(12 * words, dtype=np.uint32).reshape(12, words)
    starts, counts = np.array([0, 5, 8]), np.array([2, 0, 3], np.uint32)
    out = np.full((8, words), 99, np.uint32)
    assert compact_records(draws, starts, counts, 3, out, 1) == 6
    assert out[1:6].tolist() == draws[[0, 1, 8, 9, 10]].tolist()
    assert (out[[0, 6, 7]] == 99).all()


@given(values=st.lists(st.integers(0, 9)), dtype=st.one_of(st.just("int64"), ID_DTYPES))
def test_each_of_some_values_is_left_once_in_ascending_order(values, dtype):
    found = distinct(np.array(values, dtype))
    assert found.dtype == np.dtype(dtype)
    assert found.tolist() == sorted(set(values))


@given(nodes=st.lists(st.integers(0, 5), max_size=30), most=st.integers(0, 12))
def test_nodes_are_counted_up_to_a_bound(nodes, most):
    counts = np.zeros(6, np.uint16)
    count_nodes(np.array(nodes, np.uint32), most, counts)
    assert counts.tolist() == [min(most, nodes.count(node)) for node in range(6)]
