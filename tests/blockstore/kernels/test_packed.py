"""Ids in a stream of bits, against plain Python integers."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.format import MAX_ID_BITS, EdgeLayout, packed_bytes
from blockstore.kernels.jit import leaf
from blockstore.kernels.packed import PackedIds, pack_ids, unpack_ids, view_ids
from blockstore.pack import GraphPacker, unpack_block
from tests import reference


class Numbers(NamedTuple):
    values: list[int]  # from the base on
    bits: int
    base: int


@st.composite
def numbers(draw):
    bits = draw(st.integers(1, MAX_ID_BITS))
    values = draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=70))
    return Numbers(values, bits, draw(st.sampled_from([0, 1, 2**31, 2**56])))


@given(found=numbers(), cut=st.integers(0, 70))
def test_a_stream_is_that_of_the_reference(found, cut):
    """In two pieces, and back."""
    values = np.array(found.values, np.uint64) + np.uint64(found.base)
    words = np.zeros(values.size * found.bits // 64 + 2, np.uint64)
    cut, base = min(cut, values.size), np.uint64(found.base)
    assert pack_ids(values[:cut], base, found.bits, words, 0)
    assert pack_ids(values[cut:], base, found.bits, words, cut * found.bits)
    raw = words.tobytes()
    stream = reference.pack_bits(found.values, found.bits)
    assert raw[: len(stream)] == stream
    assert not any(raw[len(stream) :])
    out = np.zeros(values.size, np.uint64)
    size = packed_bytes(values.size, found.bits)  # no byte more is looked at
    data = np.zeros(size, np.uint8)
    data[: min(size, len(raw))] = np.frombuffer(raw, np.uint8)[:size]
    unpack_ids(PackedIds(data, found.bits, base), 0, out)
    assert out.tolist() == values.tolist()
    assert out.tolist() == reference.unpack_bits(raw, found.bits, found.base, values.size)


@pytest.mark.parametrize("bits", [1, 8, 31, 56])
def test_numbers_without_room_are_told(bits):
    words = np.zeros(4, np.uint64)
    assert pack_ids(np.array([5, 4 + (1 << bits)], np.uint64), np.uint64(5), bits, words, 0)
    assert not pack_ids(np.array([4], np.uint64), np.uint64(5), bits, words, 0)
    assert not pack_ids(np.array([5 + (1 << bits)], np.uint64), np.uint64(5), bits, words, 0)


@leaf
def _read_array(values, out):
    ids = view_ids(values)
    unpack_ids(ids, ids.bits, out)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_an_array_of_ids_is_read_as_a_stream(dtype):
    values = np.array([1, 2**31, np.iinfo(dtype).max, 7, 0, 0, 0], dtype)
    out = np.zeros(4, dtype)
    _read_array(values, out)
    assert out.tolist() == values[1:5].tolist()


@st.composite
def columns(draw):
    """(layout, degrees, sections of as many edges), whatever widths and numbers there are."""
    found = draw(numbers())
    degrees = draw(st.lists(st.integers(0, 50), min_size=1, max_size=30))
    if draw(st.booleans()):
        degrees[draw(st.integers(0, len(degrees) - 1))] = draw(st.integers(500, 9000))
    edge_id_bytes = draw(st.sampled_from([0, 4, 8]))
    weight_bytes, time_bytes = draw(st.sampled_from([0, 4])), draw(st.sampled_from([0, 8]))
    rng, count = np.random.default_rng(draw(st.integers(0, 2**32))), sum(degrees)
    sources = rng.integers(0, 1 << found.bits, count).astype(np.uint64) + np.uint64(found.base)
    sections = (
        sources,
        rng.integers(0, 2 ** (8 * (edge_id_bytes or 4)), count, np.uint64).astype(
            f"u{edge_id_bytes or 4}"
        ),
        rng.random(count).astype(np.float32),
        rng.integers(-(2**63), 2**63 - 1, count),
    )
    beside = edge_id_bytes, weight_bytes, time_bytes
    return EdgeLayout("uint64", found.bits, found.base, *beside), degrees, sections


@settings(deadline=None, max_examples=60)
@given(made=columns())
def test_columns_of_any_width_come_back_from_their_blocks(made):
    layout, degrees, sections = made
    blocks: list[np.ndarray] = []
    packer = GraphPacker(4096, layout, 3, lambda block: blocks.append(block.copy()))
    packer.append(np.array(degrees, np.int64), *sections)
    packer.close()
    found = [unpack_block(block, "here") for block in blocks]
    held = (True, layout.edge_id_bytes, layout.weight_bytes, layout.time_bytes)
    for name, values, is_held in zip(
        ("sources", "edge_ids", "weights", "times"), sections, held, strict=True
    ):
        parts = [getattr(block, name) for block in found]
        if is_held:
            assert np.concatenate(parts).tolist() == values.tolist()
        else:
            assert parts == [None] * len(parts)
    for block, raw in zip(found, blocks, strict=True):
        header = block.header
        start = layout.sections(header.num_nodes, 0)[0]
        assert block.sources.tolist() == reference.unpack_bits(
            raw[start:].tobytes(), layout.source_bits, layout.source_base, header.num_edges
        )
