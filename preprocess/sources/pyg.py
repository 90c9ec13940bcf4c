"""The layout of PyG: a `.pt` file of one `Data` or `HeteroData`, as an object or as a dict.

docs/layouts.md lists the supported parts.  In a `Data` an array belongs to edges if "edge" is in
its name, or if its rows match the number of edges but not of nodes.  Only attributes of objects are
read: no code of their classes runs, and PyG need not be installed.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.strided import GivenArray, Placed, StoredArray, StridedRows
from preprocess.files.torchfile import TorchObject, kind_of, read_torch
from preprocess.sources.arrays import ArrayRows, CompressedEdges, EdgeArray, EdgeLists, id_rows
from preprocess.sources.source import NODE, RELATION, EdgeFile, Ends, Owner, Rows, Source

_ONLY: Ends = (NODE, RELATION, NODE)  # the relation of a `Data`
_EDGES = ("edge_index", "adj_t")
_COUNTED = ("x", "y", "train_mask", "val_mask", "test_mask")
_SUFFIXES = (".pt", ".pth")
_PROCESSED = "processed/data.pt"
_SPLITS = {"train": "train", "val": "valid", "valid": "valid", "test": "test"}
_RENAMED = {"edge_weight": "weight", "edge_time": "time"}
_VALUES = ("edge_weight", "edge_attr")  # names for values of adj_t: one number an edge, or more
_FITTING = ("x", "y", "edge_attr", *_RENAMED)  # arrays that must have the right number of rows
_SCAN_ROWS = 1 << 18  # rows scanned at a time
_MAX_SHOWN = 8  # names

Store = dict[str, Any]  # values of a type or of a relation, by name


class PygSource(Source):
    """A graph that PyG saved, homogeneous or heterogeneous.  Raises BadInput."""

    layout = "pyg"

    def __init__(self, path: Path) -> None:
        file = path / _PROCESSED if path.is_dir() else path
        super().__init__(path)
        self._file = file
        self.add_files(file)
        nodes, relations = _read_stores(file)
        self._sides: dict[Ends, list[int]] = {}  # [columns, rows] of adjacency matrices
        for ends, held in relations.items():
            self.add_edges(ends, self._open_edges(ends, held))
        for name in [*nodes, *(end for ends in relations for end in ends[::2])]:
            if name not in self.num_nodes:
                self.num_nodes[name] = self._count_nodes(name, nodes.get(name, {}))
        if not relations or not any(self.num_nodes.values()):
            raise BadInput.at(file, "no edges, or no nodes", "edge_index and x", "is it a graph?")
        for name, count in self.num_nodes.items():
            self._add_store(name, nodes.get(name, {}), count, "one a node")
        for ends, held in relations.items():
            self._add_store(ends, held, self._edges[ends].num_edges, "one an edge")

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A file `*.pt`, or a folder with `processed/data.pt`."""
        if path.is_dir():
            return _PROCESSED if (path / _PROCESSED).is_file() else None
        is_file = path.is_file() and path.suffix in _SUFFIXES
        return f"{path.name}, a file of torch.save" if is_file else None

    def _place(self, owner: Owner) -> str:
        """Prefix of the names of an owner's arrays in messages."""
        if owner in (NODE, _ONLY):
            return f"{self._file}: "
        return f"{self._file}: {owner if isinstance(owner, str) else ':'.join(owner)}."

    def _open_edges(self, ends: Ends, held: Store) -> EdgeFile:
        """Open the edges of a relation, from its values.  Raises BadInput: there are none."""
        index, adjacency, where = held.get("edge_index"), held.get("adj_t"), self._place(ends)
        if isinstance(index, Placed | GivenArray):
            return EdgeArray(StridedRows(self._file, index, f"{where}edge_index"))
        if isinstance(adjacency, TorchObject) and isinstance(
            adjacency.attributes.get("storage"), TorchObject
        ):
            parts = adjacency.attributes["storage"].attributes
            values = parts.get("_value")
            if isinstance(values, Placed | GivenArray):  # they become the first array
                others = dict(held)
                held.clear()
                held.update({_VALUES[len(values.shape) > 1]: values} | others)
            return self._open_adjacency(ends, parts, f"{where}adj_t")
        name, found = ("adj_t", adjacency) if adjacency is not None else ("edge_index", index)
        raise BadInput.at(
            f"{where}{name}", "nothing" if found is None else kind_of(found),
            "edge_index, a tensor (2, edges), or adj_t in CSR",
            "set it with torch_geometric.utils.to_edge_index, and save the graph again",
        )  # fmt: skip

    def _open_adjacency(self, ends: Ends, parts: Store, where: str) -> EdgeFile:
        """Open an `adj_t`, whose rows are targets, and whose columns are sources."""
        sizes = parts.get("_sparse_sizes")
        if not isinstance(sizes, list) or [type(n) for n in sizes] != [int, int] or min(sizes) < 0:
            raise BadInput.at(where, f"sizes {sizes}", "(rows, columns)", "save edge_index instead")
        self._sides[ends] = sizes[::-1]

        def ids(what: str, key: str, size: int | None) -> StoredArray:
            value, place = parts.get(key), f"{where}: {what}"
            expected = f"({'entries' if size is None else size},) of integers"
            if not isinstance(value, Placed | GivenArray) or not value.shape:
                raise BadInput.at(place, "no array", expected, "save edge_index instead")
            array = StridedRows(self._file, value, place)
            fits = len(array.shape) == 1 and array.dtype.kind in "iu" and size in (None, array.size)
            array.check(fits, expected, "save edge_index instead")
            return array

        columns = ids("columns", "_col", None)
        if parts.get("_rowptr") is not None:
            return CompressedEdges(ids("row offsets", "_rowptr", sizes[0] + 1), columns, 1, where)
        return EdgeLists(columns, ids("rows", "_row", columns.size), where)

    def _count_nodes(self, name: str, held: Store) -> int:
        """Number of nodes, from `num_nodes`, the rows of an array, or else the largest id."""
        count = _listed_nodes(held)
        if count is None:
            count = 0
            for ends, edges in self._edges.items():
                for end in (0, 1):
                    if ends[2 * end] == name:
                        sides = self._sides.get(ends)
                        if sides:
                            count = max(count, sides[end])
                        else:  # a pass over the edges
                            pieces = edges.pieces(_SCAN_ROWS)
                            count = max([count, *(int(ids[end].max()) + 1 for ids in pieces)])
        if count < 0:
            raise BadInput.at(f"{self._place(name)}num_nodes", count, "0 or more", "correct it")
        return count

    def _add_store(self, owner: Owner, held: Store, count: int, says: str) -> None:
        """Add the arrays of a type or a relation.  Raises BadInput: wrong number of rows."""
        for key, value in held.items():
            where = f"{self._place(owner)}{key}"
            split, _, form = key.rpartition("_")
            is_split = split in _SPLITS and form in ("mask", "idx")
            found = _num_rows(value)
            if key in _FITTING and found is None:
                what = "no rows" if isinstance(value, Placed | GivenArray | int) else kind_of(value)
                expected = "a dense array of numbers"
                raise BadInput.at(where, what, expected, "convert it, or leave it out")
            fits = found is not None and (is_split or key in _FITTING or found == count)
            if key in _EDGES or not fits:
                continue
            array, is_node = StridedRows(self._file, value, where), isinstance(owner, str)
            if is_split and form == "mask":
                self.add_split(owner, _mask(_SPLITS[split], array, count, says))
            elif is_split:
                self.add_split(owner, id_rows(_SPLITS[split], array))
            elif is_node and key == "y":
                self.add_label(str(owner), ArrayRows(key, array, count, says, single=True))
            else:
                name = key if is_node else _RENAMED.get(key, key)
                self.add_array(owner, ArrayRows(name, array, count, says))


def _mask(name: str, array: StridedRows, num_rows: int, says: str) -> Rows:
    """A split given as a mask, of which the first column is used; its nodes are counted here."""
    shape = array.shape
    fits = array.dtype.kind in "bu" and len(shape) <= 2 and 0 not in shape[1:]
    array.check(fits, "truth values, one a row", "convert it")
    rows = ArrayRows(name, array, num_rows, says)
    num_ids = sum(ids.size for ids in _masked(rows, _SCAN_ROWS))
    form = rows.form._replace(dtype=np.dtype(np.int64), row_shape=(), num_rows=num_ids)
    return Rows(form, partial(_masked, rows), rows.path)


def _masked(rows: ArrayRows, count: int) -> Iterator[NDArray[Any]]:
    first = 0
    for piece in rows.pieces(count):
        ids = first + np.flatnonzero(piece.reshape(piece.shape[0], -1)[:, 0])
        if ids.size:
            yield ids
        first += piece.shape[0]


def _read_stores(path: Path) -> tuple[dict[str, Store], dict[Ends, Store]]:
    """Values of each node type and of each relation of the only graph in a file."""
    graph = _graph_of(path, read_torch(path))
    if isinstance(graph, TorchObject):
        held = graph.attributes
        if "_node_store_dict" in held:
            stores = [_dict(path, held.get(f"_{unit}_store_dict")) for unit in ("node", "edge")]
            return _heterogeneous(path, stores[0] | stores[1])
        if "_store" in held:
            return _homogeneous(path, _values(path, held["_store"]))
        graph = {str(k).removeprefix("__").removesuffix("__"): v for k, v in held.items()}
    if isinstance(graph, dict) and graph:
        if all(isinstance(v, dict | TorchObject) for v in graph.values()):
            return _heterogeneous(path, graph)
        return _homogeneous(path, _values(path, graph))
    what = "an empty dict" if isinstance(graph, dict) else f"a {kind_of(graph)}"
    raise BadInput.at(
        path, what, "Data, HeteroData or their to_dict()", "save one graph, not a list or a tensor"
    )


def _graph_of(path: Path, held: Any) -> Any:
    """The only graph of a file.  Raises BadInput: several, or none."""
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
    """The number of graphs according to each array of a collated data set."""
    if isinstance(slices, Mapping):
        for value in slices.values():
            yield from _num_graphs(value)
    elif isinstance(slices, Placed | GivenArray) and len(slices.shape) == 1:
        yield slices.shape[0] - 1


def _heterogeneous(path: Path, held: Store) -> tuple[dict[str, Store], dict[Ends, Store]]:
    nodes: dict[str, Store] = {}
    edges: dict[Ends, Store] = {}
    for key, store in dict[Any, Any](held).items():
        if key == "_global_store":
            continue
        if isinstance(key, str):
            nodes[key] = _values(path, store)
        elif isinstance(key, tuple) and len(key) == 3 and all(isinstance(k, str) for k in key):
            edges[key] = _values(path, store)
        else:
            raise BadInput.at(
                f"{path}: {key!r}", "this store", "a node type, or (source, relation, target)",
                "rename it",
            )  # fmt: skip
    return nodes, edges


def _homogeneous(path: Path, held: Store) -> tuple[dict[str, Store], dict[Ends, Store]]:
    """Assign arrays to nodes or edges, by name, then by their number of rows."""
    index = held.get("edge_index")
    if index is None and "adj_t" not in held:
        listed = ", ".join(list(held)[:_MAX_SHOWN]) or "nothing"
        raise BadInput.at(path, listed, "edge_index beside it", "is it a graph of PyG?")
    num_nodes = _listed_nodes(held)
    num_edges = None
    if isinstance(index, Placed | GivenArray) and len(index.shape) == 2:
        num_edges = index.shape[1]
    nodes, edges = Store(), Store()
    for key, value in held.items():
        rows = _num_rows(value)
        by_rows = rows is not None and rows == num_edges and rows != num_nodes
        of_edges = "edge" in key or key in _EDGES or (by_rows and key not in _COUNTED[:2])
        (edges if of_edges else nodes)[key] = value
    return {NODE: nodes}, {_ONLY: edges}


def _values(path: Path, store: Any) -> Store:
    """The values of a storage by name, without those that are None."""
    held = _dict(
        path, store.attributes.get("_mapping") if isinstance(store, TorchObject) else store
    )
    # in a data set of one graph num_nodes is a list
    only = {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in held.items()}
    return {str(k): v for k, v in only.items() if v is not None}


def _dict(path: Path, held: Any) -> dict[Any, Any]:
    if not isinstance(held, dict):
        raise BadInput.at(path, f"a {kind_of(held)} for a store", "a dict", "save it again")
    return held


def _listed_nodes(held: Store) -> int | None:
    """Number of nodes of a storage from `num_nodes` or the rows of an array; None: unknown."""
    said = held.get("num_nodes")
    if type(said) is int:
        return said
    counts = (_num_rows(held.get(key)) for key in _COUNTED)
    return next((n for n in counts if n is not None), None)


def _num_rows(value: Any) -> int | None:
    """Rows of a dense array; None if the value is no array, or a single number."""
    return value.shape[0] if isinstance(value, Placed | GivenArray) and value.shape else None
