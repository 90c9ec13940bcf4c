"""npy files in pieces: equal to what numpy reads and writes, refused where they are not sound."""

import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile, NpyWriter, RawFile, ZipArray, list_members
from preprocess.files.strided import StoredArray


def open_stored(folder: Path, values: np.ndarray, kind: str) -> StoredArray:
    """The same array in a file of each kind."""
    path = folder / "a"
    match kind:
        case "npy":
            with path.open("wb") as f:
                np.save(f, values)
            return NpyFile(path)
        case "raw":
            values.tofile(path)
            return RawFile(path, values.dtype, values.shape)
    save = np.savez_compressed if kind == "packed" else np.savez
    with path.open("wb") as f:
        save(f, other=np.arange(3), a=values, last=np.arange(2))
    return ZipArray(path, "a")


@given(
    size=st.integers(0, 40),
    first=st.integers(0, 40),
    count=st.integers(1, 50),
    dtype=st.sampled_from(["<i8", ">i4", "<f2", ">f8", "?", "|u1", "<u8"]),
    kind=st.sampled_from(["npy", "raw", "zip", "packed"]),
)
def test_pieces_are_the_array(tmp_path_factory, size, first, count, dtype, kind):
    values = (np.arange(size) * 7 % 5).astype(dtype)
    file = open_stored(tmp_path_factory.mktemp("npy"), values, kind)
    assert (file.shape, file.dtype) == ((size,), values.dtype.newbyteorder("="))
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
        file.flat().read(0, file.size)
    except BadInput:
        pass


@pytest.mark.parametrize("kind", ["npy", "raw", "zip", "packed"])
def test_both_rows_are_read_in_step(tmp_path: Path, kind: str):
    values = np.arange(2000).reshape(2, 1000)
    file = open_stored(tmp_path, values, kind)
    pairs = zip(*(file.row(end).all_pieces(7) for end in (0, 1)), strict=True)
    found = [np.stack(pair) for pair in pairs]
    assert np.array_equal(np.concatenate(found, axis=1), values)


@pytest.mark.parametrize("kind", ["npy", "raw", "zip", "packed"])
def test_rows_of_several_dimensions(tmp_path: Path, kind: str):
    values = np.arange(60).reshape(5, 4, 3)
    file = open_stored(tmp_path, values, kind)
    assert np.array_equal(np.concatenate([p.copy() for p in file.all_pieces(2)]), values)
    assert np.array_equal(file.row(3).read(1, 2), values[3, 1:3])
    assert np.array_equal(file.row(3).row(2).read(0, 3), values[3, 2])
    assert np.array_equal(file.flat().read(7, 9), values.reshape(-1)[7:16])


def test_a_packed_array_takes_no_more_memory_than_a_piece(tmp_path: Path):
    values = np.zeros(4_000_000, np.int64)  # 32 MB, of which deflate makes 31 KB
    file = open_stored(tmp_path, values, "packed")
    tracemalloc.start()
    total = sum(piece.size for piece in file.pieces(1_000_000, values.size, 10_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 3_000_000
    assert peak < 4 << 20


def test_members_of_an_npz_file_are_listed(tmp_path: Path):
    np.savez(tmp_path / "a.npz", edge_index=np.arange(2), node_feat=np.arange(3))
    assert list_members(tmp_path / "a.npz") == ["edge_index", "node_feat"]


@pytest.mark.parametrize("size", [79, 81])
def test_a_file_without_a_header_has_its_exact_size(tmp_path: Path, size: int):
    path = tmp_path / "a.npy"
    path.write_bytes(bytes(size))
    with pytest.raises(BadInput, match=rf"a.npy: end: found {size} bytes, expected 80 for"):
        RawFile(path, np.float32, (5, 4))
    with pytest.raises(BadInput, match=r"none.npy: found no file: it is missing"):
        RawFile(tmp_path / "none.npy", np.float32, (5, 4))


def rewrite(path: Path, change: bytes) -> None:
    """Put another file in the place of one member."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.npy", change)


def whole(folder: Path) -> bytes:
    """An npy file of 1,000 items that hardly compress."""
    np.save(folder / "whole.npy", np.random.default_rng(1).integers(0, 2**60, 1000))
    return (folder / "whole.npy").read_bytes()


def spoil_zip(path: Path, kind: str) -> None:
    """A zip file that is not sound in one way."""
    raw = whole(path.parent)
    rewrite(path, raw)
    match kind:
        case "missing":
            path.unlink()
        case "not a zip file":
            path.write_bytes(path.read_bytes()[:-30])
        case "no array 'a', expected it beside b":
            np.savez(path, b=np.arange(3))
        case "found 8127 bytes, expected 8128 for shape (1000,)":
            rewrite(path, raw[:-1])
        case "magic":
            rewrite(path, b"PK" + raw[2:])
        case "Python objects":
            np.savez(path, a=np.array([{}, 1], object))
        case "header":
            rewrite(path, raw[:10] + b"(" * 20 + raw[30:])
        case "Bad CRC-32" | "invalid":
            packed = bytearray(path.read_bytes())
            at = 5000 if kind == "Bad CRC-32" else 40
            packed[at : at + 8] = bytes(8) if kind == "Bad CRC-32" else b"\xff" * 8
            path.write_bytes(packed)


@pytest.mark.parametrize(
    "kind",
    [
        "missing", "not a zip file", "no array 'a', expected it beside b", "magic", "header",
        "found 8127 bytes, expected 8128 for shape (1000,)", "Python objects", "Bad CRC-32",
        "invalid",
    ],
)  # fmt: skip
def test_a_zip_file_that_is_not_sound_is_said_in_one_line(tmp_path: Path, kind: str):
    path = tmp_path / "a.npz"
    spoil_zip(path, kind)
    with pytest.raises(BadInput) as caught:
        ZipArray(path, "a").read(0, 1000)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert kind in text
    assert "\n" not in text


@given(st.data())
def test_any_bytes_in_a_zip_file_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("npy") / "a.npz"
    save = data.draw(st.sampled_from([np.savez, np.savez_compressed]))
    save(path, a=np.arange(4), b=np.arange(2))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        file = ZipArray(path, "a")
        if file.size < 100:
            file.flat().read(0, file.size)
    except BadInput:
        pass
