"""What cannot be ingested ends in one line with exit code 2, and leaves nothing behind."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from blockstore.errors import OutOfSpace
from blockstore.store import open_store, read_rows
from blockstore.verify import verify_store
from preprocess.__main__ import app
from preprocess.errors import BadInput
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.partition.partition import PartitionOptions
from preprocess.partition.repartition import repartition
from preprocess.sources.layouts import open_source
from tests.preprocess.quiet import QUIET

EDGES = b"a,b\na,b\n"
STRUCT = pa.array([{"p": 1, "q": 2}, {"p": 3, "q": 4}])


def refused(source: Path, *options: str) -> str:
    """The one line; nothing is there but the source."""
    target = source.parent / "store"
    before = sorted(source.parent.iterdir())
    done = CliRunner().invoke(app, ["ingest", str(source), str(target), *options])
    assert done.exit_code == 2, done.output
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert sorted(source.parent.iterdir()) == before
    return last


def tables(folder: Path, nodes: Any, edges: Any = EDGES, **node: Any) -> Path:
    """A folder with tables: bytes of text, or a table of Parquet."""
    folder = folder / "in"
    folder.mkdir()
    names = {}
    for name, table in (("nodes", nodes), ("edges", edges)):
        names[name] = f"{name}.csv" if isinstance(table, bytes) else f"{name}.parquet"
        if isinstance(table, bytes):
            (folder / names[name]).write_bytes(table)
        else:
            pq.write_table(table, folder / names[name])
    described = {"node_type": "u", "files": names["nodes"], "node_id_col": "id", **node}
    kind, more = described["node_type"], node.pop("edge", {})
    described.pop("edge", None)
    edge = {
        "relation": [kind, "e", kind], "files": names["edges"], "source_id_col": "a",
        "dest_id_col": "b", **more,
    }  # fmt: skip
    (folder / "schema.json").write_text(json.dumps({"nodes": [described], "edges": [edge]}))
    return folder


def plain(folder: Path, features: np.ndarray) -> Path:
    folder = folder / "in"
    folder.mkdir()
    np.save(folder / "edge_index.npy", np.random.default_rng(0).integers(0, len(features), (2, 90)))
    np.save(folder / "node_feat.npy", features)
    return folder


X = {"features": [{"feature_col": "x"}]}


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("float32", 1e300, np.float64),
        ("float32", -3.5e38, np.float64),
        ("bfloat16", 1e300, np.float64),
        ("bfloat16", 3.4e38, np.float32),
        ("bfloat16", 3.3961775e38, np.float64),  # infinite only once it has been rounded twice
        ("float16", 1e300, np.float64),
        ("float16", 65520, np.int64),
        ("int8", 1e300, np.float64),
    ],
)
def test_a_feature_that_the_dtype_cannot_hold_is_refused(tmp_path: Path, dtype, value, stored):
    features = np.zeros((100, 8), stored)
    features[37, 3] = value
    line = refused(plain(tmp_path, features), "--dtype", dtype)
    assert f"node_feat.npy[37, 3]: found {value:g}".replace("+", "") in line.replace("+", "")
    assert f"for {dtype}; " in line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_infinities_and_nan_of_the_source_stay(tmp_path: Path, dtype):
    features = np.zeros((100, 8))
    features[3, 1], features[4, 2], features[5, 0] = np.inf, -np.inf, np.nan
    options = IngestOptions(dtype=dtype, allow_nan=True, order="source")
    ingest(open_source(plain(tmp_path, features)).source, tmp_path / "store", options, QUIET)
    opened = open_store(tmp_path / "store")
    rows = read_rows(opened, opened.manifest.types[0].features["x"])
    if dtype == "bfloat16":
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(rows, features.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("nodes", "place"),
    [
        (b"id,x\na,1.5\nb,1e300\n", "nodes.csv:3: found 1e+300 in column 'x'"),
        (b'id,x\na,"1.5,1"\nb,"2,1e300"\n', "nodes.csv:3: found 1e+300 in column 'x'"),
        (pa.table({"id": ["a", "b"], "x": [1.5, 1e300]}), "column x[1]: found 1e+300"),
        (
            pa.table({"id": ["a", "b"], "x": [[1.5, 0], [1, 1e300]]}),
            "column x[1, 1]: found 1e+300",
        ),
    ],
)
def test_so_is_one_of_a_table(tmp_path: Path, nodes, place):
    line = refused(tables(tmp_path, nodes, **X))
    assert place in line
    assert "for float32; scale the numbers" in line


def test_infinities_of_a_text_stay(tmp_path: Path):
    source = tables(tmp_path, b"id,x\na,1.5\nb,inf\n", **X)
    ingest(open_source(source).source, tmp_path / "store", IngestOptions(order="source"), QUIET)
    opened = open_store(tmp_path / "store")
    assert read_rows(opened, opened.manifest.types[0].features["x"]).tolist() == [1.5, np.inf]


@pytest.mark.parametrize(
    ("nodes", "edges", "more", "words"),
    [
        (b"id,x\na,1\nc\xff,2\n", EDGES, {}, "nodes.csv:3: found bytes that are not UTF-8"),
        (b"id,x\na,1\nb,2\n", b"a,b\na,a\na,\xfe\n", {}, "edges.csv:3: found bytes that"),
        (b"id,x\xff\na,1\nb,2\n", EDGES, {}, r"nodes.csv: header: found b'x\xff', expected names"),
        (
            b"id,x\na,1\nb,\xff\n", EDGES, {"split_col": "x"},
            "nodes.csv:3: found bytes that are not UTF-8 in column 'x'",
        ),
        (
            pa.table({"id": pa.array([b"a", b"\xff"])}), EDGES, {},
            r"nodes.parquet[1]: found b'\xff' in column 'id', expected UTF-8",
        ),
        (
            pa.table({"id": STRUCT}), EDGES, {},
            "nodes.parquet: schema: found struct<p: int64, q: int64> in column 'id'",
        ),
        (
            pa.table({"id": ["a", "b"], "s": STRUCT}), EDGES, {"split_col": "s"},
            "found struct<p: int64, q: int64> in column 's'",
        ),
        (
            pa.table({"id": ["a", "b"], "s": STRUCT}), EDGES,
            {"features": [{"feature_col": "s"}]}, "nodes.parquet: column s: found text, expected",
        ),
        (b"id\na\nb\n", pa.table({"a": STRUCT, "b": STRUCT}), {}, "edges.parquet: schema: found"),
        (
            b"id\na\nb\n", EDGES, {"edge": {"relation": ["u", "e", "nobody"]}},
            "schema.json: found node type 'nobody' of relation 'e'",
        ),
        (b"id\na\nb\n", EDGES, {"node_type": "t" * 300}, "at most; give the type, relation or"),
        (b"id\na\nb\n", EDGES, {"node_type": "\xe9" * 100}, "at most; give the type, relation or"),
        (
            b"id\na\nb\n", EDGES, {"edge": {"relation": ["u", "e" * 250, "u"]}},
            "at most; give the type, relation or",
        ),
        (
            b"id,x\na,1\nb,2\n", EDGES,
            {"features": [{"feature_col": "x", "feature_name": "n" * 300}]},
            "at most; give the type, relation or",
        ),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_taken(tmp_path: Path, nodes, edges, more, words):
    assert words in refused(tables(tmp_path, nodes, edges, **more))


@pytest.mark.parametrize("size", ["0", "-4096", "1000", "5000", "1T", "1e30", "abc", "9" * 30])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_block_size_that_is_none(tmp_path: Path, size, more):
    source = plain(tmp_path, np.zeros((9, 2), np.float32))
    line = refused(source, f"--block-size={size}", *more)
    assert "is not a size" in line or "--block-size: found" in line


@pytest.mark.parametrize("size", [0, -4096, 1, 4097, 1 << 50])
def test_a_block_size_given_by_a_script(tmp_path: Path, size):
    source = open_source(plain(tmp_path, np.zeros((9, 2), np.float32))).source
    with pytest.raises(BadInput, match="--block-size: found"):
        ingest(source, tmp_path / "store", IngestOptions(block_bytes=size), QUIET)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_target_that_is_a_link(tmp_path: Path):
    source = plain(tmp_path, np.zeros((9, 2), np.float32))
    (tmp_path / "store").symlink_to(tmp_path / "nowhere" / "x")
    assert "store: is a link that leads nowhere; remove it" in refused(source)
    ingest(open_source(source).source, tmp_path / "made", IngestOptions(), QUIET)
    with pytest.raises(Exception, match="is a link that leads nowhere"):
        repartition(open_store(tmp_path / "made"), tmp_path / "store", PartitionOptions(2), QUIET)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "made", "store"]


@contextmanager
def files_of(num_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes: the next one fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _plain(folder: Path) -> Path:
    return plain(folder, np.random.default_rng(0).random((3000, 8), np.float32))


def _texts(folder: Path) -> Path:
    rows = b"".join(b"n%d,%d\n" % (i, i) for i in range(3000))
    return tables(folder, b"id,x\n" + rows, b"a,b\nn1,n2\n", **X)


@pytest.mark.parametrize("make", [_plain, _texts])
def test_a_disk_that_is_full_is_named_with_its_file(tmp_path: Path, make: Callable[[Path], Path]):
    """Whatever write is the first that fails; with room again the same call goes on."""
    source, options = make(tmp_path), IngestOptions(block_bytes=4096)
    target, named = tmp_path / "store", set()
    for limit in (0, 60, 150, 300, 700, 1500, 2500, 4096, 12288, 28672):
        try:
            with files_of(limit):
                if not target.exists():
                    ingest(open_source(source).source, target, options, QUIET)
        except OutOfSpace as error:
            file, _, rest = str(error).partition(": ")
            named.add(Path(file).name.split("+")[0])
            assert file.startswith((f"{tmp_path}/.store.", f"{target}.keys/"))
            assert rest.startswith("File too large, ")
            assert " bytes still to write; free some space, or choose another disk" in rest
            assert "\n" not in rest
            assert not target.exists()
    assert len(named) > 2
    if not target.exists():
        ingest(open_source(source).source, target, options, QUIET)
    verify_store(target)
    assert not list(tmp_path.glob(".*"))
