"""What a source of graphs offers, whatever its layout: chunks of edges and rows, nothing whole."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

EdgePieces = Iterator[tuple[NDArray[Any], NDArray[Any]]]  # sources and targets


class SourceRows(NamedTuple):
    """One array of rows: of a type, a row a node; of a relation, a row an edge; or a split.

    A split of a type is a list of node ids, one of a relation a list of edge positions, or of pairs
    (source id, target id), row_shape (2,).
    """

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]  # () where a row is one number
    num_rows: int
    held: str  # "dense" or "csr"
    where: str  # file, for messages

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize


class SourceRelation(NamedTuple):
    src: str
    name: str
    dst: str
    num_edges: int
    where: str  # file, for messages


class Source(Protocol):
    """A homogeneous or heterogeneous graph on disk.  Headers are checked when it is opened.

    Ids of nodes are per type, from 0.  Raises BadInput, from everything here.
    """

    @property
    def layout(self) -> str:
        """Name of the layout, as `--layout` takes it."""

    @property
    def where(self) -> str:
        """Its path, for messages."""

    @property
    def files(self) -> Sequence[Path]:
        """Every file that is read: a resumed ingest checks that they are the same."""

    @property
    def undirected(self) -> bool:
        """Whether the layout's owner adds the reverse of each edge when loading it."""

    @property
    def num_nodes(self) -> Mapping[str, int]:
        """Nodes of each type, in the order of their ranges in a store."""

    @property
    def relations(self) -> Sequence[SourceRelation]:
        """All relations, in the order of their edge types in a store."""

    def divides(self, of: SourceRelation | SourceRows) -> bool:
        """Whether reading may begin anywhere in the edges of a relation, or in an array.

        Tasks elsewhere read ranges of these: the source is pickled, and opens its files.
        """

    def edges(self, relation: SourceRelation, count: int, span: range | None = None) -> EdgePieces:
        """(src, dst) in the source's order, at most `count` at a time; arrays are reused.

        span   those to read: some, if the relation divides; None: all

        Ids are checked each time: BadInput names the position of one that is out of range.
        """

    def edge_rows(self, relation: SourceRelation) -> Sequence[SourceRows]:
        """Arrays of a relation, a row an edge in the order of `edges`, in a fixed order.

        Of these, "weight" (one number a row) and "time" (one integer a row) guide sampling.
        """

    def edge_splits(self, relation: SourceRelation) -> Sequence[SourceRows]:
        """Splits of a relation, for link prediction.  Ids are not checked."""

    def features(self, node_type: str) -> Sequence[SourceRows]:
        """Arrays of a type other than labels, in a fixed order; the main one is named "x"."""

    def label(self, node_type: str) -> SourceRows | None:
        """Labels of a type: one number a row, or a row of them (multi-label); -1 or NaN: none."""

    def splits(self, node_type: str) -> Sequence[SourceRows]:
        """Splits of a type: lists of node ids, in the source's order.  Ids are not checked."""

    def rows(
        self, rows: SourceRows, count: int, span: range | None = None
    ) -> Iterator[NDArray[Any]]:
        """Dense rows in order, (at most `count`, *row_shape) at a time; the array is reused.

        span   those to read: some, if the array divides; None: all
        """
