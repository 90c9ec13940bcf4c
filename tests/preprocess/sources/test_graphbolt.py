"""GraphBolt's raw layout: text and arrays, node and link tasks, torch files; refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preprocess.errors import BadInput
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.arrays import ArrayRows, MadeRows, open_array
from preprocess.sources.graphbolt import GraphBoltSource, write_listed
from preprocess.sources.source import SourceRows
from tests.preprocess.quiet import QUIET
from tests.preprocess.sources.reading import read_all, ready
from tests.preprocess.sources.refusals import assert_refused, drop, put, save, text

SMALL = """dataset_name: small
graph:
  nodes:
    - num: 5
  edges:
    - format: csv
      path: edges/self.csv
feature_data:
  - domain: node
    name: feat
    format: numpy
    in_memory: false
    path: data/feat.npy
  - {domain: edge, name: weight, format: torch, path: data/weight.pt}
tasks:
  - name: node_classification
    num_classes: 3
    train_set:
      - data:
          - {name: seeds, format: numpy, in_memory: true, path: set/train.npy}
          - {name: labels, format: torch, path: set/train-labels.pt}
    validation_set:
      - data:
          - {format: torch, path: set/valid.pt}
          - {format: torch, path: set/valid-labels.pt}
  - name: link_prediction
    num_classes: 10
    train_set:
      - data:
          - {name: node_pairs, format: numpy, path: set/pairs.npy}
    test_set:
      - data:
          - {name: seeds, format: numpy, path: set/test-pairs.npy}
          - {name: labels, format: numpy, path: set/test-labels.npy}
          - {name: indexes, format: numpy, path: set/test-indexes.npy}
"""
EDGES = [(0, 1), (1, 2), (4, 4), (0, 1)]


def small(folder: Path) -> Path:
    """One type without a name; text for edges, as pandas writes it without a header."""
    for name in ("edges", "data", "set"):
        (folder / name).mkdir()
    (folder / "metadata.yaml").write_text(SMALL)
    (folder / "edges/self.csv").write_text("".join(f"{s},{d}\n" for s, d in EDGES))
    np.save(folder / "data/feat.npy", np.arange(10, dtype=np.float16).reshape(5, 2))
    torch.save(torch.tensor([0.5, 1, 1.5, 2]), folder / "data/weight.pt")
    np.save(folder / "set/train.npy", np.array([3, 0], np.int32))
    torch.save(torch.tensor([[2], [1]], dtype=torch.uint8), folder / "set/train-labels.pt")
    torch.save(torch.tensor([4]), folder / "set/valid.pt")
    torch.save(torch.tensor([[0]], dtype=torch.uint8), folder / "set/valid-labels.pt")
    np.save(folder / "set/pairs.npy", np.array([[0, 1], [4, 4]]))
    np.save(folder / "set/test-pairs.npy", np.array([[1, 2], [1, 3], [1, 4]]))
    np.save(folder / "set/test-labels.npy", np.array([1.0, 0.0, 0.0]))
    np.save(folder / "set/test-indexes.npy", np.array([0, 0, 0]))
    return folder


def large(folder: Path) -> Path:
    """Two types, arrays for edges, multi-label targets, years; JSON is YAML too."""

    def array(name: str, values: Any, dtype: str) -> dict[str, str]:
        np.save(folder / f"{name}.npy", np.array(values, dtype))
        return {"format": "numpy", "path": f"{name}.npy"}

    paper, author = {"type": "paper"}, {"type": "author"}
    write, cite = {"type": "author:writes:paper"}, {"type": "paper:cites:paper"}
    node, edge, seeds = {"domain": "node"}, {"domain": "edge"}, {"name": "seeds"}
    labels = {"name": "labels", **array("l", [[1, 0], [0, 1]], "f4")}
    graph = {
        "nodes": [{**paper, "num": 3}, {**author, "num": 2}],
        "edges": [
            {**write, **array("w", [[0, 1, 1], [2, 0, 1]], "i8")},
            {**cite, **array("c", [[0], [2]], "i4")},
        ],
        "feature_data": [{**node, **author, "name": "year", **array("y", [7, 8], "i2")}],
    }
    features = [
        {**node, **paper, "name": "feat", **array("f", [[1], [2], [3]], "f4")},
        {**edge, **write, "name": "time", **array("t", [5, 6, 7], "i8")},
        {**edge, **write, "name": "feat", **array("e", [[1, 2]] * 3, "f4")},
    ]
    train = [
        {**paper, "data": [{**seeds, **array("s", [2, 0], "i8")}, labels]},
        {**author, "data": [{"name": "seed_nodes", **array("a", [1], "i8")}]},
        {**write, "data": [{**seeds, **array("p", [[1, 1]], "i8")}]},
    ]
    meta = {"graph": graph, "feature_data": features, "tasks": [{"train_set": train}]}
    (folder / "metadata.yaml").write_text(json.dumps(meta))
    return folder


def test_a_graph_of_one_type(tmp_path: Path):
    assert GraphBoltSource.recognise(small(tmp_path)) == "metadata.yaml"
    source = GraphBoltSource(tmp_path)
    with ready(source, tmp_path):
        label = source.label("node")
        assert label is not None
        assert (label.dtype, label.row_shape) == (np.int16, ())
        assert read_all(source) == {
            "node": {
                "nodes": 5,
                "features": {"x": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]},
                "label": {"label": [1, -1, -1, 2, 0]},
                "splits": {"train": [3, 0], "valid": [4]},
            },
            "node to node": {
                "edges": EDGES,
                "arrays": {"weight": [0.5, 1, 1.5, 2]},
                "splits": {
                    "train": [[0, 1], [4, 4]],
                    "test": [[1, 2]],
                    "test_negative": [[1, 3], [1, 4]],
                },
            },
        }


def test_a_graph_of_several_types(tmp_path: Path):
    source = GraphBoltSource(large(tmp_path))
    with ready(source, tmp_path):
        assert read_all(source) == {
            "paper": {
                "nodes": 3,
                "features": {"x": [[1], [2], [3]]},
                "label": {"label": [[0, 1], [None, None], [1, 0]]},
                "splits": {"train": [2, 0]},
            },
            "author": {
                "nodes": 2,
                "features": {"year": [7, 8]},
                "label": {},
                "splits": {"train": [1]},
            },
            "author writes paper": {
                "edges": [(0, 2), (1, 0), (1, 1)],
                "arrays": {"time": [5, 6, 7], "feat": [[1, 2]] * 3},
                "splits": {"train": [[1, 1]]},
            },
            "paper cites paper": {"edges": [(0, 2)], "arrays": {}, "splits": {}},
        }


@pytest.mark.parametrize("write", [small, large])
def test_they_become_stores(tmp_path: Path, write: Any):
    options = IngestOptions(mem_bytes=64 << 20, block_bytes=4096)
    source = GraphBoltSource(write(tmp_path))
    manifest = ingest(source, tmp_path / "store", options, QUIET).manifest
    assert sum(r.num_edges for r in manifest.relations) == 4
    assert not (tmp_path / "store.keys").exists()


@given(
    num_nodes=st.integers(1, 40), window=st.integers(1, 50), width=st.integers(1, 3),
    data=st.data(), floats=st.booleans(),
)  # fmt: skip
def test_listed_values_in_any_window(tmp_path_factory, num_nodes, window, width, data, floats):
    """Each node has the last value that a list has for it."""
    folder = tmp_path_factory.mktemp("listed")
    dtype = np.dtype(np.float32 if floats else np.int16)
    expected = np.full((num_nodes, width), np.nan if floats else -1, dtype)
    lists = []
    for i in range(data.draw(st.integers(0, 3))):
        ids = np.array(data.draw(st.lists(st.integers(0, num_nodes - 1), unique=True)), np.int32)
        values = np.arange(ids.size * width, dtype=np.int8).reshape(-1, width) + i
        np.save(folder / f"ids{i}.npy", ids)
        np.save(folder / f"values{i}.npy", values)
        lists.append(
            tuple(
                ArrayRows(n, open_array(folder / f"{n}{i}.npy", "numpy")) for n in ("ids", "values")
            )
        )
        expected[ids] = values
    form = SourceRows("label", dtype, (width,), num_nodes, "dense", "here")
    made = MadeRows(form, folder / "out")
    write_listed(lists, made, window)
    found = np.concatenate([p.copy() for p in made.pieces(7)])
    assert np.array_equal(found, expected, equal_nan=floats)
    assert [p.name for p in folder.iterdir() if p.suffix != ".npy"] == ["out"]


def meta(old: str, new: str) -> Any:
    """A spoiler that changes `metadata.yaml`."""
    return text("metadata.yaml", SMALL.replace(old, new, 1))


TWICE = """  - train_set:
      - data:
          - {name: seeds, format: numpy, path: set/train.npy}
"""
REFUSED = {
    "no metadata": (drop("metadata.yaml"), "metadata.yaml: found no file"),
    "no YAML": (text("metadata.yaml", "graph: ["), "metadata.yaml: found "),
    "nothing": (text("metadata.yaml", "a: 1"), "metadata.yaml: found Object missing required"),
    "type twice": (
        meta("    - num: 5", "    - {num: 5, type: a}\n    - {num: 5, type: a}"),
        "metadata.yaml: graph.nodes[1]: found node type 'a' twice",
    ),
    "relation twice": (
        meta("feature_data:", "    - {format: csv, path: edges/self.csv}\nfeature_data:"),
        "metadata.yaml: graph.edges[1]: found type None twice",
    ),
    "nodes below zero": (meta("num: 5", "num: -5"), "graph.nodes[0]: found -5 nodes"),
    "unknown end": (
        meta("- format: csv", "- type: 'node:to:item'\n      format: csv"),
        "graph.edges[0]: found node type 'item', expected one of node",
    ),
    "no relation": (
        meta("- format: csv", "- type: 'node-to'\n      format: csv"),
        "graph.edges[0]: found type 'node-to', expected source:relation:target",
    ),
    "edge format": (meta("format: csv", "format: torch"), "graph.edges[0]: found format 'torch'"),
    "missing edges": (drop("edges/self.csv"), "self.csv: found no file: it is missing"),
    "header": (text("edges/self.csv", "src,dst\n" + "0,1\n" * 4), "self.csv:1: found 'src' in"),
    "one column": (text("edges/self.csv", "0\n"), "self.csv:1: found 1 columns, expected 2"),
    "ragged": (text("edges/self.csv", "0,1\n\n2,3,4\n"), "self.csv:3: found 3 columns"),
    "id too large": (text("edges/self.csv", "0,1\n\n0,5\n1,1\n1,1\n"), "csv:3: found node id 5"),
    "id below zero": (text("edges/self.csv", "-1,1\n" * 4), "self.csv:1: found node id -1"),
    "domain": (meta("domain: node", "domain: graph"), "feature_data[0]: found domain 'graph'"),
    "feature format": (
        meta("format: numpy\n    in_memory: false", "format: csv"), "feat.npy: found format 'csv'",
    ),
    "feature of no type": (
        meta("domain: node", "type: item\n    domain: node"),
        "feature_data[0]: found node type 'item'",
    ),
    "feature order": (
        lambda f: np.save(f / "data/feat.npy", np.asfortranarray(np.ones((5, 300)))),
        "feat.npy: header: found shape (5, 300) of float64 in Fortran order",
    ),
    "few features": (save("data/feat.npy", np.ones((4, 2))), "feat.npy: found 4 rows, expected 5"),
    "truncated": (
        lambda f: (f / "data/feat.npy").write_bytes((f / "data/feat.npy").read_bytes()[:-1]),
        "feat.npy: end: found 147 bytes, expected 148",
    ),
    "no tensor": (
        put("data/weight.pt", {"a": 1}), "weight.pt: found a dict, expected",
    ),
    "damaged tensor": (text("data/weight.pt", b"junk"), "weight.pt: found "),
    "seeds shape": (save("set/train.npy", [[[1]]]), "train.npy: header: found shape (1, 1, 1)"),
    "seeds kind": (save("set/train.npy", [0.5, 1]), "train.npy: header: found shape (2,) of float"),
    "seed id": (save("set/train.npy", [5, 0]), "train.npy[0]: found node id 5, expected 0 to 4"),
    "overlap": (save("set/train.npy", [4, 0]), "found node 4, which is in"),
    "few labels": (
        put("set/train-labels.pt", torch.ones(3)),
        "train-labels.pt: header: found 3 labels, expected 2",
    ),
    "labels disagree": (
        put("set/train-labels.pt", torch.ones(2, 3)),
        "valid-labels.pt: header: found labels of shape (1,), expected (3,)",
    ),
    "pairs out of range": (save("set/pairs.npy", [[0, 1], [5, 0]]), "pairs.npy[1]: found 5"),
    "no negative": (save("set/test-labels.npy", [1, 0, 2]), "test-labels.npy[2]: found label 2"),
    "two tasks": (
        text("metadata.yaml", SMALL + TWICE),
        "tasks[2].train_set[0]: found seeds again, first in tasks[0].train_set[0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    spoiler, words = REFUSED[name]
    spoiler(small(tmp_path))
    assert_refused(tmp_path, lambda: GraphBoltSource(tmp_path), words)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("w.npy", np.zeros((3, 2), int), "w.npy: header: found shape (3, 2) of int64"),
        ("w.npy", np.zeros((2, 3)), "w.npy: header: found shape (2, 3) of float64"),
        ("w.npy", np.array([[0, 1, 2], [2, 0, 1]]), "w.npy[0, 2]: found node id 2"),
        ("w.npy", np.array([[0, 1, 1], [2, 3, 1]]), "w.npy[1, 1]: found node id 3"),
        ("t.npy", np.ones(3), "t.npy: found float64 of shape (), expected one integer an edge"),
        ("t.npy", np.ones(4, int), "t.npy: found 4 rows, expected 3"),
    ],
)  # fmt: skip
def test_refused_arrays_of_edges(tmp_path: Path, name: str, values: np.ndarray, words: str):
    np.save(large(tmp_path) / name, values)
    with pytest.raises(BadInput) as caught:
        read_store(tmp_path)
    assert words in str(caught.value)


def read_store(folder: Path) -> None:
    ingest(GraphBoltSource(folder), folder / "store", IngestOptions(mem_bytes=64 << 20), QUIET)


def test_no_edges_in_text_are_none(tmp_path: Path):
    (small(tmp_path) / "edges/self.csv").write_text("")
    torch.save(torch.empty(0), tmp_path / "data/weight.pt")
    source = GraphBoltSource(tmp_path)
    assert [r.num_edges for r in source.relations] == [0]
    assert list(source.edges(source.relations[0], 5)) == []
