"""What a source of graphs offers, whatever its layout: chunks of edges and rows, nothing whole."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class SourceRows(NamedTuple):
    """One array of rows: features or labels of a type, a row a node, or the ids of a split."""

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]  # () where a row is one number
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
    """A homogeneous or heterogeneous graph on disk.  Headers are checked when it is opened."""

    @property
    def where(self) -> str:
        """Its path, for messages."""

    @property
    def num_nodes(self) -> Mapping[str, int]:
        """Nodes of each type."""

    @property
    def relations(self) -> Sequence[SourceRelation]:
        """All relations."""

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst) in the source's order, at most `count` at a time; arrays are reused.

        Ids are checked each time: BadInput names the position of one that is out of range.
        """

    def features(self, node_type: str) -> Sequence[SourceRows]:
        """Feature arrays of a type, in a fixed order."""

    def label(self, node_type: str) -> SourceRows | None:
        """Labels of a type."""

    def splits(self, node_type: str) -> Sequence[SourceRows]:
        """Splits of a type: lists of node ids, in the source's order.  Ids are not checked."""

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Dense rows in order, (at most `count`, *row_shape) at a time; the array is reused."""
