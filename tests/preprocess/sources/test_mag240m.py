"""MAG240M: as OGB-LSC lays it out, small; refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preprocess.sources.layouts import open_source
from preprocess.sources.mag240m import Mag240mSource
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    round_trip,
)
from tests.preprocess.sources.refusals import Spoiler, assert_refused, cut, drop, moved, put, save

META = {"paper": 7, "author": 5, "institution": 2, "num_classes": 153}
SPLITS = {"train": [0, 3], "valid": [5], "test": [6, 1, 2]}
NAMES = ("author___affiliated_with___institution", "author___writes___paper",
         "paper___cites___paper")  # fmt: skip
EDGES = {
    NAMES[0]: [[4, 0, 1], [1, 0, 1]],
    NAMES[1]: [[0, 0, 4, 2], [6, 1, 1, 3]],
    NAMES[2]: [[6, 0, 3, 3, 2], [0, 6, 3, 1, 2]],
}
FEATURES = (np.arange(7 * 768) % 401 / 64 - 3).astype(np.float16).reshape(7, 768)
LABELS = np.array([0, np.nan, np.nan, 152, np.nan, 7, np.nan], np.float32)
YEARS = np.array([2016, 2019, 2020, 2015, 1990, 2018, 2020], np.int16)


def write_graph(root: Path, splits: dict[str, Any] = SPLITS) -> Path:
    """Seven papers, five authors, two institutions."""
    folder = root / "mag240m_kddcup2021"
    paper = folder / "processed" / "paper"
    paper.mkdir(parents=True)
    torch.save(META, folder / "meta.pt")
    torch.save({k: np.array(v, int) for k, v in splits.items()}, folder / "split_dict.pt")
    (folder / "RELEASE_v1.txt").touch()
    np.save(paper / "node_feat.npy", FEATURES)
    np.save(paper / "node_label.npy", LABELS)
    np.save(paper / "node_year.npy", YEARS)
    for name, edges in EDGES.items():
        (folder / "processed" / name).mkdir()
        np.save(folder / "processed" / name / "edge_index.npy", np.array(edges))
    return folder


def expected(splits: dict[str, Any]) -> ExpectedGraph:
    return ExpectedGraph(
        {
            "paper": ExpectedType(7, {"x": FEATURES, "year": YEARS}, LABELS, splits),
            "author": ExpectedType(5),
            "institution": ExpectedType(2),
        },
        {
            (s, r, d): ExpectedRelation(EDGES[name])
            for name in NAMES
            for s, r, d in [name.split("___")]
        },
    )


def test_a_graph_is_read_and_becomes_a_store(tmp_path: Path):
    opened = open_source(write_graph(tmp_path))
    assert isinstance(opened.source, Mag240mSource)
    assert opened.saw == f"meta.pt and processed/{NAMES[0]}"
    check_source(opened.source, expected(SPLITS))
    round_trip(opened.source, expected(SPLITS), tmp_path)


def test_the_folder_above_is_taken_too(tmp_path: Path):
    write_graph(tmp_path)
    opened = open_source(tmp_path)
    assert opened.saw == f"mag240m_kddcup2021/meta.pt and mag240m_kddcup2021/processed/{NAMES[0]}"
    check_source(opened.source, expected(SPLITS))


def test_edges_may_lie_in_pairs_on_disk(tmp_path: Path):
    folder = write_graph(tmp_path)
    for name, edges in EDGES.items():
        array = np.asfortranarray(np.array(edges, np.int32))
        np.save(folder / "processed" / name / "edge_index.npy", array)
    check_source(Mag240mSource(folder), expected(SPLITS))


@pytest.mark.parametrize(
    ("held", "given"),
    [
        ({"train": [0], "test-whole": [6, 1]}, {"train": [0], "test": [6, 1]}),
        (
            {"train": [0], "test-dev": [6], "test-challenge": [1], "test-whole": [6, 1]},
            {"train": [0], "test-dev": [6], "test-challenge": [1]},
        ),
        ({"train": [0], "test": [6, 1], "test-dev": [6]}, {"train": [0], "test": [6, 1]}),
        ({"train": [0], "test-dev": [6]}, {"train": [0], "test-dev": [6]}),
        ({"train": [0], "valid": []}, {"train": [0], "valid": np.empty(0, np.int64)}),
        ({}, {}),
    ],
)
def test_parts_of_the_test_split_are_taken_where_they_are(tmp_path: Path, held: Any, given: Any):
    check_source(Mag240mSource(write_graph(tmp_path, held)), expected(given))


def test_splits_may_be_tensors(tmp_path: Path):
    folder = write_graph(tmp_path)
    torch.save({k: torch.tensor(v) for k, v in SPLITS.items()}, folder / "split_dict.pt")
    check_source(Mag240mSource(folder), expected(SPLITS))


def saved(name: str, array: Any) -> Spoiler:
    """A spoiler that replaces an npy file."""
    return save(f"processed/{name}", array)


def headerless(name: str) -> Spoiler:
    return lambda folder: FEATURES.tofile(folder / name)


def no_relations(folder: Path) -> None:
    for name in NAMES:
        (folder / "processed" / name).rename(folder / name)


CITES = f"{NAMES[2]}/edge_index.npy"
REFUSED = {
    "no meta": (drop("meta.pt"), "meta.pt: found no file"),
    "no splits": (drop("split_dict.pt"), "split_dict.pt: found no file"),
    "truncated meta": (cut("meta.pt"), "meta.pt: found "),
    "objects": (put("meta.pt", {"paper": Path("a")}), "meta.pt: found "),
    "a list": (put("meta.pt", [7, 5]), "meta.pt: found a list, expected a dict"),
    "a count": (put("meta.pt", {**META, "author": 5.5}), "meta.pt: author: found 5.5, expected"),
    "no papers": (put("meta.pt", {"author": 5}), "meta.pt: found counts of author, exp"),
    "a count of nothing": (put("meta.pt", {**META, "paper": -1}), "meta.pt: paper: found -1, exp"),
    "a split list": (put("split_dict.pt", [[0]]), "split_dict.pt: found a list, expected a dict"),
    "pairs as a split": (
        put("split_dict.pt", {"train": torch.zeros(2, 2, dtype=torch.int64)}),
        "split_dict.pt: train: found shape (2, 2)",
    ),
    "a name of two": (
        moved(f"processed/{NAMES[2]}", "processed/paper___cites"), "paper___cites: found 2 names",
    ),
    "no features": (drop("processed/paper/node_feat.npy"), "node_feat.npy: found no file"),
    "no labels": (drop("processed/paper/node_label.npy"), "node_label.npy: found no file"),
    "no years": (drop("processed/paper/node_year.npy"), "node_year.npy: found no file"),
    "no header": (headerless("processed/paper/node_feat.npy"), "node_feat.npy: header: found "),
    "unknown type": (
        moved(f"processed/{NAMES[2]}", "processed/paper___in___journal"),
        "paper___in___journal/edge_index.npy: found a relation of",
    ),
    "no relations": (no_relations, "processed: found no relations"),
    "no edges": (drop(f"processed/{CITES}"), "edge_index.npy: found no file"),
    "edges truncated": (cut(f"processed/{CITES}"), "edge_index.npy: end: found "),
    "edges of pairs": (saved(CITES, np.zeros((5, 2), int)), "header: found shape (5, 2)"),
    "edges of floats": (saved(CITES, np.zeros((2, 5))), "header: found shape (2, 5) of float64"),
    "id too large": (saved(CITES, [[0, 7], [1, 1]]), "edge_index.npy[0, 1]: found node id 7"),
    "id below zero": (saved(CITES, [[0, 1], [1, -1]]), "edge_index.npy[1, 1]: found node id -1"),
    "too few rows": (saved("paper/node_feat.npy", FEATURES[1:]), "found 6 rows, expected 7"),
    "too many labels": (saved("paper/node_label.npy", np.zeros(8)), "found 8 rows, expected 7"),
    "Fortran order": (saved("paper/node_feat.npy", np.asfortranarray(FEATURES)), "Fortran order"),
    "text": (saved("paper/node_year.npy", np.array(["a"] * 7)), "node_year.npy: found items of"),
    "features truncated": (cut("processed/paper/node_feat.npy"), "node_feat.npy: end: found "),
    "split of floats": (put("split_dict.pt", {"train": torch.ones(2)}), "found shape (2,) of f"),
    "split of text": (put("split_dict.pt", {"train": "all"}), "split_dict.pt: train: found a str"),
    "split out of range": (put("split_dict.pt", {"train": torch.tensor([0, 7])}), "train[1]: fou"),
    "splits overlap": (
        put("split_dict.pt", {"train": torch.tensor([3]), "valid": torch.tensor([1, 3])}),
        "split_dict.pt: valid[1]: found node 3, which is in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    spoiler, words = REFUSED[name]
    folder = write_graph(tmp_path)
    spoiler(folder)
    assert_refused(folder, lambda: Mag240mSource(folder), words)
