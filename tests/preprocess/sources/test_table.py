"""Tables with a schema file: CSV and Parquet, ids of any kind, every refusal with its place."""

import csv
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore.store import open_store, read_rows
from blockstore.verify import verify_store
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.ingest.prepare import keys_of
from preprocess.sources import idmap, table
from preprocess.sources.table import TableSource
from tests.effort import tries
from tests.preprocess.quiet import QUIET
from tests.preprocess.sources.reading import read_all, ready, texts_of
from tests.preprocess.sources.refusals import assert_refused, text
from tests.preprocess.test_hetero import stored_blocks

SCHEMA: dict[str, Any] = {
    "version": "gconstruct-v0.1",
    "nodes": [
        {
            "node_type": "user",
            "files": "users-*.csv",
            "node_id_col": "id",
            "features": [
                {"feature_col": ["age", "vector"], "feature_name": "x"},
                {"feature_col": "old"},
            ],
            "labels": [{"label_col": "class", "task_type": "classification"}],
            "split_col": "part",
        },
        {
            "node_type": "item",
            "files": ["items.parquet"],
            "node_id_col": "sku",
            "features": [{"feature_col": "v", "feature_name": "x"}],
            "labels": [{"label_col": ["a", "b"]}],
            "mask_cols": {"train": "in_train", "test": "in_test"},
            "time_col": "made",
        },
        {"node_type": "tag", "from_edges": True},
        {"node_type": "day", "files": "days.tsv", "features": [{"feature_col": "warm"}]},
    ],
    "edges": [
        {
            "relation": ["user", "likes", "item"],
            "files": ["likes.csv.gz"],
            "source_id_col": "user",
            "dest_id_col": "item",
            "weight_col": "stars",
            "time_col": "when",
            "features": [{"feature_col": "note"}],
            "labels": [{"label_col": "good"}],
            "split_col": "part",
        },
        {
            "relation": ["item", "has", "tag"],
            "files": "tags",
            "format": {"name": "csv", "separator": ";", "header": False},
            "source_id_col": "0",
            "dest_id_col": "1",
        },
        {
            "relation": ["tag", "is", "tag"],
            "files": "same.csv",
            "source_id_col": "from",
            "dest_id_col": "to",
        },
        {
            "relation": ["user", "came", "day"],
            "files": "came.csv",
            "source_id_col": "user",
            "dest_id_col": "day",
        },
    ],
}
USERS = ["ann", "bob", "çem", "d 4"]
SKUS = [7_000_000_000, -3, 12]


def write_graph(folder: Path, schema: Any = SCHEMA, name: str = "schema.json") -> Path:
    """Four users in two files, three items with sparse ids, tags that only edges name."""
    head = "id,age,vector,old,class,part\n"
    (folder / "users-2.csv").write_text(head + 'çem,3,"5,6",False,,\nd 4,4,"7,8",True,-1,val\n')
    (folder / "users-1.csv").write_text(
        head + 'ann,1,"1,2",True,0,train\nbob,2,"3,4",False,1,test\n'
    )
    items = pa.table(
        {
            "sku": pa.array(SKUS),
            "v": pa.array([[0.5, 1], [2, 3], [4, 5]], pa.list_(pa.float32())),
            "a": pa.array([0, 1, 1], pa.int8()),
            "b": pa.array([1, 0, 1], pa.int8()),
            "made": pa.array([5, 6, 7], pa.timestamp("ms")),
            "in_train": pa.array([True, False, True]),
            "in_test": pa.array([0, 1, 0], pa.int8()),
        }
    )
    pq.write_table(items, folder / "items.parquet", row_group_size=2)
    likes = "user,item,stars,when,note,good,part\n"
    likes += f"bob,-3,0.5,100,1.5,1,train\nann,{SKUS[0]},2,-7,,0,\nbob,-3,1,9000000000,3,1,test\n"
    (folder / "likes.csv.gz").write_bytes(gzip.compress(likes.encode()))
    (folder / "tags").mkdir()
    (folder / "tags" / "b.csv").write_text('12;"blue"\n-3;red\n')
    (folder / "tags" / "a.csv").write_text("12;red\n")
    (folder / "same.csv").write_text("from,to\ngreen,blue\nblue,1\n")
    (folder / "days.tsv").write_text("warm\n20.5\n-1\n")
    (folder / "came.csv").write_text("user,day\nd 4,1\nann,0\n")
    encode = msgspec.json.encode if name.endswith(".json") else msgspec.yaml.encode
    (folder / name).write_bytes(encode(schema))
    return folder


EXPECTED = {
    "user": {
        "nodes": 4,
        "features": {
            "x": [[1, 1, 2], [2, 3, 4], [3, 5, 6], [4, 7, 8]],
            "old": [True, False, False, True],
        },
        "label": {"label": [0, 1, None, -1]},
        "splits": {"train": [0], "valid": [3], "test": [1]},
    },
    "item": {
        "nodes": 3,
        "features": {"x": [[0.5, 1], [2, 3], [4, 5]], "time": [5, 6, 7], "key": SKUS},
        "label": {"label": [[0, 1], [1, 0], [1, 1]]},
        "splits": {"train": [0, 2], "test": [1]},
    },
    "tag": {"nodes": 4, "features": {}, "label": {}, "splits": {}},
    "day": {"nodes": 2, "features": {"warm": [20.5, -1]}, "label": {}, "splits": {}},
    "user likes item": {
        "edges": [(1, 1), (0, 0), (1, 1)],
        "arrays": {
            "note": [1.5, None, 3],
            "weight": [0.5, 2, 1],
            "time": [100, -7, 9_000_000_000],
            "label": [1, 0, 1],
        },
        "splits": {"train": [0], "test": [2]},
    },
    "item has tag": {"edges": [(2, 0), (2, 1), (1, 0)], "arrays": {}, "splits": {}},
    "tag is tag": {"edges": [(2, 1), (1, 3)], "arrays": {}, "splits": {}},
    "user came day": {"edges": [(3, 1), (0, 0)], "arrays": {}, "splits": {}},
}


@pytest.mark.parametrize("name", ["schema.json", "schema.yaml", "mine.yml"])
def test_a_graph_of_everything(tmp_path: Path, name: str):
    write_graph(tmp_path, name=name)
    path = tmp_path / name if name == "mine.yml" else tmp_path
    assert TableSource.recognise(path) == f"{name}, a schema of tables"
    source = TableSource(path)
    assert dict(source.num_nodes) == {"user": 4, "item": 3, "tag": 7, "day": 2}  # at most
    with ready(source, tmp_path) as keys:
        assert read_all(source) == EXPECTED
        assert texts_of(keys / "user.parquet") == USERS
        assert texts_of(keys / "tag.parquet") == ["red", "blue", "green", "1"]
        assert sorted(p.name for p in keys.iterdir()) == ["tag.parquet", "user.parquet"]


def test_a_store_of_everything(tmp_path: Path):
    """Edges, keys and arrays come back out; the owner's texts lie beside the store."""
    source = TableSource(write_graph(tmp_path))
    options = IngestOptions(mem_bytes=64 << 20, block_bytes=4096, edge_ids=True, allow_nan=True)
    ingest(source, tmp_path / "store", options, QUIET)
    assert sorted(p.name for p in tmp_path.glob("*store*")) == ["store", "store.keys"]
    assert texts_of(keys_of(tmp_path / "store") / "user.parquet") == USERS
    store = open_store(tmp_path / "store")
    verify_store(tmp_path / "store")
    types = {t.name: t for t in store.manifest.types}
    item = types["item"]
    original = read_rows(store, item.original_id)
    assert read_rows(store, item.features["key"]).tolist() == [SKUS[i] for i in original]
    for relation in store.manifest.relations:
        found = stored_blocks(store, relation)
        src, dst = (
            read_rows(store, types[t].original_id)[np.array(found[end]) - types[t].first].tolist()
            for t, end in ((relation.src, "src"), (relation.dst, "dst"))
        )
        expected = EXPECTED[f"{relation.src} {relation.name} {relation.dst}"]["edges"]
        assert [(s, d) for _, s, d in sorted(zip(found["id"], src, dst, strict=True))] == expected


def write_edges(
    folder: Path, nodes: list[Any], edges: list[tuple[Any, Any]], parquet: bool
) -> None:
    """One type, one relation, as text or Parquet."""
    tables = {"n": {"id": nodes}, "e": {"s": [s for s, _ in edges], "d": [d for _, d in edges]}}
    kind = pa.int64() if all(isinstance(n, int) for n in nodes) else pa.string()
    for name, columns in tables.items():
        if parquet:
            held = pa.table({c: pa.array(v, kind) for c, v in columns.items()})
            pq.write_table(held, folder / f"{name}.parquet")
        else:
            with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as f:
                out = csv.writer(f, quoting=csv.QUOTE_ALL, lineterminator="\n")
                out.writerows([list(columns), *zip(*columns.values(), strict=True)])
    suffix = "parquet" if parquet else "csv"
    schema = {
        "nodes": [{"node_type": "n", "files": f"n.{suffix}", "node_id_col": "id"}],
        "edges": [
            {
                "relation": ["n", "to", "n"],
                "files": f"e.{suffix}",
                "source_id_col": "s",
                "dest_id_col": "d",
            }
        ],
    }
    (folder / "schema.json").write_text(json.dumps(schema))


INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=6)


@settings(max_examples=tries(20, 40))
@given(data=st.data(), parquet=st.booleans(), tiny=st.booleans())
def test_ids_of_any_kind_in_any_memory(tmp_path_factory, data, parquet, tiny):
    """Text, sparse integers, and 0, 1, 2, ...: as a dict numbers them."""
    nodes: list[Any] = data.draw(
        st.one_of(
            st.lists(INTEGERS, min_size=1, max_size=60, unique=True),
            st.lists(TEXTS, min_size=1, max_size=60, unique=True),
            st.integers(1, 60).map(lambda n: list(range(n))),
        )
    )
    ends = st.sampled_from(nodes)
    edges = data.draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=60))
    folder = tmp_path_factory.mktemp("ids")
    write_edges(folder, nodes, edges, parquet)
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            patch.setattr("preprocess.sources.columns.table_bytes_of", lambda _: 1700)
        source = TableSource(folder)
        with ready(source, folder) as keys:
            found = read_all(source)
            number = {key: i for i, key in enumerate(nodes)}
            assert found["n to n"]["edges"] == [(number[s], number[d]) for s, d in edges]
            if isinstance(nodes[0], int):
                dense = nodes == list(range(len(nodes)))
                assert found["n"]["features"] == ({} if dense else {"key": nodes})
            elif (keys / "n.parquet").exists():
                assert texts_of(keys / "n.parquet") == nodes
            else:  # texts that are all integers
                assert [int(n) for n in nodes] == found["n"]["features"].get(
                    "key", list(range(len(nodes)))
                )


@pytest.mark.parametrize("last", [["x1"], ["NA"], []])
def test_integers_that_turn_out_to_be_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: list[str]
):
    monkeypatch.setattr("preprocess.files.tables.PIECE_BYTES", 32)
    nodes = [*map(str, range(50)), "007", *last]
    write_edges(tmp_path, nodes, [(nodes[-1], "7"), ("7", "007")], parquet=False)
    source = TableSource(tmp_path)
    with ready(source, tmp_path) as keys:
        assert read_all(source)["n to n"]["edges"] == [(len(nodes) - 1, 7), (7, 50)]
        assert texts_of(keys / "n.parquet") == nodes


def test_reverses_are_added_where_the_schema_says_so(tmp_path: Path):
    assert not TableSource(write_graph(tmp_path)).undirected
    (tmp_path / "schema.json").write_text(json.dumps({**SCHEMA, "undirected": True}))
    assert TableSource(tmp_path).undirected


class _Stopped(KeyboardInterrupt):
    """A run that is stopped."""


def test_a_stopped_preparation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Types that are mapped are not mapped again; the store is that of an undisturbed run."""
    source = TableSource(write_graph(tmp_path))
    options = IngestOptions(mem_bytes=64 << 20, block_bytes=4096, allow_nan=True)
    ingest(source, tmp_path / "whole", options, QUIET)
    mapped = []
    real = idmap.map_keys

    def stopping(defined, referring, folder, *others):
        mapped.append(len(referring))
        if len(mapped) == 2:
            raise _Stopped
        return real(defined, referring, folder, *others)

    monkeypatch.setattr("preprocess.sources.columns.map_keys", stopping)
    with pytest.raises(_Stopped):
        ingest(TableSource(tmp_path), tmp_path / "store", options, QUIET)
    assert (tmp_path / ".store.prepared.work").is_dir()
    result = ingest(
        TableSource(tmp_path), tmp_path / "store", replace(options, mem_bytes=96 << 20), QUIET
    )
    assert mapped == [2, 2, 2, 3]  # users, then items twice, then tags
    whole = open_store(tmp_path / "whole").manifest
    assert result.manifest.fingerprint == whole.fingerprint
    assert not list(tmp_path.glob(".store*"))


def schema_with(*path: Any, value: Any) -> Any:
    """A spoiler that changes one value of the schema."""

    def change(folder: Path) -> None:
        schema = json.loads(json.dumps(SCHEMA))
        held = schema
        for step in path[:-1]:
            held = held[step]
        if value is None:
            del held[path[-1]]
        else:
            held[path[-1]] = value
        (folder / "schema.json").write_text(json.dumps(schema))

    return change


LIKES = "user,item,stars,when,note,good,part\n"


def likes(row: str) -> Any:
    """A spoiler of the second row of an edge table."""
    raw = f"{LIKES}bob,-3,0.5,100,1.5,1,train\n{row}\n"
    return lambda folder: (folder / "likes.csv.gz").write_bytes(gzip.compress(raw.encode()))


USER = "id,age,vector,old,class,part\n"
REFUSED = {
    "no schema": (lambda f: (f / "schema.json").unlink(), "schema.json: found no file"),
    "no JSON": (text("schema.json", "{"), "schema.json: found Input data was truncated"),
    "no nodes": (schema_with("nodes", value=[]), "schema.json: found node type 'user' of rel"),
    "unknown field": (
        schema_with("nodes", 0, "transform", value=1),
        "schema.json: found Object contains unknown field 'transform' - at '$.nodes[0]'",
    ),
    "type twice": (
        schema_with("nodes", 1, "node_type", value="user"), "found node type 'user' twice",
    ),
    "relation twice": (
        schema_with("edges", 2, "relation", value=["item", "has", "tag"]),
        "schema.json: found relation item has tag twice",
    ),
    "unknown type": (
        schema_with("edges", 0, "relation", value=["user", "likes", "thing"]),
        "schema.json: found node type 'thing' of relation 'likes'",
    ),
    "from edges and files": (
        schema_with("nodes", 2, "files", value="a.csv"), "nodes[2]: found from_edges and files",
    ),
    "no files": (schema_with("nodes", 0, "files", value=[]), "nodes[0]: found no files"),
    "no match": (schema_with("nodes", 0, "files", value="z*"), "nodes[0]: found no file for 'z*'"),
    "missing file": (schema_with("nodes", 0, "files", value="u.csv"), "u.csv: found no file"),
    "two labels": (
        schema_with("nodes", 0, "labels", value=[{"label_col": "a"}] * 2),
        "nodes[0]: found 2 labels",
    ),
    "unknown mask": (
        schema_with("nodes", 1, "mask_cols", value={"dev": "in_test"}),
        "nodes[1]: found mask_cols of 'dev'",
    ),
    "id type": (schema_with("nodes", 0, "id_type", value="uuid"), "nodes[0]: found id_type 'uuid'"),
    "integers that are none": (
        schema_with("nodes", 0, "id_type", value="integer"),
        "users-1.csv:2: found 'ann' in column 'id', expected int64",
    ),
    "missing column": (
        schema_with("nodes", 0, "node_id_col", value="uid"),
        "users-1.csv: header: found columns id,",
    ),
    "column missing in one file": (
        text("users-2.csv", "id,age\nx,1\n"), "users-2.csv: header: found columns id, age",
    ),
    "width varies": (
        text("users-2.csv", f'{USER}x,1,"1,2,3",True,0,\n'),
        "users-2.csv: column 'vector': found 3 x int64, expected 2 x int64",
    ),
    "width varies inside": (
        text("users-2.csv", f'{USER}çem,1,"1,2",True,0,\nd 4,1,"1",True,0,\n'),
        "users-2.csv:3: found 1 numbers in column 'vector', expected 2",
    ),
    "text for a feature": (
        schema_with("nodes", 0, "features", value=[{"feature_col": "id"}]),
        "users-1.csv: column id: found text, expected numbers",
    ),
    "text for a label": (
        schema_with("nodes", 0, "labels", 0, "label_col", value="part"),
        "users-1.csv: column part: found text",
    ),
    "node twice": (
        text("users-2.csv", f'{USER}çem,3,"5,6",False,,\n\nann,4,"7,8",True,-1,\n'),
        "users-2.csv:4: found node id 'ann' again, first in",
    ),
    "unknown end": (likes("eve,-3,1,1,1,1,"), "likes.csv.gz:3: found node id 'eve', expected one"),
    "unknown integer": (likes("ann,13,1,1,1,1,"), "likes.csv.gz:3: found node id 13, expected one"),
    "no id": (likes("ann,,1,1,1,1,"), "likes.csv.gz:3: found nothing in column 'item'"),
    "no text": (likes(",-3,1,1,1,1,"), "likes.csv.gz:3: found nothing in column 'user'"),
    "row out of range": (
        text("came.csv", "user,day\nann,0\nbob,2\n"),
        "came.csv:3: column 'day': found node id 2, expected 0 to 1",
    ),
    "row below zero": (text("came.csv", "user,day\nann,-1\n"), "column 'day': found node id -1"),
    "weight": (likes("ann,-3,much,1,1,1,"), "likes.csv.gz: column stars: found text, expected num"),
    "time": (likes("ann,-3,1,,1,1,"), "likes.csv.gz:3: found nothing in column 'when'"),
    "word of a split": (likes("ann,-3,1,1,1,1,dev"), "likes.csv.gz:3: found another word"),
    "truncated": (
        lambda f: (f / "items.parquet").write_bytes((f / "items.parquet").read_bytes()[:200]),
        "items.parquet: found",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    spoiler, words = REFUSED[name]
    spoiler(write_graph(tmp_path))
    assert_refused(tmp_path, lambda: TableSource(tmp_path), words)


def test_the_document_has_every_field_of_a_schema():
    page = (Path(__file__).parents[3] / "docs/layouts.md").read_text()
    section = page.partition("## CSV and Parquet tables\n")[2].partition("\n## ")[0]
    tables = [t.partition("\n\n")[0] for t in section.split("\n| field")[1:]]
    named = [
        {name for row in t.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
        for t in tables
    ]
    kinds = (table._Graph, table._Nodes, table._Edges)
    assert named == [set(kind.__struct_fields__) for kind in kinds]
    example = section.partition("```json\n")[2].partition("```")[0]
    found = msgspec.json.decode(example, type=table._Graph)
    assert (found.nodes[1].from_edges, found.edges[0].relation[1]) == (True, "likes")
