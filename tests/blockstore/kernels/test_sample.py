"""Sampling from packed blocks in slots, against tests/reference.py on the plain graph."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.blockstore.kernels.sampling import (
    Sampler,
    expected,
    sample_by_block,
    sample_items,
    sample_present,
    uniform,
)
from tests.graphs import KEYS, held_graphs, hold, make_csc
from tests.reference import sample_edges

FANOUTS = st.one_of(st.integers(0, 12), st.sampled_from([-1, 63, 64, 65, 100, 700]))


@st.composite
def frontiers(draw, held):
    """Columns of a graph in any order, some twice, some of another type."""
    return draw(st.lists(st.integers(0, held.graph.num_nodes + 2), max_size=80))


@given(held=held_graphs(), fanout=FANOUTS, key=KEYS, replace=st.booleans(), data=st.data())
def test_draws_are_those_of_the_reference(held, fanout, key, replace, data):
    columns = data.draw(frontiers(held))
    found = sample_present(held, columns, fanout, key, replace)
    assert found == expected(held, columns, fanout, key, replace)


@given(
    held=held_graphs(with_edge_ids=True, block_sizes=(4096,)),
    fanout=FANOUTS, key=KEYS, replace=st.booleans(), together=st.integers(1, 3), data=st.data(),
)  # fmt: skip
def test_blocks_present_a_few_at_a_time_give_the_same(held, fanout, key, replace, together, data):
    columns = data.draw(frontiers(held))
    found = sample_by_block(held, columns, fanout, key, replace, together)
    assert found == expected(held, columns, fanout, key, replace)


@given(
    held=held_graphs(), fanout=FANOUTS, key=KEYS, replace=st.booleans(), data=st.data(),
    first=st.sampled_from([0, 2**33]),
)  # fmt: skip
def test_picks_are_numbered_in_block_order(held, fanout, key, replace, first, data):
    columns, graph = data.draw(frontiers(held)), held.graph
    assert sample_items(held, columns, fanout, key, replace, first) == [
        [first + e for e in sample_edges(graph.indptr, c, fanout, key, replace, held.first)]
        if c < graph.num_nodes
        else []
        for c in columns
    ]


@pytest.mark.parametrize(
    ("block_bytes", "fanout"),
    [(4096, -1), (4096, 5), (4096, 64), (4096, 65), (4096, 400), (16384, -1), (65536, 64)]
    + [pytest.param(65536, fanout, marks=pytest.mark.long) for fanout in (-1, 5, 65, 400)],
)
@pytest.mark.parametrize(
    "edge_id_dtype", ["uint32", pytest.param("uint64", marks=pytest.mark.long)]
)  # the second is compiled for this test alone
def test_a_multi_block_column_is_sampled_over_all_its_blocks(block_bytes, fanout, edge_id_dtype):
    degrees = [3, 0, 10 * block_bytes // 4, 0, 5, 3 * block_bytes // 4, 2]
    graph = make_csc(degrees, 1, "uint32", edge_id_dtype)
    held = hold(graph, block_bytes, "uint32", edge_id_dtype, 50)
    sampler = Sampler(held, range(7), uniform(fanout, 9))
    assert (np.array(degrees) > held.capacity).sum() == 2
    assert sample_present(held, range(7), fanout, 9) == expected(held, range(7), fanout, 9)
    found = sample_by_block(held, range(7), fanout, 9, False, 2)
    assert found == expected(held, range(7), fanout, 9)
    assert np.ptp(sampler.blocks) >= 10


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_columns_that_just_fill_a_block(spare):
    """One edge less than a block holds, as many, and one more: the last is a multi-block column."""
    capacity = hold(make_csc([1], 0)).capacity
    held = hold(make_csc([0, 2, capacity + spare, 0, capacity + spare, 1], 3))
    columns = [5, 4, 3, 2, 1, 0]
    for fanout in (-1, 10, 2000):
        assert sample_present(held, columns, fanout, 1) == expected(held, columns, fanout, 1)


@given(held=held_graphs(), fanout=st.integers(1, 30), key=KEYS)
def test_every_column_is_a_sub_multiset_of_its_neighbors(held, fanout, key):
    graph = held.graph
    columns = list(range(graph.num_nodes))
    for column, found in zip(
        columns, sample_present(held, columns, fanout, key).sources, strict=True
    ):
        neighbors = graph.indices[graph.indptr[column] : graph.indptr[column + 1]].tolist()
        assert len(found) == min(len(neighbors), fanout)
        assert Counter(found) <= Counter(neighbors)


@given(held=held_graphs(), fanout=st.integers(0, 20), key=KEYS, data=st.data())
def test_a_column_draws_the_same_in_any_company(held, fanout, key, data):
    columns = data.draw(frontiers(held))
    together = sample_present(held, columns, fanout, key).sources
    for column, found in list(zip(columns, together, strict=True))[:5]:
        assert sample_present(held, [column], fanout, key).sources == [found]


@pytest.mark.parametrize("fanout", [3, 63, 64, 65, 128, 1000])
def test_columns_no_longer_than_the_fanout_keep_their_order(fanout):
    held = hold(make_csc([fanout - 1, fanout, 1, 0], 5), 65536)
    graph = held.graph
    found = sample_present(held, range(4), fanout, 8).sources
    assert [source for column in found for source in column] == graph.indices.tolist()


@pytest.mark.parametrize("fanout", [0, 7, 100, 4000])
def test_replacement_draws_the_whole_fanout_from_any_column_with_edges(fanout):
    held = hold(make_csc([0, 1, 5, 3000, 0, 80], 6))
    found = sample_present(held, range(6), fanout, 2, replace=True)
    assert [len(column) for column in found.sources] == [0, fanout, fanout, fanout, 0, fanout]
    assert found == expected(held, range(6), fanout, 2, replace=True)
    assert found == sample_by_block(held, range(6), fanout, 2, True, 1)
