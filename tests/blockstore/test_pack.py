"""Columns into graph blocks and back, whatever the pieces they come in."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.errors import CorruptBlock, StoreError, UnsupportedVersion
from blockstore.pack import GraphPacker, unpack_block
from tests import reference
from tests.graphs import Held, held_graphs, hold, make_csc


def _unpacked(held: Held):
    return [unpack_block(block, f"block {i}") for i, block in enumerate(held.blocks)]


def _in_pieces(held: Held, cuts: list[int]) -> tuple[list[bytes], list[int]]:
    """Blocks and index of the same graph, appended in pieces."""
    blocks: list[bytes] = []
    graph, size = held.graph, held.blocks[0].size if held.blocks else 4096
    packer = GraphPacker(size, held.layout, held.first, lambda b: blocks.append(b.tobytes()))
    bounds = [0, *sorted(min(cut, graph.num_nodes) for cut in cuts), graph.num_nodes]
    for low, high in pairwise(bounds):
        edges = slice(int(graph.indptr[low]), int(graph.indptr[high]))
        edge_ids = graph.edge_ids[edges] if held.edge_id_dtype else None
        packer.append(
            np.diff(graph.indptr[low : high + 1]), graph.indices[edges], edge_ids,
            graph.weights[edges], graph.times[edges],
        )  # fmt: skip
    return blocks, packer.close().tolist()


@given(held=held_graphs())
def test_blocks_hold_the_columns_in_order(held):
    graph, found = held.graph, _unpacked(held)
    sources = np.concatenate([block.sources for block in found])
    assert sources.tolist() == graph.indices.tolist()
    assert sources.dtype == held.id_dtype
    if held.edge_id_dtype:
        edge_ids = np.concatenate([block.edge_ids for block in found])
        assert edge_ids.tolist() == graph.edge_ids.tolist()
        assert edge_ids.dtype == held.edge_id_dtype
    for name, kept in zip(("weights", "times"), held.beside, strict=True):
        parts = [getattr(block, name) for block in found]
        assert all((part is not None) == kept for part in parts)
        if kept and parts:
            assert np.array_equal(np.concatenate(parts), getattr(graph, name))
    nodes = [block.header.num_nodes for block in found]
    firsts = (held.first + np.concatenate([[0], np.cumsum(nodes)])).tolist()
    assert held.first_node.tolist() == firsts
    assert [block.header.first_node for block in found] == firsts[:-1]


@given(held=held_graphs())
def test_headers_say_what_lies_where(held):
    degrees, column = np.diff(held.graph.indptr), 0
    for block in _unpacked(held):
        header, here = block.header, block.degrees_here()
        expected = degrees[column : column + header.num_nodes]
        column += header.num_nodes
        assert here.tolist() == np.minimum(expected, held.capacity).tolist()
        assert header.num_carried + here.sum() == header.num_edges
        assert block.offsets[0] == header.num_carried
        assert header.last_degree == (expected[-1] if expected.size else 0)
        if header.last_degree > held.capacity:  # a multi-block column starts in a block of its own
            assert (header.num_nodes, header.num_carried) == (1, 0)


@given(held=held_graphs())
def test_columns_are_cut_into_blocks_by_the_rule(held):
    size = held.blocks[0].size
    expected = reference.pack_columns(
        np.diff(held.graph.indptr).tolist(),
        held.capacity,
        lambda columns, edges: held.layout.sections(columns, edges)[-1] <= size,
    )
    headers = [block.header for block in _unpacked(held)]
    assert [(h.num_nodes, h.num_edges, h.num_carried) for h in headers] == expected


@given(held=held_graphs(), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_pieces_make_no_difference(held, cuts):
    expected = [block.tobytes() for block in held.blocks], held.first_node.tolist()
    assert _in_pieces(held, cuts) == expected


@pytest.mark.parametrize("columns", [0, 1, 1007, 1008, 5000])
def test_columns_without_edges(columns):
    held = hold(make_csc([0] * columns, 0), first=3)
    assert sum(block.header.num_nodes for block in _unpacked(held)) == columns
    assert len(held.blocks) == -(-columns // 1007)  # 64 bytes and 1,008 offsets fill 4,096
    assert held.first_node[-1] == 3 + columns


def test_a_multi_block_column_that_ends_with_its_block_lets_empty_columns_follow():
    capacity = hold(make_csc([1], 0)).capacity
    held = hold(make_csc([2 * capacity, 0, 0, 3], 1))
    shapes = [(b.header.num_nodes, b.header.num_edges) for b in _unpacked(held)]
    assert shapes[0] == (1, capacity)
    assert shapes[1][1] == capacity
    assert shapes[-1][1] == 3


def test_every_header_byte_that_is_flipped_is_noticed_or_harmless():
    """What is left to the page checksums is never an exception of another kind."""
    held = hold(make_csc([5, 0, 3], 1, "uint32", "uint64"), 4096, "uint32", "uint64")
    for byte in range(64):
        for bit in range(8):
            block = held.blocks[0].copy()
            block[byte] ^= 1 << bit
            try:
                found = unpack_block(block, "here")
            except StoreError as error:
                assert str(error).startswith("here: ")  # noqa: PT017
            else:
                assert found.sources.size == found.header.num_edges


def test_errors_name_the_place_what_was_found_and_what_was_expected():
    block = hold(make_csc([5, 0, 3], 1)).blocks[0]
    changed = block.copy()
    changed[0] = 0
    with pytest.raises(CorruptBlock, match=r"^train\+8192: magic is b'\\x00BLK', not b'GBLK'"):
        unpack_block(changed, "train+8192")
    changed = block.copy()
    changed[4] = 9
    with pytest.raises(UnsupportedVersion, match=r"^here: block format 9, this code reads 2"):
        unpack_block(changed, "here")
    changed = block.copy()
    changed[29] = 255
    with pytest.raises(CorruptBlock, match=r"^here: .* do not fit a block of 4096 bytes"):
        unpack_block(changed, "here")
