"""The plain layout of several types: as real folders have it, in all its forms; refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from preprocess.sources.layouts import open_source
from preprocess.sources.plain import PlainHeteroSource
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    round_trip,
)
from tests.preprocess.sources.refusals import Spoiler, assert_refused, cut, drop, save, text

WRITES = np.array([[0, 1, 1, 0], [2, 0, 1, 2]])
CITES = np.array([[0, 2], [1, 1]])
PAPER_X = np.array([[0, 1.5, 0, 0], [0, 0, 0, 0], [2, 0, 3, 0]], np.float32)
LABELS = np.array([1, -1, 0])
SCHEMA = {
    "node_types": {"author": 2, "paper": 3, "field": 1},
    "offsets": {"author": 0, "paper": 2, "field": 5},
    "relations": ["author|writes|paper", "paper|cites|paper"],
    "target": "paper",
    "feature_shapes": {"paper": [3, 4]},
}
TYPES = {"author": 2, "paper": 3, "field": 1}


def save_csr(folder: Path, stem: str, dense: np.ndarray) -> None:
    """The three parts of a sparse array."""
    csr = scipy.sparse.csr_array(dense)
    np.save(folder / f"{stem}__indptr.npy", csr.indptr.astype(np.int64))
    np.save(folder / f"{stem}__indices.npy", csr.indices)
    np.save(folder / f"{stem}__data.npy", csr.data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As the real ones: Fortran order, ids of 32 bits, labels and splits of one type."""
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    np.save(tmp_path / "edge__author__writes__paper.npy", np.asfortranarray(WRITES.astype("i4")))
    np.save(tmp_path / "edge__paper__cites__paper.npy", CITES)
    save_csr(tmp_path, "feat__paper", PAPER_X)
    np.save(tmp_path / "node_label.npy", np.array([-1, -1, *LABELS, -1]))
    np.save(tmp_path / "train_idx.npy", np.array([4, 2]))
    np.save(tmp_path / "meta_test_idx.npy", np.array([3], np.uint8))
    np.save(tmp_path / "edge_index.npy", np.empty((2, 6), np.int64))  # all of them: not read
    np.save(tmp_path / "edge_type.npy", np.zeros(6, np.int16))
    (tmp_path / "SOURCE.md").write_text("where it is from")
    return tmp_path


def expected() -> ExpectedGraph:
    """What the folder holds."""
    types = {name: ExpectedType(count) for name, count in TYPES.items()}
    splits = {"train": np.array([2, 0]), "meta_test": np.array([1])}
    types["paper"] = ExpectedType(3, {"x": PAPER_X}, LABELS, splits)
    relations = {
        ("author", "writes", "paper"): ExpectedRelation(WRITES),
        ("paper", "cites", "paper"): ExpectedRelation(CITES),
    }
    return ExpectedGraph(types, relations)


def test_a_folder_as_real_ones_are(folder: Path, tmp_path: Path):
    opened = open_source(folder)
    assert opened.source.layout == "plain-hetero"
    assert opened.saw == "schema.json and edge__author__writes__paper.npy"
    names = {p.name for p in opened.source.files}
    assert not names & {"edge_index.npy", "edge_type.npy", "SOURCE.md"}
    check_source(opened.source, expected())
    round_trip(opened.source, expected(), tmp_path / "out")


def test_every_kind_of_array_of_every_type(folder: Path, tmp_path: Path):
    graph = expected()
    author, paper = graph.types["author"], graph.types["paper"]
    writes = graph.relations[("author", "writes", "paper")]
    for name in ("node_label", "train_idx", "meta_test_idx"):
        (folder / f"{name}.npy").unlink()
    paper.splits, paper.label = {}, np.eye(3, 7, dtype=np.uint8)
    np.save(folder / "label__paper.npy", paper.label)
    author.label = np.array([0.5, np.nan], np.float32)
    np.save(folder / "label__author.npy", author.label)
    author.splits = {"train": np.array([1]), "test": np.array([0])}
    for name, ids in author.splits.items():
        np.save(folder / f"split__author__{name}.npy", ids)
    author.features["x"] = np.ones((2, 3), np.float32)
    np.save(folder / "feat__author.npy", author.features["x"])
    for name, rows in (("age", np.array([7, 9], np.int16)), ("faces", np.ones((2, 2, 2), "u1"))):
        author.features[name] = rows
        np.save(folder / f"feat__author__{name}.npy", rows)
    paper.features["words"] = np.array([[0, 0], [0, 4], [5, 0]], np.float32)
    save_csr(folder, "feat__paper__words", paper.features["words"])
    (folder / "feat__paper__words__csr.json").write_text('{"shape": [3, 2]}')
    writes.arrays = {
        "place": np.array([[1, 2]] * 4, np.int16),
        "time": np.array([4, 3, 2, 1]),
        "weight": np.array([0.5, 0, 2, 1], np.float32),
    }
    for name, rows in writes.arrays.items():
        np.save(folder / f"edge__author__writes__paper__{name}.npy", rows)
    writes.splits = {"train": np.array([3, 0]), "test": np.array([[1, 0]])}
    for name, rows in writes.splits.items():
        np.save(folder / f"edge_split__author__writes__paper__{name}.npy", rows)
    source = PlainHeteroSource(folder)
    check_source(source, graph)
    round_trip(source, graph, tmp_path / "out")


def test_names_are_encoded_where_they_must_be(tmp_path: Path):
    schema = {"node_types": {"a_": 1, "b|c/d": 2}, "relations": [["a_", "_to__", "b|c/d"]]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    np.save(tmp_path / "edge__a%5F__%5Fto_%5F__b%7Cc%2Fd.npy", np.array([[0], [1]]))
    np.save(tmp_path / "feat__a%5F__%64ata.npy", np.array([5]))
    relations = {("a_", "_to__", "b|c/d"): ExpectedRelation(np.array([[0], [1]]))}
    types = {"a_": ExpectedType(1, {"data": np.array([5])}), "b|c/d": ExpectedType(2)}
    check_source(open_source(tmp_path).source, ExpectedGraph(types, relations))


def schema(**changes: object) -> Spoiler:
    """A spoiler that changes fields of the schema."""
    return text("schema.json", json.dumps(SCHEMA | changes))


W = "edge__author__writes__paper"
REFUSED = {
    "no schema": (drop("schema.json"), "schema.json: found no file"),
    "no json": (text("schema.json", "{"), "schema.json: found Input data was truncated"),
    "a type twice": (
        text("schema.json", '{"node_types": {"a": 1, "a": 2}, "relations": []}'),
        "schema.json: found 'a' twice",
    ),
    "a relation twice": (
        schema(relations=["paper|cites|paper"] * 2), "found relation paper|cites|paper twice",
    ),
    "negative nodes": (schema(node_types={"a": -1}), "Expected 'int' >= 0"),
    "no nodes": (schema(node_types={}), "schema.json: found a graph with no nodes"),
    "an odd relation": (schema(relations=["paper|cites"]), "found relation 'paper|cites', exp"),
    "unknown type": (schema(relations=["x|cites|paper"]), "found node type 'x' of x|cites|paper"),
    "unknown target": (schema(target="nobody"), "schema.json: found target 'nobody'"),
    "odd offsets": (schema(offsets={"paper": 1}), "found offset 1 of paper, expected 2"),
    "no edges": (drop(f"{W}.npy"), f"{W}.npy: found no file"),
    "edges cut": (cut(f"{W}.npy"), f"{W}.npy: end: found"),
    "edges of floats": (save(W, WRITES * 1.0), f"{W}.npy: header: found shape (2, 4) of float64"),
    "edges turned": (save(W, WRITES.T), f"{W}.npy: header: found shape (4, 2)"),
    "a source too large": (save(W, [[2], [0]]), f"{W}.npy[0, 0]: found node id 2, expected 0 to 1"),
    "a target below": (save(W, [[1], [-1]]), f"{W}.npy[1, 0]: found node id -1, expected 0 to 2"),
    "unknown relation": (save("edge__paper__likes__paper", CITES), "found relation paper|likes|p"),
    "array of unknown": (save("edge__a__b__c__d", [1]), "d.npy: found relation a|b|c, expected"),
    "features of unknown": (save("feat__conf", PAPER_X), "feat__conf.npy: found node type 'conf'"),
    "a long name": (save("feat__a__b__c__d", [1]), "found 4 names behind feat, expected 1 or 2"),
    "a part of nothing": (save("feat__paper__b__c", [1]), "found a part 'c', expected one of indp"),
    "dense and sparse": (save("feat__paper", PAPER_X), "feat__paper.npy: found feat__paper__ind"),
    "few features": (save("feat__author", [[1]]), "feat__author.npy: header: found 1 rows, exp"),
    "flat features": (save("feat__author", [1, 2]), "feat__author.npy: header: found shape (2,)"),
    "complex": (save("feat__author__z", [1j, 2]), "__z.npy: header: found shape (2,) of c"),
    "indices cut": (cut("feat__paper__indices.npy"), "feat__paper__indices.npy: end: found"),
    "no data": (drop("feat__paper__data.npy"), "feat__paper__data.npy: found no file"),
    "few offsets": (
        save("feat__paper__indptr", [0, 1, 3]), "feat__paper__indptr.npy: header: found shape (3,)",
    ),
    "column": (
        save("feat__paper__indices", [1, 0, 4]), "feat__paper__indices.npy[2]: found column 4",
    ),
    "no shape": (schema(feature_shapes={}), "feat__paper__csr.json: found no file"),
    "few labels": (save("node_label", LABELS), "node_label.npy: header: found 3 rows, expected 6"),
    "two labels": (save("label__paper", LABELS), "node_label.npy: found labels of paper, which"),
    "labels of bools": (save("label__author", [True, False]), "found shape (2,) of bool"),
    "a split of others": (save("train_idx", [2, 1]), "train_idx.npy[1]: found node id 1, exp"),
    "a split too large": (save("train_idx", [5]), "train_idx.npy[0]: found node id 5, exp"),
    "two splits": (save("split__paper__train", [0]), "train_idx.npy: found split train of paper"),
    "split id": (save("split__author__test", [2]), "split__author__test.npy[0]: found node id 2"),
    "split of floats": (save("split__author__test", [1.0]), "found shape (1,) of float64, exp"),
    "edge rows": (save(f"{W}__weight", [1, 2]), f"{W}__weight.npy: header: found 2 rows"),
    "edge split": (save(f"edge_split__{W[6:]}__a", [4]), "__a.npy[0]: found 4, expected 0 to 3"),
    "pairs": (save(f"edge_split__{W[6:]}__a", [[2, 0]]), "__a.npy[0]: found 2, expected 0 to 1"),
    "triples": (save(f"edge_split__{W[6:]}__a", [[2, 0, 1]]), "expected (n,) or (n, 2) of int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(folder: Path, name: str):
    spoiler, words = REFUSED[name]
    spoiler(folder)
    assert_refused(folder, lambda: PlainHeteroSource(folder), words)


def test_a_folder_that_is_not_there(tmp_path: Path):
    assert_refused(tmp_path, lambda: PlainHeteroSource(tmp_path / "none"), "found nothing, not a")
