"""The machine instructions, against Python's own integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from blockstore.kernels.intrinsics import (
    LANES,
    VECTOR,
    add_lanes,
    fence,
    mulhi,
    prefetch,
    stream_vector,
)

WORDS = st.integers(0, 2**64 - 1)


@njit
def _mulhi(a, b):
    return mulhi(a, b)


@njit
def _prefetch_around(array, far):
    for index in range(-far, array.size + far):
        prefetch(array, index)
    return array.sum()


@njit
def _add_lanes(target, at, source):
    add_lanes(target, at, source)


@njit
def _stream_vector(source, start, target, at):
    stream_vector(source, start, target, at)
    fence()


@given(start=st.integers(0, 70), at=st.integers(0, 3))
def test_a_vector_is_written_past_the_caches_from_any_place(start, at):
    source, memory = np.arange(120, dtype=np.uint8), np.zeros(6 * VECTOR, np.uint8)
    first = -memory.ctypes.data % VECTOR + at * VECTOR
    expected = memory.copy()
    expected[first : first + VECTOR] = source[start : start + VECTOR]
    _stream_vector(source, start, memory, first)
    assert np.array_equal(memory, expected)


@given(dtype=st.sampled_from([np.float32, np.float64]), at=st.integers(0, 9))
def test_lanes_are_added_and_others_left_alone(dtype, at):
    target = np.linspace(0, 1, LANES + 9).astype(dtype)
    source = np.arange(LANES).astype(dtype)
    expected = target.copy()
    expected[at : at + LANES] += source
    _add_lanes(target, at, source)
    assert np.array_equal(target, expected)


@given(a=WORDS, b=WORDS)
def test_mulhi_is_the_upper_half_of_the_product(a, b):
    assert int(_mulhi(np.uint64(a), np.uint64(b))) == a * b >> 64


def test_prefetching_outside_an_array_does_no_harm():
    for dtype in (np.uint8, np.uint32, np.uint64):
        assert _prefetch_around(np.arange(10, dtype=dtype), 100_000) == 45
