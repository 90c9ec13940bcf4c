"""The layout of PyG: a `.pt` file of one `Data` or `HeteroData`, as an object or as a dict.

    torch.save(data, path), torch.save(data.to_dict(), path)
    processed/data.pt of an InMemoryDataset: (data, slices) or (dict, slices, class), one graph

of nodes      `x` is the main array and `y` the label; `train_mask` or `train_idx`, val_, valid_ and
              test_ are splits, of a mask of several columns the first; other arrays with a row a
              node keep their names
of edges      `edge_index` (2, edges), or `adj_t` of torch_sparse or of torch in CSR, whose values
              are weights; `edge_weight` is "weight", `edge_time` "time"; other arrays with a row an
              edge keep their names
nodes         `num_nodes`, else the rows of `x`, `y` or a mask, else one more than the largest id

In a `Data` an array is of edges if "edge" is in its name or it has a row an edge but none a node.
What is no array, or has other rows, is left out.  Objects are read for their attributes: no code
of a file's classes runs, and PyG need not be installed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.strided import Held, Placed, StridedRows
from preprocess.source import SourceRelation, SourceRows
from preprocess.sources.ends import checked
from preprocess.sources.plain import NODE
from preprocess.sources.pygedges import SCAN_ROWS, open_edges
from preprocess.sources.pygfile import (
    EDGES,
    ONLY,
    Ends,
    Other,
    Stores,
    Value,
    listed_nodes,
    num_rows,
    read_stores,
)

_SUFFIXES = (".pt", ".pth")
_PROCESSED = "processed/data.pt"
_SPLITS = {"train": "train", "val": "valid", "valid": "valid", "test": "test"}
_RENAMED = {"edge_weight": "weight", "edge_time": "time"}
_VALUES = ("edge_weight", "edge_attr")  # of an adjacency matrix: a number an edge, or more
_FITTING = ("x", "y", "edge_attr", *_RENAMED)  # arrays that must have the right number of rows

_Reader = Callable[[int], Iterator[NDArray[Any]]]


class PygSource:
    """A graph that PyG saved, homogeneous or heterogeneous.  Raises BadInput."""

    layout = "pyg"
    undirected = False

    def __init__(self, path: Path) -> None:
        file = path / _PROCESSED if path.is_dir() else path
        self.where, self.files, self._file = str(path), [file], file
        stores = read_stores(file)
        self._edges = {e: open_edges(file, held, self._place(e)) for e, held in stores.edges}
        self.num_nodes: Mapping[str, int] = self._count_nodes(stores)
        if not stores.edges or not any(self.num_nodes.values()):
            raise BadInput.at(file, "no edges, or no nodes", "edge_index and x", "is it a graph?")
        self.relations = tuple(
            SourceRelation(*ends, e.num_edges, e.where) for ends, e in self._edges.items()
        )
        self._readers: dict[SourceRows, _Reader] = {}
        self._arrays: dict[str | Ends, list[SourceRows]] = {}
        self._labels: dict[str, SourceRows] = {}
        self._split_arrays: dict[str | Ends, list[_Split]] = {}
        for name, num_nodes in self.num_nodes.items():
            self._add(name, stores.nodes.get(name, {}), num_nodes)
        for ends, held in stores.edges:
            values = self._edges[ends].values
            if values is not None:
                held = {_VALUES[len(values.shape) > 1]: values, **held}
            self._add(ends, held, self._edges[ends].num_edges)

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A file `*.pt`, or a folder with `processed/data.pt`."""
        if path.is_dir():
            return _PROCESSED if (path / _PROCESSED).is_file() else None
        is_file = path.is_file() and path.suffix in _SUFFIXES
        return f"{path.name}, a file of torch.save" if is_file else None

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), checked, at most `count` at a time."""
        held, names = self._edges[relation[:3]], (relation.src, relation.dst)
        sizes = self.num_nodes[names[0]], self.num_nodes[names[1]]
        return checked(
            held.pieces(max(count, 1)), sizes, held.place,
            lambda end: f"{names[end]} has {sizes[end]} nodes",
        )  # fmt: skip

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """Arrays with a row an edge."""
        return self._arrays.get(relation[:3], [])

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        """Masks and lists of positions."""
        return self._splits_of(relation[:3])

    def features(self, node_type: str) -> list[SourceRows]:
        """Arrays with a row a node."""
        return self._arrays.get(node_type, [])

    def label(self, node_type: str) -> SourceRows | None:
        """`y`."""
        return self._labels.get(node_type)

    def splits(self, node_type: str) -> list[SourceRows]:
        """Masks and lists of ids."""
        return self._splits_of(node_type)

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order, not to be written to."""
        return self._readers[rows](max(count, 1))

    def _splits_of(self, owner: str | Ends) -> list[SourceRows]:
        found = []
        for split in self._split_arrays.get(owner, []):
            rows = split.rows()
            self._readers[rows] = split.pieces
            found.append(rows)
        return found

    def _place(self, owner: str | Ends) -> str:
        """What stands before the name of an array, for messages."""
        if owner in (NODE, ONLY):
            return f"{self._file}: "
        return f"{self._file}: {owner if isinstance(owner, str) else ':'.join(owner)}."

    def _count_nodes(self, stores: Stores) -> dict[str, int]:
        """Nodes of every type: those of stores, then those that relations name."""
        counts = {}
        for name in [*stores.nodes, *(end for ends, _ in stores.edges for end in ends[::2])]:
            if name not in counts:
                found = listed_nodes(stores.nodes.get(name, {}))
                counts[name] = self._largest_id(name) + 1 if found is None else found
                if counts[name] < 0:
                    raise BadInput.at(
                        f"{self._place(name)}num_nodes", counts[name], "0 or more", "correct it"
                    )
        return counts

    def _largest_id(self, name: str) -> int:
        found = [-1]
        for ends, edges in self._edges.items():
            found += [edges.largest_id(end) for end in (0, 1) if ends[2 * end] == name]
        return max(found)

    def _add(self, owner: str | Ends, held: Mapping[str, Value], count: int) -> None:
        """The arrays of a type or a relation.  Raises BadInput: one that must fit does not."""
        arrays: dict[str, SourceRows] = {}
        for key, value in held.items():
            where = f"{self._place(owner)}{key}"
            split, _, form = key.rpartition("_")
            is_split = split in _SPLITS and form in ("mask", "idx")
            if key in EDGES or not self._fits(key, value, None if is_split else count, where):
                continue
            assert isinstance(value, Placed | Held)
            array = StridedRows(self._file, value, where)
            if is_split:
                self._add_split(owner, _Split(_SPLITS[split], array, form), count)
                continue
            rows = self._listed(owner, key, array)
            if rows.name in arrays:
                raise BadInput.at(
                    where, f"a second array {rows.name!r}", f"one, {arrays[rows.name].where}",
                    "leave one out",
                )  # fmt: skip
            arrays[rows.name] = rows
        if isinstance(owner, str) and "y" in arrays:
            self._labels[owner] = arrays.pop("y")
        self._arrays[owner] = list(arrays.values())

    def _fits(self, key: str, value: Value, expected: int | None, where: str) -> bool:
        """Whether it is an array of that many rows, or any.  Raises BadInput: it must be."""
        found = num_rows(value)
        if key in _FITTING and found is None:
            what = value.text if isinstance(value, Other) else "no rows"
            raise BadInput.at(
                where, what, "a dense array of numbers", "convert it, or leave it out"
            )
        if key in _FITTING and found != expected:
            raise BadInput.at(where, f"{found} rows", expected, "save it whole, or leave it out")
        return found is not None and expected in (None, found)

    def _listed(self, owner: str | Ends, key: str, array: StridedRows) -> SourceRows:
        if array.dtype.kind not in "biuf":
            raise BadInput.at(array.where, f"items of {array.dtype}", "numbers", "convert it")
        is_node = isinstance(owner, str)
        shape = () if is_node and key == "y" and array.shape[1:] == (1,) else array.shape[1:]
        name = key if is_node else _RENAMED.get(key, key)
        rows = SourceRows(name, array.dtype, shape, array.num_rows, "dense", array.where)
        self._readers[rows] = partial(_shaped, array, shape)
        return rows

    def _add_split(self, owner: str | Ends, split: "_Split", count: int) -> None:
        others = self._split_arrays.setdefault(owner, [])
        if split.is_mask and split.array.num_rows != count:
            raise BadInput.at(
                split.array.where, f"{split.array.num_rows} rows", count, "save it whole"
            )
        if any(s.name == split.name for s in others):
            raise BadInput.at(
                split.array.where, f"a second split {split.name!r}", "one", "leave one out"
            )
        others.append(split)


class _Split:
    """A mask, of which the first column counts, or a list of ids."""

    def __init__(self, name: str, array: StridedRows, form: str) -> None:
        self.name, self.array, self.is_mask = name, array, form == "mask"
        most = 2 if self.is_mask else 1
        shape, kind = array.shape, array.dtype.kind
        fits = kind in "bu" if self.is_mask else kind in "iu"
        if not fits or len(shape) > most or 0 in shape[1:]:
            raise BadInput.at(
                array.where, f"shape {shape} of {array.dtype}",
                "truth values, one a row" if self.is_mask else "a list of integers", "convert it",
            )  # fmt: skip
        self._num_ids: int | None = None

    def rows(self) -> SourceRows:
        """What it is; a mask is counted, once."""
        if self._num_ids is None:
            pieces = self.pieces(SCAN_ROWS) if self.is_mask else []
            self._num_ids = sum(p.size for p in pieces) if self.is_mask else self.array.num_rows
        dtype = np.dtype(np.int64) if self.is_mask else self.array.dtype
        return SourceRows(self.name, dtype, (), self._num_ids, "dense", self.array.where)

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Ids, `count` at most at a time."""
        first = 0
        for piece in self.array.pieces(0, self.array.num_rows, count):
            if not self.is_mask:
                yield piece
                continue
            ids = first + np.flatnonzero(piece.reshape(piece.shape[0], -1)[:, 0])
            if ids.size:
                yield ids
            first += piece.shape[0]


def _shaped(array: StridedRows, shape: Sequence[int], count: int) -> Iterator[NDArray[Any]]:
    for piece in array.pieces(0, array.num_rows, count):
        yield piece.reshape(-1, *shape)
