"""Tables of text and Parquet: what comes out is what csv and numpy say; refusals name the line."""

import csv
import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.errors import BadInput
from preprocess.files import tables
from preprocess.files.arrow import FLAG, INTEGER, TEXT, ColumnType, Texts, writing_keys
from preprocess.files.tables import Table, joined

FLOAT = ColumnType(np.dtype(np.float32))


def write(path: Path, text: str | bytes) -> Path:
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def column(table: Table, name: str, kind: ColumnType, count: int = 3) -> np.ndarray:
    """One column, whole."""
    pieces = [arrays[0] for arrays in table.arrays({name: kind}, count)]
    assert all(p.shape[0] <= count for p in pieces)
    return np.concatenate(pieces)


def words(table: Table, name: str, count: int = 3) -> list[str]:
    return [piece.at(i) for piece in table.texts(name, count) for i in range(len(piece))]


def matrix(table: Table, dtype: Any, count: int) -> Any:
    """All columns side by side, some rows at a time."""
    kind = ColumnType(np.dtype(dtype))
    arrays = table.arrays(dict.fromkeys(table.names, kind), count)
    assert kind.dtype is not None
    return joined(arrays, (len(table.names),), kind.dtype)


@pytest.mark.parametrize("name", ["edge.csv", "edge.csv.gz"])
@pytest.mark.parametrize("piece_bytes", [16, 1 << 20])
def test_text_without_a_header(tmp_path: Path, monkeypatch, name: str, piece_bytes: int):
    monkeypatch.setattr(tables, "PIECE_BYTES", piece_bytes)
    edges = np.arange(40).reshape(20, 2)
    text = "".join(f"{a},{b}\n" for a, b in edges)
    table = Table(write(tmp_path / name, text), header=False)
    assert table.names == ("0", "1")
    assert table.num_rows() == 20
    for count in (1, 7, 100):
        rows = [m.copy() for m in matrix(table, np.int64, count)]
        assert np.array_equal(np.concatenate(rows), edges)
    assert np.array_equal(column(table, "1", INTEGER), edges[:, 1])


keys = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters='"'), max_size=9)


@given(rows=st.lists(st.tuples(keys, st.integers(-(2**63), 2**63 - 1)), max_size=20))
def test_quoted_text_as_the_csv_module_writes_it(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("text") / "a.csv"
    out = io.StringIO()
    csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([("key", "n"), *rows])
    table = Table(write(path, out.getvalue()))
    assert table.num_rows() == len(rows)
    assert words(table, "key") == [key for key, _ in rows]
    numbers = [int(n) for (piece,) in table.arrays({"n": INTEGER}, 2) for n in piece]
    assert numbers == [n for _, n in rows]


def test_what_text_seems_to_hold(tmp_path: Path):
    text = 'a,b,c,d,e,f\n1,x,0.5,True,"1, 2","[0.5,1]"\n2,2020-01-01,,False,"3,4","[2,3]"\n'
    table = Table(write(tmp_path / "a.csv", text))
    seen = table.look()
    assert [str(seen[n]) for n in table.names] == [
        "int64", "text", "float32", "bool", "2 x int64", "2 x float32",
    ]  # fmt: skip
    assert np.array_equal(column(table, "c", seen["c"]), [0.5, np.nan], equal_nan=True)
    assert column(table, "d", FLAG).tolist() == [True, False]
    assert column(table, "e", seen["e"]).tolist() == [[1, 2], [3, 4]]
    assert column(table, "f", seen["f"]).tolist() == [[0.5, 1], [2, 3]]
    assert words(table, "a") == ["1", "2"]


@pytest.mark.parametrize("group", [2, 1000])
def test_parquet_of_every_kind(tmp_path: Path, group: int):
    vectors = np.arange(15, dtype=np.float16).reshape(5, 3)
    held = pa.table(
        {
            "id": pa.array(["a", "bb", "", "é", "a"]).dictionary_encode(),
            "n": pa.array([1, 2, 3, 4, 5], pa.uint32()),
            "gap": pa.array([1, None, 3, 4, 5], pa.int64()),
            "v": pa.array(list(vectors), pa.list_(pa.float16())),
            "w": pa.array(vectors.astype("f8").tolist(), pa.list_(pa.float64(), 3)),
            "t": pa.array([1, 2, 3, 4, 5], pa.timestamp("us")),
            "b": pa.array([True, False, True, True, False]),
        }
    )
    pq.write_table(held, tmp_path / "a.parquet", row_group_size=group)
    table = Table(tmp_path / "a.parquet")
    assert (table.num_rows(), table.names) == (5, tuple(held.column_names))
    seen = table.look()
    assert [str(seen[n]) for n in table.names] == [
        "text", "uint32", "int64", "3 x float16", "3 x float64", "int64", "bool",
    ]  # fmt: skip
    assert words(table, "id") == ["a", "bb", "", "é", "a"]
    assert words(table, "n", 2) == ["1", "2", "3", "4", "5"]
    for name in ("v", "w"):
        array = column(table, name, seen[name], 2)
        assert array.dtype == seen[name].dtype
        assert np.array_equal(array, vectors)
    assert column(table, "t", INTEGER).tolist() == [1, 2, 3, 4, 5]
    assert column(table, "b", FLAG).tolist() == [True, False, True, True, False]
    assert np.isnan(column(table, "gap", FLOAT)[1])
    with pytest.raises(BadInput, match=r"a.parquet\[1\]: found nothing in column 'gap'"):
        column(table, "gap", INTEGER)


REFUSED = {
    "a word for a number": ("a,b\n1,2\n\n\n1,x\n", ":5: found 'x' in column 'b', expected int64"),
    "half a number": ("a,b\n1,2\n1,2.5\n", ":3: found '2.5' in column 'b', expected int64"),
    "past 64 bits": ("a,b\n1,9223372036854775808\n", ":2: found '9223372036854775808'"),
    "a column too few": ("a,b\r\n1,2\r\n\r\n7\r\n", ":4: found 1 columns in 7, expected 2"),
    "a column too many": ("a,b\n1,2,3\n", ":2: found 3 columns in 1,2,3, expected 2"),
    "nothing for a number": ("a,b\n1,2\n\n3,\n", ":4: found nothing in column 'b'"),
    "no such column": ("a,c\n1,2\n", ": header: found columns a, c, expected one 'b'"),
    "a name twice": ("b,b\n1,2\n", ": found two columns 'b'"),
    "nothing at all": ("", ": found an empty file"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_refusals_name_the_line(tmp_path: Path, name: str, suffix: str):
    text, expected = REFUSED[name]
    path = write(tmp_path / f"a{suffix}", text)
    with pytest.raises(BadInput) as caught:
        column(Table(path), "b", INTEGER)
    assert str(caught.value).startswith(f"{path}{expected}")
    assert "\n" not in str(caught.value)


def test_vectors_that_are_none(tmp_path: Path):
    for cell, words in [
        ("1", "1 numbers in column 'v', expected 2"),
        ("1,x", "1,x in column 'v', expected 2 x float32"),
        ("", "1 numbers"),
    ]:
        table = Table(write(tmp_path / "a.csv", f'v,w\n"1,2",0\n\n"{cell}",0\n'))
        with pytest.raises(BadInput) as caught:
            column(table, "v", ColumnType(np.dtype(np.float32), 2))
        assert str(caught.value).startswith(f"{table.path}:4: found {words}")


def test_files_that_are_no_tables(tmp_path: Path):
    with pytest.raises(BadInput, match="found no file: it is missing"):
        Table(tmp_path / "a.csv")
    with pytest.raises(BadInput, match="a name that says no format"):
        Table(write(tmp_path / "a.bin", b""))
    with pytest.raises(BadInput, match=r"a.parquet: found Parquet magic bytes"):
        _ = Table(write(tmp_path / "a.parquet", b"PAR1 and nothing more")).names
    packed = gzip.compress(b"1,2\n" * 10_000)
    for raw in (packed[:-9], b"1,2\n", packed[:12] + b"\xff\xff" + packed[14:]):
        (tmp_path / "b.csv.gz").write_bytes(raw)
        with pytest.raises(BadInput, match=r"b.csv.gz: found .*, expected a whole csv file"):
            Table(tmp_path / "b.csv.gz", header=False).num_rows()


def test_a_line_that_never_ends_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tables, "PIECE_BYTES", 64)
    path = write(tmp_path / "a.csv", "a\n" + "1\n" * 40 + "x" * 1000 + "\n")
    with pytest.raises(BadInput, match="found a line longer than 32 bytes"):
        Table(path).num_rows()


def test_wide_rows_take_wider_pieces(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tables, "PIECE_BYTES", 64)
    rows = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    path = write(tmp_path / "a.csv", "".join(",".join(map(str, r)) + "\n" for r in rows))
    found = [m.copy() for m in matrix(Table(path, header=False), np.float32, 2)]
    assert np.array_equal(np.concatenate(found), rows)


def test_keys_are_written_as_parquet(tmp_path: Path):
    with writing_keys(tmp_path / "t.parquet") as append:
        data = np.frombuffer("xxabé".encode(), np.uint8)
        append(Texts(np.array([2, 3, 3, 6]), data))
        append(Texts(np.array([0]), data[:0]))
    assert pq.read_table(tmp_path / "t.parquet")["key"].to_pylist() == ["a", "", "bé"]
    assert words(Table(tmp_path / "t.parquet"), "key") == ["a", "", "bé"]
    assert Table(tmp_path / "t.parquet").look()["key"] == TEXT
