"""npy files in pieces: equal to what numpy reads and writes, refused where they are not sound."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.errors import BadInput
from preprocess.npy import NpyFile, NpyWriter


@given(
    size=st.integers(0, 40),
    first=st.integers(0, 40),
    count=st.integers(1, 50),
    dtype=st.sampled_from(["<i8", ">i4", "<f2", ">f8", "?", "|u1", "<u8"]),
)
def test_pieces_are_the_array(tmp_path_factory, size, first, count, dtype):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    values = (np.arange(size) * 7 % 5).astype(dtype)
    np.save(path, values)
    file = NpyFile(path)
    first = min(first, size)
    found = [piece.copy() for piece in file.pieces(first, size, count)]
    assert all(piece.size <= count for piece in found)
    assert all(piece.dtype.isnative for piece in found)
    assert np.concatenate([*found, values[:0]]).tolist() == values[first:].tolist()
    assert file.read(first, size - first).tolist() == values[first:].tolist()


def test_fortran_order_is_told_where_it_matters(tmp_path: Path):
    for name, array in (("f", np.ones((2, 3)).T.copy("F")), ("c", np.ones((2, 3)))):
        np.save(tmp_path / f"{name}.npy", array)
    np.save(tmp_path / "row.npy", np.asfortranarray(np.ones((1, 3))))
    assert NpyFile(tmp_path / "f.npy").fortran_order
    assert not NpyFile(tmp_path / "c.npy").fortran_order
    assert not NpyFile(tmp_path / "row.npy").fortran_order


def test_a_list_gets_its_length_at_the_end(tmp_path: Path):
    with NpyWriter(tmp_path / "list.npy", None, np.int32) as out:
        for part in ([1, 2], [], [3]):
            out.append(np.array(part, np.int64))
    found = np.load(tmp_path / "list.npy")
    assert found.dtype == np.int32
    assert found.tolist() == [1, 2, 3]


def test_items_go_where_they_are_put(tmp_path: Path):
    with NpyWriter(tmp_path / "a.npy", (2, 3), np.int16) as out:
        out.put(3, np.array([4, 5, 6]))
        out.put(0, np.array([1, 2, 3]))
    assert np.load(tmp_path / "a.npy").tolist() == [[1, 2, 3], [4, 5, 6]]


def spoil(path: Path, kind: str) -> None:
    """A file that is not sound in one way."""
    np.save(path, np.arange(100))
    raw = path.read_bytes()
    match kind:
        case "missing":
            path.unlink()
        case "is a folder" | "Is a directory":
            path.unlink()
            path.mkdir()
        case "truncated":
            path.write_bytes(raw[:-1])
        case "version (3, 0)":
            path.write_bytes(raw[:6] + b"\x03" + raw[7:])
        case "Python objects":
            np.save(path, np.array([{}, 1], object), allow_pickle=True)
        case "items of [('a', '<i4')]":
            np.save(path, np.zeros(3, [("a", "<i4")]))
        case "EOF":
            path.write_bytes(raw[:4])
        case "magic":
            path.write_bytes(b"PK" + raw[2:])
        case "header":
            path.write_bytes(raw[:10] + b"(" * 20 + raw[30:])


@pytest.mark.parametrize(
    "kind",
    [
        "missing", "Is a directory", "truncated", "version (3, 0)", "Python objects",
        "items of [('a', '<i4')]", "EOF", "magic", "header",
    ],
)  # fmt: skip
def test_what_is_not_sound_is_said_in_one_line(tmp_path: Path, kind: str):
    path = tmp_path / "a.npy"
    spoil(path, kind)
    with pytest.raises(BadInput) as caught:
        NpyFile(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert kind in text
    assert "\n" not in text
    assert "found" in text
    assert "expected" in text


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100))
    file = NpyFile(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadInput, match="became shorter"):
        file.read(0, 100)


@given(st.data())
def test_any_bytes_in_a_header_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, np.arange(4))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 80))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        file = NpyFile(path)
        file.read(0, file.size)
    except BadInput:
        pass
