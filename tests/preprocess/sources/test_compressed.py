"""Offsets become ids of rows, however they are cut; bad offsets are named."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.errors import BadInput
from preprocess.sources.compressed import major_ids


def cut(values: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """In pieces, each in the same buffer."""
    buffer = np.empty(size, values.dtype)
    for first in range(0, values.size, size):
        piece = buffer[: min(size, values.size - first)]
        piece[:] = values[first : first + size]
        yield piece


def read(indptr: np.ndarray, num_entries: int, size: int, count: int) -> list[int]:
    pieces = [p.copy() for p in major_ids(cut(indptr, size), "a: indptr", num_entries, count)]
    assert all(p.size == count for p in pieces[:-1])
    return [int(i) for p in pieces for i in p]


@given(
    degrees=st.lists(st.integers(0, 5), max_size=30), size=st.integers(1, 40),
    count=st.integers(1, 40), dtype=st.sampled_from(["i4", "i8", "u4", "u8"]),
)  # fmt: skip
def test_every_entry_has_its_row(degrees: list[int], size: int, count: int, dtype: str):
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(dtype)
    expected = [row for row, degree in enumerate(degrees) for _ in range(degree)]
    assert read(indptr, len(expected), size, count) == expected


@pytest.mark.parametrize("size", [1, 2, 10])
@pytest.mark.parametrize(
    ("indptr", "words"),
    [
        ([1, 2, 4], "a: indptr[0]: found offset 1, expected 0"),
        ([-1, 2, 4], "a: indptr[0]: found offset -1, expected 0"),
        ([0, 3, 2, 4], "a: indptr[2]: found offset 2, expected 3 to 4"),
        ([0, 3, 5, 4], "a: indptr[2]: found offset 5, expected 3 to 4"),
        ([0, 3, -1, 4], "a: indptr[2]: found offset -1, expected 3 to 4"),
        ([0, 1, 3], "a: indptr[2]: found 3, expected 4"),
        ([0], "a: indptr[0]: found 0, expected 4"),
    ],
)
def test_bad_offsets_are_named(indptr: list[int], words: str, size: int):
    with pytest.raises(BadInput) as caught:
        read(np.array(indptr), 4, size, 3)
    assert words in str(caught.value)
