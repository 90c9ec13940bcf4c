"""The heap of the least keys, against sorting."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.heap import push

MARKS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=40, unique=True)


@given(MARKS, st.integers(1, 8), st.booleans(), st.sampled_from([np.float64, np.int64]))
def test_it_keeps_the_least_of_equal_ones_the_first_or_the_last(marks, most, last, dtype):
    keys, places, count = np.empty(most, dtype), np.empty(most, np.int64), 0
    for key, place in marks:
        count = push(keys, places, count, most, dtype(key), place, last)
    kept = sorted(marks, key=lambda m: (m[0], -m[1] if last else m[1]))[:most]
    assert sorted(zip(keys[:count].tolist(), places[:count].tolist(), strict=True)) == sorted(kept)
