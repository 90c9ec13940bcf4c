"""The heap of the least keys, against sorting."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.ranked import Heap, push

MARKS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=40, unique=True)


@given(MARKS, st.integers(1, 8), st.booleans())
def test_it_keeps_the_least_of_equal_ones_the_first_or_the_last(marks, maximum, last):
    heap, count = Heap(np.empty(maximum, np.int64), np.empty(maximum, np.int64)), 0
    for key, place in marks:
        count = push(heap, count, maximum, key, place, last)
    kept = sorted(marks, key=lambda m: (m[0], -m[1] if last else m[1]))[:maximum]
    found = zip(heap.ranks[:count].tolist(), heap.positions[:count].tolist(), strict=True)
    assert sorted(found) == sorted(kept)
