"""Work in block order, and small copies, against plain Python."""

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
    missing_keys,
    order_by_block,
    prefix_starts,
    stride_starts,
    take_ids,
)
from blockstore.kernels.rows import ABSENT, NO_ROW
from tests.graphs import ID_DTYPES

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


@given(nodes=st.lists(st.integers(0, 5), max_size=30), maximum=st.integers(0, 12))
def test_nodes_are_counted_up_to_a_bound(nodes, maximum):
    counts = np.zeros(6, np.uint16)
    count_nodes(np.array(nodes, np.uint32), maximum, counts)
    assert counts.tolist() == [min(maximum, nodes.count(node)) for node in range(6)]
