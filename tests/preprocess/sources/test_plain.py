"""The plain layout: every form of it that is taken, and what each refusal says."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from preprocess.errors import BadInput
from preprocess.sources.layouts import open_source
from preprocess.sources.plain import PlainSource
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    edges_of,
    round_trip,
)
from tests.preprocess.sources.refusals import assert_refused, cut, drop, read_whole, save, text

EDGES = np.array([[0, 1, 2, 2, 3], [1, 0, 2, 3, 4]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five nodes, five edges, three features, labels, splits."""
    np.save(tmp_path / "edge_index.npy", EDGES)
    np.save(tmp_path / "node_feat.npy", np.arange(15, dtype=np.float32).reshape(5, 3))
    np.save(tmp_path / "node_label.npy", np.array([0, 1, 0, 1, 0]))
    np.save(tmp_path / "train_idx.npy", np.array([4, 0]))
    np.save(tmp_path / "test_idx.npy", np.array([1], np.int32))
    return tmp_path


@pytest.mark.parametrize("dtype", ["<i8", "<i4", "<u4", "<u8", ">i8", "<i2", "u1"])
@pytest.mark.parametrize("fortran", [False, True])
def test_edges_of_any_integers_in_either_order(folder: Path, dtype: str, fortran: bool):
    array = np.asarray(EDGES.astype(dtype), order="F" if fortran else "C")
    np.save(folder / "edge_index.npy", array)
    source = PlainSource(folder)
    assert np.array_equal(edges_of(source, source.relations[0]), EDGES)


def test_facts_of_a_folder(folder: Path):
    source = PlainSource(folder)
    assert source.num_nodes == {"node": 5}
    assert [r.num_edges for r in source.relations] == [5]
    (features,) = source.features("node")
    assert (features.row_shape, features.held, features.row_bytes) == ((3,), "dense", 12)
    assert [s.name for s in source.splits("node")] == ["train", "test"]
    rows = [piece.copy() for piece in source.rows(features, 2)]
    assert [r.shape[0] for r in rows] == [2, 2, 1]
    assert np.array_equal(np.concatenate(rows), np.load(folder / "node_feat.npy"))
    read_whole(PlainSource(folder))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_sparse_features_come_out_dense(folder: Path, dtype: str):
    dense = np.array([[0, 1, 0], [0, 0, 0], [2, 0, 3], [0, 0, 0], [0, 0, 4]], dtype)
    csr = scipy.sparse.csr_array(dense.astype(np.float64))
    (folder / "node_feat.npy").unlink()
    np.save(folder / "node_feat_indptr.npy", csr.indptr.astype(np.int64))
    np.save(folder / "node_feat_indices.npy", csr.indices.astype(np.int32))
    np.save(folder / "node_feat_data.npy", csr.data.astype(dtype))
    (folder / "node_feat_csr.json").write_text(json.dumps({"shape": [5, 3], "nnz": 4}))
    source = PlainSource(folder)
    (features,) = source.features("node")
    assert features.held == "csr"
    for count in (1, 2, 9):
        rows = np.concatenate([r.copy() for r in source.rows(features, count)])
        assert np.array_equal(rows, dense)


def test_nodes_are_counted_by_ids_where_nothing_else_counts_them(folder: Path):
    for path in folder.glob("node_*"):
        path.unlink()
    assert PlainSource(folder).num_nodes == {"node": 5}


@pytest.mark.parametrize("labels", [np.eye(5, 4, dtype=np.uint8), np.full(5, np.nan)])
def test_labels_of_any_kind(folder: Path, labels: np.ndarray):
    np.save(folder / "node_label.npy", labels)
    label = PlainSource(folder).label("node")
    assert label is not None
    assert (label.dtype, label.row_shape) == (labels.dtype, labels.shape[1:])


def csr(indptr, indices, meta='{"shape": [5, 3], "nnz": 2}', data=(1.0, 2.0)):
    """A spoiler that replaces the features by a CSR matrix."""

    def change(folder: Path) -> None:
        (folder / "node_feat.npy").unlink()
        np.save(folder / "node_feat_indptr.npy", np.array(indptr))
        np.save(folder / "node_feat_indices.npy", np.array(indices))
        np.save(folder / "node_feat_data.npy", np.array(data, np.float32))
        (folder / "node_feat_csr.json").write_text(meta)

    return change


GOOD = [0, 1, 1, 2, 2, 2]
REFUSED = {
    "id too large": (save("edge_index", EDGES + 1), "edge_index.npy[1, 4]: found node id 5"),
    "id below zero": (save("edge_index", EDGES - 1), "edge_index.npy[0, 0]: found node id -1"),
    "unsigned id": (save("edge_index", EDGES.astype("u8") - np.uint64(1)), "id 1844674407370955"),
    "shape": (save("edge_index", EDGES.T), "edge_index.npy: header: found shape (5, 2)"),
    "one row": (save("edge_index", EDGES[0]), "edge_index.npy: header: found shape (5,)"),
    "floats": (save("edge_index", EDGES + 0.5), "found shape (2, 5) of float64"),
    "bools": (save("edge_index", EDGES > 1), "found shape (2, 5) of bool"),
    "few features": (save("node_feat", np.ones((4, 3))), "node_feat.npy: header: found 4 rows"),
    "few labels": (save("node_label", np.ones(4)), "node_label.npy: header: found 4 rows"),
    "flat features": (save("node_feat", np.ones(5)), "(5,) of float64, expected (nodes, f"),
    "no features": (save("node_feat", np.ones((5, 0))), "found shape (5, 0)"),
    "complex": (save("node_feat", np.ones((5, 1)) * 1j), "found shape (5, 1) of complex128"),
    "order": (save("node_feat", np.ones((300, 5)).T), "(5, 300) of float64 in Fortran order"),
    "label shape": (save("node_label", np.ones((5, 1, 1))), "found shape (5, 1, 1)"),
    "label order": (save("node_label", np.ones((300, 5)).T), "(5, 300) of float64 in Fortran"),
    "label kind": (save("node_label", np.ones(5, bool)), "found shape (5,) of bool"),
    "split shape": (save("test_idx", np.ones((1, 1), int)), "test_idx.npy: header: found shape"),
    "split kind": (save("test_idx", np.ones(1)), "found shape (1,) of float64"),
    "split id": (save("test_idx", np.array([1, 5])), "test_idx.npy[1]: found node id 5"),
    "split below": (save("test_idx", np.array([-1])), "test_idx.npy[0]: found node id -1"),
    "overlap": (save("test_idx", np.array([1, 4])), "[1]: found node 4, which is in train_idx"),
    "csr meta": (csr(GOOD, [0, 1], "{"), "node_feat_csr.json: found"),
    "csr size": (csr(GOOD, [0]), "node_feat_indices.npy: header: found shape (1,) of int64"),
    "csr kind": (csr(GOOD, [0.5, 1]), "found shape (2,) of float64, expected (2,) of integers"),
    "csr column": (csr(GOOD, [0, 3]), "node_feat_indices.npy[1]: found column 3, expected 0 to 2"),
    "csr offsets": (csr([0, 2, 1, 2, 2, 2], [0, 1]), "node_feat_indptr.npy[0]: found offsets"),
    "csr end": (csr([0, 1, 1, 2, 2, 9], [0, 1]), "node_feat_indptr.npy[0]: found offsets"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(folder: Path, name: str):
    spoiler, words = REFUSED[name]
    spoiler(folder)
    assert_refused(folder, lambda: PlainSource(folder), words)


def test_a_split_may_list_a_node_twice_but_no_two_splits_the_same(folder: Path):
    np.save(folder / "train_idx.npy", np.array([4, 0, 4]))
    read_whole(PlainSource(folder))


def test_no_nodes_no_folder(tmp_path: Path):
    with pytest.raises(BadInput, match="found nothing, not a folder"):
        PlainSource(tmp_path / "none")
    np.save(tmp_path / "edge_index.npy", np.empty((2, 0), np.int64))
    with pytest.raises(BadInput, match="a graph with no nodes"):
        PlainSource(tmp_path)
    with pytest.raises(BadInput, match="found a file, not a folder"):
        PlainSource(tmp_path / "edge_index.npy")


def everything(folder: Path) -> ExpectedGraph:
    """Arrays of every kind beside those of the folder; what it then holds."""
    node = ExpectedType(5)
    node.features = {
        "x": np.load(folder / "node_feat.npy"),
        "kind": np.arange(10).reshape(5, 1, 2),
        "words": np.array([[0, 1], [0, 0], [2, 3], [0, 0], [0, 4]], np.float16),
        "year": np.array([1, 2, 3, 4, 5], np.int16),
    }
    np.save(folder / "node_year.npy", node.features["year"])
    np.save(folder / "node_kind.npy", node.features["kind"])
    for part, values in (("indptr", [0, 1, 1, 3, 3, 4]), ("indices", [1, 0, 1, 1])):
        np.save(folder / f"node_words_{part}.npy", np.array(values))
    np.save(folder / "node_words_data.npy", np.array([1, 2, 3, 4], np.float16))
    (folder / "node_words_csr.json").write_text('{"shape": [5, 2], "nnz": 4}')
    node.label = np.eye(5, 4, dtype=np.uint8)
    np.save(folder / "node_label.npy", node.label)
    np.save(folder / "meta_test_idx.npy", np.array([3]))
    node.splits = {"train": np.array([4, 0]), "test": np.array([1]), "meta_test": np.array([3])}
    edges = ExpectedRelation(EDGES)
    edges.arrays = {
        "time": np.arange(5),
        "type": np.array([2, 0, 1, 1, 0], np.int16),
        "weight": np.array([0, 0.5, 1, 2, 8]),
    }
    for name, rows in edges.arrays.items():
        np.save(folder / f"edge_{name}.npy", rows)
    edges.splits = {"train": np.array([4, 2]), "test": np.array([[0, 1], [4, 4]])}
    for name, rows in edges.splits.items():
        np.save(folder / f"{name}_edge.npy", rows)
    np.save(folder / "split_masks.npy", np.ones((3, 5), bool))  # of another name: not read
    return ExpectedGraph({"node": node}, {("node", "to", "node"): edges})


def test_a_folder_with_everything(folder: Path, tmp_path: Path):
    graph = everything(folder)
    opened = open_source(folder)
    assert (opened.source.layout, opened.saw) == ("plain", "edge_index.npy")
    assert "split_masks.npy" not in {p.name for p in opened.source.files}
    check_source(opened.source, graph)
    round_trip(opened.source, graph, tmp_path / "out")


def test_a_file_says_how_many_nodes_there_are(tmp_path: Path):
    np.save(tmp_path / "edge_index.npy", EDGES)
    (tmp_path / "meta.json").write_text('{"num_nodes": 7}')
    assert PlainSource(tmp_path).num_nodes == {"node": 7}
    (tmp_path / "meta.json").write_text("{}")
    assert PlainSource(tmp_path).num_nodes == {"node": 5}


MORE_REFUSED = {
    "no edges": (drop("edge_index.npy"), "edge_index.npy: found no file"),
    "edges cut": (cut("edge_index.npy"), "edge_index.npy: end: found"),
    "array cut": (cut("node_year.npy"), "node_year.npy: end: found"),
    "few rows": (save("node_year", np.ones(4)), "node_year.npy: header: found 4 rows, expected 5"),
    "no rows": (save("node_year", np.array(3)), "node_year.npy: header: found shape ()"),
    "texts": (save("node_year", np.array(["a"] * 5)), "node_year.npy: found items of <U1"),
    "no shape": (drop("node_words_csr.json"), "node_words_csr.json: found no"),
    "no offsets": (drop("node_words_indptr.npy"), "indptr.npy: found no file"),
    "dense too": (save("node_words", np.ones((5, 1))), "node_words.npy: found node_words_csr.json"),
    "twice": (save("node_%79ear", np.ones(5)), "node_year.npy: found an array 'year', which n"),
    "count": (text("meta.json", '{"num_nodes": 6}'), "header: found 5 rows, expected 6, one"),
    "fewer": (text("meta.json", '{"num_nodes": 4}'), "meta.json: found 4 nodes, expected 5, as"),
    "no count": (text("meta.json", '{"num_nodes": "six"}'), "meta.json: found Expected 'int |"),
    "edge rows": (save("edge_type", np.ones(4)), "edge_type.npy: header: found 4 rows, expected 5"),
    "edge kind": (save("edge_type", np.ones(5) * 1j), "edge_type.npy: header: found shape (5,) of"),
    "position": (save("train_edge", np.array([0, 5])), "train_edge.npy[1]: found 5, expected 0 t"),
    "pair": (save("test_edge", np.array([[0, 5]])), "test_edge.npy[0]: found 5, expected 0 to 4"),
    "list": (save("test_edge", np.ones(2)), "test_edge.npy: header: found shape (2,) of float64"),
    "other split": (save("meta_test_idx", np.array([9])), "meta_test_idx.npy[0]: found node id 9"),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE_REFUSED)
def test_what_else_is_refused_is_named(folder: Path, name: str):
    everything(folder)
    spoiler, words = MORE_REFUSED[name]
    spoiler(folder)
    assert_refused(folder, lambda: PlainSource(folder), words)
