"""A graph on disk, in any layout, read in chunks of edges and rows."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray
from preprocess.errors import BadInput
from preprocess.kernels.edges import first_outside
from preprocess.pipeline.progress import Progress

NODE, RELATION = "node", "to"  # names used if the layout has no types
REVERSE = "rev_"  # prefix of the name of an added reverse relation

EdgePieces = Iterator[tuple[NDArray[Any], NDArray[Any]]]  # sources and targets
Ends = tuple[str, str, str]  # source type, relation, target type
Owner = str | Ends  # what an array belongs to: a node type or a relation


class SourceRows(NamedTuple):
    """An array of rows: one row for each node of a type or edge of a relation, or a split.

    A split of a type is a list of node ids; a split of a relation is a list of edge positions, or
    of pairs (source id, target id) with row_shape (2,).
    """

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]  # () if a row is a single number
    num_rows: int
    held: str  # "dense" or "csr"
    where: str  # file, for messages
    stored: RowArray | None = None  # if the source is a store: its array, which is copied as it is

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of one read of the whole array."""
        return self.num_rows * self.row_bytes


class SourceRelation(NamedTuple):
    src: str
    name: str
    dst: str
    num_edges: int
    where: str  # file, for messages


class RowStream(Protocol):
    """An array of rows that is read in order."""

    @property
    def name(self) -> str:
        """Name of the array in its type or relation."""

    @property
    def form(self) -> SourceRows:
        """Its shape and dtype; a list in text is parsed once to count it."""

    @property
    def path(self) -> Path | None:
        """The source file that it is in; None if a preparation made it."""

    def pieces(self, count: int, /) -> Iterator[NDArray[Any]]:
        """(at most `count`, *row_shape) at a time; the array is reused.  Raises BadInput."""


class Rows(NamedTuple):
    """A `RowStream` whose rows a function reads."""

    form: SourceRows
    pieces: Callable[[int], Iterator[NDArray[Any]]]
    path: Path | None = None

    @property
    def name(self) -> str:
        return self.form.name


class EdgeFile(Protocol):
    """The edges of a relation in a file."""

    @property
    def path(self) -> Path:
        """The file that holds them."""

    @property
    def where(self) -> str:
        """The file and the place in it, for messages."""

    @property
    def num_edges(self) -> int:
        """Edges in the file; text without a count is parsed once."""

    def pieces(self, count: int) -> EdgePieces:
        """(src, dst), at most `count` at a time, ids not checked; arrays may be reused."""

    def place(self, end: int, row: int) -> str:
        """The place in the file of an edge's source (`end` 0) or target (1), for messages."""


class Source:
    """A homogeneous or heterogeneous graph on disk.  Headers are checked when it is opened.

    Each layout is a subclass, constructed with a path, that fills `num_nodes`, and adds edges,
    arrays, labels and splits.  Node ids count from 0 in each type.  Raises BadInput, everywhere.
    """

    layout = ""  # name for `--layout`
    undirected = False  # whether the original loader of this data set adds reverse edges
    marks: tuple[str, ...] = ()  # files that identify this layout; (): override `recognise`

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """Describe the files that identify this layout; None if it is another."""
        there = cls.marks and all((path / name).is_file() for name in cls.marks)
        return " and ".join(cls.marks) if there else None

    def __init__(self, where: Path, num_nodes: Mapping[str, int] | None = None) -> None:
        self.where, self._num_nodes = str(where), dict(num_nodes or {})
        self._edges: dict[Ends, EdgeFile] = {}
        self._arrays: dict[Owner, list[RowStream]] = {}
        self._splits: dict[Owner, list[RowStream]] = {}
        self._labels: dict[str, RowStream] = {}
        self._readers: dict[SourceRows, RowStream] = {}
        self._files: set[Path] = set()

    def add_files(self, *paths: Path) -> None:
        """Register files that are read besides those of edges and arrays."""
        self._files.update(paths)

    def add_edges(self, ends: Ends, edges: EdgeFile) -> None:
        self._edges[ends] = edges
        self._files.add(edges.path)

    def add_array(self, owner: Owner, rows: RowStream) -> None:
        """Add an array of a type or a relation.  The main one of a type is named "x"; "weight" (one
        number a row) and "time" (one integer a row) of a relation guide sampling.

        Raises BadInput: the name is taken.
        """
        self._add(self._arrays.setdefault(owner, []), "array", rows)

    def add_label(self, node_type: str, rows: RowStream) -> None:
        """Add labels: a number, or a row of them (multi-label), for each node; -1 or NaN: none."""
        self._add([], "label", rows)
        self._labels[node_type] = rows

    def add_split(self, owner: Owner, rows: RowStream) -> None:
        """Add a split of a type or a relation.  Raises BadInput: the name is taken."""
        self._add(self._splits.setdefault(owner, []), "split", rows)

    def check_nodes(self, where: object) -> None:
        """Raises BadInput if there are no nodes at all."""
        if not any(self.num_nodes.values()):
            raise BadInput.at(where, "a graph with no nodes", "at least one", "is it whole?")

    def write_keys(self, folder: Path, progress: Progress) -> None:
        """Does nothing if ids are numbers from 0; see `Preparable`."""

    def with_reverses(self, undirected: bool) -> Self:
        """The source itself or, if `undirected`, a copy with reverse relations.

        For each relation (a, name, b) with a != b it adds (b, rev_name, a).  Reverse edges have the
        ids and arrays of the original ones, but no splits.  Raises BadInput: the source has a
        relation of that name itself.
        """
        if not undirected:
            return self
        whole = copy(self)
        whole._edges, whole._arrays = dict(self._edges), dict(self._arrays)
        for (src, name, dst), edges in self._edges.items():
            added = dst, REVERSE + name, src
            if src == dst:
                continue
            if added in self._edges:
                raise BadInput.at(
                    edges.where, f"a relation {added[1]} from {dst} to {src}",
                    "none where reverses are to be added", "leave --undirected out",
                )  # fmt: skip
            whole._edges[added] = _Reversed(edges, name)
            whole._arrays[added] = self._arrays.get((src, name, dst), [])
        return whole

    def reverse_of(self, relation: SourceRelation) -> str:
        """Name of the relation that an added one reverses; "" if the source has the relation."""
        edges = self._edges[relation[:3]]
        return edges.name if isinstance(edges, _Reversed) else ""

    @property
    def num_nodes(self) -> dict[str, int]:
        """Nodes of each type, in the order of their ranges in a store."""
        return self._num_nodes

    @property
    def files(self) -> list[Path]:
        """Every file that is read; a resumed ingest checks that they have not changed."""
        return sorted(self._files)

    @property
    def relations(self) -> tuple[SourceRelation, ...]:
        """The relations, in the order of their edge types in a store."""
        return tuple(SourceRelation(*ends, e.num_edges, e.where) for ends, e in self._edges.items())

    def edges(self, relation: SourceRelation, count: int, span: range | None = None) -> EdgePieces:
        """(src, dst) in the source's order, at most `count` at a time; arrays are reused.

        span   edges to read: a range, if `divides(relation)`; None: all

        Ids are checked each time; BadInput names the position of an id that is out of range.
        """
        edges, done = self._edges[relation[:3]], 0 if span is None else span.start
        for piece in _pieces(edges, relation.num_edges, count, span):
            for end, ids in enumerate(piece):
                owner = (relation.src, relation.dst)[end]
                check_ids(ids, self.num_nodes[owner], owner, edges.place, end, done)
            yield piece
            done += piece[0].size

    def divides(self, of: SourceRelation | SourceRows) -> bool:
        """Whether ranges of a relation's edges, or of an array, can be read.

        Tasks in other processes read such ranges: the source is pickled, and reopens its files.
        """
        held = self._readers[of] if isinstance(of, SourceRows) else self._edges[of[:3]]
        return _seeks(held)

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """Arrays of a relation, in a fixed order; their rows are in the order of `edges`."""
        return self._readable(self._arrays.get(relation[:3], []))

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        """Splits of a relation, for link prediction.  Ids are not checked."""
        return self._readable(self._splits.get(relation[:3], []))

    def features(self, node_type: str) -> list[SourceRows]:
        """Arrays of a type other than labels, in a fixed order."""
        return self._readable(self._arrays.get(node_type, []))

    def label(self, node_type: str) -> SourceRows | None:
        held = self._labels.get(node_type)
        return None if held is None else self._readable([held])[0]

    def splits(self, node_type: str) -> list[SourceRows]:
        """Splits of a type: lists of node ids, in the source's order.  Ids are not checked."""
        return self._readable(self._splits.get(node_type, []))

    def rows(
        self, rows: SourceRows, count: int, span: range | None = None
    ) -> Iterator[NDArray[Any]]:
        """Dense rows in order, (at most `count`, *row_shape) at a time.

        span   rows to read: a range, if `divides(rows)`; None: all

        The array may be reused, and must not be modified.
        """
        return _pieces(self._readers[rows], rows.num_rows, count, span)

    def _add(self, others: list[RowStream], what: str, rows: RowStream) -> None:
        twice = next((r for r in others if r.name == rows.name), None)
        if twice is not None:
            raise BadInput.at(
                rows.form.where, f"{what} {rows.name!r} again", f"it once, in {twice.form.where}",
                "rename one of them, or leave it out",
            )  # fmt: skip
        others.append(rows)
        if rows.path is not None:
            self._files.add(rows.path)

    def _readable(self, arrays: list[RowStream]) -> list[SourceRows]:
        forms = [rows.form for rows in arrays]
        self._readers.update(zip(forms, arrays, strict=True))
        return forms


def _seeks(held: RowStream | EdgeFile) -> bool:
    """Whether reading may begin anywhere, so that `pieces` takes a span."""
    return bool(getattr(held, "seeks", False))


def _pieces(held: Any, total: int, count: int, span: range | None) -> Iterator[Any]:
    whole = span is None or len(span) == total
    pieces: Iterator[Any] = held.pieces(max(count, 1), *(() if whole else (span,)))
    return pieces


class _Reversed:
    """The edges of another relation, reversed."""

    def __init__(self, edges: EdgeFile, name: str) -> None:
        self._edges, self.path, self.where, self.name = edges, edges.path, edges.where, name
        self.seeks = _seeks(edges)

    @property
    def num_edges(self) -> int:
        return self._edges.num_edges

    def pieces(self, count: int, span: range | None = None) -> EdgePieces:
        for src, dst in _pieces(self._edges, self.num_edges, count, span):
            yield dst, src

    def place(self, end: int, row: int) -> str:
        return self._edges.place(1 - end, row)


def check_ids(
    ids: NDArray[Any],
    num_nodes: int,
    owner: str,
    place: Callable[[int, int], str],
    end: int = 0,
    done: int = 0,
) -> None:
    """Raises BadInput if an id is not that of a node of the type `owner`.

    place   (end, row) -> the place of an id, for messages; `end` is passed to it
    done    number of rows before these
    """
    bad = int(first_outside(ids, num_nodes))
    if bad >= 0:
        raise BadInput.at(
            place(end, done + bad), f"node id {ids[bad]}", f"0 to {num_nodes - 1}",
            f"there are {num_nodes} nodes of type {owner}",
        )  # fmt: skip


def split_ends(name: str, separator: str, where: object) -> Ends:
    """Split the name of a folder into (source type, relation, target type).  Raises BadInput."""
    parts = name.split(separator)
    if len(parts) != 3:
        raise BadInput.at(
            where, f"{len(parts)} names", separator.join(("source", "relation", "target")),
            "rename it",
        )  # fmt: skip
    return parts[0], parts[1], parts[2]
