"""The machine instructions, against Python's own integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from blockstore.kernels.intrinsics import LANES, add_lanes, mulhi, prefetch

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
