"""Edges and rows in arrays: any shape, order and dtype, in any pieces, against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.files.npy import NpyFile
from preprocess.sources.typed import ArrayRows, EdgeArray


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
)
def test_rows(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, row_shape, dtype, count: int
):
    path = tmp_path_factory.mktemp("rows") / "a.npy"
    array = np.arange(num_rows * int(np.prod(row_shape))).reshape(num_rows, *row_shape)
    array = (array % 7).astype(dtype)
    np.save(path, array)
    reader = ArrayRows(NpyFile(path), num_rows)
    rows = reader.rows("a")
    assert (rows.num_rows, rows.row_shape, rows.dtype) == (
        num_rows,
        row_shape,
        array.dtype.newbyteorder("="),
    )
    pieces = [piece.copy() for piece in reader.pieces(count)]
    assert all(0 < len(piece) <= count for piece in pieces)
    assert np.array_equal(np.concatenate([array[:0], *pieces]), array)
