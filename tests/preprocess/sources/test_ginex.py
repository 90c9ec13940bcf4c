"""Ginex's layout, as its `prepare_dataset.py` writes it; headerless files of the wrong size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preprocess.sources.ginex import GinexSource
from preprocess.sources.layouts import open_source
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    round_trip,
)  # fmt: skip
from tests.preprocess.sources.refusals import assert_refused

torch = pytest.importorskip("torch")

INDPTR = np.array([0, 2, 2, 3, 5], np.int64)
INDICES = np.array([1, 3, 0, 2, 3], np.int64)
FEATURES = np.arange(12, dtype=np.float32).reshape(4, 3)
LABELS = np.array([[1], [np.nan], [0], [2]], np.float32)
SPLITS = {"train": [3, 0], "valid": [2], "test": [1]}
EXPECTED = ExpectedGraph(
    {"node": ExpectedType(4, {"x": FEATURES}, LABELS[:, 0], SPLITS)},
    {("node", "to", "node"): ExpectedRelation([INDICES, [0, 0, 2, 3, 3]])},
)


def write(folder: Path, **changes: Any) -> Path:
    """Arrays and settings; `changes` replace some of conf.json, None removes."""
    arrays = {"indptr": INDPTR, "indices": INDICES, "features": FEATURES, "labels": LABELS}
    conf: dict[str, Any] = {"num_nodes": 4, "num_classes": 3}
    for name, values in arrays.items():
        values.tofile(folder / f"{name}.dat")
        conf |= {f"{name}_shape": values.shape, f"{name}_dtype": str(values.dtype)}
    kept = {k: v for k, v in (conf | changes).items() if v is not None}
    (folder / "conf.json").write_text(json.dumps(kept))
    splits = {name: torch.tensor(ids) for name, ids in SPLITS.items()}
    torch.save(splits, folder / "split_idx.pth")
    torch.save(torch.rand(4), folder / "nc_score.pth")
    return folder


def test_a_folder_of_ginex(tmp_path: Path):
    opened = open_source(write(tmp_path))
    assert (opened.source.layout, opened.saw) == ("ginex", "conf.json and indptr.dat")
    check_source(opened.source, EXPECTED)


def test_it_becomes_a_store(tmp_path: Path):
    round_trip(GinexSource(write(tmp_path)), EXPECTED, tmp_path)


def test_splits_may_be_missing_and_labels_a_list(tmp_path: Path):
    write(tmp_path, labels_shape=[4])
    (tmp_path / "split_idx.pth").unlink()
    nodes = ExpectedType(4, {"x": FEATURES}, LABELS[:, 0])
    check_source(GinexSource(tmp_path), ExpectedGraph({"node": nodes}, EXPECTED.relations))


def test_arrays_in_splits_are_read(tmp_path: Path):
    """What the loader of OGB gives without torch."""
    splits = {name: np.array(ids) for name, ids in SPLITS.items()}
    torch.save(splits, write(tmp_path) / "split_idx.pth")
    check_source(GinexSource(tmp_path), EXPECTED)


def array(name: str, values: Any) -> Any:
    """A spoiler that replaces a file."""
    return lambda folder: np.asarray(values).tofile(folder / f"{name}.dat")


def conf(**changes: Any) -> Any:
    """A spoiler of settings."""
    return lambda folder: write(folder, **changes)


def splits(values: Any) -> Any:
    """A spoiler of splits."""
    return lambda folder: torch.save(values, folder / "split_idx.pth")


REFUSED = {
    "no conf": (lambda f: (f / "conf.json").unlink(), "conf.json: found no file"),
    "no JSON": (lambda f: (f / "conf.json").write_text("{"), "conf.json: found Input data"),
    "no dtype": (conf(labels_dtype=None), "conf.json: found Object missing required field"),
    "wild dtype": (conf(indptr_dtype="wild"), "conf.json: indptr_dtype: found 'wild', expected in"),
    "float ids": (conf(indices_dtype="float64"), "conf.json: indices_dtype: found 'float64'"),
    "words": (conf(labels_dtype="S4"), "conf.json: labels_dtype: found 'S4', expected numbers"),
    "shape of ids": (conf(indices_shape=[5, 1]), "conf.json: indices_shape: found [5, 1]"),
    "no shape": (conf(features_shape=[]), "conf.json: features_shape: found []"),
    "no features": (conf(features_shape=[4, 0]), "conf.json: features_shape: found [4, 0]"),
    "nodes": (conf(num_nodes=5), "conf.json: indptr_shape: found [5], expected 6"),
    "rows": (conf(features_shape=[3, 4]), "features_shape: found [3, 4], expected 4, of 2"),
    "width": (conf(features_shape=[4, 4]), "features.dat: end: found 48 bytes, expected 64"),
    "item size": (conf(labels_dtype="float64"), "labels.dat: end: found 16 bytes, expected 32"),
    "no indptr": (lambda f: (f / "indptr.dat").unlink(), "indptr.dat: found no file"),
    "no features file": (lambda f: (f / "features.dat").unlink(), "features.dat: found no file"),
    "truncated": (array("indices", INDICES[:4]), "indices.dat: end: found 32 bytes, expected 40"),
    "too long": (array("indices", [0] * 6), "indices.dat: end: found 48 bytes, expected 40"),
    "narrow": (array("indices", INDICES.astype("i4")), "indices.dat: end: found 20 bytes"),
    "no end": (array("indptr", [0, 2, 2, 3, 4]), "indptr.dat[4]: found offset 4, expected 5"),
    "no start": (array("indptr", [1, 2, 2, 3, 5]), "indptr.dat[0]: found offset 1, expected 0"),
    "falling": (array("indptr", [0, 3, 2, 3, 5]), "indptr.dat[2]: found offset 2, expected 3 to"),
    "source": (array("indices", [0, 4, 0, 0, 0]), "indices.dat[1]: found node id 4, expected 0"),
    "below zero": (array("indices", [0, 0, -1, 0, 0]), "indices.dat[2]: found node id -1"),
    "damaged splits": (lambda f: (f / "split_idx.pth").write_bytes(b"PK"), "split_idx.pth: found"),
    "a list": (splits([torch.tensor([1])]), "split_idx.pth: found a list, expected a dict"),
    "list in it": (splits({"train": [1]}), "split_idx.pth: train: found a list, expected a list"),
    "float split": (splits({"test": torch.rand(2)}), "pth: test: found shape (2,) of float32"),
    "masks": (splits({"test": torch.ones(4, dtype=torch.bool)}), "test: found shape (4,) of bool"),
    "far id": (splits({"valid": torch.tensor([0, 4])}), "split_idx.pth: valid[1]: found node id 4"),
    "overlap": (
        splits({"train": torch.tensor([0]), "valid": torch.tensor([1, 0])}),
        "split_idx.pth: valid[1]: found node 0, which is in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    spoil, words = REFUSED[name]
    spoil(write(tmp_path))
    assert_refused(tmp_path, lambda: GinexSource(tmp_path), words)


def test_no_nodes_are_refused(tmp_path: Path):
    write(tmp_path, num_nodes=0, indptr_shape=[1], indices_shape=[0], features_shape=[0, 3],
          labels_shape=[0])  # fmt: skip
    np.zeros(1, np.int64).tofile(tmp_path / "indptr.dat")
    for name in ("indices", "features", "labels"):
        (tmp_path / f"{name}.dat").write_bytes(b"")
    assert_refused(
        tmp_path, lambda: GinexSource(tmp_path), "conf.json: found a graph with no nodes"
    )
