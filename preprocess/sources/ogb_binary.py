"""OGB's layout in arrays: `raw/data.npz`, read where it lies in the file or decompressed in order.

    edge_index                      (2, edges) integers
    num_nodes_list, num_edges_list  one number each: there is one graph
    node_feat, node_<name>          (nodes, ...)
    edge_feat, edge_<name>          (edges, ...)
and `raw/node-label.npz`: node_label, (nodes,) or (nodes, labels); NaN where there is none.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import ZipArray, list_members
from preprocess.source import SourceRows
from preprocess.sources.ogb import Array, OgbSource, RelationPart, TypePart, check_names
from preprocess.sources.plain import NODE, RELATION

_DATA, _LABELS = "data.npz", "node-label.npz"
_INDEX, _LABEL = "edge_index", "node_label"
_COUNTS = ("num_nodes_list", "num_edges_list")


class OgbBinarySource(OgbSource):
    """A dataset's folder with arrays in `raw`.  Raises BadInput."""

    layout = "ogb-binary"

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with `raw/data.npz`."""
        return f"raw/{_DATA}" if (path / "raw" / _DATA).is_file() else None

    def __init__(self, path: Path) -> None:
        data, labels = path / "raw" / _DATA, path / "raw" / _LABELS
        members = list_members(data)
        for name in members:
            if not name.startswith(("node_", "edge_")) and name not in _COUNTS:
                raise BadInput.at(
                    data, f"array {name!r}", "names that begin with node_ or edge_", "take it out"
                )
        num_nodes, num_edges = (_only_number(ZipArray(data, name)) for name in _COUNTS)
        edges = ZipEdges(data, num_edges)
        nodes = [n for n in members if n.startswith("node_")]
        rows = [n for n in members if n.startswith("edge_") and n != _INDEX]
        features = _arrays(data, nodes, num_nodes, {"node_feat": "x"})
        label = ZipRows(labels, _LABEL, "label", num_nodes) if labels.exists() else None
        relation = RelationPart(
            (NODE, RELATION, NODE), edges, _arrays(data, rows, num_edges, {"edge_feat": "feat"})
        )
        super().__init__(path, {NODE: TypePart(num_nodes, features, label)}, [relation], [])


def _arrays(path: Path, members: list[str], num_rows: int, main: dict[str, str]) -> list[Array]:
    """The main array first, then the others by name."""
    found: list[Array] = [
        ZipRows(path, n, main.get(n, n[5:]), num_rows, main=n in main)
        for n in sorted(members, key=lambda n: (n not in main, n))
    ]
    check_names(found)
    return found


def _only_number(array: ZipArray) -> int:
    if array.size != 1 or array.dtype.kind not in "iu":
        raise BadInput.at(
            array.where, f"shape {array.shape} of {array.dtype}", "one integer: one graph",
            "take one graph out of them",
        )  # fmt: skip
    number = int(array.read(0, 1)[0])
    if number < 0:
        raise BadInput.at(array.where, number, "at least 0", "correct it")
    return number


class ZipRows:
    """An array of a `.npz` file, a row a node or an edge."""

    def __init__(
        self, path: Path, member: str, name: str, num_rows: int, main: bool = False
    ) -> None:
        """`main`: one column is a row of one, not a number."""
        self.path, self._array = path, ZipArray(path, member)
        shape, dtype, order = self._array.shape, self._array.dtype, self._array.fortran_order
        if not shape or 0 in shape[1:] or order or dtype.kind not in "biuf":
            raise BadInput.at(
                self._array.where,
                f"shape {shape} of {dtype}{' in Fortran order' if order else ''}",
                "rows of numbers in C order", "save it again",
            )  # fmt: skip
        if shape[0] != num_rows:
            counts = "num_edges_list" if member.startswith("edge_") else "num_nodes_list"
            raise BadInput.at(
                self._array.where, f"{shape[0]} rows", f"{num_rows}, as {counts} says",
                "are they of one graph?",
            )  # fmt: skip
        single = not main and prod(shape[1:]) == 1
        row_shape = () if single else shape[1:] or (1,)
        self.form = SourceRows(name, dtype, row_shape, num_rows, "dense", self._array.where)

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array is reused."""
        width = prod(self.form.row_shape)
        for piece in self._array.pieces(0, self._array.size, count * width):
            yield piece.reshape(-1, *self.form.row_shape)


class ZipEdges:
    """The array (2, edges) of a `.npz` file."""

    def __init__(self, path: Path, num_edges: int) -> None:
        self.path, self.num_edges, self._array = path, num_edges, ZipArray(path, _INDEX)
        shape, dtype = self._array.shape, self._array.dtype
        if len(shape) != 2 or shape[0] != 2 or dtype.kind not in "iu":
            raise BadInput.at(
                self._array.where, f"shape {shape} of {dtype}", "(2, edges) of integers",
                "transpose or convert it",
            )  # fmt: skip
        if shape[1] != num_edges:
            raise BadInput.at(
                self._array.where, f"{shape[1]} edges", f"{num_edges}, as num_edges_list says",
                "are they of one graph?",
            )  # fmt: skip

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), at most `count` at a time: both rows are read in step."""
        total = self.num_edges
        if not self._array.fortran_order:
            sources = self._array.pieces(0, total, count)
            yield from zip(sources, self._array.pieces(total, 2 * total, count), strict=True)
            return
        for pairs in self._array.pieces(0, 2 * total, 2 * count):  # they lie together in the file
            yield pairs[::2].copy(), pairs[1::2].copy()

    def place(self, end: int, row: int) -> str:
        return f"{self._array.where}[{end}, {row}]"
