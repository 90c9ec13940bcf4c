"""A schema that is proposed for tables is one that they can be ingested by."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preprocess.errors import BadInput
from preprocess.sources.layouts import open_source
from preprocess.sources.propose import propose
from tests.preprocess.sources.reading import read_all, ready
from tests.preprocess.test_commands import good, refused, run

USERS = "user_id,age,height,city,label,split\nu1,3,1.5,Rome,0,train\nu2,5,1.75,Oslo,,test\n"
ITEMS = {"item_id": [10, 20], "price": [2.5, 3.5], "vector": [[0.5, 1.0], [2.0, 4.0]]}
BOUGHT = "item_id,user_id,stars,timestamp,weight\n10,u2,4,17,0.5\n20,u1,2,18,1.5\n"


def proposed(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The schema, what a source gives by it, and the notes."""
    schema, notes = propose(folder)
    (folder / "schema.json").write_text(json.dumps(schema))
    source = open_source(folder).source
    with ready(source, folder.parent):
        return schema, read_all(source), notes


def test_users_items_and_what_they_bought(tmp_path: Path):
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "users.csv").write_text(USERS)
    pq.write_table(pa.table(ITEMS), folder / "items.parquet")
    (folder / "purchases.csv").write_text(BOUGHT)
    (folder / "README.txt").write_text("what this is")
    _, found, notes = proposed(folder)
    assert list(found) == ["item", "user", "item purchases user"]
    assert found["user"]["features"] == {"x": [[3.0, 1.5], [5.0, 1.75]]}
    assert found["user"]["label"] == {"label": [0.0, None]}
    assert found["user"]["splits"] == {"train": [0], "test": [1]}
    assert found["item"]["features"]["x"] == [[2.5, 0.5, 1.0], [3.5, 2.0, 4.0]]
    bought = found["item purchases user"]
    assert bought["edges"] == [(0, 1), (1, 0)]
    assert bought["arrays"] == {"stars": [4, 2], "weight": [0.5, 1.5], "time": [17, 18]}
    assert notes == ["users: text is left out: city"]


def test_users_that_only_ratings_name(tmp_path: Path):
    """As MovieLens has them."""
    folder = tmp_path / "films"
    folder.mkdir()
    (folder / "movies.csv").write_text("movieId,title,year\n7,Up,2009\n9,Her,2013\n")
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n3,9,4.5,17\n1,7,2.0,18\n")
    _, found, notes = proposed(folder)
    assert list(found) == ["movie", "user", "user ratings movie"]
    assert found["user ratings movie"]["edges"] == [(0, 1), (1, 0)]
    assert found["user ratings movie"]["arrays"] == {"rating": [4.5, 2.0], "time": [17, 18]}
    assert notes == [
        "movies: text is left out: title",
        "type 'user' has no table: its nodes are those that edges name",
    ]


def test_parts_of_a_table_are_one(tmp_path: Path):
    folder = tmp_path / "parts"
    (folder / "likes").mkdir(parents=True)
    for i in (0, 1):
        (folder / f"likes/part-0000{i}.csv").write_text(f"src,dst\n{i},{i}\n")
        (folder / f"nodes-{i}.csv").write_text(f"id,train_mask\n{i},{i}\n")
    schema, found, _ = proposed(folder)
    assert schema["edges"][0]["files"] == "likes"
    assert schema["nodes"][0]["files"] == ["nodes-0.csv", "nodes-1.csv"]
    assert found["node likes node"]["edges"] == [(0, 0), (1, 1)]
    assert found["node"]["splits"] == {"train": [1]}


@pytest.mark.parametrize(
    ("name", "header", "relation"),
    [
        ("edges", "source_id,target_id", ["node", "edges", "node"]),
        ("musae_edges", "id_1,id_2", ["node", "musae_edges", "node"]),
        ("author_writes_paper", "src,dst", ["author", "writes", "paper"]),
        ("likes", "user,item", ["user", "likes", "item"]),
        ("likes", "user_id,item_id", ["user", "likes", "item"]),
    ],
)
def test_edges_alone(tmp_path: Path, name: str, header: str, relation: list[str]):
    folder = tmp_path / "edges"
    folder.mkdir()
    (folder / f"{name}.tsv").write_text(header.replace(",", "\t") + "\na\tb\nb\tb\n")
    schema, found, notes = proposed(folder)
    assert schema["edges"][0]["relation"] == relation
    assert found[" ".join(relation)]["edges"] == [(0, 1), (1, 1)] or len(set(relation[::2])) == 2
    assert all(f"type {end!r} has no table" in " ".join(notes) for end in relation[::2])


def test_ingest_says_how_to_get_one(tmp_path: Path):
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "users.csv").write_text(USERS)
    (folder / "friends.csv").write_text("src,dst\nu1,u2\n")
    assert refused("ingest", folder, tmp_path / "s") == (
        f"{folder}: found tables without a schema, expected schema.json, which says what they are;"
        f" blockstore schema {folder} > {folder}/schema.json proposes one: look at it"
    )
    result = run("schema", folder)
    (folder / "schema.json").write_text(result.stdout)
    assert result.stderr == "users: text is left out: city\n"
    assert "2 nodes, 1 edges" in good("ingest", folder, tmp_path / "s", "--no-summary")


def test_there_must_be_tables(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.ones(3))
    with pytest.raises(BadInput, match=r"found no \.csv, \.tsv or \.parquet, expected a folder"):
        propose(tmp_path)
    assert "expected a folder of tables" in refused("schema", tmp_path / "a.npy")
    (tmp_path / "bad.csv").write_bytes(b"")
    assert "bad.csv: found an empty file" in refused("schema", tmp_path)
