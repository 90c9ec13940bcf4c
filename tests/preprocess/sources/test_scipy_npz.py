"""Sparse matrices of scipy: CSR, CSC, COO, packed or not, weights or ones; refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from preprocess.sources.layouts import open_source
from preprocess.sources.scipy_npz import ScipyNpzSource
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    edges_of,
    round_trip,
)  # fmt: skip
from tests.preprocess.sources.refusals import assert_refused

KEY = ("node", "to", "node")
SRC = np.array([0, 0, 2, 3, 3, 3])
DST = np.array([1, 4, 2, 0, 1, 4])
WEIGHTS = np.array([0.5, 1, 2, 3, 4, 0])


def matrix(values: Any) -> Any:
    return sp.coo_array((np.asarray(values), (SRC, DST)), shape=(5, 5))


def expected(form: str, values: Any) -> ExpectedGraph:
    order = np.lexsort((SRC, DST)) if form == "csc" else np.arange(SRC.size)
    arrays = {"weight": np.asarray(values)[order]} if not (np.asarray(values) == 1).all() else {}
    edges = np.stack([SRC, DST])[:, order]
    return ExpectedGraph({"node": ExpectedType(5)}, {KEY: ExpectedRelation(edges, arrays)})


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(
    "values", [WEIGHTS, np.ones(6), np.ones(6, np.int8), np.ones(6, bool), WEIGHTS.astype(np.int64)]
)
def test_a_matrix_is_a_graph(tmp_path: Path, form: str, compressed: bool, values: np.ndarray):
    path = tmp_path / "graph.npz"
    sp.save_npz(path, matrix(values).asformat(form), compressed=compressed)
    opened = open_source(path)
    assert opened.saw == "graph.npz, a sparse matrix"
    assert opened.source.layout == "scipy-npz"
    check_source(opened.source, expected(form, values))


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_it_becomes_a_store(tmp_path: Path, form: str):
    sp.save_npz(tmp_path / "graph.npz", matrix(WEIGHTS).asformat(form))
    source = ScipyNpzSource(tmp_path / "graph.npz")
    assert round_trip(source, expected(form, WEIGHTS), tmp_path).manifest.relations[0].has_weights


def test_old_names_and_new_ones_are_read(tmp_path: Path):
    """Old scipy: the format as text; scipy to come: `coords`; matrices as well as arrays."""
    common = {"shape": [5, 5], "data": WEIGHTS}
    np.savez(tmp_path / "a.npz", format="coo", row=SRC, col=DST, **common)
    coords = np.stack([SRC, DST]).astype(np.int32)
    np.savez_compressed(tmp_path / "b.npz", format=b"coo", coords=coords, **common)
    np.savez(tmp_path / "c.npz", format="coo", coords=np.asfortranarray(coords), **common)
    for name in ("a.npz", "b.npz", "c.npz"):
        check_source(ScipyNpzSource(tmp_path / name), expected("coo", WEIGHTS))


@given(
    edges=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40),
    form=st.sampled_from(["csr", "csc"]), compressed=st.booleans(),
)  # fmt: skip
def test_any_matrix_is_read_as_scipy_reads_it(tmp_path_factory, edges, form, compressed):
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    ends = np.array(edges, np.int64).reshape(-1, 2).T
    held = sp.coo_array((np.ones(ends.shape[1]), (ends[0], ends[1])), shape=(9, 9)).asformat(form)
    sp.save_npz(path, held, compressed=compressed)
    source = ScipyNpzSource(path)
    coo = sp.load_npz(path).tocoo()
    assert np.array_equal(edges_of(source, source.relations[0]), np.stack([coo.row, coo.col]))


CSR = {"format": b"csr", "shape": [5, 5], "indptr": [0, 2, 2, 3, 6, 6], "indices": DST,
       "data": WEIGHTS}  # fmt: skip
COO = {"format": b"coo", "shape": [5, 5], "row": SRC, "col": DST, "data": WEIGHTS}
REFUSED = {
    "another npz": ({"a": [1]}, "graph.npz: found no array 'format', expected it beside a"),
    "blocks": (CSR | {"format": b"bsr"}, "graph.npz: format: found 'bsr', expected one of csr"),
    "wild format": (CSR | {"format": [1, 2]}, "graph.npz: format: header: found shape (2,)"),
    "long format": (CSR | {"format": "c" * 99}, "graph.npz: format: header: found shape ()"),
    "no shape": ({k: v for k, v in CSR.items() if k != "shape"}, "found no array 'shape'"),
    "two types": (CSR | {"shape": [5, 6]}, "graph.npz: shape: found a matrix of 5 x 6"),
    "below zero": (CSR | {"shape": [-5, -5]}, "graph.npz: shape: found a matrix of -5 x -5"),
    "nothing": (
        {**CSR, "shape": [0, 0], "indptr": [0], "indices": DST[:0], "data": WEIGHTS[:0]},
        "graph.npz: shape: found a graph with no nodes",
    ),
    "odd shape": (CSR | {"shape": [5.0, 5.0]}, "graph.npz: shape: header: found shape (2,) of fl"),
    "few offsets": (
        CSR | {"indptr": [0, 6]}, "indptr: header: found shape (2,) of int64, expected (6,)",
    ),
    "no end": (CSR | {"indptr": [0, 2, 2, 3, 5, 5]}, "indptr[5]: found 5, expected 6"),
    "falling": (CSR | {"indptr": [0, 2, 1, 3, 6, 6]}, "indptr[2]: found offset 1, expected 2 to"),
    "no start": (CSR | {"indptr": [1, 2, 2, 3, 6, 6]}, "indptr[0]: found offset 1, expected 0"),
    "few indices": (CSR | {"indices": DST[:5]}, "indices: header: found shape (5,) of int64"),
    "float indices": (CSR | {"indices": DST * 0.5}, "indices: header: found shape (6,) of float"),
    "column": (CSR | {"indices": DST + 1}, "indices[1]: found node id 5, expected 0 to 4"),
    "column below": (CSR | {"indices": DST - 1}, "indices[3]: found node id -1, expected 0 to 4"),
    "row": (COO | {"row": SRC + 2}, "row[3]: found node id 5, expected 0 to 4"),
    "col": (COO | {"col": DST + 1}, "col[1]: found node id 5, expected 0 to 4"),
    "no col": ({k: v for k, v in COO.items() if k != "col"}, "found no array 'col'"),
    "coords": (
        {**COO, "coords": np.stack([SRC, DST + 1])}, "coords[1, 1]: found node id 5, expected 0",
    ),
    "three coords": (COO | {"coords": [SRC] * 3}, "coords: header: found shape (3, 6) of int64"),
    "complex": (CSR | {"data": WEIGHTS * 1j}, "data: header: found shape (6,) of complex128"),
    "objects": (CSR | {"data": np.array([None] * 6)}, "data: found Python objects"),
    "square data": (CSR | {"data": [[1]]}, "data: header: found shape (1, 1) of int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    held, words = REFUSED[name]
    np.savez(tmp_path / "graph.npz", **held)
    assert_refused(tmp_path, lambda: ScipyNpzSource(tmp_path / "graph.npz"), words)


@pytest.mark.parametrize("compressed", [True, False])
def test_damage_is_refused(tmp_path: Path, compressed: bool):
    path = tmp_path / "graph.npz"
    assert_refused(tmp_path, lambda: ScipyNpzSource(path), "graph.npz: found no file")
    sp.save_npz(path, matrix(WEIGHTS).tocsr(), compressed=compressed)
    whole = path.read_bytes()
    for raw in (whole[: len(whole) // 2], b"junk", b""):
        path.write_bytes(raw)
        assert_refused(tmp_path, lambda: ScipyNpzSource(path), "graph.npz: ")
