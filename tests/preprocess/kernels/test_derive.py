"""Kernels of derived features against numpy, in any columns."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.kernels.derive import add_rows
from preprocess.kernels.edges import count_ids

IDS = st.sampled_from([np.uint32, np.uint64])


@given(
    edges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), max_size=40),
    width=st.integers(1, 40),
    first=st.integers(0, 2**31),
    ids=IDS,
    data=st.data(),
)
def test_rows_are_added_edge_by_edge(edges, width: int, first: int, ids: Any, data):
    edges = sorted(edges)
    low = data.draw(st.integers(0, width))
    high = data.draw(st.integers(low, width))
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((7, width)).astype(np.float32)
    before = rng.standard_normal((9, width)).astype(np.float32)
    origins = np.array([o + first for o, _ in edges], ids)
    targets = np.array([t for _, t in edges], ids)
    summed, greatest = before.copy(), before.copy()
    add_rows(False, rows, first, origins, targets, low, high, summed)
    add_rows(True, rows, first, origins, targets, low, high, greatest)
    expected, most = before.copy(), before.copy()
    for origin, target in edges:
        expected[target, low:high] += rows[origin, low:high]
        most[target, low:high] = np.maximum(most[target, low:high], rows[origin, low:high])
    assert np.array_equal(summed, expected)
    assert np.array_equal(greatest, most)
    counts = np.zeros(9, np.uint32)
    count_ids(targets, 0, counts)
    assert counts.tolist() == np.bincount(targets.astype(np.int64), minlength=9).tolist()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_nan_is_the_greatest_of_all(order: list[int]):
    rows = np.array([[np.nan], [3]], np.float32)
    sums = np.full((1, 1), -np.inf, np.float32)
    add_rows(True, rows, 0, np.array(order, np.uint32), np.zeros(2, np.uint32), 0, 1, sums)
    assert np.isnan(sums[0, 0])
