"""The source that every layout is: a layout opens its files and adds here what lies in them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.kernels.edges import first_outside
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import Facts
from preprocess.sources.source import EdgePieces, SourceRelation, SourceRows

NODE, RELATION = "node", "to"  # of a graph whose layout names no types

Ends = tuple[str, str, str]  # source type, relation, target type
Owner = str | Ends  # what an array is of: a node type or a relation


class RowStream(Protocol):
    """An array of rows that is read in order."""

    @property
    def name(self) -> str:
        """As its owner has it."""

    @property
    def form(self) -> SourceRows:
        """What it is; a list in text is counted at first."""

    @property
    def path(self) -> Path | None:
        """The file of the source that it is in; None of what a preparation made."""

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        """(at most `count`, *row_shape) at a time; the array is reused.  Raises BadInput."""


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
        """In it; text without a count is parsed once."""

    def pieces(self, count: int) -> EdgePieces:
        """(src, dst), at most `count` at a time, not checked; arrays may be reused."""

    def place(self, end: int, row: int) -> str:
        """Of the source (0) or the target (1) of an edge, for messages."""


@runtime_checkable
class Seekable(Protocol):
    """Edges or rows that can be read from anywhere."""

    @property
    def seeks(self) -> bool:
        """Whether that costs no more than to read from the beginning."""

    def pieces(self, count: int, span: range | None = None) -> Iterator[Any]:
        """What is in the span; None: all."""


class GraphSource:
    """A `Source` of what a layout adds: edges, arrays, labels and splits.

    A layout derives from it and fills `num_nodes`; it is opened by its path.  Raises BadInput.
    """

    layout = ""  # as `--layout` takes it
    undirected = False
    marks: tuple[str, ...] = ()  # files by which a folder is of this layout; (): `recognise` tells

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """What of this layout is there, by the names of files; None where it is another."""
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
        """Files that are read besides those of edges and arrays."""
        self._files.update(paths)

    def add_edges(self, ends: Ends, edges: EdgeFile) -> None:
        self._edges[ends] = edges
        self._files.add(edges.path)

    def add_array(self, owner: Owner, rows: RowStream) -> None:
        """An array of a type or a relation.  Raises BadInput: another has its name."""
        self._add(self._arrays.setdefault(owner, []), "array", rows)

    def add_label(self, node_type: str, rows: RowStream) -> None:
        held: list[RowStream] = []
        self._add(held, "label", rows)
        self._labels[node_type] = rows

    def add_split(self, owner: Owner, rows: RowStream) -> None:
        """A split of a type or a relation.  Raises BadInput: another has its name."""
        self._add(self._splits.setdefault(owner, []), "split", rows)

    def check_nodes(self, where: object) -> None:
        """Raises BadInput: there are no nodes at all."""
        if not any(self.num_nodes.values()):
            raise BadInput.at(where, "a graph with no nodes", "at least one", "is it whole?")

    def write_keys(self, folder: Path, progress: Progress) -> None:
        """None, where ids are numbers from 0."""

    @property
    def num_nodes(self) -> dict[str, int]:
        """Nodes of each type, in the order of their ranges in a store."""
        return self._num_nodes

    @property
    def files(self) -> list[Path]:
        return sorted(self._files)

    @property
    def relations(self) -> tuple[SourceRelation, ...]:
        return tuple(SourceRelation(*ends, e.num_edges, e.where) for ends, e in self._edges.items())

    def edges(self, relation: SourceRelation, count: int, span: range | None = None) -> EdgePieces:
        """(src, dst), checked, at most `count` at a time."""
        edges, done = self._edges[relation[:3]], 0 if span is None else span.start
        for piece in _pieces(edges, relation.num_edges, count, span):
            for end, ids in enumerate(piece):
                owner = (relation.src, relation.dst)[end]
                check_ids(ids, self.num_nodes[owner], owner, edges.place, end, done)
            yield piece
            done += piece[0].size

    def divides(self, of: SourceRelation | SourceRows) -> bool:
        """Whether its file can be read from anywhere."""
        held = self._readers[of] if isinstance(of, SourceRows) else self._edges[of[:3]]
        return isinstance(held, Seekable) and held.seeks

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        return self._readable(self._arrays.get(relation[:3], []))

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        return self._readable(self._splits.get(relation[:3], []))

    def features(self, node_type: str) -> list[SourceRows]:
        return self._readable(self._arrays.get(node_type, []))

    def label(self, node_type: str) -> SourceRows | None:
        held = self._labels.get(node_type)
        return None if held is None else self._readable([held])[0]

    def splits(self, node_type: str) -> list[SourceRows]:
        return self._readable(self._splits.get(node_type, []))

    def rows(
        self, rows: SourceRows, count: int, span: range | None = None
    ) -> Iterator[NDArray[Any]]:
        """Rows in order; the array may be reused, and is not to be written to."""
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


def _pieces(
    held: RowStream | EdgeFile, total: int, count: int, span: range | None
) -> Iterator[Any]:
    if span is None or len(span) == total:
        return held.pieces(max(count, 1))
    assert isinstance(held, Seekable)
    return held.pieces(max(count, 1), span)


class MadeRows:
    """Rows that a preparation writes to a file of its own, without a header."""

    path = None

    def __init__(self, form: SourceRows, made: Path | None = None) -> None:
        """`made` may be set later: nothing is read before the preparation."""
        self.name, self.form, self.made = form.name, form, made

    def write(self, window: int, none: float, fill: Callable[[int, NDArray[Any]], None]) -> Facts:
        """Make the file in one pass for `window` nodes: `fill(first, rows)` enters what there is.

        none   stands for what is not entered
        """
        assert self.made is not None
        self.made.unlink(missing_ok=True)
        form = self.form
        buffer = np.empty((min(window, form.num_rows), *form.row_shape), form.dtype)
        with ArrayFile(self.made, form.dtype) as out:
            for first in range(0, form.num_rows, window):
                rows = buffer[: min(window, form.num_rows - first)]
                rows[:] = none
                fill(first, rows)
                out.append(rows)
        return {}

    def pieces(self, count: int) -> Iterator[NDArray[Any]]:
        assert self.made is not None
        form = self.form
        width = form.row_bytes // form.dtype.itemsize
        with ArrayFile(self.made, form.dtype) as file:
            for piece in file.pieces(0, form.num_rows * width, count * width):
                yield piece.reshape(-1, *form.row_shape)


def check_ids(
    ids: NDArray[Any],
    num_nodes: int,
    owner: str,
    place: Callable[[int, int], str],
    end: int = 0,
    done: int = 0,
) -> None:
    """Raises BadInput: a node of the type `owner` that there is not.

    place   says where an id stands, of an `end` (0 or 1) and a row
    done    rows before these
    """
    bad = int(first_outside(ids, num_nodes))
    if bad >= 0:
        raise BadInput.at(
            place(end, done + bad), f"node id {ids[bad]}", f"0 to {num_nodes - 1}",
            f"there are {num_nodes} nodes of type {owner}",
        )  # fmt: skip


def split_ends(name: str, separator: str, where: object) -> Ends:
    """(source type, relation, target type) of the name of a folder.  Raises BadInput."""
    parts = name.split(separator)
    if len(parts) != 3:
        raise BadInput.at(
            where, f"{len(parts)} names", separator.join(("source", "relation", "target")),
            "rename it",
        )  # fmt: skip
    return parts[0], parts[1], parts[2]
