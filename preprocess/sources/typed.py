"""Graphs of several types whose edges and rows are arrays in files: what their sources share."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import StoredArray
from preprocess.source import SourceRelation, SourceRows
from preprocess.sources.ends import checked


class RowReader(Protocol):
    """Rows that are read in order."""

    def rows(self, name: str) -> SourceRows:
        """What they are, under a name."""

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """(at most `count`, *row_shape) at a time; the array is reused.  Raises BadInput."""


class ArrayRows:
    """A row a node, in one array.  Raises BadInput: another shape, order or dtype."""

    def __init__(self, file: StoredArray, num_rows: int) -> None:
        if not file.shape or 0 in file.shape[1:] or file.fortran_order:
            order = " in Fortran order" if file.fortran_order else ""
            raise BadInput.at(
                f"{file.where}: header", f"shape {file.shape}{order}", "rows in C order",
                "save it again with numpy.ascontiguousarray",
            )  # fmt: skip
        if file.dtype.kind not in "biuf":
            raise BadInput.at(
                f"{file.where}: header", f"items of {file.dtype}", "real numbers", "convert them"
            )
        if file.shape[0] != num_rows:
            raise BadInput.at(
                f"{file.where}: header", f"{file.shape[0]} rows", f"{num_rows}, one a node",
                "is it of this graph?",
            )  # fmt: skip
        self._file = file

    def rows(self, name: str) -> SourceRows:
        """What they are, under a name."""
        file = self._file
        return SourceRows(name, file.dtype, file.shape[1:], file.shape[0], "dense", file.where)

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order, at most `count` at a time; the array is reused."""
        row_shape = self._file.shape[1:]
        width = int(np.prod(row_shape, dtype=np.int64))
        for piece in self._file.pieces(0, self._file.size, count * width):
            yield piece.reshape(-1, *row_shape)


class EdgeArray:
    """Edges in one array, (2, edges) or, where `paired`, (edges, 2): row or column 0 is the source.

    Raises BadInput: another shape or dtype.
    """

    def __init__(self, file: StoredArray, paired: bool = False) -> None:
        shape, ends = file.shape, 1 if paired else 0
        if len(shape) != 2 or shape[ends] != 2:
            raise BadInput.at(
                f"{file.where}: header", f"shape {shape}", "(edges, 2)" if paired else "(2, edges)",
                "transpose or reshape it",
            )  # fmt: skip
        if file.dtype.kind not in "iu":
            raise BadInput.at(
                f"{file.where}: header", f"items of {file.dtype}", "integer node ids",
                "convert them",
            )  # fmt: skip
        self.path, self.num_edges = file.path, shape[1 - ends]
        self._file, self._paired = file, paired
        self._together = paired != file.fortran_order  # both ends of an edge lie side by side

    def place(self, end: int, edge: int) -> str:
        """Of one end of an edge, for messages."""
        return f"{self._file.where}[{edge}, {end}]" if self._paired else (
            f"{self._file.where}[{end}, {edge}]"
        )  # fmt: skip

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), at most `count` at a time; the arrays are reused."""
        total = self.num_edges
        if not self._together:
            sources = self._file.pieces(0, total, count)
            yield from zip(sources, self._file.pieces(total, 2 * total, count), strict=True)
            return
        split = np.empty((2, min(count, total)), self._file.dtype)
        for pairs in self._file.pieces(0, 2 * total, 2 * count):
            src, dst = split[:, : pairs.size // 2]
            src[:], dst[:] = pairs[::2], pairs[1::2]
            yield src, dst


class TypedArrays:
    """What `Source` asks for, of arrays that a layout has opened and added here."""

    undirected = False

    def __init__(self, where: Path, num_nodes: Mapping[str, int]) -> None:
        self.where, self.num_nodes = str(where), num_nodes
        self.files: list[Path] = []
        self._edges: dict[SourceRelation, EdgeArray] = {}
        self._features: dict[str, list[SourceRows]] = {}
        self._labels: dict[str, SourceRows] = {}
        self._splits: dict[str, list[SourceRows]] = {}
        self._readers: dict[SourceRows, RowReader] = {}

    def add_edges(self, ends: tuple[str, str, str], edges: EdgeArray) -> None:
        """A relation (source type, name, target type)."""
        self._edges[SourceRelation(*ends, edges.num_edges, str(edges.path))] = edges
        self.files.append(edges.path)

    def add_feature(self, node_type: str, name: str, reader: RowReader) -> None:
        """An array of a type."""
        self._features.setdefault(node_type, []).append(self._added(name, reader))

    def add_label(self, node_type: str, reader: RowReader) -> None:
        """The labels of a type."""
        self._labels[node_type] = self._added("label", reader)

    def add_split(self, node_type: str, name: str, reader: RowReader) -> None:
        """A split of a type."""
        self._splits.setdefault(node_type, []).append(self._added(name, reader))

    @property
    def relations(self) -> tuple[SourceRelation, ...]:
        """In the order in which they were added."""
        return tuple(self._edges)

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), checked, at most `count` at a time."""
        edges, names = self._edges[relation], (relation.src, relation.dst)
        sizes = self.num_nodes[relation.src], self.num_nodes[relation.dst]
        return checked(
            edges.pieces(max(count, 1)), sizes, edges.place,
            lambda end: f"there are {sizes[end]} of type {names[end]}",
        )  # fmt: skip

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        return []

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        return []

    def features(self, node_type: str) -> list[SourceRows]:
        """In the order in which they were added."""
        return self._features.get(node_type, [])

    def label(self, node_type: str) -> SourceRows | None:
        """Where the type has labels."""
        return self._labels.get(node_type)

    def splits(self, node_type: str) -> list[SourceRows]:
        """In the order in which they were added."""
        return self._splits.get(node_type, [])

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array is reused."""
        return self._readers[rows].pieces(max(count, 1))

    def _added(self, name: str, reader: RowReader) -> SourceRows:
        rows = reader.rows(name)
        self._readers[rows] = reader
        return rows
