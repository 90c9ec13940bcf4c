"""What a source of graphs offers, whatever its layout: chunks of edges and rows, nothing whole."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class SourceRows(NamedTuple):
    """One per-node array of a source."""

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    num_rows: int
    held: str  # "dense" or "csr"
    where: str  # file, for messages

    @property
    def row_bytes(self) -> int:
        """Bytes of a dense row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize


class SourceRelation(NamedTuple):
    """One relation of a source."""

    src: str
    name: str
    dst: str
    num_edges: int
    where: str  # file, for messages


class Source(Protocol):
    """A homogeneous or heterogeneous graph on disk."""

    where: str
    num_nodes: dict[str, int]  # per node type
    relations: tuple[SourceRelation, ...]

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst) in the source's order, at most `count` at a time; arrays are reused.

        Ids are checked: BadInput names the position of one that is out of range.
        """

    def features(self, node_type: str) -> list[SourceRows]:
        """Feature arrays of a type, in a fixed order."""

    def label(self, node_type: str) -> SourceRows | None:
        """Labels of a type."""

    def rows(self, node_type: str, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Dense rows in order, (at most `count`, *row_shape) at a time; the array is reused."""

    def splits(self, node_type: str) -> dict[str, NDArray[np.int64]]:
        """Node ids of each split, in the source's order; checked and disjoint."""
