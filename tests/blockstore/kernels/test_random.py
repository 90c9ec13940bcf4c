"""Keyed random numbers against plain Python, and their distributions at fixed seeds."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from blockstore.kernels.random import (
    draw_below,
    make_epoch_key,
    make_key,
    mix,
    permute,
    permute_range,
)
from tests import reference
from tests.blockstore.kernels.chi import RARE, chi_square, distribution
from tests.graphs import KEYS

SMALL = st.integers(0, 2**40)


@njit
def _draws(num, bound, out):
    for i in range(num):
        out[i] = draw_below(np.uint64(5), i // 10, i % 10, bound)


@njit
def _permutations(num, size, out):
    for key in range(num):
        permute_range(0, size, size, mix(np.uint64(key)), out[key])


@given(x=KEYS)
def test_mix_is_splitmix64(x):
    assert int(mix(np.uint64(x))) == reference.mix(x)


@given(seed=KEYS, epoch=SMALL, step=SMALL, hop=st.integers(0, 9), relation=st.integers(0, 99))
def test_keys_are_those_of_the_reference(seed, epoch, step, hop, relation):
    key = make_key(seed, epoch, step, hop, relation)
    assert key == reference.make_key(seed, epoch, step, hop, relation)
    assert make_epoch_key(seed, epoch) == reference.make_epoch_key(seed, epoch)


def test_every_part_of_a_position_changes_the_key():
    keys = [make_key(*place) for place in np.eye(5, dtype=np.int64).tolist()]
    assert len({*keys, make_key(0, 0, 0, 0, 0), make_key(1, 1, 0, 0, 0)}) == 7


def test_negative_seeds_are_taken_modulo_2_to_the_64():
    assert make_key(-1, 0, 0, 0, 0) == reference.make_key(2**64 - 1, 0, 0, 0, 0)
    assert make_epoch_key(-1, 0) == reference.make_epoch_key(2**64 - 1, 0)


@given(key=KEYS, node=KEYS, draw=st.integers(0, 2**31), bound=st.integers(1, 2**62))
def test_draws_are_those_of_the_reference_and_below_their_bound(key, node, draw, bound):
    found = int(draw_below(np.uint64(key), np.uint64(node), draw, bound))
    assert found == reference.draw_below(key, node, draw, bound)
    assert 0 <= found < bound


@distribution
@pytest.mark.parametrize("bound", [2, 7, 64, 1000])
def test_draws_are_uniform(bound):
    """100,000 draws of 10,000 nodes: 100 or more expected in each cell."""
    num = 100_000
    out = np.empty(num, np.int64)
    _draws(num, bound, out)
    assert chi_square(np.bincount(out, minlength=bound), num / bound) > RARE


@distribution
def test_consecutive_draws_of_a_node_are_independent():
    """Pairs of draws below 16: 256 cells, 351 expected in each."""
    out = np.empty(100_000, np.int64)
    _draws(out.size, 16, out)
    pairs = out.reshape(-1, 10)  # ids: (nodes, draws)
    cells = (pairs[:, :-1] * 16 + pairs[:, 1:]).ravel()
    assert chi_square(np.bincount(cells, minlength=256), cells.size / 256) > RARE


@given(size=st.integers(1, 2000), key=KEYS)
def test_permute_is_a_bijection_that_the_reference_gives_too(size, key):
    found = np.empty(size, np.int64)
    permute_range(0, size, size, np.uint64(key), found)
    assert sorted(found.tolist()) == list(range(size))
    for index in {0, size // 2, size - 1}:
        assert found[index] == reference.permute(index, size, key)


@given(key=KEYS, cuts=st.lists(st.integers(0, 500), max_size=5))
def test_ranges_of_a_permutation_are_pieces_of_it(key, cuts):
    whole, pieces = np.empty(500, np.int64), np.empty(500, np.int64)
    permute_range(0, 500, 500, np.uint64(key), whole)
    for start, stop in pairwise([0, *sorted(cuts), 500]):
        permute_range(start, stop, 500, np.uint64(key), pieces[start:stop])
    assert pieces.tolist() == whole.tolist()


@given(size=st.integers(2**31, 2**62), key=KEYS)
def test_permute_works_on_sizes_beyond_32_bits(size, key):
    for index in (0, size - 1):
        found = int(permute(index, size, np.uint64(key)))
        assert found == reference.permute(index, size, key)
        assert 0 <= found < size


@distribution
@pytest.mark.parametrize("size", [2, 3, 5, 10, 16, 17, 33, 64, 100])
def test_positions_and_pairs_of_a_permutation_are_equally_likely(size):
    """20,000 keys: 200 or more expected for each index at each position, and all pairs at once.

    The first two indices have size * (size - 1) pairs of positions, 2 or more expected in each.
    """
    num = 20_000
    out = np.empty((num, size), np.int64)
    _permutations(num, size, out)
    for index in range(size):
        counts = np.bincount(out[:, index], minlength=size)
        assert chi_square(counts, num / size) > RARE
    cells = np.bincount(out[:, 0] * size + out[:, 1], minlength=size * size)
    possible = cells.reshape(size, size)[~np.eye(size, dtype=bool)]
    assert chi_square(possible, num / possible.size) > RARE


def test_numbers_are_what_they_were_in_version_1():
    """Batches must stay the same: a change of these is a change of the sampler's version."""
    assert make_key(1, 2, 3, 4, 5) == 0x65EF7D4EB5178A4D
    assert make_epoch_key(1, 2) == 0x82144CE1906B8D15
    draws = [int(draw_below(np.uint64(7), 8, k, 1000)) for k in range(4)]
    assert draws == [26, 243, 413, 521]
    assert [int(permute(i, 10, np.uint64(9))) for i in range(10)] == [3, 1, 6, 8, 5, 7, 9, 4, 0, 2]
