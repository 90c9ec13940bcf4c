"""The layout of GraphBolt's OnDiskDataset before preprocessing: `metadata.yaml` and arrays.

docs/layouts.md lists the supported parts.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.files.npy import NpyFile
from preprocess.ingest.prepare import Preparation
from preprocess.pipeline.stage import Facts
from preprocess.sources.arrays import ArrayRows, EdgeArray, MadeRows, open_array
from preprocess.sources.source import NODE, RELATION, Ends, Owner, Source, SourceRows, check_ids
from preprocess.sources.sourcefiles import read_description
from preprocess.sources.text import TextEdges

META = "metadata.yaml"
_SEEDS = ("seeds", "seed_nodes", "node_pairs")
_SETS = (("train", "train_set"), ("valid", "validation_set"), ("test", "test_set"))
_MAIN = "feat"
_MIN_WINDOW = 1 << 16  # labels brought into order at a time
_PIECE_ROWS = 1 << 14


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
    place: str  # place in metadata.yaml, for messages
    ids: ArrayRows
    labels: ArrayRows | None
    has_negatives: bool


class GraphBoltSource(Source):
    """A `Source` that is `Preparable`: the labels of several lists become one array."""

    layout, marks = "graphbolt", (META,)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder, self._meta_path = path, path / META
        meta = read_description(self._meta_path, _Meta)
        self.add_files(self._meta_path)
        self._count_nodes(meta.graph.nodes)
        for i, edge in enumerate(meta.graph.edges):
            self._open_edges(f"graph.edges[{i}]", edge)
        for i, feature in enumerate([*(meta.feature_data or []), *meta.graph.feature_data]):
            self._open_feature(f"feature_data[{i}]", feature)
        self._seeds: dict[Owner, list[_Seeds]] = {}
        for i, task in enumerate(meta.tasks or []):
            self._open_task(f"tasks[{i}]", task)
        self._made: dict[str, MadeRows] = {}  # labels of each type
        for name in self.num_nodes:
            form = self._label_form(name)
            if form is not None:
                self._made[name] = MadeRows(form)
                self.add_label(name, self._made[name])

    def prepare(self, preparation: Preparation) -> None:
        """Count edges in text, merge labels into one array, separate pairs from negative pairs."""
        texts = [e for e in self._edges.values() if isinstance(e, TextEdges)]
        counts = preparation.record(
            "count edges", lambda: {"edges": [e.num_edges for e in texts]}, ()
        )
        for edges, count in zip(texts, counts["edges"], strict=True):
            edges.num_edges = count
        for number, (name, rows) in enumerate(self._made.items()):
            rows.made = preparation.folder / f"labels-{number}"
            window = max(_MIN_WINDOW, preparation.mem_bytes // 4 // rows.form.row_bytes)
            lists = [(s.ids, s.labels) for s in self._seeds[name] if s.labels is not None]
            preparation.record(
                f"labels of {name}",
                partial(write_listed, lists, rows, window, name),
                [rows.made.name],
            )
        for number, ends in enumerate(self._edges):
            for seeds in self._seeds.get(ends, []):
                if seeds.has_negatives:
                    self._prepare_pairs(number, ends, seeds, preparation)

    def _count_nodes(self, nodes: Sequence[_Nodes]) -> None:
        for i, node in enumerate(nodes):
            name = node.type if node.type is not None else NODE
            if name in self.num_nodes or node.num < 0:
                twice = name in self.num_nodes
                found = f"node type {name!r} twice" if twice else f"{node.num} nodes"
                raise self._bad(f"graph.nodes[{i}]", found, "each type once, with its nodes")
            self.num_nodes[name] = node.num
        if not nodes:
            raise self._bad("graph.nodes", "no types", "one at least")

    def _open_edges(self, place: str, edge: _Edges) -> None:
        ends, path = self._ends(place, edge.type), self._folder / edge.path
        if ends in self._edges:
            raise self._bad(place, f"type {edge.type!r} twice", "each once")
        if edge.format not in ("csv", "numpy"):
            raise self._bad(place, f"format {edge.format!r}", "csv or numpy")
        is_text = edge.format == "csv"
        self.add_edges(ends, TextEdges(path) if is_text else EdgeArray(NpyFile(path)))

    def _ends(self, place: str, name: str | None) -> Ends:
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

    def _owner(self, place: str, name: str | None, pairs: bool) -> Owner:
        """The node type, or the ends of the relation, that a name refers to."""
        if pairs:
            ends = self._ends(place, name)
            if ends not in self._edges:
                raise self._bad(place, f"relation {name!r}", "one under graph.edges")
            return ends
        if name is None and len(self.num_nodes) == 1:
            return next(iter(self.num_nodes))
        if name not in self.num_nodes:
            raise self._bad(place, f"node type {name!r}", f"one of {', '.join(self.num_nodes)}")
        return name

    def _open_feature(self, place: str, feature: _Feature) -> None:
        if feature.domain not in ("node", "edge"):
            raise self._bad(place, f"domain {feature.domain!r}", "node or edge")
        owner = self._owner(place, feature.type, feature.domain == "edge")
        name = "x" if feature.domain == "node" and feature.name == _MAIN else feature.name
        array = open_array(self._folder / feature.path, feature.format)
        self.add_array(owner, ArrayRows(name, array))

    def _open_task(self, place: str, task: _Task) -> None:
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
                if not seeds.has_negatives:
                    self.add_split(owner, seeds.ids)

    def _seeds_of(self, split: str, place: str, found: _Set) -> tuple[Owner, _Seeds]:
        names = [d.name or (_SEEDS[0], "labels", "")[min(i, 2)] for i, d in enumerate(found.data)]
        arrays = {}
        for name, d in zip(names, found.data, strict=True):
            if name in (*_SEEDS, "labels"):
                path = self._folder / d.path
                self.add_files(path)
                arrays[name] = ArrayRows(split, open_array(path, d.format))
        seeds = next((arrays[n] for n in _SEEDS if n in arrays), None)
        if seeds is None:
            raise self._bad(place, f"data {', '.join(names) or 'of nothing'}", "one called seeds")
        form, labels = seeds.form, arrays.get("labels")
        if form.dtype.kind not in "iu" or form.row_shape not in ((), (2,)):
            raise BadInput.at(
                f"{form.where}: header",
                f"shape {(form.num_rows, *form.row_shape)} of {form.dtype}",
                "integers (seeds,) or (pairs, 2)", "correct it",
            )  # fmt: skip
        if labels is not None and labels.form.num_rows != form.num_rows:
            raise BadInput.at(
                f"{labels.path}: header", f"{labels.form.num_rows} labels",
                f"{form.num_rows}, one a seed of {seeds.path.name}", "are they of another set?",
            )  # fmt: skip
        pairs = form.row_shape == (2,)
        negatives = pairs and labels is not None and "indexes" in names
        owner = self._owner(place, found.type, pairs)
        return owner, _Seeds(split, place, seeds, labels, negatives)

    def _label_form(self, node_type: str) -> SourceRows | None:
        """Form of a type's labels as one array.  Raises BadInput: the sets are not consistent."""
        held = self._seeds.get(node_type, [])
        forms = [s.labels.form for s in held if s.labels is not None]
        if not forms:
            return None
        dtype = np.result_type(*(form.dtype for form in forms))
        if dtype.kind in "bu":  # room for -1
            dtype = np.result_type(dtype, np.int8) if dtype.itemsize < 8 else np.dtype(np.int64)
        shape = forms[0].row_shape
        for form in forms:
            if form.row_shape != shape:
                raise BadInput.at(
                    f"{form.where}: header", f"labels of shape {form.row_shape}",
                    f"{shape} as in {Path(forms[0].where).name}", "correct it",
                )  # fmt: skip
        shape = () if shape == (1,) else shape
        return SourceRows("label", dtype, shape, self.num_nodes[node_type], "dense", forms[0].where)

    def _prepare_pairs(
        self, number: int, ends: Ends, seeds: _Seeds, preparation: Preparation
    ) -> None:
        names = (seeds.split, f"{seeds.split}_negative")
        paths = [preparation.folder / f"pairs-{number}-{name}" for name in names]
        counts = preparation.record(
            f"pairs of {number} {seeds.split}",
            partial(_write_pairs, seeds, paths),
            [path.name for path in paths],
        )
        for name, path, count in zip(names, paths, counts["pairs"], strict=True):
            where = f"{seeds.ids.form.where}: {name}"
            form = seeds.ids.form._replace(name=name, num_rows=count, where=where)
            self.add_split(ends, MadeRows(form, path))


def _pieces(
    seeds: ArrayRows, labels: ArrayRows
) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """(rows before, seeds, their labels), some at a time."""
    row = 0
    for ids, values in zip(seeds.pieces(_PIECE_ROWS), labels.pieces(_PIECE_ROWS), strict=True):
        yield row, ids, values.reshape(ids.shape[0], -1)
        row += ids.shape[0]


def _write_pairs(seeds: _Seeds, paths: Sequence[Path]) -> Facts:
    """Write pairs that are edges to the first file, the others to the second; returns counts."""
    assert seeds.labels is not None
    for path in paths:
        path.unlink(missing_ok=True)
    dtype = seeds.ids.form.dtype
    with ArrayFile(paths[0], dtype) as yes, ArrayFile(paths[1], dtype) as no:
        for row, pairs, labels in _pieces(seeds.ids, seeds.labels):
            flags = labels[:, 0]
            bad = (flags != 0) & (flags != 1)
            if bad.any():
                at = int(np.argmax(bad))
                raise BadInput.at(
                    f"{seeds.labels.path}[{row + at}]", f"label {flags[at]}", "0 or 1", "correct it"
                )
            yes.append(pairs[flags == 1])
            no.append(pairs[flags == 0])
        return {"pairs": [yes.size // 2, no.size // 2]}


def write_listed(
    lists: Sequence[tuple[ArrayRows, ArrayRows]], rows: MadeRows, window: int, owner: str = NODE
) -> Facts:
    """Merge lists of nodes and their values into one array, with a pass for each `window` nodes.

    rows   the array; nodes that are in no list get NaN, or -1 for integers

    Raises BadInput: an id out of range.
    """
    num_nodes = rows.form.num_rows

    def fill(first: int, labels: NDArray[Any]) -> None:
        flat = labels.reshape(labels.shape[0], -1)
        for seeds, values in lists:
            for row, ids, piece in _pieces(seeds, values):
                check_ids(ids, num_nodes, owner, partial(_place, seeds.path), done=row)
                here = ids.astype(np.int64) - first
                inside = (here >= 0) & (here < flat.shape[0])
                flat[here[inside]] = piece[inside]

    return rows.write(window, np.nan if rows.form.dtype.kind == "f" else -1, fill)


def _place(path: Path, _: int, row: int) -> str:
    return f"{path}[{row}]"
