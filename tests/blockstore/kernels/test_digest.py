"""Digests: the same for the same words in the same order, and by any cuts of a column."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockstore.kernels.digest import digest_columns

WORDS = st.lists(st.integers(0, 3), max_size=12)
MASK = 2**64 - 1


def digest(words) -> int:
    """By hand."""
    found = 0
    for word in words:
        found = ((found ^ word) + 0x9E3779B97F4A7C15) * 0x9E3779B97F4A7C15 & MASK
        found ^= found >> 29
    return found


@given(words=WORDS, dtype=st.sampled_from([np.uint8, np.uint32]))
def test_rows_have_the_digests_of_their_words(words, dtype):
    rows = np.array([words, words[::-1]], dtype).reshape(2, len(words))
    out = np.zeros(3, np.uint64)
    digest_columns(rows, np.arange(3), np.array([1, 0, 1]), out)
    expected = [digest(words[::-1]), digest(words), digest(words[::-1])]
    assert out.tolist() == expected


@given(columns=st.lists(WORDS, min_size=1, max_size=6), cut=st.integers(0, 12))
def test_a_column_may_come_in_parts(columns, cut):
    chosen = np.arange(0, len(columns), 2)
    found = np.zeros(chosen.size, np.uint64)
    for parts in ([c[:cut] for c in columns], [c[cut:] for c in columns]):
        begins = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
        words = np.array([w for p in parts for w in p], np.uint32).reshape(-1, 1)
        digest_columns(words, begins, chosen, found)
    assert found.tolist() == [digest(columns[c]) for c in chosen]


def test_zeros_count():
    assert len({digest([0] * n) for n in range(50)}) == 50
