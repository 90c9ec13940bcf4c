"""OGB's datasets in arrays: stored or compressed; refusals."""

from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.sources.layouts import open_source
from preprocess.sources.ogb import OgbBinarySource
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    round_trip,
)
from tests.preprocess.sources.ogbfiles import (
    EDGES,
    ENDS,
    FEATURES,
    NAN,
    SPLITS,
    names_of,
    npy,
    papers,
    papers_graph,
)
from tests.preprocess.sources.refusals import assert_refused


@pytest.mark.parametrize("compressed", [False, True])
def test_a_dataset_is_recognised_and_read(tmp_path: Path, compressed: bool):
    opened = open_source(papers(tmp_path / "papers100M", compressed))
    assert (opened.source.layout, opened.saw) == ("ogb-binary", "raw/data.npz")
    assert not opened.source.undirected
    check_source(opened.source, papers_graph())
    round_trip(opened.source, papers_graph(), tmp_path)


def test_every_file_that_is_read_is_named(tmp_path: Path):
    assert names_of(OgbBinarySource(papers(tmp_path)), tmp_path) == [
        "raw/data.npz", "raw/node-label.npz", "split/time/test.csv.gz", "split/time/train.csv.gz",
        "split/time/valid.csv.gz",
    ]  # fmt: skip


@settings(max_examples=20)
@given(
    num_nodes=st.integers(1, 40), num_edges=st.integers(0, 60), compressed=st.booleans(),
    fortran=st.booleans(), half=st.booleans(), narrow=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_graph_is_read_as_written(
    tmp_path_factory, num_nodes, num_edges, compressed, fortran, half, narrow, seed
):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("any")
    edges = rng.integers(0, num_nodes, (2, num_edges)).astype(np.int32 if narrow else np.int64)
    features = rng.standard_normal((num_nodes, 3)).astype(np.float16 if half else np.float32)
    weights = rng.random((num_edges, 1)).astype(np.float32)
    labels = np.where(rng.random(num_nodes) < 0.5, NAN, 3.0)
    papers(
        folder, compressed, edge_index=np.asfortranarray(edges) if fortran else edges,
        num_nodes_list=np.array([num_nodes]), num_edges_list=np.array([num_edges]),
        node_feat=features, node_year=None, edge_weight=weights, node_label=labels,
    )  # fmt: skip
    for split in SPLITS:
        (folder / f"split/time/{split}.csv.gz").unlink()
    (folder / "split/time").rmdir()
    node = ExpectedType(num_nodes, {"x": features}, labels)
    relation = ExpectedRelation(edges, {"weight": weights[:, 0]})
    check_source(OgbBinarySource(folder), ExpectedGraph({"node": node}, {ENDS: relation}))


def test_arrays_of_edges_and_pairs(tmp_path: Path):
    """As ogbl_vessel: no labels, training negatives too."""
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    folder = papers(tmp_path, edge_feat=rows, edge_kind=np.arange(5), node_year=None)
    (folder / "raw/node-label.npz").unlink()
    pairs = {"edge": torch.tensor([[0, 1]]), "edge_neg": torch.tensor([[4, 0], [3, 0]])}
    for split in SPLITS:
        torch.save(pairs, folder / f"split/time/{split}.pt")
    splits = {
        s + n: v for s in SPLITS for n, v in (("", [[0, 1]]), ("_negative", [[4, 0], [3, 0]]))
    }
    relation = ExpectedRelation(EDGES, {"feat": rows, "kind": range(5)}, splits)
    node = ExpectedType(5, {"x": FEATURES})
    check_source(OgbBinarySource(folder), ExpectedGraph({"node": node}, {ENDS: relation}))


def test_several_labels_a_node(tmp_path: Path):
    labels = np.array([[0, 1], [NAN, 1], [1, 1], [0, 0], [NAN, NAN]])
    expected = papers_graph()
    expected.types["node"].label = labels
    check_source(OgbBinarySource(papers(tmp_path, node_label=labels)), expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no edges": ({"edge_index": None}, "data.npz: found no array 'edge_index', expected it beside"),
    "no number of nodes": ({"num_nodes_list": None}, "data.npz: found no array 'num_nodes_list'"),
    "no number of edges": ({"num_edges_list": None}, "data.npz: found no array 'num_edges_list'"),
    "unknown array": ({"feat": np.ones(5)}, "data.npz: found array 'feat', expected names that b"),
    "several graphs": (
        {"num_nodes_list": np.array([2, 3])}, "data.npz: num_nodes_list: header: found shape (2,)",
    ),
    "number of floats": ({"num_edges_list": np.ones(1)}, "_edges_list: header: found shape (1,)"),
    "nodes below zero": ({"num_nodes_list": np.array([-1])}, "data.npz: num_nodes_list: found -1"),
    "edge shape": ({"edge_index": EDGES.T}, "data.npz: edge_index: header: found shape (5, 2)"),
    "edges of floats": ({"edge_index": EDGES / 1}, "edge_index: header: found shape (2, 5) of f"),
    "number of edges": (
        {"num_edges_list": np.array([6])}, "data.npz: edge_index: found 5 edges, expected 6, as",
    ),
    "number of nodes": (
        {"num_nodes_list": np.array([6])}, "node_feat: header: found 5 rows, expected 6, a",
    ),
    "id too large": (
        {"edge_index": np.add(EDGES, [[0], [1]])},
        "data.npz: edge_index[1, 2]: found node id 5, expected 0 to 4",
    ),
    "id below zero": ({"edge_index": EDGES - 1}, "data.npz: edge_index[0, 0]: found node id -1"),
    "feature order": (
        {"node_feat": np.asfortranarray(np.ones((5, 300), np.float32))},
        "data.npz: node_feat: header: found shape (5, 300) of float32 in Fortran order",
    ),
    "features of text": ({"node_feat": np.array(["a"] * 5)}, "node_feat: found items of <U1"),
    "features of objects": (
        {"node_feat": np.array([{}] * 5)}, "data.npz: node_feat: found Python objects",
    ),
    "complex": ({"node_feat": np.ones(5, complex)}, "node_feat: header: found shape (5,) of compl"),
    "edge rows": ({"edge_weight": np.ones(4)}, "edge_weight: header: found 4 rows, expected 5, a"),
    "few labels": ({"node_label": np.ones(4)}, "label.npz: node_label: header: found 4 rows, ex"),
    "label of objects": ({"node_label": np.array([{}] * 5)}, "node_label: found Python objects"),
    "two arrays": ({"node_x": np.ones(5)}, "data.npz: node_x: found array 'x' again"),
}  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str, compressed: bool):
    changes, words = REFUSED[name]
    papers(tmp_path, compressed, **changes)
    assert_refused(tmp_path, lambda: OgbBinarySource(tmp_path), words)


def members(folder: Path, kind: int, **raw: bytes) -> None:
    """Write `data.npz` again with some members replaced."""
    path = folder / "raw/data.npz"
    with ZipFile(path) as file:
        held = {name: file.read(name) for name in file.namelist()}
    with ZipFile(path, "w", kind) as file:
        for name, content in (held | {f"{n}.npy": c for n, c in raw.items()}).items():
            file.writestr(name, content)


@pytest.mark.parametrize("kind", [ZIP_STORED, ZIP_DEFLATED])
def test_a_member_that_is_cut(tmp_path: Path, kind: int):
    members(papers(tmp_path), kind, node_feat=npy(FEATURES)[:-1])
    words = "data.npz: node_feat: end: found 167 bytes, expected 168 for shape (5, 2)"
    assert_refused(tmp_path, lambda: OgbBinarySource(tmp_path), words)


@pytest.mark.parametrize("kind", [ZIP_STORED, ZIP_DEFLATED])
def test_a_member_that_is_no_array(tmp_path: Path, kind: int):
    members(papers(tmp_path), kind, edge_index=b"0,1\n")
    words = "data.npz: edge_index: header: found "
    assert_refused(tmp_path, lambda: OgbBinarySource(tmp_path), words)


@pytest.mark.parametrize("name", ["data.npz", "node-label.npz"])
def test_a_file_that_is_cut(tmp_path: Path, name: str):
    path = papers(tmp_path) / "raw" / name
    path.write_bytes(path.read_bytes()[:-30])
    assert_refused(tmp_path, lambda: OgbBinarySource(tmp_path), f"raw/{name}")


def test_a_missing_label_array(tmp_path: Path):
    np.savez(papers(tmp_path) / "raw/node-label.npz", label=np.ones(5))
    words = "node-label.npz: found no array 'node_label', expected it beside label"
    assert_refused(tmp_path, lambda: OgbBinarySource(tmp_path), words)


def test_a_missing_file(tmp_path: Path):
    (papers(tmp_path) / "raw/data.npz").unlink()
    words = "data.npz: found no file: it is missing"
    assert_refused(tmp_path, lambda: OgbBinarySource(tmp_path), words)
