"""Edges and rows in arrays: any shape, order and dtype, in any pieces, against numpy."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile
from preprocess.sources.arrays import ArrayRows, EdgeArray, major_ids


@given(
    edges=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=9),
    paired=st.booleans(),
    fortran=st.booleans(),
    dtype=st.sampled_from(["<i8", ">i4", "u1"]),
    count=st.integers(1, 12),
)
def test_edges(
    tmp_path_factory: pytest.TempPathFactory, edges, paired: bool, fortran: bool, dtype, count: int
):
    path = tmp_path_factory.mktemp("edges") / "edge_index.npy"
    whole = np.array(edges, dtype).reshape(-1, 2)
    array = whole if paired else whole.T
    np.save(path, np.asfortranarray(array) if fortran else np.ascontiguousarray(array))
    found = EdgeArray(NpyFile(path), paired)
    assert found.num_edges == len(edges)
    pieces = [np.stack([src, dst], axis=1) for src, dst in found.pieces(count)]
    assert all(0 < len(piece) <= count for piece in pieces)
    assert [tuple(pair) for piece in pieces for pair in piece.tolist()] == edges
    assert found.place(1, 5) == f"{path}{[5, 1] if paired else [1, 5]}"


@given(
    num_rows=st.integers(0, 9),
    row_shape=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from(["<f2", ">f4", "i8", "?"]),
    count=st.integers(1, 12),
    fortran=st.booleans(),
)
def test_rows(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, row_shape, dtype, count: int, fortran
):
    path = tmp_path_factory.mktemp("rows") / "a.npy"
    array = np.arange(num_rows * int(np.prod(row_shape))).reshape(num_rows, *row_shape)
    array = (array % 7).astype(dtype)
    np.save(path, np.asfortranarray(array) if fortran and array.ndim == 2 else array)
    reader = ArrayRows("a", NpyFile(path), num_rows)
    rows = reader.form
    assert (rows.num_rows, rows.row_shape, rows.dtype) == (
        num_rows,
        row_shape,
        array.dtype.newbyteorder("="),
    )
    pieces = [piece.copy() for piece in reader.pieces(count)]
    assert all(0 < len(piece) <= count for piece in pieces)
    assert np.array_equal(np.concatenate([array[:0], *pieces]), array)


def test_some_rows_of_an_array_in_fortran_order(tmp_path):
    array = np.arange(24).reshape(8, 3)
    np.save(tmp_path / "a.npy", np.asfortranarray(array))
    rows = ArrayRows("a", NpyFile(tmp_path / "a.npy"), first=2, count=5)
    assert (
        np.concatenate([piece.copy() for piece in rows.pieces(2)]).tolist() == array[2:7].tolist()
    )


@pytest.mark.parametrize("shape", [(2, 257), (2, 2, 2)])
def test_arrays_in_fortran_order_have_two_dimensions_and_few_columns(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.asfortranarray(np.ones(shape)))
    with pytest.raises(
        BadInput, match=r"in Fortran order, expected rows of numbers in C order, or"
    ):
        ArrayRows("a", NpyFile(tmp_path / "a.npy"))


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
