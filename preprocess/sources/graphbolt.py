"""The layout of GraphBolt's OnDiskDataset before it is preprocessed: `metadata.yaml` and arrays.

    graph:
      nodes: [{type: paper, num: 1000}]             # one without a type: one type, "node"
      edges: [{type: "author:writes:paper", format: csv, path: edges.csv}]  # or numpy, (2, edges)
    feature_data: [{domain: node, type: paper, name: feat, format: numpy, path: feat.npy}]
    tasks: [{train_set: [{type: paper, data: [{name: seeds, format: numpy, path: ids.npy},
                                              {name: labels, format: torch, path: labels.pt}]}]}]

Text has two columns and no header.  The node array `feat` is the main one.  Seeds that are nodes
are splits, and their labels make up one array, with none for every other node; a type may be in one
such task.  Seeds that are pairs are splits of a relation; where labels say which of them are no
edges (0, with `indexes` beside them), those are the split "<name>_negative".  Other labels of
pairs, and `negative_srcs` and `negative_dsts`, are not taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.npy import NpyFile
from preprocess.files.tables import INTEGER, Table
from preprocess.pipeline import Facts
from preprocess.prepare import Preparation
from preprocess.progress import Progress
from preprocess.source import SourceRelation, SourceRows
from preprocess.sources.ends import checked
from preprocess.sources.listed import PIECE_ROWS, RowFile, read_list, write_listed
from preprocess.sources.plain import NODE, RELATION
from preprocess.sources.table import read_description
from preprocess.stages.array_file import ArrayFile

META = "metadata.yaml"
_SEEDS = ("seeds", "seed_nodes", "node_pairs")
_SETS = (("train", "train_set"), ("valid", "validation_set"), ("test", "test_set"))
_MAIN = "feat"
_LEAST_WINDOW = 1 << 16  # labels that are brought into order at a time


class _Nodes(msgspec.Struct):
    num: int
    type: str | None = None


class _Edges(msgspec.Struct):
    format: str
    path: str
    type: str | None = None


class _Feature(msgspec.Struct):
    name: str
    format: str
    path: str
    domain: str = "node"
    type: str | None = None


class _Topology(msgspec.Struct):
    nodes: list[_Nodes]
    edges: list[_Edges]
    feature_data: list[_Feature] = []


class _Data(msgspec.Struct):
    format: str
    path: str
    name: str | None = None


class _Set(msgspec.Struct):
    data: list[_Data]
    type: str | None = None


class _Task(msgspec.Struct):
    name: str | None = None
    train_set: list[_Set] | None = None
    validation_set: list[_Set] | None = None
    test_set: list[_Set] | None = None


class _Meta(msgspec.Struct):
    graph: _Topology
    feature_data: list[_Feature] | None = None
    tasks: list[_Task] | None = None


class _Seeds(NamedTuple):
    """One split of a type or a relation."""

    split: str
    place: str  # in metadata.yaml, for messages
    seeds: RowFile
    labels: RowFile | None
    has_negatives: bool


class GraphBoltSource:
    """A `Source` that is `Preparable`: labels that lie in several lists become one array.

    Raises BadInput.
    """

    layout = "graphbolt"
    undirected = False

    def __init__(self, path: Path) -> None:
        self.where, self._folder = str(path), path
        self._meta_path = path / META
        meta = read_description(self._meta_path, _Meta)
        self.num_nodes: Mapping[str, int] = self._count_nodes(meta.graph.nodes)
        self._edges: list[_EdgeFile] = []
        for i, edge in enumerate(meta.graph.edges):
            self._add_edges(f"graph.edges[{i}]", edge)
        self._num_edges: list[int] | None = None
        self.files = [self._meta_path, *(e.path for e in self._edges)]
        self._features: dict[object, list[tuple[SourceRows, RowFile]]] = {}
        for i, feature in enumerate([*(meta.feature_data or []), *meta.graph.feature_data]):
            self._add_feature(f"feature_data[{i}]", feature)
        self._seeds: dict[object, list[_Seeds]] = {}
        for i, task in enumerate(meta.tasks or []):
            self._add_task(f"tasks[{i}]", task)
        self._label_files: dict[str, Path] = {}
        self._readers: dict[SourceRows, Callable[[int], Iterator[NDArray[Any]]]] = {}
        self._pairs: dict[object, list[SourceRows]] = {}

    @classmethod
    def recognise(cls, path: Path) -> str | None:
        """A folder with `metadata.yaml`."""
        return f"{META} of GraphBolt's OnDiskDataset" if (path / META).is_file() else None

    def prepare(self, preparation: Preparation) -> None:
        """Count the edges in text, put labels into one array, tell pairs from negative pairs."""
        counts = preparation.step(
            "count edges", lambda: {"edges": [e.count() for e in self._edges]}, lambda _: ()
        )
        self._num_edges = counts["edges"]
        for number, name in enumerate(self.num_nodes):
            form = self._label_form(name)
            if form is not None:
                file = f"labels-{number}"
                path = preparation.folder / file
                window = max(_LEAST_WINDOW, preparation.mem_bytes // 8 // form.row_bytes)
                lists = [(s.seeds, s.labels) for s in self._seeds[name] if s.labels is not None]
                preparation.step(
                    f"labels of {name}",
                    partial(_write_labels, lists, form, path, window),
                    partial(_only, file),
                )
                self._label_files[name] = path
        for number, edge in enumerate(self._edges):
            for seeds in self._seeds.get(edge.ends, []):
                if seeds.has_negatives:
                    self._prepare_pairs(number, edge, seeds, preparation)

    def write_keys(self, folder: Path, progress: Progress) -> None:
        """None: ids are numbers from 0."""

    @property
    def relations(self) -> Sequence[SourceRelation]:
        """In the order of `metadata.yaml`."""
        if self._num_edges is None:
            self._num_edges = [e.count() for e in self._edges]
        return tuple(
            SourceRelation(*e.ends, num_edges, str(e.path))
            for e, num_edges in zip(self._edges, self._num_edges, strict=True)
        )

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), checked, at most `count` at a time."""
        edge, names = self._edge_of(relation), (relation.src, relation.dst)
        return checked(
            edge.pieces(max(count, 1)), (self.num_nodes[names[0]], self.num_nodes[names[1]]),
            edge.place, lambda end: f"{META} says how many {names[end]} are",
        )  # fmt: skip

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """Arrays of domain "edge"."""
        return self._arrays(self._edge_of(relation).ends)

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        """Pairs (source, target)."""
        ends = self._edge_of(relation).ends
        plain = [s for s in self._seeds.get(ends, []) if not s.has_negatives]
        return [self._readable(s.seeds, s.split) for s in plain] + self._pairs.get(ends, [])

    def features(self, node_type: str) -> list[SourceRows]:
        """Arrays of domain "node"."""
        return self._arrays(node_type)

    def label(self, node_type: str) -> SourceRows | None:
        """Of the sets of the type's task; NaN or -1 for every other node."""
        form = self._label_form(node_type)
        if form is not None and node_type in self._label_files:
            path = self._label_files[node_type]
            self._readers[form] = partial(read_list, path, form)
        return form

    def splits(self, node_type: str) -> list[SourceRows]:
        """Of the type's task."""
        return [self._readable(s.seeds, s.split) for s in self._seeds.get(node_type, [])]

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array may be reused."""
        return self._readers[rows](max(count, 1))

    def _readable(self, array: RowFile, name: str) -> SourceRows:
        rows = array.rows(name)
        self._readers[rows] = array.pieces
        return rows

    def _arrays(self, owner: object) -> list[SourceRows]:
        found = self._features.get(owner, [])
        for rows, array in found:
            self._readers[rows] = array.pieces
        return [rows for rows, _ in found]

    def _edge_of(self, relation: SourceRelation) -> "_EdgeFile":
        return next(e for e in self._edges if e.ends == relation[:3])

    def _count_nodes(self, nodes: Sequence[_Nodes]) -> dict[str, int]:
        names = [n.type if n.type is not None else NODE for n in nodes]
        for i, (name, node) in enumerate(zip(names, nodes, strict=True)):
            if names.index(name) < i or node.num < 0:
                found = (
                    f"node type {name!r} twice" if names.index(name) < i else f"{node.num} nodes"
                )
                raise self._bad(f"graph.nodes[{i}]", found, "each type once, with its nodes")
        if not names:
            raise self._bad("graph.nodes", "no types", "one at least")
        return {name: node.num for name, node in zip(names, nodes, strict=True)}

    def _add_edges(self, place: str, edge: _Edges) -> None:
        ends = self._ends(place, edge.type)
        if any(e.ends == ends for e in self._edges):
            raise self._bad(place, f"type {edge.type!r} twice", "each once")
        if edge.format not in ("csv", "numpy"):
            raise self._bad(place, f"format {edge.format!r}", "csv or numpy")
        self._edges.append(_EdgeFile(ends, self._folder / edge.path, edge.format))

    def _ends(self, place: str, name: str | None) -> tuple[str, str, str]:
        """(source type, relation, target type) of a name such as "author:writes:paper"."""
        only = next(iter(self.num_nodes))
        parts = (only, RELATION, only) if name is None else tuple(name.split(":"))
        if len(parts) != 3 or (name is None and len(self.num_nodes) > 1):
            raise self._bad(place, f"type {name!r}", "source:relation:target")
        for end in (parts[0], parts[2]):
            if end not in self.num_nodes:
                raise self._bad(place, f"node type {end!r}", f"one of {', '.join(self.num_nodes)}")
        return parts[0], parts[1], parts[2]

    def _bad(self, place: str, found: str, expected: str) -> BadInput:
        return BadInput.at(f"{self._meta_path}: {place}", found, expected, "correct it")

    def _owner(self, place: str, name: str | None, pairs: bool) -> object:
        """The node type, or the ends of the relation, that a name stands for."""
        if pairs:
            ends = self._ends(place, name)
            if all(e.ends != ends for e in self._edges):
                raise self._bad(place, f"relation {name!r}", "one under graph.edges")
            return ends
        if name is None and len(self.num_nodes) == 1:
            return next(iter(self.num_nodes))
        if name not in self.num_nodes:
            raise self._bad(place, f"node type {name!r}", f"one of {', '.join(self.num_nodes)}")
        return name

    def _add_feature(self, place: str, feature: _Feature) -> None:
        if feature.domain not in ("node", "edge"):
            raise self._bad(place, f"domain {feature.domain!r}", "node or edge")
        owner = self._owner(place, feature.type, feature.domain == "edge")
        array = RowFile(self._folder / feature.path, feature.format)
        name = "x" if feature.domain == "node" and feature.name == _MAIN else feature.name
        self._features.setdefault(owner, []).append((array.rows(name), array))
        self.files.append(array.path)

    def _add_task(self, place: str, task: _Task) -> None:
        for split, field in _SETS:
            for i, found in enumerate(getattr(task, field) or []):
                here = f"{place}.{field}[{i}]"
                owner, seeds = self._seeds_of(split, here, found)
                others = self._seeds.setdefault(owner, [])
                if any(s.split == split or not s.place.startswith(place) for s in others):
                    raise self._bad(
                        here, f"{found.type or 'seeds'} again, first in {others[0].place}",
                        "one task a type, and each split once",
                    )  # fmt: skip
                others.append(seeds)

    def _seeds_of(self, split: str, place: str, found: _Set) -> tuple[object, _Seeds]:
        names = [d.name or (_SEEDS[0], "labels", "")[min(i, 2)] for i, d in enumerate(found.data)]
        arrays = {
            name: RowFile(self._folder / d.path, d.format)
            for name, d in zip(names, found.data, strict=True)
            if name in (*_SEEDS, "labels")
        }
        self.files += [a.path for a in arrays.values()]
        seeds = next((arrays[n] for n in _SEEDS if n in arrays), None)
        if seeds is None:
            raise self._bad(place, f"data {', '.join(names) or 'of nothing'}", "one called seeds")
        if seeds.dtype.kind not in "iu" or seeds.shape[1:] not in ((), (2,)):
            raise BadInput.at(
                f"{seeds.path}: header", f"shape {seeds.shape} of {seeds.dtype}",
                "integers (seeds,) or (pairs, 2)", "correct it",
            )  # fmt: skip
        labels = arrays.get("labels")
        if labels is not None and labels.num_rows != seeds.num_rows:
            raise BadInput.at(
                f"{labels.path}: header", f"{labels.num_rows} labels",
                f"{seeds.num_rows}, one a seed of {seeds.path.name}", "are they of another set?",
            )  # fmt: skip
        pairs = seeds.shape[1:] == (2,)
        negatives = pairs and labels is not None and "indexes" in names
        return self._owner(place, found.type, pairs), _Seeds(split, place, seeds, labels, negatives)

    def _label_form(self, node_type: str) -> SourceRows | None:
        """The labels of a type as one array.  Raises BadInput: the sets do not agree."""
        labels = [s.labels for s in self._seeds.get(node_type, []) if s.labels is not None]
        if not labels:
            return None
        dtype = np.result_type(*(a.dtype for a in labels))
        if dtype.kind in "bu":  # room for -1
            dtype = np.result_type(dtype, np.int8) if dtype.itemsize < 8 else np.dtype(np.int64)
        for a in labels:
            if a.shape[1:] != labels[0].shape[1:]:
                raise BadInput.at(
                    f"{a.path}: header", f"labels of shape {a.shape[1:]}",
                    f"{labels[0].shape[1:]} as in {labels[0].path.name}", "correct it",
                )  # fmt: skip
        shape = labels[0].shape[1:] if labels[0].shape[1:] != (1,) else ()
        num_nodes = self.num_nodes[node_type]
        return SourceRows("label", dtype, shape, num_nodes, "dense", str(labels[0].path))

    def _prepare_pairs(
        self, number: int, edge: "_EdgeFile", seeds: _Seeds, preparation: Preparation
    ) -> None:
        files = {
            name: f"pairs-{number}-{name}" for name in (seeds.split, f"{seeds.split}_negative")
        }
        counts = preparation.step(
            f"pairs of {number} {seeds.split}",
            partial(_write_pairs, seeds, [preparation.folder / f for f in files.values()]),
            lambda _: files.values(),
        )
        held = self._pairs.setdefault(edge.ends, [])
        for (name, file), count in zip(files.items(), counts["pairs"], strict=True):
            rows = SourceRows(
                name, seeds.seeds.dtype, (2,), count, "dense", f"{seeds.seeds.path}: {name}"
            )
            held.append(rows)
            self._readers[rows] = partial(read_list, preparation.folder / file, rows)


class _EdgeFile:
    """The edges of a relation: text of two columns without a header, or an array (2, edges)."""

    def __init__(self, ends: tuple[str, str, str], path: Path, form: str) -> None:
        self.ends, self.path = ends, path
        self._table = Table(path, "csv", ",", header=False) if form == "csv" else None
        self._file = NpyFile(path) if form == "numpy" else None
        if self._file is not None and (
            len(self._file.shape) != 2
            or self._file.shape[0] != 2
            or self._file.dtype.kind not in "iu"
        ):
            raise BadInput.at(
                f"{path}: header", f"shape {self._file.shape} of {self._file.dtype}",
                "(2, edges) of integers", "transpose or convert it",
            )  # fmt: skip
        if self._table is not None and path.stat().st_size:
            if len(self._table.names) != 2:
                raise BadInput.at(
                    f"{path}:1", f"{len(self._table.names)} columns", "2, source and target",
                    "correct it",
                )  # fmt: skip
            next(self.pieces(1))  # a header is refused

    def count(self) -> int:
        """Edges; text is parsed once."""
        if self._file is not None:
            return int(self._file.shape[1])
        assert self._table is not None
        return self._table.num_rows() if self.path.stat().st_size else 0

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), at most `count` at a time."""
        if self._table is not None:
            if self.path.stat().st_size:
                columns = {"0": INTEGER, "1": INTEGER}
                yield from ((src, dst) for src, dst in self._table.arrays(columns, count))
            return
        assert self._file is not None
        total = self._file.shape[1]
        if not self._file.fortran_order:
            sources = self._file.pieces(0, total, count)
            yield from zip(sources, self._file.pieces(total, 2 * total, count), strict=True)
            return
        for pairs in self._file.pieces(0, 2 * total, 2 * count):  # they lie together on disk
            yield pairs[::2].copy(), pairs[1::2].copy()

    def place(self, end: int, row: int) -> str:
        """Of an id, for messages."""
        if self._table is not None:
            return self._table.place(row)
        return f"{self.path}[{end}, {row}]"


def _write_pairs(seeds: _Seeds, paths: Sequence[Path]) -> Facts:
    """Pairs that are edges to the first file, the others to the second; how many there are."""
    assert seeds.labels is not None
    counts = [0, 0]
    for path in paths:
        path.unlink(missing_ok=True)
    with (
        ArrayFile(paths[0], seeds.seeds.dtype) as yes,
        ArrayFile(paths[1], seeds.seeds.dtype) as no,
    ):
        row = 0
        for pairs, labels in zip(
            seeds.seeds.pieces(PIECE_ROWS), seeds.labels.pieces(PIECE_ROWS), strict=True
        ):
            flags = labels.reshape(pairs.shape[0], -1)[:, 0]
            bad = (flags != 0) & (flags != 1)
            if bad.any():
                at = int(np.argmax(bad))
                raise BadInput.at(
                    f"{seeds.labels.path}[{row + at}]", f"label {flags[at]}", "0 or 1", "correct it"
                )
            for i, (file, chosen) in enumerate(((yes, flags == 1), (no, flags == 0))):
                file.append(pairs[chosen])
                counts[i] += int(chosen.sum())
            row += pairs.shape[0]
    return {"pairs": counts}


def _write_labels(
    lists: Sequence[tuple[RowFile, RowFile]], form: SourceRows, path: Path, window: int
) -> Facts:
    write_listed(lists, form, path, window)
    return {}


def _only(file: str, _: Facts) -> list[str]:
    return [file]
