"""Graphs whose nodes and edges are rows of tables: what every layout of tables has in common."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from preprocess.contents import check_length
from preprocess.errors import BadInput
from preprocess.files.tables import KeyWriter
from preprocess.pipeline import Facts
from preprocess.prepare import Preparation
from preprocess.progress import Progress
from preprocess.source import SourceRelation, SourceRows
from preprocess.sources.columns import EdgeTables, NodeTables, TableArray, Tables, list_splits
from preprocess.sources.columns import Splits as SplitColumns
from preprocess.sources.nodeids import INTEGERS, TEXTS, NodeIds
from preprocess.stages.array_file import ArrayFile

KEY = "key"  # the array of a type that holds its owner's integer ids
_INT64 = np.dtype(np.int64)
_SPLITS = ("train", "valid", "test")

_Reader = Callable[[int], Iterator[NDArray[Any]]]


class TabularSource:
    """A `Source` that is `Preparable`: ids of nodes are mapped, splits are listed.

    Node i is row i of its tables; without tables, the i-th that edges name: relation by relation,
    all sources, then all targets.  Integer ids that are not 0, 1, 2, ... come as the array "key";
    texts go to a file beside the store.  Raises BadInput.
    """

    layout = ""
    undirected = False

    def __init__(
        self,
        where: Path,
        nodes: Sequence[NodeTables],
        edges: Sequence[EdgeTables],
        described: Sequence[Path],
    ) -> None:
        """`described` are the files that say what the tables are."""
        self.where = str(where)
        self._nodes = {n.name: n for n in nodes}
        self._edges = tuple(edges)
        self._check_names(nodes)
        tables = [e.tables for e in edges]
        tables += [n.tables for n in nodes if n.tables is not None]
        self.files = sorted({*described, *(path for t in tables for path in t.paths)})
        self._check_columns()
        self._ids = NodeIds(nodes, edges)
        self._num_nodes: dict[str, int] = {}
        self._num_edges: dict[int, int] = {}
        self._lists: dict[str, list[SourceRows]] = {}
        self._readers: dict[SourceRows, _Reader] = {}

    def prepare(self, preparation: Preparation) -> None:
        """Map the ids of every type, count every relation, list every split."""
        self._ids.prepare(preparation)
        self._num_nodes = {}
        counts = preparation.step(
            "count edges", lambda: {str(i): self._count(i) for i in range(len(self._edges))},
            lambda _: (),
        )  # fmt: skip
        self._num_edges = {int(number): count for number, count in counts.items()}
        for name, tables, splits in self._split_columns():
            files = {split: f"splits-{name}-{split}" for split in _SPLITS}
            facts = preparation.step(
                f"splits of {name}",
                partial(_write_splits, preparation.folder, files, tables, splits),
                partial(_files_of, files),
            )
            where = (
                f"{tables.where}: column {splits.word or ', '.join(dict(splits.masks).values())}"
            )
            self._lists[name] = []
            for split, count in facts.items():
                rows = SourceRows(split, _INT64, (), count, "dense", f"{where}: {split}")
                self._lists[name].append(rows)
                path = preparation.folder / files[split]
                self._readers[rows] = partial(_read_list, path, count)

    def write_keys(self, folder: Path, progress: Progress) -> None:
        """`<type>.parquet` for each type with texts: a column "key", a row a node in order."""
        for name, num_nodes in self.num_nodes.items():
            if self._ids.kind(name) != TEXTS:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / _key_file(name)
            with (
                progress.stage(f"keys of {name}", num_nodes, "nodes") as stage,
                KeyWriter(path, text=True) as out,
            ):
                for keys in self._ids.keys(name):
                    out.append(keys)
                    stage.advance(len(keys))

    @property
    def num_nodes(self) -> Mapping[str, int]:
        """Of each type; of one that edges name at most so many, until it is prepared."""
        if not self._num_nodes:
            self._num_nodes = {name: self._ids.num_nodes(name) for name in self._nodes}
        return self._num_nodes

    @property
    def relations(self) -> Sequence[SourceRelation]:
        """In the order in which they are described."""
        for number in range(len(self._edges)):
            if number not in self._num_edges:
                self._num_edges[number] = self._count(number)
        return tuple(
            SourceRelation(e.src, e.name, e.dst, self._num_edges[i], e.tables.where)
            for i, e in enumerate(self._edges)
        )

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(src, dst), checked, in the order of the tables."""
        number = self.relations.index(relation)
        return self._ids.edges(number, relation.num_edges, max(count, 1))

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        """Weights, times and other columns."""
        edge = self._edges[self.relations.index(relation)]
        arrays = [TableArray(edge.tables, columns) for columns in edge.features]
        return [self._readable(array, relation.num_edges) for array in arrays]

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        """Positions of edges; none until it is prepared."""
        return self._lists.get(f"edges-{self.relations.index(relation)}", [])

    def features(self, node_type: str) -> list[SourceRows]:
        """Those described, then the owner's integer ids."""
        node, num_nodes = self._nodes[node_type], self.num_nodes[node_type]
        found = []
        if node.tables is not None:
            arrays = [TableArray(node.tables, columns) for columns in node.features]
            found = [self._readable(array, num_nodes) for array in arrays]
        if self._ids.kind(node_type) == INTEGERS:
            where = node.tables.where if node.tables is not None else self.where
            rows = SourceRows(KEY, _INT64, (), num_nodes, "dense", f"{where}: ids of {node_type}")
            self._readers[rows] = partial(self._read_keys, node_type)
            found.append(rows)
        return found

    def label(self, node_type: str) -> SourceRows | None:
        """Of float64 where it is one column, so that a node may be without."""
        node = self._nodes[node_type]
        if node.label is None or node.tables is None:
            return None
        array = TableArray(node.tables, node.label, label=True)
        return self._readable(array, self.num_nodes[node_type])

    def splits(self, node_type: str) -> list[SourceRows]:
        """Ids of nodes; none until it is prepared."""
        return self._lists.get(f"nodes-{list(self._nodes).index(node_type)}", [])

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        """Rows in order; the array is reused."""
        return self._readers[rows](max(count, 1))

    def _readable(self, array: TableArray, num_rows: int) -> SourceRows:
        rows = array.rows(num_rows)
        self._readers[rows] = array.pieces
        return rows

    def _read_keys(self, node_type: str, count: int) -> Iterator[NDArray[Any]]:
        for keys in self._ids.keys(node_type):
            values = keys.data.view(np.int64)
            for first in range(0, values.size, count):
                yield values[first : first + count]

    def _count(self, number: int) -> int:
        counted = self._ids.num_edges(number)
        return self._edges[number].tables.num_rows() if counted is None else counted

    def _split_columns(self) -> Iterator[tuple[str, Tables, SplitColumns]]:
        for i, node in enumerate(self._nodes.values()):
            if node.splits and node.tables is not None:
                yield f"nodes-{i}", node.tables, node.splits
        for i, edge in enumerate(self._edges):
            if edge.splits:
                yield f"edges-{i}", edge.tables, edge.splits

    def _check_names(self, nodes: Sequence[NodeTables]) -> None:
        names = [n.name for n in nodes]
        for name in names:
            check_length(_key_file(name))
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise BadInput.at(self.where, f"node type {twice!r} twice", "each once", "join them")
        relations = [(e.src, e.name, e.dst) for e in self._edges]
        for e in self._edges:
            for name in (e.src, e.dst):
                if name not in self._nodes:
                    raise BadInput.at(
                        self.where, f"node type {name!r} of relation {e.name!r}",
                        f"one of {', '.join(names) or 'those under nodes'}", "describe the type",
                    )  # fmt: skip
            if relations.count((e.src, e.name, e.dst)) > 1:
                raise BadInput.at(
                    self.where, f"relation {e.src} {e.name} {e.dst} twice", "each once",
                    "list all its files under one",
                )  # fmt: skip
        if not nodes:
            raise BadInput.at(self.where, "no node types", "one at least", "describe the nodes")

    def _check_columns(self) -> None:
        """Every column that is named is there, and holds what is wanted of it."""
        for node in self._nodes.values():
            if node.tables is None:
                continue
            for columns in node.features:
                TableArray(node.tables, columns)
            if node.label is not None:
                TableArray(node.tables, node.label, label=True)
            _check_held(
                node.tables, (node.key, node.splits.word, *dict(node.splits.masks).values())
            )
        for edge in self._edges:
            for columns in edge.features:
                TableArray(edge.tables, columns)
            masks = dict(edge.splits.masks).values()
            _check_held(edge.tables, (edge.src_key, edge.dst_key, edge.splits.word, *masks))


def _key_file(node_type: str) -> str:
    return f"{quote(node_type, safe=' ')}.parquet"


def _check_held(tables: Tables, names: Sequence[str]) -> None:
    for name in names:
        if name:
            tables.type_of(name)


def _write_splits(
    folder: Path, files: Mapping[str, str], tables: Tables, splits: SplitColumns
) -> Facts:
    """A file of row numbers for each split; returns how many each has, of those that have some."""
    counts: dict[str, int] = {}
    for file in files.values():
        (folder / file).unlink(missing_ok=True)

    def put(split: str, rows: NDArray[np.int64]) -> None:
        if rows.size:
            with ArrayFile(folder / files[split], np.int64) as file:
                file.append(rows)
            counts[split] = counts.get(split, 0) + rows.size

    list_splits(tables, splits, put)
    return {split: counts[split] for split in _SPLITS if split in counts}


def _files_of(files: Mapping[str, str], counts: Facts) -> list[str]:
    return [files[split] for split in counts]


def _read_list(path: Path, num_rows: int, count: int) -> Iterator[NDArray[Any]]:
    with ArrayFile(path, np.int64) as file:
        yield from file.pieces(0, num_rows, count)
