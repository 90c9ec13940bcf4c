"""A store as a source: nodes by store id, columns and rows in the order of its blocks.

Splits hold original ids, as they do in the store.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import TIME_DTYPE, WEIGHT_DTYPE, NodeType, Relation, RowArray
from blockstore.store import Store, numpy_dtype, read_rows
from blockstore.unpack import GraphBlock
from preprocess.files.store import graph_blocks, stored_edges, stored_rows
from preprocess.ingest.contents import TIME, WEIGHT
from preprocess.sources.source import EdgePieces, SourceRelation, SourceRows

_SCAN_BYTES = 4 << 20
_SPLIT_IDS = 1 << 16

Section = Callable[[GraphBlock], NDArray[Any] | None]


class StoredSource:
    """A `Source` whose files are a store: its graph and rows, by store ids."""

    def __init__(self, store: Store) -> None:
        self._store, manifest = store, store.manifest
        self.layout, self.where, self.undirected = "store", str(store.path), False
        self.files: Sequence[Path] = [store.path / "zarr.json"]
        self.types: Mapping[str, NodeType] = {t.name: t for t in manifest.types}
        self.num_nodes: Mapping[str, int] = {t.name: t.num_nodes for t in manifest.types}
        self._relations = {
            SourceRelation(r.src, r.name, r.dst, r.num_edges, str(store.path / r.path)): r
            for r in manifest.relations
        }
        self._arrays: dict[SourceRows, RowArray] = {}
        self._sections: dict[SourceRows, tuple[Relation, Section]] = {}

    @property
    def relations(self) -> Sequence[SourceRelation]:
        """Of the store; reverses that an ingest added are among them."""
        return list(self._relations)

    def stored(self, relation: SourceRelation) -> Relation:
        """What the manifest says of a relation."""
        return self._relations[relation]

    def divides(self, _of: SourceRelation | SourceRows) -> bool:
        return False  # it is read block by block

    def edges(self, relation: SourceRelation, count: int, span: range | None = None) -> EdgePieces:
        """Numbers in their types, in the order of the blocks."""
        assert span is None or len(span) == relation.num_edges
        src, dst = self.types[relation.src].first, self.types[relation.dst].first
        for targets, sources in stored_edges(self._store, self.stored(relation), count):
            yield sources - sources.dtype.type(src), targets - targets.dtype.type(dst)

    def edge_ids(self, relation: SourceRelation) -> SourceRows | None:
        """The ids that the source of the store gave, a row an edge."""
        dtype = self.stored(relation).edge_id_dtype
        if dtype is None:
            return None
        return self._section(relation, "edge id", dtype, lambda block: block.edge_ids)

    def edge_rows(self, relation: SourceRelation) -> Sequence[SourceRows]:
        stored, found = self.stored(relation), []
        if stored.has_weights:
            found.append(self._section(relation, WEIGHT, WEIGHT_DTYPE, lambda b: b.weights))
        if stored.has_times:
            found.append(self._section(relation, TIME, TIME_DTYPE, lambda b: b.times))
        return [*found, *(self._rows(name, array) for name, array in stored.features.items())]

    def edge_splits(self, relation: SourceRelation) -> Sequence[SourceRows]:
        return [self._rows(n, array) for n, array in self.stored(relation).splits.items()]

    def features(self, node_type: str) -> Sequence[SourceRows]:
        """As they are stored: bfloat16 as uint16, int8 without its scale."""
        return [self._rows(n, array) for n, array in self.types[node_type].features.items()]

    def label(self, node_type: str) -> SourceRows | None:
        label = self.types[node_type].label
        return None if label is None else self._rows("label", label)

    def splits(self, node_type: str) -> Sequence[SourceRows]:
        return [self._rows(n, array) for n, array in self.types[node_type].splits.items()]

    def split_places(self, node_type: str, name: str) -> Iterator[NDArray[np.int64]]:
        """The nodes of a split by store id, from that of the type's first; the ids are in memory.

        Returns at most 65536 at a time.
        """
        t = self.types[node_type]
        store_id = read_rows(self._store, t.store_id)
        for ids in self.rows(self._rows(name, t.splits[name]), _SPLIT_IDS):
            yield store_id[ids].astype(np.int64) - t.first

    def rows(
        self, rows: SourceRows, count: int, span: range | None = None
    ) -> Iterator[NDArray[Any]]:
        assert span is None or len(span) == rows.num_rows
        if rows in self._arrays:
            yield from self.pieces(self._arrays[rows], count)
            return
        relation, section = self._sections[rows]
        for _, block in graph_blocks(self._store, relation, _SCAN_BYTES):
            values = section(block)
            assert values is not None
            for at in range(0, values.size, count):
                yield values[at : at + count]

    def scale(self, array: RowArray) -> NDArray[np.float32]:
        """Of an int8 array."""
        return self._store.scale(array)

    def pieces(self, array: RowArray, count: int = _SPLIT_IDS) -> Iterator[NDArray[Any]]:
        """Rows of an array in the order of the store, at most `count` at a time."""
        for rows in stored_rows(self._store, array, _SCAN_BYTES):
            shaped = rows.reshape(rows.shape[0], *array.row_shape)
            for at in range(0, shaped.shape[0], count):
                yield shaped[at : at + count]

    def _rows(self, name: str, array: RowArray) -> SourceRows:
        where = str(self._store.path / array.path)
        dtype = numpy_dtype(array.dtype)
        rows = SourceRows(name, dtype, array.row_shape, array.num_rows, array.source, where)
        self._arrays[rows] = array
        return rows

    def _section(
        self, relation: SourceRelation, name: str, dtype: str, section: Section
    ) -> SourceRows:
        where = f"{relation.where}, {name}s"
        rows = SourceRows(name, np.dtype(dtype), (), relation.num_edges, "dense", where)
        self._sections[rows] = self.stored(relation), section
        return rows
