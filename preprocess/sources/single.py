"""What sources of one node type and one relation have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.source import SourceRelation, SourceRows
from preprocess.sources.ends import checked
from preprocess.sources.plain import NODE, RELATION

Reader = Callable[[int], Iterator[NDArray[Any]]]


class SingleSource(ABC):
    """A `Source` of one type "node" and one relation "to"; arrays are added to it.

    Raises BadInput.
    """

    undirected = False

    def __init__(
        self, path: Path, files: Sequence[Path], num_nodes: int, num_edges: int, edges_where: str
    ) -> None:
        """`edges_where` says what `num_nodes` comes from too."""
        if num_nodes == 0:
            raise BadInput.at(edges_where, "no nodes", "one at least", "is it the right file?")
        self.where, self.files = str(path), list(files)
        self.num_nodes = {NODE: num_nodes}
        self.relations = (SourceRelation(NODE, RELATION, NODE, num_edges, edges_where),)
        self._features: list[SourceRows] = []
        self._label: SourceRows | None = None
        self._splits: list[SourceRows] = []
        self._readers: dict[SourceRows, Reader] = {}

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), checked, at most `count` at a time."""
        num_nodes, pieces = self.num_nodes[NODE], self._edge_pieces(max(count, 1))
        remark = f"{relation.where} is of {num_nodes} nodes"
        return checked(pieces, (num_nodes, num_nodes), self._place, lambda _: remark)

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """None, unless the layout has some."""
        return []

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        return []

    def features(self, node_type: str) -> list[SourceRows]:
        """Arrays of the nodes."""
        return self._features

    def label(self, node_type: str) -> SourceRows | None:
        """Labels of the nodes."""
        return self._label

    def splits(self, node_type: str) -> list[SourceRows]:
        """Splits of the nodes."""
        return self._splits

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array is reused."""
        return self._readers[rows](max(count, 1))

    @abstractmethod
    def _edge_pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), not checked."""

    @abstractmethod
    def _place(self, end: int, row: int) -> str:
        """Of the source (0) or the target (1) of an edge, for messages."""
