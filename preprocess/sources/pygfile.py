"""What a file of PyG holds: the arrays of each node type and of each relation.

A process of its own loads the file and says where its arrays lie; this one reads them.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from preprocess.errors import BadInput
from preprocess.files.strided import Array, Held, Placed
from preprocess.files.torchapart import answer, ask_apart
from preprocess.files.torchfile import Record, is_tensor, load_torch
from preprocess.files.torchplaces import describe
from preprocess.sources.plain import NODE, RELATION

Ends = tuple[str, str, str]

ONLY: Ends = (NODE, RELATION, NODE)  # the relation of a `Data`
EDGES = ("edge_index", "adj_t")
_DATA = "torch_geometric.data"
_CLASSES = (
    f"{_DATA}.data.Data", f"{_DATA}.data.DataTensorAttr", f"{_DATA}.data.DataEdgeAttr",
    f"{_DATA}.hetero_data.HeteroData", f"{_DATA}.feature_store.TensorAttr",
    f"{_DATA}.graph_store.EdgeAttr", f"{_DATA}.graph_store.EdgeLayout",
    f"{_DATA}.storage.BaseStorage", f"{_DATA}.storage.GlobalStorage",
    f"{_DATA}.storage.NodeStorage", f"{_DATA}.storage.EdgeStorage", f"{_DATA}.storage.AttrType",
    "torch_sparse.tensor.SparseTensor", "torch_sparse.storage.SparseStorage",
)  # fmt: skip
_COUNTED = ("x", "y", "train_mask", "val_mask", "test_mask")
_MOST_SHOWN = 8  # names


class Adjacency(msgspec.Struct, frozen=True, tag=True):
    """A matrix in CSR, or sorted pairs: the parts that are arrays."""

    indptr: Array | None
    row: Array | None
    col: Array | None
    values: Array | None
    sizes: tuple[int, ...]


class Other(msgspec.Struct, frozen=True, tag=True):
    """What is neither, in words."""

    text: str


Value = Placed | Held | Adjacency | Other | int


class Stores(msgspec.Struct, frozen=True):
    """What is of each node type, and of each relation."""

    nodes: dict[str, dict[str, Value]]
    edges: list[tuple[Ends, dict[str, Value]]]


def read_stores(path: Path) -> Stores:
    """Of the one graph in a file.  Raises BadInput."""
    return msgspec.msgpack.decode(ask_apart(path, __spec__.name, _load_stores), type=Stores)


def listed_nodes(held: Mapping[str, Value]) -> int | None:
    """Nodes of a store as `num_nodes` or the rows of an array say, if one does."""
    said = held.get("num_nodes")
    if isinstance(said, int):
        return said
    counts = (num_rows(held.get(key)) for key in _COUNTED)
    return next((n for n in counts if n is not None), None)


def num_rows(value: Value | None) -> int | None:
    """Of a dense array; None where a value is none, or one number."""
    return value.shape[0] if isinstance(value, Placed | Held) and value.shape else None


def _load_stores(path: Path) -> Stores:
    graph = _graph_of(path, load_torch(path, _CLASSES))
    if isinstance(graph, Record):
        held = graph.attributes
        if "_node_store_dict" in held:
            stores = [_dict(path, held.get(f"_{unit}_store_dict")) for unit in ("node", "edge")]
            return _heterogeneous(path, stores[0] | stores[1])
        if "_store" in held:
            return _homogeneous(path, _values(path, held["_store"]))
        graph = {str(k).removeprefix("__").removesuffix("__"): v for k, v in held.items()}
    if isinstance(graph, dict) and graph:
        if all(isinstance(v, dict | Record) for v in graph.values()):
            return _heterogeneous(path, graph)
        return _homogeneous(path, _values(path, graph))
    what = "an empty dict" if isinstance(graph, dict) else f"a {type(graph).__name__}"
    raise BadInput.at(
        path, what, "Data, HeteroData or their to_dict()", "save one graph, not a list or a tensor"
    )


def _graph_of(path: Path, held: Any) -> Any:
    """The one graph of a file.  Raises BadInput: several, or none."""
    if isinstance(held, tuple) and len(held) in (2, 3, 4):
        graph, slices = held[:2]
        sizes = set(_num_graphs(slices))
        if sizes - {1}:
            raise BadInput.at(
                f"{path}: slices", f"{max(sizes)} graphs", "one", "save dataset[i] of one alone"
            )
        return graph
    if isinstance(held, list) and len(held) == 1:
        return held[0]
    return held


def _num_graphs(slices: Any) -> Iterator[int]:
    """As each array of a collated data set says it."""
    if isinstance(slices, Mapping):
        for value in slices.values():
            yield from _num_graphs(value)
    elif is_tensor(slices) and slices.ndim == 1:
        yield int(slices.shape[0]) - 1


def _heterogeneous(path: Path, held: dict[Any, Any]) -> Stores:
    found = Stores({}, [])
    for key, store in held.items():
        if key == "_global_store":
            continue
        if isinstance(key, str):
            found.nodes[key] = _values(path, store)
        elif isinstance(key, tuple) and len(key) == 3 and all(isinstance(k, str) for k in key):
            found.edges.append(((key[0], key[1], key[2]), _values(path, store)))
        else:
            raise BadInput.at(
                f"{path}: {key!r}", "this store", "a node type, or (source, relation, target)",
                "rename it",
            )  # fmt: skip
    return found


def _homogeneous(path: Path, held: dict[str, Value]) -> Stores:
    """Arrays are of nodes or of edges by name, then by how many rows they have."""
    index = held.get("edge_index")
    if index is None and "adj_t" not in held:
        listed = ", ".join(list(held)[:_MOST_SHOWN]) or "nothing"
        raise BadInput.at(path, listed, "edge_index beside it", "is it a graph of PyG?")
    num_nodes = listed_nodes(held)
    num_edges = None
    if isinstance(index, Placed | Held) and len(index.shape) == 2:
        num_edges = index.shape[1]
    nodes: dict[str, Value] = {}
    edges: dict[str, Value] = {}
    for key, value in held.items():
        rows = num_rows(value)
        by_rows = rows is not None and rows == num_edges and rows != num_nodes
        of_edges = "edge" in key or key in EDGES or (by_rows and key not in _COUNTED[:2])
        (edges if of_edges else nodes)[key] = value
    return Stores({NODE: nodes}, [(ONLY, edges)])


def _values(path: Path, store: Any) -> dict[str, Value]:
    """What a store holds, by name; what is None is not there."""
    held = store.attributes.get("_mapping") if isinstance(store, Record) else store
    return {str(k): _value(path, v) for k, v in _dict(path, held).items() if v is not None}


def _value(path: Path, value: Any) -> Value:
    if isinstance(value, list) and len(value) == 1:  # num_nodes of a data set of one graph
        value = value[0]
    if type(value) is int:
        return value
    if is_tensor(value):
        return describe(path, value) or Other(f"items of {value.dtype}")
    layout = str(getattr(value, "layout", type(value).__name__))
    if layout == "torch.sparse_csr":
        crow, col = _part(path, value.crow_indices()), _part(path, value.col_indices())
        return Adjacency(crow, None, col, _part(path, value.values()), tuple(value.shape))
    if isinstance(value, Record) and isinstance(value.attributes.get("storage"), Record):
        held = value.attributes["storage"].attributes
        crow, row, col, values = (
            _part(path, held.get(name)) for name in ("_rowptr", "_row", "_col", "_value")
        )
        sizes = held.get("_sparse_sizes")
        known = tuple(n for n in sizes if type(n) is int) if isinstance(sizes, tuple) else ()
        return Adjacency(crow, row, col, values, known)
    return Other(layout)


def _part(path: Path, value: Any) -> Array | None:
    return describe(path, value) if is_tensor(value) else None


def _dict(path: Path, held: Any) -> dict[Any, Any]:
    if not isinstance(held, dict):
        raise BadInput.at(path, f"a {type(held).__name__} for a store", "a dict", "save it again")
    return held


if __name__ == "__main__":
    sys.exit(answer(Path(sys.argv[1]), _load_stores))
