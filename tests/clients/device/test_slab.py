"""Slabs: arrays in few parts, found by address, and room that is used again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from clients.device.slab import ALIGN, Slab  # noqa: E402


def new_slab(sizes=None):
    def allocate(num_bytes):
        if sizes is not None:
            sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    return Slab(allocate)


shapes = st.lists(
    st.tuples(st.integers(0, 300_000), st.sampled_from(["uint8", "int32", "int64", "float32"])),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(batches=st.lists(shapes, min_size=1, max_size=4))
def test_arrays_are_apart_aligned_and_found(batches):
    slab = new_slab()
    for arrays in batches:
        slab.clear()
        made = [slab.empty((count,), dtype) for count, dtype in arrays]
        for value, array in enumerate(made):
            array[...] = value
        for value, array in enumerate(made):
            assert (array == value).all()
            assert array.ctypes.data % ALIGN == 0 or not array.size
        parts = slab.filled()
        for array in (a for a in made if a.size):
            place = slab.find(array.ctypes.data)
            raw = parts[place.part][place.offset : place.offset + array.nbytes]
            np.testing.assert_array_equal(raw.numpy().view(array.dtype), array)


def test_a_slab_grows_to_one_part_and_stays():
    sizes = []
    slab = new_slab(sizes)
    for _ in range(5):
        slab.clear()
        for _ in range(3):
            slab.empty((1 << 20,), "uint8")
    assert len(slab.filled()) == 1
    before = len(sizes)
    slab.clear()
    slab.empty((3 << 20,), "uint8")
    assert len(sizes) == before
    assert len(slab.filled()) == 1


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(10), torch.arange(12.0).view(3, 4).T, torch.empty(0), torch.tensor(3.5),
     torch.arange(5).to(torch.bfloat16)],
)  # fmt: skip
def test_tensors_of_others_are_put_in(tensor):
    slab = new_slab()
    slab.empty((5,), "uint8")
    place = slab.put(tensor)
    raw = slab.filled()[place.part][place.offset : place.offset + tensor.nbytes]
    assert torch.equal(raw.view(tensor.dtype).view(tensor.shape), tensor.contiguous())


def test_shadows_have_addresses_only():
    slab = new_slab()
    for _ in range(2):
        first = slab.shadow((1 << 28, 100), "float32")  # more than there is memory
        empty = slab.shadow((0, 3), "float32")
        second = slab.shadow((7, 3), "int16")
        assert slab.find_shadow(first.ctypes.data + 4096) == (0, 4096)
        assert slab.find_shadow(second[2:].ctypes.data) == (2, 12)
        assert slab.find_shadow(np.zeros(3).ctypes.data) is None
        assert slab.find(first.ctypes.data) is None
        assert empty.shape == (0, 3)
        slab.clear()
        assert slab.find_shadow(first.ctypes.data) is None
