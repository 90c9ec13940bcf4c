"""Arrays laid over slots that are not adjacent, as a client finds them again."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.memory.blob import ALIGN, joined, made, part, write_blob

SLOT = 256


@settings(deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from(["uint8", "uint32", "int64"]), st.integers(0, 90)), max_size=6
    ),
    order=st.permutations(range(20)),
)
def test_arrays_are_found_again(sizes, order):
    rng = np.random.default_rng(len(sizes))
    arrays = [(str(i), rng.integers(0, 200, n).astype(d)) for i, (d, n) in enumerate(sizes)]
    data = np.full(20 * SLOT, 0xEE, np.uint8)
    blob = write_blob(data, SLOT, order, arrays)
    assert blob.slots == tuple(order)
    flat = np.concatenate([data[slot * SLOT :][:SLOT] for slot in order])
    end = 0
    for placed, (name, array) in zip(blob.arrays, arrays, strict=True):
        assert (placed.name, placed.dtype, placed.length) == (name, array.dtype.name, array.size)
        assert placed.offset % ALIGN == 0
        assert placed.offset >= end
        end = placed.offset + array.nbytes
        assert flat[placed.offset : end].tobytes() == array.tobytes()
    assert end <= 20 * SLOT


def test_slots_that_are_not_given_are_not_written():
    data = np.full(4 * SLOT, 0xEE, np.uint8)
    write_blob(data, SLOT, [2, 0], [("a", np.zeros(SLOT + 10, np.uint8))])
    assert (data[SLOT : 2 * SLOT] == 0xEE).all()
    assert (data[3 * SLOT :] == 0xEE).all()
    with pytest.raises(IndexError):
        write_blob(data, SLOT, [2], [("a", np.zeros(SLOT + 10, np.uint8))])


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.data())
def test_pieces_are_written_as_one_array(sizes, data):
    ends = np.cumsum([0, *sizes])
    whole = np.arange(ends[-1], dtype=np.uint32)
    pieces = [whole[a:b] for a, b in pairwise(ends)]
    low = data.draw(st.integers(0, int(ends[-1])))
    high = data.draw(st.integers(low, int(ends[-1])))
    twice = made(pieces, np.uint64, lambda items, out: np.multiply(items, 2, out=out))
    arrays = [("part", part(joined(pieces), low, high)), ("twice", twice), ("all", joined(pieces))]
    memory = np.zeros(80 * SLOT, np.uint8)
    blob = write_blob(memory, SLOT, range(80), arrays)
    expected = [whole[low:high], 2 * whole.astype(np.uint64), whole]
    for placed, values in zip(blob.arrays, expected, strict=True):
        assert (placed.dtype, placed.length) == (values.dtype.name, values.size)
        assert memory[placed.offset :][: values.nbytes].tobytes() == values.tobytes()
