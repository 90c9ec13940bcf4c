"""Graphs whose nodes and edges are rows of tables: the common part of all table layouts."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from preprocess.errors import BadInput
from preprocess.files.array_file import ArrayFile
from preprocess.files.arrow import writing_keys
from preprocess.ingest.contents import SPLITS, check_length
from preprocess.ingest.prepare import Preparation
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import Facts
from preprocess.sources.arrays import MadeRows
from preprocess.sources.columns import (
    INTEGERS,
    TEXTS,
    EdgeTables,
    NodeIds,
    NodeTables,
    TableArray,
    TableSequence,
    split_rows,
)
from preprocess.sources.columns import Splits as SplitColumns
from preprocess.sources.source import EdgePieces, Owner, Rows, Source, SourceRows

KEY = "key"  # the array of a type that holds the user's integer ids
_INT64 = np.dtype(np.int64)


class TabularSource(Source):
    """A `Source` that is `Preparable`: it maps ids of nodes, and lists splits.

    Node i is row i of its tables or, without tables, the i-th node that appears in edges: relation
    by relation, all sources, then all targets.  Integer ids other than 0, 1, 2, ... are stored as
    the array "key"; texts go to a file beside the store.  Raises BadInput.
    """

    def __init__(
        self,
        where: Path,
        nodes: Sequence[NodeTables],
        edges: Sequence[EdgeTables],
        described: Sequence[Path],
    ) -> None:
        """`described`: the files that describe the tables."""
        super().__init__(where)
        self._node_tables, self._edge_tables = tuple(nodes), tuple(edges)
        self._check_names()
        self._ids = NodeIds(nodes, edges)
        self.add_files(*described)
        self._split_columns: dict[str, tuple[Owner, TableSequence, SplitColumns]] = {}
        for i, node in enumerate(nodes):
            if node.tables is not None:
                num_nodes = partial(self._ids.num_nodes, node.name)
                self._open(f"nodes-{i}", node.name, node, node.tables, num_nodes, node.key)
                if node.label is not None:
                    label = TableArray(node.tables, node.label, num_nodes, label=True)
                    self.add_label(node.name, label)
        for i, edge in enumerate(edges):
            ends = (edge.src, edge.name, edge.dst)
            self.add_edges(ends, _RowEdges(self._ids, i, edge))
            count = partial(self._ids.num_edges, i)
            self._open(f"edges-{i}", ends, edge, edge.tables, count, edge.src_key, edge.dst_key)

    def prepare(self, preparation: Preparation) -> None:
        """Map the ids of every type, count the edges of every relation, list every split."""
        self._num_nodes.clear()
        self._splits.clear()
        self._ids.prepare(preparation)
        for node in self._node_tables:
            held = self._arrays.get(node.name, [])  # has the keys if it was prepared before
            if self._ids.kind(node.name) == INTEGERS and Rows not in map(type, held):
                where = node.tables.where if node.tables is not None else self.where
                form = SourceRows(
                    KEY, _INT64, (), self.num_nodes[node.name], "dense",
                    f"{where}: ids of {node.name}",
                )  # fmt: skip
                self.add_array(node.name, Rows(form, partial(_integers, self._ids, node.name)))
        for name, (owner, tables, splits) in self._split_columns.items():
            files = {split: f"splits-{name}-{split}" for split in SPLITS}
            facts = preparation.record(
                f"splits of {name}",
                partial(_write_splits, preparation.folder, files, tables, splits),
                partial(_files_of, files),
            )
            columns = splits.word or ", ".join(dict(splits.masks).values())
            for split, count in facts.items():
                where = f"{tables.where}: column {columns}: {split}"
                form = SourceRows(split, _INT64, (), count, "dense", where)
                self.add_split(owner, MadeRows(form, preparation.folder / files[split]))

    def write_keys(self, folder: Path, progress: Progress) -> None:
        """Write `<type>.parquet` for each type with text ids: a column "key" in node order."""
        for name, num_nodes in self.num_nodes.items():
            if self._ids.kind(name) != TEXTS:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / key_file(name)
            with (
                progress.stage(f"keys of {name}", num_nodes, "nodes") as stage,
                writing_keys(path) as append,
            ):
                for keys in self._ids.keys(name):
                    append(keys)
                    stage.advance(len(keys))

    @property
    def num_nodes(self) -> dict[str, int]:
        """Nodes of each type; until prepared, an upper bound for types without tables."""
        for node in self._node_tables:
            if node.name not in self._num_nodes:
                self._num_nodes[node.name] = self._ids.num_nodes(node.name)
        return self._num_nodes

    def _open(
        self, name: str, owner: Owner, held: NodeTables | EdgeTables, tables: TableSequence,
        num_rows: partial[int], *keys: str,
    ) -> None:  # fmt: skip
        """Add the arrays and splits of tables, and check that every named column exists."""
        self.add_files(*tables.paths)
        for columns in held.features:
            self.add_array(owner, TableArray(tables, columns, num_rows))
        for column in (*keys, held.splits.word, *dict(held.splits.masks).values()):
            if column:
                tables.type_of(column)
        if held.splits:
            self._split_columns[name] = owner, tables, held.splits

    def _check_names(self) -> None:
        names = [n.name for n in self._node_tables]
        for name in names:
            check_length(key_file(name))
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise BadInput.at(self.where, f"node type {twice!r} twice", "each once", "join them")
        relations = [(e.src, e.name, e.dst) for e in self._edge_tables]
        for ends in relations:
            for name in (ends[0], ends[2]):
                if name not in names:
                    raise BadInput.at(
                        self.where, f"node type {name!r} of relation {ends[1]!r}",
                        f"one of {', '.join(names) or 'those under nodes'}", "describe the type",
                    )  # fmt: skip
            if relations.count(ends) > 1:
                raise BadInput.at(
                    self.where, f"relation {' '.join(ends)} twice", "each once",
                    "list all its files under one",
                )  # fmt: skip
        if not names:
            raise BadInput.at(self.where, "no node types", "one at least", "describe the nodes")


class _RowEdges:
    """The edges of a relation, one for each row of its tables."""

    def __init__(self, ids: NodeIds, number: int, edge: EdgeTables) -> None:
        self.path, self.where = edge.tables.paths[0], edge.tables.where
        self._ids, self._number, self._edge = ids, number, edge

    @property
    def num_edges(self) -> int:
        return self._ids.num_edges(self._number)

    def pieces(self, count: int) -> EdgePieces:
        return self._ids.ends(self._number, count)

    def place(self, end: int, row: int) -> str:
        return f"{self._edge.tables.place(row)}: column {self._edge.ends[end][1]!r}"


def _integers(ids: NodeIds, node_type: str, count: int) -> Iterator[NDArray[Any]]:
    """The user's integer ids of the nodes of a type, at most `count` at a time."""
    for keys in ids.keys(node_type):
        values = keys.data.view(np.int64)
        for first in range(0, values.size, count):
            yield values[first : first + count]


def key_file(node_type: str) -> str:
    return f"{quote(node_type, safe=' ')}.parquet"


def _write_splits(
    folder: Path, files: dict[str, str], tables: TableSequence, splits: SplitColumns
) -> Facts:
    """Write a file of row numbers for each split; returns the counts of non-empty splits."""
    counts: dict[str, int] = {}
    for file in files.values():
        (folder / file).unlink(missing_ok=True)
    for split, rows in split_rows(tables, splits):
        if rows.size:
            with ArrayFile(folder / files[split], np.int64) as out:
                out.append(rows)
            counts[split] = counts.get(split, 0) + rows.size
    return {split: counts[split] for split in SPLITS if split in counts}


def _files_of(files: dict[str, str], counts: Facts) -> list[str]:
    return [files[split] for split in counts]
