"""Blocks of columns, against a search of the whole index."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.locate import build_guide, choose_shift, locate_columns
from tests.graphs import ID_DTYPES, held_graphs


def _locate(nodes, first, num_nodes, first_node, shift):
    guide = build_guide(first_node, first, num_nodes, shift)
    assert guide.dtype == np.uint32
    blocks = np.full(nodes.size + 1, 99, np.int32)
    locate_columns(nodes, nodes.size, first, num_nodes, first_node, guide, shift, blocks)
    assert blocks[-1] == 99
    return blocks[:-1].tolist()


@given(held=held_graphs(block_sizes=(4096,)), shift=st.one_of(st.none(), st.integers(0, 12)))
def test_every_column_is_found_in_the_block_where_it_starts(held, shift):
    num_nodes = held.graph.num_nodes
    if shift is None:
        shift = choose_shift(num_nodes, len(held.blocks))
    nodes = held.nodes(range(num_nodes))
    found = _locate(nodes, held.first, num_nodes, held.first_node, shift)
    assert found == held.block_of(range(num_nodes)).tolist()


@given(
    starts=st.lists(st.integers(0, 300), min_size=1, max_size=60), id_dtype=ID_DTYPES,
    first=st.integers(0, 100), shift=st.integers(0, 10),
)  # fmt: skip
def test_blocks_in_which_no_column_starts_are_passed_over(starts, id_dtype, first, shift):
    """Any index, as of multi-block columns in a row; nodes around the range have another type."""
    ends = sorted(starts)
    num_nodes = ends[-1] + 1
    first_node = np.array([0, *ends, num_nodes], np.uint64) + np.uint64(first)
    nodes = np.arange(first + num_nodes + 5, dtype=id_dtype)
    expected = np.searchsorted(first_node[:-1], nodes.astype(np.uint64), side="right") - 1
    expected[(nodes < first) | (nodes >= first + num_nodes)] = -1
    assert _locate(nodes, first, num_nodes, first_node, shift) == expected.tolist()


def test_a_type_without_nodes_holds_none():
    empty = np.array([5], np.uint64)
    nodes = np.array([4, 5, 6], np.uint32)
    assert _locate(nodes, 5, 0, empty, choose_shift(0, 0)) == [-1, -1, -1]


@pytest.mark.parametrize("num_blocks", [1, 7, 1000])
def test_the_guide_has_two_to_four_entries_a_block(num_blocks):
    for num_nodes in (10 * num_blocks, 3_000_000, 2**40):
        shift = choose_shift(num_nodes, num_blocks)
        entries = -(-num_nodes >> shift)
        assert 2 * num_blocks < entries + 1 <= 4 * num_blocks + 1
