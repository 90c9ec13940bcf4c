"""Splits that overlap or list edges, and what the commands say of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from blockstore.store import open_store
from tests.preprocess.test_commands import good, refused, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two splits of nodes with one node in both; edges by position and as pairs."""
    place, edges = tmp_path / "graph", np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
    place.mkdir()
    arrays = {
        "edge_index": edges, "train_idx": [0, 1], "trainval_idx": [0, 1, 2], "test_idx": [3],
        "valid_edge": [0, 3], "test_edge": [[1, 2]],
    }  # fmt: skip
    for name, values in arrays.items():
        np.save(place / f"{name}.npy", np.asarray(values))
    return place


def test_a_split_is_left_out(folder: Path, tmp_path: Path):
    said = refused("ingest", folder, tmp_path / "s")
    assert "trainval_idx.npy[0]: found node 0, which is in train_idx.npy too, expected" in said
    assert said.endswith("or one of them out with --leave-out trainval")
    good("ingest", folder, tmp_path / "s", "--leave-out", "trainval", "--leave-out", "valid")
    manifest = open_store(tmp_path / "s").manifest
    assert set(manifest.types[0].splits) == {"train", "test"}
    assert set(manifest.relations[0].splits) == {"test"}


@pytest.mark.parametrize("also", [(), ("--dry-run",)])
def test_a_split_that_is_not_there_cannot_be_left_out(folder: Path, tmp_path: Path, also):
    said = refused("ingest", folder, tmp_path / "s", "--leave-out", "dev", *also)
    assert said.startswith("--leave-out: found 'dev', expected train, test, trainval, valid; ")


def test_splits_of_edges_are_told(folder: Path, tmp_path: Path):
    plain = ("ingest", folder, tmp_path / "s", "--leave-out", "trainval")
    said = run(*plain)
    assert "splits: valid 2 (50 %), test 1 (25 %)" in said.stdout
    advice = (
        "splits of node-to-node list positions of edges (valid), and the store has none to find "
        "them by; to keep them, ingest with --edge-ids"
    )
    assert advice in said.stderr
    text = good("info", tmp_path / "s")
    assert "    valid       2 edges, as positions\n" in text
    assert "    test        1 edges, as pairs of nodes\n" in text
    facts = json.loads(good("info", tmp_path / "s", "--json", "--summary"))
    assert facts["summary"]["relations"][0]["splits"] == {"valid": 2, "test": 1}
    assert (
        "--edge-ids" not in run("ingest", folder, tmp_path / "t", *plain[3:], "--edge-ids").stderr
    )
