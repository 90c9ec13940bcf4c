"""Positions of picks against plain Python: each way of telling a pick from those before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.kernels import picks as k
from tests.reference import pick_positions


def pick(degree: int, fanout: int, replace: bool, node: int, key: int) -> list[int]:
    out = np.full(fanout + 4, -1, np.int64)
    scratch = np.full(k.scratch_size(fanout), -1, np.int64)
    k.pick_positions(out, 2, degree, fanout, replace, node, np.uint64(key), scratch)
    assert out[:2].tolist() == out[fanout + 2 :].tolist() == [-1, -1]
    return out[2 : fanout + 2].tolist()


@pytest.mark.parametrize(("degree", "fanout"), [(64, 63), (65, 64), (70, 60), (90, 80), (300, 130)])
@pytest.mark.parametrize("replace", [False, True])
def test_nearly_all_positions(degree, fanout, replace):
    """Draws that were picked before are many: also the very one before."""
    for key in range(60):
        found = pick(degree, fanout, replace, 7, key)
        assert found == pick_positions(degree, fanout, replace, key, 7)
        assert replace or len(set(found)) == fanout


@settings(deadline=None)
@given(
    st.integers(1, 400), st.integers(0, 200), st.booleans(), st.integers(0, 2**40),
    st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_picks_are_the_references(degree, fanout, replace, node, key):
    fanout = fanout if replace else min(fanout, degree - 1)
    assert pick(degree, fanout, replace, node, key) == pick_positions(
        degree, fanout, replace, key, node
    )
