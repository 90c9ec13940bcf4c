"""Addresses of rows and copies of them, against numpy's indexing."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.rows import (
    ABSENT,
    NO_ROW,
    RowView,
    address_rows,
    copy_row,
    expand_counts,
    gather_rows,
    mark_blocks,
    scatter_rows,
)
from tests.graphs import ID_DTYPES

ROW_BYTES = [1, 2, 3, 4, 6, 8, 12, 20, 24, 64, 100, 256, 511, 512, 516, 4096]


@st.composite
def row_stores(draw):
    """(rows per block, number of rows, first store id, slot of each block, id dtype)."""
    per_block, num_rows = draw(st.integers(1, 12)), draw(st.integers(1, 80))
    id_dtype = draw(ID_DTYPES)
    first = draw(st.sampled_from([0, 9, 2**31, 2**33 if id_dtype == "uint64" else 2**30]))
    num_blocks = -(-num_rows // per_block)
    slots = draw(st.permutations(range(num_blocks + 2)))[:num_blocks]
    absent = draw(st.sets(st.integers(0, num_blocks - 1)))
    slot_of_block = np.array([-1 if b in absent else s for b, s in enumerate(slots)], np.int32)
    return per_block, num_rows, first, slot_of_block, id_dtype


@given(store=row_stores(), row_bytes=st.sampled_from(ROW_BYTES), data=st.data())
def test_addresses_are_slot_times_slot_bytes_plus_the_row(store, row_bytes, data):
    per_block, num_rows, first, slot_of_block, id_dtype = store
    slot_bytes = per_block * row_bytes + 40
    rows = data.draw(st.lists(st.integers(-min(first, 3), num_rows + 2), max_size=40))
    nodes = np.array([first + row for row in rows], id_dtype)
    out = np.zeros(nodes.size, np.uint64)
    view = RowView(first, num_rows, per_block, row_bytes, slot_of_block, slot_bytes)
    missing = address_rows(nodes, nodes.size, view, out)
    for row, address in zip(rows, out, strict=True):
        block, place = divmod(row, per_block)
        if not 0 <= row < num_rows:
            assert address == NO_ROW
        elif slot_of_block[block] < 0:
            assert address == ABSENT
        else:
            assert address == slot_of_block[block] * slot_bytes + place * row_bytes
    assert missing == (out == ABSENT).sum()


@given(store=row_stores(), data=st.data())
def test_rows_of_each_block_are_counted_up_to_255(store, data):
    per_block, num_rows, first, slot_of_block, id_dtype = store
    rows = data.draw(st.lists(st.integers(-min(first, 3), num_rows + 2), max_size=10))
    rows *= data.draw(st.sampled_from([1, 3, 254, 256]))
    marks = np.zeros(slot_of_block.size, np.uint8)
    nodes = np.array([first + row for row in rows], id_dtype)
    mark_blocks(nodes, nodes.size, RowView(first, num_rows, per_block, 1, slot_of_block, 1), marks)
    blocks = Counter(row // per_block for row in rows if 0 <= row < num_rows)
    assert marks.tolist() == [min(blocks[b], 255) for b in range(marks.size)]


def test_more_rows_than_32_bits_count():
    """A type of 2**33 nodes: addresses are formed in 64 bits."""
    per_block, num_rows = 2**31, 2**33
    nodes = np.array([0, 2**31, 2**32 + 5, 2**33 - 1], np.uint64)
    slots, out, marks = np.arange(4, dtype=np.int32), np.empty(4, np.uint64), np.zeros(4, np.uint8)
    view = RowView(0, num_rows, per_block, 8, slots, 2**34)
    assert address_rows(nodes, 4, view, out) == 0
    assert out.tolist() == [0, 2**34, 2**35 + 40, 3 * 2**34 + (2**31 - 1) * 8]
    mark_blocks(nodes, 4, view, marks)
    assert marks.all()


def test_a_block_that_is_longer_than_the_array():
    nodes, out = np.arange(5, dtype=np.uint32), np.empty(5, np.uint64)
    slots = np.array([3], np.int32)
    assert address_rows(nodes, 5, RowView(0, 5, 2**33, 16, slots, 1000), out) == 0
    assert out.tolist() == [3000 + 16 * row for row in range(5)]


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize("aligned", [True, False])
def test_rows_are_copied_from_their_addresses(row_bytes, aligned):
    """Any width, addresses that need not be multiples of anything, rows without a source."""
    rng = np.random.default_rng(row_bytes)
    data = rng.integers(0, 256, 64 * row_bytes + 64, np.uint8)
    step = row_bytes if aligned else 1
    addresses = rng.integers(0, (data.size - row_bytes) // step, 50).astype(np.uint64) * step
    addresses[[3, 17]] = NO_ROW
    expected = np.array(
        [
            np.zeros(row_bytes) if a == NO_ROW else data[a : a + row_bytes]
            for a in addresses.tolist()
        ]
    )
    out = np.full((50, row_bytes), 0xA5, np.uint8)
    gather_rows(data, addresses, 5, 45, row_bytes, out.reshape(-1))
    assert (out[5:45] == expected[5:45]).all()
    assert (out[:5] == 0xA5).all()
    assert (out[45:] == 0xA5).all()
    positions = rng.permutation(50).astype(np.uint32)
    scatter_rows(data, addresses, positions, 0, 50, row_bytes, out.reshape(-1))
    assert (out[positions] == expected).all()


@pytest.mark.parametrize(("row_bytes", "offset"), [(512, 0), (512, 1), (96, 0), (100, 0)])
def test_rows_of_more_than_the_caches_are_copied_from_their_addresses(row_bytes, offset):
    """They are written another way, where they are whole vectors that begin where vectors may."""
    rng = np.random.default_rng(row_bytes)
    data = rng.integers(0, 256, (300 * row_bytes) | 1, np.uint8)
    rows = (20 << 20) // row_bytes
    addresses = rng.integers(0, data.size - row_bytes, rows).astype(np.uint64)
    addresses[[3, rows - 1]] = NO_ROW
    memory = np.full(rows * row_bytes + 128, 0xA5, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    out = memory[begin : begin + rows * row_bytes]
    picked = addresses.astype(np.int64)
    picked[[3, rows - 1]] = 0
    expected = data[picked[:, None] + np.arange(row_bytes)]
    expected[[3, rows - 1]] = 0
    gather_rows(data, addresses, 0, rows, row_bytes, out)
    assert (out.reshape(rows, row_bytes) == expected).all()
    assert (memory[:begin] == 0xA5).all()
    assert (memory[begin + out.size :] == 0xA5).all()
    positions = rng.permutation(rows).astype(np.uint32)
    scatter_rows(data, addresses, positions, 0, rows, row_bytes, out)
    assert (out.reshape(rows, row_bytes)[positions] == expected).all()


@given(count=st.integers(0, 300), start=st.integers(0, 9), to=st.integers(0, 9))
def test_copy_row_copies_that_many_bytes(count, start, to):
    source = np.arange(400, dtype=np.uint64).astype(np.uint8)
    target = np.full(400, 0xA5, np.uint8)
    copy_row(source, start, target, to, count)
    expected = np.full(400, 0xA5, np.uint8)
    expected[to : to + count] = source[start : start + count]
    assert (target == expected).all()


@given(counts=st.lists(st.integers(0, 9)), first=st.integers(0, 2**40))
def test_expand_counts_repeats_each_target(counts, first):
    out = np.empty(sum(counts), np.int64)
    assert expand_counts(np.array(counts, np.uint32), first, out) == out.size
    assert out.tolist() == np.repeat(np.arange(len(counts)) + first, counts).tolist()
