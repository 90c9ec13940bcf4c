"""Arrays at any strides come out as numpy has them, whatever is read at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preprocess.errors import BadInput
from preprocess.files import strided
from preprocess.files.strided import GivenArray, Placed, StridedRows


def write(path: Path, array: np.ndarray) -> None:
    """The whole buffer that an array is a view of, behind five bytes."""
    base = array if array.base is None else array.base
    path.write_bytes(b"later" + base.tobytes())


def placed(array: np.ndarray, start: int = 0) -> Placed:
    """A view that begins `start` items into its buffer."""
    strides = tuple(s // array.itemsize for s in array.strides)
    return Placed(array.dtype.str, array.shape, strides, 5 + start * array.itemsize)


def read(path: Path, array: Any, count: int) -> np.ndarray:
    rows = StridedRows(path, array, "a")
    pieces = [p.copy() for p in rows.all_pieces(count)]
    assert all(0 < p.shape[0] <= count for p in pieces)
    return np.concatenate([np.empty((0, *rows.shape[1:]), rows.dtype), *pieces])


@pytest.fixture(params=[8, 50, 1 << 20])
def span(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes at once."""
    monkeypatch.setattr(strided, "_MAX_SPAN", request.param)
    return int(request.param)


@pytest.mark.usefixtures("span")
def test_views_are_read_as_numpy_reads_them(tmp_path_factory):
    @given(
        shape=st.lists(st.integers(1, 7), min_size=1, max_size=3), data=st.data(),
        count=st.integers(1, 9), dtype=st.sampled_from(["i8", "f4", "?", "f2"]),
    )  # fmt: skip
    def check(shape: list[int], data: Any, count: int, dtype: str):
        path = tmp_path_factory.mktemp("strided") / "a"
        whole = np.arange(np.prod(shape), dtype=np.int64).astype(dtype).reshape(shape)
        steps = [data.draw(st.integers(1, 3)) for _ in shape]
        firsts = [data.draw(st.integers(0, n - 1)) for n in shape]
        order = data.draw(st.permutations(range(len(shape))))
        view = whole[tuple(slice(f, None, s) for f, s in zip(firsts, steps, strict=True))]
        view = view.transpose(order)
        write(path, whole)
        start = int(np.ravel_multi_index(firsts, shape))
        assert np.array_equal(read(path, placed(view, start), count), view)
        if view.ndim > 1:
            row = StridedRows(path, placed(view, start), "a").row(view.shape[0] - 1)
            assert np.array_equal(next(row.all_pieces(99)), view[-1])

    check()


@pytest.mark.parametrize("count", [1, 2, 9])
def test_arrays_that_are_held_and_those_that_repeat(tmp_path: Path, count: int):
    array = np.arange(12, dtype=np.int16).reshape(4, 3)
    held = GivenArray(array.dtype.str, array.shape, array.tobytes())
    assert np.array_equal(read(tmp_path, held, count), array)
    row = StridedRows(tmp_path, held, "a").row(2)
    assert np.array_equal(next(row.pieces(0, 3, 9)), array[2])
    (tmp_path / "a").write_bytes(array.tobytes())
    repeated = Placed(array.dtype.str, (5, 3), (0, 1), 6)
    assert np.array_equal(read(tmp_path / "a", repeated, count), np.repeat(array[1:2], 5, axis=0))


def test_bfloat16_becomes_float32(tmp_path: Path):
    values = torch.tensor([[0.1, -2, 3e38], [float("inf"), 0, 1]]).bfloat16()
    (tmp_path / "a").write_bytes(values.view(torch.int16).numpy().tobytes())
    found = read(tmp_path / "a", Placed("bfloat16", (2, 3), (3, 1), 0), 1)
    assert found.dtype == np.float32
    assert np.array_equal(found, values.float().numpy())


def test_no_rows_are_none(tmp_path: Path):
    assert read(tmp_path, GivenArray("<f4", (0, 3), b""), 4).shape == (0, 3)


def test_what_cannot_be_read_is_named(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(bytes(30))
    with pytest.raises(BadInput, match=r"a\+30: found the end of the file, expected 10 more bytes"):
        read(path, Placed("<f8", (5,), (1,), 0), 9)
    with pytest.raises(BadInput, match="a: found one number, expected rows"):
        StridedRows(path, Placed("<f8", (), (), 0), "a")
