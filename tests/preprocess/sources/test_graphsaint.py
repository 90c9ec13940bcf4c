"""GraphSAINT's layout: classes as numbers and as rows, JSON in pieces, any window; refusals."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from preprocess.sources import graphsaint
from preprocess.sources.graphsaint import GraphSaintSource
from preprocess.sources.layouts import open_source
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    round_trip,
)  # fmt: skip
from tests.preprocess.sources.reading import ready
from tests.preprocess.sources.refusals import assert_refused, drop

EDGES = np.array([[0, 0, 1, 2, 3], [1, 3, 0, 2, 0]])
FEATURES = np.arange(8, dtype=np.float64).reshape(4, 2)
ROLE = {"tr": [3, 0], "va": [1], "te": [2]}
SINGLE = {"3": 2, "0": 1, "1": 0}  # in any order; node 2 has none
MULTI = {"0": [1, 0, 0], "1": [0, 0, 0], "2": [1, 1, 0], "3": [0, 1, 1]}


def write(folder: Path, classes: Any = SINGLE) -> Path:
    """As the converters of GraphSAINT do."""
    full = sp.csr_matrix((np.ones(5, bool), (EDGES[0], EDGES[1])), shape=(4, 4))
    sp.save_npz(folder / "adj_full.npz", full)
    sp.save_npz(folder / "adj_train.npz", full[:, :0])
    np.save(folder / "feats.npy", FEATURES)
    (folder / "class_map.json").write_text(json.dumps(classes))
    (folder / "role.json").write_text(json.dumps(ROLE))
    return folder


def expected(label: Any) -> ExpectedGraph:
    splits = {"train": [3, 0], "valid": [1], "test": [2]}
    nodes = ExpectedType(4, {"x": FEATURES}, np.array(label), splits)
    return ExpectedGraph({"node": nodes}, {("node", "to", "node"): ExpectedRelation(EDGES)})


@pytest.mark.parametrize("window", [1, 3, 1 << 16])
@pytest.mark.parametrize("part", [1, 20, 1 << 18])
@pytest.mark.parametrize(
    ("classes", "label"), [(SINGLE, [1, 0, -1, 2]), (MULTI, list(MULTI.values()))]
)
def test_a_folder_of_graphsaint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    classes: Any,
    label: Any,
    part: int,
    window: int,
):
    monkeypatch.setattr(graphsaint, "_PART_BYTES", part)
    monkeypatch.setattr(graphsaint, "_MIN_WINDOW", window)
    opened = open_source(write(tmp_path, classes))
    assert (opened.source.layout, opened.saw) == ("graphsaint", "adj_full.npz and role.json")
    with small_memory(opened.source, tmp_path, window):
        check_source(opened.source, expected(label))


@contextmanager
def small_memory(source: Any, folder: Path, window: int) -> Iterator[None]:
    """Prepared with memory for a window of nodes."""
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("tests.preprocess.sources.reading.MEM", 8 * window)
        with ready(source, folder):
            yield


@pytest.mark.parametrize(
    ("classes", "label"), [(SINGLE, [1, 0, -1, 2]), (MULTI, list(MULTI.values()))]
)
def test_it_becomes_a_store(tmp_path: Path, classes: Any, label: Any):
    store = round_trip(GraphSaintSource(write(tmp_path, classes)), expected(label), tmp_path)
    found = store.manifest.types[0].label
    assert found is not None
    assert found.dtype == ("int64" if classes is SINGLE else "int8")


def test_values_of_the_matrix_are_no_weights(tmp_path: Path):
    full = sp.csr_matrix(([0.5, 1, 2, 3, 4], (EDGES[0], EDGES[1])), shape=(4, 4))
    sp.save_npz(write(tmp_path) / "adj_full.npz", full)
    source = GraphSaintSource(tmp_path)
    with ready(source, tmp_path):
        check_source(source, expected([1, 0, -1, 2]))


def text(name: str, value: Any) -> Any:
    """A spoiler that replaces a file."""
    raw = value if isinstance(value, str) else json.dumps(value)
    return lambda folder: (folder / name).write_text(raw)


def classes(value: Any) -> Any:
    """A spoiler of labels."""
    return text("class_map.json", value)


REFUSED = {
    **{f"no {n}": (drop(n), f"{n}: found ")
       for n in ("adj_full.npz", "feats.npy", "class_map.json", "role.json")},
    "another matrix": (
        lambda f: sp.save_npz(f / "adj_full.npz", sp.eye_array(3, format="csr")),
        "feats.npy: header: found 4 rows, expected 3, one a node",
    ),
    "bipartite": (
        lambda f: sp.save_npz(f / "adj_full.npz", sp.csr_array((4, 5))),
        "adj_full.npz: shape: found a matrix of 4 x 5",
    ),
    "few features": (
        lambda f: np.save(f / "feats.npy", FEATURES[:3]), "feats.npy: header: found 3 rows",
    ),
    "truncated features": (
        lambda f: (f / "feats.npy").write_bytes((f / "feats.npy").read_bytes()[:-1]),
        "feats.npy: end: found 191 bytes, expected 192",
    ),
    "labels no object": (classes([1, 2]), "class_map.json+0: found '[1, 2]', expected an object"),
    "names": (classes({"0": "cat"}), "class_map.json+"),
    "floats": (classes({"0": 0.5}), "class_map.json+"),
    "node by name": (classes({"a": 1}), "class_map.json+"),
    "far node": (classes({"0": 1, "4": 1}), 'class_map.json+1: found "4", expected nodes 0 to 3'),
    "mixed": (classes({"0": 1, "1": [1]}), "class_map.json+1: found Expected 'int', got 'array'"),
    "ragged": (
        classes({"0": [1, 0], "2": [1]}), 'class_map.json+1: found 1 labels of "2", expected 2',
    ),
    "large flag": (classes({"0": [1], "2": [128]}), "found Expected 'int' <= 127"),
    "truncated labels": (classes('{"0": 1, "1"'), "class_map.json+"),
    "no va": (text("role.json", {"tr": [0], "te": [1]}), "role.json: found no list 'va'"),
    "unknown role": (text("role.json", {"tr": [0], "more": [1]}), "role.json: more: found this"),
    "role twice": (
        text("role.json", '{"tr": [0], "tr": [1], "va": [], "te": []}'),
        "role.json: tr: found this list, expected tr, va and te, each once",
    ),
    "role no list": (text("role.json", {"tr": 1}), "role.json+1: found"),
    "role of floats": (text("role.json", {"tr": [0.5]}), "role.json+8: found Expected 'int'"),
    "far role": (text("role.json", ROLE | {"va": [4]}), "role.json: va[0]: found node id 4"),
    "overlap": (text("role.json", ROLE | {"te": [2, 0]}), "role.json: te[1]: found node 0, which"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    spoil, words = REFUSED[name]
    spoil(write(tmp_path))
    assert_refused(tmp_path, lambda: GraphSaintSource(tmp_path), words)
