"""Files of PyG: objects, dicts and data sets, weights alone; what would run code does not."""

import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preprocess.errors import BadInput
from preprocess.files.strided import GivenArray, Placed
from preprocess.sources.layouts import open_source
from preprocess.sources.pyg import PygSource, _read_stores
from tests.effort import tries
from tests.later import Later
from tests.preprocess.files.test_torchfile import read_elsewhere
from tests.preprocess.reader import graph
from tests.preprocess.sources.conformance import (
    ExpectedGraph,
    ExpectedRelation,
    ExpectedType,
    check_source,
    round_trip,
)  # fmt: skip
from tests.preprocess.sources.refusals import assert_refused

torch = pytest.importorskip("torch")
geometric, pyg = Later("torch_geometric"), Later("torch_geometric.data")

EDGES = np.array([[0, 2, 1, 0], [1, 1, 3, 3]])
X = np.arange(10, dtype=np.float32).reshape(5, 2)
Y = np.array([0, 1, 2, 1, -1])
TRAIN = np.array([True, False, True, False, False])
VALID = np.array([False, False, False, True, False])
ONLY = ("node", "to", "node")


def small() -> Any:
    """One of each array that a `Data` of one graph may hold."""
    data = pyg.Data(x=torch.tensor(X), edge_index=torch.tensor(EDGES), y=torch.tensor(Y)[:, None])
    data.train_mask, data.val_mask = torch.tensor(TRAIN), torch.tensor(VALID)
    data.test_idx = torch.tensor([4, 1])
    data.edge_weight = torch.tensor([0.5, 1, 1.5, 2])
    data.edge_attr = torch.tensor([[1, 2]] * 4, dtype=torch.bfloat16)
    data.edge_time = torch.tensor([7, 6, 5, 4])
    data.node_year = torch.tensor([1999] * 5, dtype=torch.int16)
    data.rating = torch.tensor([4, 3, 2, 1], dtype=torch.uint8)  # a row an edge
    data.name, data.other, data.note = "small", torch.arange(7), None
    return data


SMALL = ExpectedGraph(
    {
        "node": ExpectedType(
            5, {"x": X, "node_year": [1999] * 5}, Y,
            {"train": [0, 2], "valid": [3], "test": [4, 1]},
        )
    },
    {
        ONLY: ExpectedRelation(
            EDGES,
            {"weight": [0.5, 1, 1.5, 2], "edge_attr": [[1.0, 2.0]] * 4, "time": [7, 6, 5, 4],
             "rating": [4, 3, 2, 1]},
        )
    },
)  # fmt: skip
CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def large() -> Any:
    """Types with and without arrays, splits of edges, one type without a store."""
    data = pyg.HeteroData(name="large")
    data["paper"].x = torch.tensor(X[:3])
    data["paper"].y = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.bool)
    data["paper"].time = torch.tensor([3, 1, 2])
    data["paper"].train_mask = torch.ones(3, 10, dtype=torch.bool)
    data["paper"].train_mask[1, 0] = False
    data["author"].num_nodes = 2
    data[CITES].edge_index = torch.tensor([[0, 1], [2, 2]])
    data[CITES].train_mask = torch.tensor([False, True])
    data[WRITES].edge_index = torch.tensor([[0, 1, 1], [0, 0, 2]], dtype=torch.int32)
    data[WRITES].edge_attr = torch.tensor([1.0, 2, 3])
    data["author", "at", "place"].edge_index = torch.tensor([[1], [3]])
    return data


LARGE = ExpectedGraph(
    {
        "paper": ExpectedType(
            3, {"x": X[:3], "time": [3, 1, 2]}, [[1, 0], [0, 1], [1, 1]], {"train": [0, 2]}
        ),
        "author": ExpectedType(2),
        "place": ExpectedType(4),
    },
    {
        CITES: ExpectedRelation([[0, 1], [2, 2]], {}, {"train": [1]}),
        WRITES: ExpectedRelation([[0, 1, 1], [0, 0, 2]], {"edge_attr": [1.0, 2, 3]}),
        ("author", "at", "place"): ExpectedRelation([[1], [3]]),
    },
)


def as_object(data: Any, path: Path) -> None:
    """The usual way."""
    torch.save(data, path)


def as_dict(data: Any, path: Path) -> None:
    """The way that needs no class."""
    torch.save(data.to_dict(), path)


def as_data_set(data: Any, path: Path) -> None:
    """`processed/data.pt`."""
    pyg.InMemoryDataset.save([data], str(path))


def as_pair(data: Any, path: Path) -> None:
    """`processed/data.pt` of PyG before 2.3, and of OGB."""
    torch.save((data, None), path)


def as_old_file(data: Any, path: Path) -> None:
    """The format before torch 1.6, which cannot be mapped."""
    torch.save(data, path, _use_new_zipfile_serialization=False)


WAYS = [as_object, as_dict, as_data_set, as_pair, as_old_file]


@pytest.mark.parametrize("save", WAYS)
@pytest.mark.parametrize(("make", "expected"), [(small, SMALL), (large, LARGE)])
def test_a_graph_however_it_was_saved(tmp_path: Path, save: Any, make: Any, expected: Any):
    save(make(), tmp_path / "graph.pt")
    opened = open_source(tmp_path / "graph.pt")
    assert (opened.source.layout, opened.saw) == ("pyg", "graph.pt, a file of torch.save")
    check_source(opened.source, expected)


@pytest.mark.parametrize(("make", "expected"), [(small, SMALL), (large, LARGE)])
def test_it_becomes_a_store(tmp_path: Path, make: Any, expected: Any):
    as_object(make(), tmp_path / "graph.pt")
    round_trip(PygSource(tmp_path / "graph.pt"), expected, tmp_path)


def test_the_folder_of_a_data_set_is_recognised(tmp_path: Path):
    (tmp_path / "processed").mkdir()
    as_data_set(small(), tmp_path / "processed" / "data.pt")
    opened = open_source(tmp_path)
    assert (opened.source.layout, opened.saw) == ("pyg", "processed/data.pt")
    check_source(opened.source, SMALL)


@pytest.mark.parametrize("loaded", [True, False])
def test_pyg_need_not_be_installed_and_torch_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
):
    """Where torch is loaded the file is read here, without PyG; else by a process of its own."""
    as_object(large(), tmp_path / "graph.pt")
    if loaded:
        for name in list(sys.modules):
            if name.partition(".")[0] in ("torch_geometric", "torch_sparse"):
                monkeypatch.delitem(sys.modules, name)
        for name in ("torch_geometric", "torch_sparse"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError):
            importlib.import_module("torch_geometric.data")
        monkeypatch.setattr(subprocess, "Popen", None)  # no other process
        found = [graph(tmp_path / "graph.pt"), "torch" in sys.modules]
    else:
        (found,) = read_elsewhere("graph", (tmp_path / "graph.pt", ""))
    assert found == [[{"paper": 3, "author": 2, "place": 4}, 6], loaded]


def test_tensors_are_read_from_the_file(tmp_path: Path):
    """None of those that torch maps is held; those of an old file are."""
    as_object(small(), tmp_path / "graph.pt")
    as_old_file(small(), tmp_path / "old.pt")
    for name, kind in (("graph.pt", Placed), ("old.pt", GivenArray)):
        nodes, relations = _read_stores(tmp_path / name)
        held = nodes["node"] | relations[ONLY]
        arrays = {k for k, v in held.items() if isinstance(v, kind)}
        assert arrays == set(held) - {"name"}


def test_what_torch_allows_elsewhere_stays(tmp_path: Path):
    as_object(small(), tmp_path / "graph.pt")
    before = set(torch.serialization.get_safe_globals())
    assert pyg.Data in before
    PygSource(tmp_path / "graph.pt")
    assert set(torch.serialization.get_safe_globals()) == before


class Code:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "it ran"))


class System:
    """Unpickling it calls a function of a module that may never be allowed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        import os

        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("kind", [Code, System])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_does_not_run(tmp_path: Path, kind: Any, zipped: bool):
    path = tmp_path / "graph.pt"
    held = small().to_dict() | {"evil": kind(tmp_path / "ran")}
    torch.save(held, path, _use_new_zipfile_serialization=zipped)
    assert_refused(tmp_path, lambda: PygSource(path), "graph.pt: found ")
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have


def test_state_of_an_object_sets_nothing_else(tmp_path: Path):
    """Attributes that are no dict, and slots, are refused; a class is not replaced."""
    for state in ((None, {"__class__": 1}), [1], ({}, {"x": 1})):
        path = tmp_path / "graph.pt"
        torch.save(Reduced(state), path)
        assert_refused(tmp_path, lambda: PygSource(tmp_path / "graph.pt"), "graph.pt: found ")


class Reduced:
    """Pickles as a `Data` with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return (pyg.Data, (), self.state)


def test_a_graph_of_old_pyg(tmp_path: Path):
    """Before 2.0 arrays were attributes of the object itself."""
    held = {"x": torch.tensor(X), "edge_index": torch.tensor(EDGES), "y": None, "pos": None,
            "__num_nodes__": 5}  # fmt: skip
    torch.save((Reduced(held), {"x": torch.tensor([0, 5])}), tmp_path / "data.pt")
    expected = {"node": ExpectedType(5, {"x": X})}, {ONLY: ExpectedRelation(EDGES)}
    check_source(PygSource(tmp_path / "data.pt"), ExpectedGraph(*expected))


def test_nodes_are_counted_where_nothing_says_how_many(tmp_path: Path):
    torch.save({"edge_index": torch.tensor(EDGES)}, tmp_path / "a.pt")
    expected = {"node": ExpectedType(4)}, {ONLY: ExpectedRelation(EDGES)}
    check_source(PygSource(tmp_path / "a.pt"), ExpectedGraph(*expected))


def test_views_and_numpy_arrays_are_read(tmp_path: Path):
    """Pairs that lie together, every second column, an array instead of a tensor."""
    held = {
        "edge_index": torch.tensor(np.ascontiguousarray(EDGES.T)).t(),
        "x": torch.tensor(np.repeat(X, 2, axis=1))[:, ::2],
        "y": Y,
        "num_nodes": 5,
    }
    torch.save(held, tmp_path / "a.pt")
    nodes = {"node": ExpectedType(5, {"x": X}, Y)}
    check_source(
        PygSource(tmp_path / "a.pt"), ExpectedGraph(nodes, {ONLY: ExpectedRelation(EDGES)})
    )


TRANSPOSED = EDGES[:, np.lexsort((EDGES[0], EDGES[1]))]
VALUES = {(s, d): float(i + 2) for i, (s, d) in enumerate(EDGES.T.tolist())}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["torch_sparse", "rows", "torch"])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_transposed_adjacency_is_read(tmp_path: Path, layout: str, weighted: bool):
    values = torch.tensor([VALUES[s, d] for s, d in TRANSPOSED.T.tolist()])
    src, dst = torch.tensor(TRANSPOSED)
    if layout == "torch":
        indptr = torch.tensor([0, 0, 2, 2, 4, 4])
        kept = values if weighted else torch.ones(4)
        adjacency = torch.sparse_csr_tensor(indptr, src, kept, (5, 5))
    else:
        sparse = pytest.importorskip("torch_sparse")
        adjacency = sparse.SparseTensor(
            row=dst, col=src, value=values if weighted else None, sparse_sizes=(5, 5)
        )
        if layout == "torch_sparse":
            adjacency.storage.rowptr()
    data = pyg.Data(adj_t=adjacency, x=torch.tensor(X))
    torch.save(data, tmp_path / "a.pt")
    arrays = {"weight": values.numpy()} if weighted else {}
    arrays |= {"weight": np.ones(4)} if layout == "torch" and not weighted else {}
    nodes = {"node": ExpectedType(5, {"x": X})}
    relations = {ONLY: ExpectedRelation(TRANSPOSED, arrays)}
    check_source(PygSource(tmp_path / "a.pt"), ExpectedGraph(nodes, relations))


def changed(**values: Any) -> Any:
    """A `Data` with some arrays replaced, None removes."""
    data = small()
    for key, value in values.items():
        data[key] = value
    return data


def sparse(**parts: Any) -> Any:
    """A `Data` of which one part of the adjacency is replaced."""
    torch_sparse = pytest.importorskip("torch_sparse")
    src, dst = torch.tensor(TRANSPOSED)
    adjacency = torch_sparse.SparseTensor(row=dst, col=src, sparse_sizes=(5, 5))
    adjacency.storage.rowptr()
    for name, value in parts.items():
        setattr(adjacency.storage, f"_{name}", value)
    return pyg.Data(adj_t=adjacency, x=torch.tensor(X))


def hetero(**values: Any) -> Any:
    """`large` with some arrays of papers replaced."""
    data = large()
    for key, value in values.items():
        data["paper"][key] = value
    return data


def far_author() -> Any:
    data = large()
    data[WRITES].edge_index = torch.tensor([[0, 2, 0], [0, 0, 0]])
    return data


REFUSED = {
    "a tensor": (lambda: torch.arange(3), "graph.pt: found a Tensor, expected Data, HeteroData"),
    "nothing": (dict, "graph.pt: found an empty dict, expected Data"),
    "several": (lambda: [small(), small()], "graph.pt: found a list, expected Data"),
    "a model": (lambda: {"weight": torch.ones(2)}, "graph.pt: found weight, expected edge_index"),
    "temporal": (
        lambda: pyg.TemporalData(src=torch.tensor([0]), dst=torch.tensor([1]), t=torch.tensor([0])),
        "graph.pt: found Unsupported global: GLOBAL torch_geometric.data.temporal.TemporalData",
    ),
    "no edges": (lambda: changed(edge_index=None), "graph.pt: found x, y"),
    "edges as list": (
        lambda: {"edge_index": [[0], [1]]}, "graph.pt: edge_index: found list, expected edge_index",
    ),
    "EdgeIndex": (lambda: {"edge_index": geometric.EdgeIndex([[0], [1]])}, "graph.pt: found "),
    "pairs": (
        lambda: changed(edge_index=torch.tensor(EDGES.T.copy())),
        "graph.pt: edge_index: found shape (4, 2) of int64, expected (2, edges)",
    ),
    "float ids": (
        lambda: changed(edge_index=torch.rand(2, 4)), "edge_index: found shape (2, 4) of float32",
    ),
    "source": (
        lambda: changed(edge_index=torch.tensor(EDGES) + 3), "edge_index[0, 1]: found node id 5",
    ),
    "below zero": (
        lambda: changed(edge_index=torch.tensor(EDGES) - 1), "edge_index[0, 0]: found node id -1",
    ),
    "few labels": (lambda: changed(y=torch.ones(3)), "graph.pt: y: found 3 rows, expected 5"),
    "one label": (lambda: changed(y=torch.tensor(1)), "graph.pt: y: found no rows, expected"),
    "few features": (
        lambda: changed(x=torch.ones(3, 2), num_nodes=5), "graph.pt: x: found 3 rows, expected 5",
    ),
    "x as list": (lambda: changed(x=[1, 2]), "graph.pt: x: found list, expected a dense array of"),
    "sparse x": (
        lambda: changed(x=torch.eye(5).to_sparse()), "graph.pt: x: found torch.sparse_coo,",
    ),
    "complex": (
        lambda: changed(x=torch.ones(5, dtype=torch.complex64)),
        "graph.pt: x: found shape (5,) of complex64, expected rows of numbers",
    ),
    "eight bits": (
        lambda: changed(x=torch.ones(5).to(torch.float8_e5m2)),
        "graph.pt: x: found items of torch.float8_e5m2, expected a dense array",
    ),
    "few weights": (
        lambda: changed(edge_weight=torch.ones(3)), "graph.pt: edge_weight: found 3 rows, expected",
    ),
    "two weights": (
        lambda: changed(weight=torch.ones(4)), "weight: found array 'weight' again",
    ),
    "mask rows": (lambda: changed(val_mask=VALID[:3]), "graph.pt: val_mask: found 3 rows,"),
    "mask of floats": (
        lambda: changed(val_mask=torch.ones(5)), "val_mask: found shape (5,) of float32, expected",
    ),
    "deep mask": (
        lambda: changed(val_mask=torch.ones(5, 1, 1, dtype=torch.bool)),
        "graph.pt: val_mask: found shape (5, 1, 1) of bool",
    ),
    "two splits": (
        lambda: changed(valid_idx=torch.tensor([3])), "valid_idx: found split 'valid' again",
    ),
    "overlap": (lambda: changed(test_idx=torch.tensor([1, 2])), "test_idx[1]: found node 2, which"),
    "far split": (lambda: changed(test_idx=torch.tensor([5])), "test_idx[0]: found node id 5"),
    "split of floats": (lambda: changed(test_idx=torch.ones(1)), "test_idx: found shape (1,) of"),
    "no nodes": (
        lambda: pyg.Data(edge_index=torch.empty(2, 0, dtype=torch.long)),
        "graph.pt: found no edges,",
    ),
    "nodes below zero": (lambda: changed(num_nodes=-1), "graph.pt: num_nodes: found -1"),
    "other type": (far_author, "graph.pt: author:writes:paper.edge_index[0, 1]: found node id 2"),
    "few of a type": (
        lambda: hetero(y=torch.ones(2)), "graph.pt: paper.y: found 2 rows, expected 3",
    ),
    "no edges of a relation": (
        lambda: {"a": {}, ("a", "to", "a"): {"weight": torch.ones(1)}},
        "graph.pt: a:to:a.edge_index: found nothing, expected edge_index",
    ),
    "odd store": (lambda: {"a": {}, ("a", "a"): {}}, "graph.pt: ('a', 'a'): found this store"),
    "adjacency pattern": (
        lambda: {"adj_t": torch.eye(5).to_sparse()}, "graph.pt: adj_t: found torch.sparse_coo",
    ),
    "columns": (
        lambda: sparse(col=torch.tensor([0, 2, 0, 9])), "adj_t: columns[3]: found node id 9",
    ),
    "no columns": (lambda: sparse(col=torch.rand(4)), "adj_t: columns: found shape (4,) of float"),
    "offsets": (
        lambda: sparse(rowptr=torch.tensor([0, 0, 2, 1, 4, 4])), "offsets[3]: found offset 1",
    ),
    "few offsets": (lambda: sparse(rowptr=torch.tensor([0, 4])), "row offsets: found shape (2,)"),
    "rows": (
        lambda: sparse(rowptr=None, row=torch.tensor([1, 1, 3, 5])), "rows[3]: found node id 5",
    ),
    "few rows": (
        lambda: sparse(rowptr=None, row=torch.tensor([1])), "adj_t: rows: found shape (1,)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(tmp_path: Path, name: str):
    make, words = REFUSED[name]
    torch.save(make(), tmp_path / "graph.pt")
    assert_refused(tmp_path, lambda: PygSource(tmp_path / "graph.pt"), words)


def test_a_data_set_of_several_graphs_is_refused(tmp_path: Path):
    path = tmp_path / "graph.pt"
    pyg.InMemoryDataset.save([small(), small()], str(path))
    assert_refused(tmp_path, lambda: PygSource(path), "graph.pt: slices: found 2 graphs, expected")


def test_damage_is_refused(tmp_path: Path):
    path = tmp_path / "graph.pt"
    assert_refused(tmp_path, lambda: PygSource(path), "graph.pt: found no file")
    as_object(small(), path)
    whole = path.read_bytes()
    for raw in (whole[: len(whole) // 2], whole[:-30], b"junk", b"", b"PK"):
        path.write_bytes(raw)
        assert_refused(tmp_path, lambda: PygSource(path), "graph.pt: found ")


def test_any_byte_may_change(tmp_path: Path):
    """Whatever a changed file gives, it is a graph or `BadInput`."""
    path = tmp_path / "graph.pt"
    as_object(changed(note=None), path)
    whole = path.read_bytes()
    at = whole.index(b"data.pkl") + 64
    rng = np.random.default_rng(5)
    for _ in range(tries(30, 60)):
        raw = bytearray(whole)
        raw[rng.integers(at, at + 2500)] ^= 1 << int(rng.integers(8))
        path.write_bytes(raw)
        with suppress(BadInput):
            assert PygSource(path).num_nodes["node"] >= 0
