"""Picks are uniform: singles, pairs and whole sets, in every way that positions are drawn."""

from itertools import combinations
from math import comb

import numpy as np
import pytest

from tests.blockstore.kernels.chi import RARE, chi_square, distribution
from tests.blockstore.kernels.sampling import sample_present
from tests.graphs import Csc, hold

# degree, fanout: exact bits, bits as a filter, a set, columns over several blocks (above 1,005)
CASES = [(6, 2), (12, 5), (64, 10), (65, 10), (200, 12), (70, 66), (300, 100), (2500, 8)]


def _sampled(degree: int, fanout: int, num: int, replace: bool = False):
    """Positions picked by `num` columns of this degree under two keys, (2 * num, fanout)."""
    indptr = np.arange(num + 1) * degree
    positions = np.tile(np.arange(degree, dtype=np.uint32), num)
    held = hold(Csc(indptr, positions, positions), 4096)
    found = [sample_present(held, range(num), fanout, key, replace).sources for key in (11, 12)]
    return np.array(found).reshape(2 * num, fanout)


@distribution
@pytest.mark.parametrize(("degree", "fanout"), CASES)
def test_every_position_is_equally_likely(degree, fanout):
    """Each of n columns picks a position with p = fanout / degree: n * p expected.

    A position's count has variance n * p * (1 - p), as columns are independent and pick it once
    at most; of cells that trials fall into it would be n * p * (1 - 1 / degree).  So the shrink is
    (1 - p) / (1 - 1 / degree).
    """
    num = max(300, 20_000 // degree)
    picks = _sampled(degree, fanout, num)
    counts = np.bincount(picks.ravel(), minlength=degree)
    p = fanout / degree
    assert (np.diff(np.sort(picks, axis=1), axis=1) > 0).all()
    assert chi_square(counts, 2 * num * p, (1 - p) / (1 - 1 / degree)) > RARE


@distribution
@pytest.mark.parametrize(("degree", "fanout"), [(10, 2), (60, 9), (65, 10), (200, 70), (2500, 8)])
def test_every_pair_is_equally_likely(degree, fanout):
    """Pairs of fifths of the positions, g = degree / 5 in each: 25 cells.

    Two picks of a column, in slots that a generator of the test's own chose, are equally likely
    any two distinct positions: n * g * g / (degree * (degree - 1)) fall into two given fifths,
    n * g * (g - 1) / (degree * (degree - 1)) into the same fifth twice.
    """
    fifth = degree // 5
    picks = _sampled(degree, fanout, max(1000, 20_000 // degree))
    rng = np.random.default_rng(1)
    slots = np.array([rng.choice(fanout, 2, replace=False) for _ in picks])
    a, b = np.take_along_axis(picks, slots, axis=1).T // fifth
    counts = np.bincount(a * 5 + b, minlength=25).reshape(5, 5)
    ways = fifth * fifth - np.eye(5) * fifth
    assert chi_square(counts, len(picks) * ways / (degree * (degree - 1))) > RARE


@distribution
@pytest.mark.parametrize(("degree", "fanout"), [(6, 2), (6, 3), (7, 5), (9, 4), (12, 2)])
def test_every_set_is_equally_likely(degree, fanout):
    """All subsets of a column's positions, so all singles, pairs and so on: 100 expected in each.

    Each column falls into exactly one of `degree` choose `fanout` cells.
    """
    sets = list(combinations(range(degree), fanout))
    num = 50 * comb(degree, fanout)
    weights = 1 << np.arange(degree)
    found = weights[_sampled(degree, fanout, num)].sum(axis=1)
    counts = np.bincount(found, minlength=1 << degree)
    cells = [counts[sum(1 << p for p in picks)] for picks in sets]
    assert sum(cells) == 2 * num
    assert chi_square(cells, 100) > RARE


@distribution
@pytest.mark.parametrize(("degree", "fanout"), [(5, 3), (64, 20), (2500, 10)])
def test_draws_with_replacement_are_uniform_and_independent(degree, fanout):
    """Positions: 2 * num * fanout trials.  Slots 0 and 1 by residues modulo 5: 25 even cells."""
    num = max(300, 20_000 // degree)
    picks = _sampled(degree, fanout, num, replace=True)
    counts = np.bincount(picks.ravel(), minlength=degree)
    assert chi_square(counts, picks.size / degree) > RARE
    even = picks[(picks < degree - degree % 5).all(axis=1)] % 5
    pairs = np.bincount(even[:, 0] * 5 + even[:, 1], minlength=25)
    assert chi_square(pairs, even.shape[0] / 25) > RARE


@distribution
def test_neighboring_nodes_and_keys_draw_independently():
    """Columns 2i and 2i + 1 pick one of 8: 64 cells; so do keys 11 and 12: 300 or more in each."""
    picks = _sampled(8, 1, 20_000).reshape(2, 20_000)
    nodes = picks[:, 0::2] * 8 + picks[:, 1::2]
    assert chi_square(np.bincount(nodes.ravel(), minlength=64), nodes.size / 64) > RARE
    keys = picks[0] * 8 + picks[1]
    assert chi_square(np.bincount(keys, minlength=64), keys.size / 64) > RARE
