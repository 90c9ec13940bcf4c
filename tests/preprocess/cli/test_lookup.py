"""`blockstore lookup`: from what tables call a node to its number, and back."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.preprocess.test_commands import good, refused, run

SCHEMA = {
    "nodes": [
        {"node_type": "user", "files": "users.csv", "node_id_col": "id"},
        {"node_type": "item", "files": "items.csv", "node_id_col": "id"},
        {"node_type": "day", "files": "days.csv", "features": [{"feature_col": "warm"}]},
    ],
    "edges": [
        {"relation": ["user", "likes", "item"], "files": "likes.csv",
         "source_id_col": "user", "dest_id_col": "item"},
    ],
}  # fmt: skip
USERS = [f"name {i * 7 % 501}" for i in range(500)]
ITEMS = np.arange(1000, 9000, 4)[::-1]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users with texts, items with integers, days with neither; in blocks of 4 KiB."""
    folder = tmp_path_factory.mktemp("lookup")
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    (folder / "users.csv").write_text("id\n" + "\n".join(USERS) + "\n")
    (folder / "items.csv").write_text("id\n" + "\n".join(map(str, ITEMS)) + "\n")
    (folder / "days.csv").write_text("warm\n1\n2\n")
    likes = [f"{USERS[i * i % 500]},{ITEMS[i * 3 % ITEMS.size]}" for i in range(900)]
    (folder / "likes.csv").write_text("user,item\n" + "\n".join(likes) + "\n")
    good("ingest", folder, folder / "store", "--no-summary", "--block-size", "4K")
    return folder / "store"


def test_numbers_of_texts_and_of_integers(store: Path):
    asked = ["name 7", str(ITEMS[1999]), "name 0", str(ITEMS[3])]
    lines = sorted(good("lookup", store, *asked).splitlines())
    assert lines == [
        f"item\t{ITEMS[1999]}\t1999", f"item\t{ITEMS[3]}\t3", "user\tname 0\t0", "user\tname 7\t1",
    ]  # fmt: skip


def test_back_from_numbers(store: Path):
    assert good("lookup", store, 1, 499, "--back", "--type", "user").splitlines() == [
        f"user\t{USERS[1]}\t1", f"user\t{USERS[499]}\t499",
    ]  # fmt: skip
    assert good("lookup", store, 7, "--back").splitlines() == [
        f"user\t{USERS[7]}\t7", f"item\t{ITEMS[7]}\t7",
    ]  # fmt: skip


def test_what_is_not_there(store: Path, tmp_path: Path):
    result = run("lookup", store, "name 7", "nobody", "9" * 30)
    assert (result.exit_code, result.stdout) == (2, "user\tname 7\t1\n")
    assert f"{store}: found no node 'nobody' and 1 more, expected ids of its" in result.stderr
    assert "expected one of user, item, day" in refused("lookup", store, 1, "--type", "tag")
    assert "found 'x', expected numbers of nodes" in refused("lookup", store, "x", "--back")
    said = refused("lookup", store, 1, "--type", "day")
    assert f"found no ids but the numbers of nodes, from 0, expected {store}.keys, or" in said
