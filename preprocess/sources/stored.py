"""A store as a source: nodes by store id, columns and rows in the order of its blocks.

Splits hold original ids, as they do in the store.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import TIME_DTYPE, WEIGHT_DTYPE, NodeType, Relation, RowArray
from blockstore.store import Store, numpy_dtype, read_rows
from preprocess.files.store import graph_blocks, stored_edges, stored_rows
from preprocess.ingest.contents import TIME, WEIGHT
from preprocess.sources.source import EdgePieces, Rows, Source, SourceRelation, SourceRows

_SCAN_BYTES = 4 << 20
_SPLIT_IDS = 1 << 16


class StoredSource(Source):
    """A `Source` whose files are a store: its graph and rows, by store ids.

    Features are given as they are stored: bfloat16 as uint16, int8 without its scale.
    """

    layout = "store"

    def __init__(self, store: Store) -> None:
        manifest = store.manifest
        super().__init__(store.path, {t.name: t.num_nodes for t in manifest.types})
        self.types: dict[str, NodeType] = {t.name: t for t in manifest.types}
        self._store = store
        for t in manifest.types:
            for name, array in t.features.items():
                self.add_array(t.name, self._rows(name, array))
            for name, array in t.splits.items():
                self.add_split(t.name, self._rows(name, array))
            if t.label is not None:
                self.add_label(t.name, self._rows("label", t.label))
        for r in manifest.relations:
            ends = (r.src, r.name, r.dst)
            self.add_edges(ends, _StoredEdges(self, r))
            if r.has_weights:
                self.add_array(ends, self._section(r, WEIGHT, WEIGHT_DTYPE, "weights"))
            if r.has_times:
                self.add_array(ends, self._section(r, TIME, TIME_DTYPE, "times"))
            for name, array in r.features.items():
                self.add_array(ends, self._rows(name, array))
            for name, array in r.splits.items():
                self.add_split(ends, self._rows(name, array))

    def stored(self, relation: SourceRelation) -> Relation:
        """The manifest's entry of a relation."""
        return next(
            r for r in self._store.manifest.relations if (r.src, r.name, r.dst) == relation[:3]
        )

    def edge_ids(self, relation: SourceRelation) -> SourceRows | None:
        """The ids of edges in the store's own source, one for each edge; None: not kept."""
        stored = self.stored(relation)
        if stored.edge_id_dtype is None:
            return None
        rows = self._section(stored, "edge id", stored.edge_id_dtype, "edge_ids")
        return self._readable([rows])[0]

    def split_places(self, node_type: str, name: str) -> Iterator[NDArray[np.int64]]:
        """The nodes of a split by store id, counted from the type's first node.

        Holds the type's `store_id` array in memory.  Yields at most 65536 at a time.
        """
        t = self.types[node_type]
        store_id = read_rows(self._store, t.store_id)
        for ids in self.pieces(t.splits[name]):
            yield store_id[ids].astype(np.int64) - t.first

    def scale(self, array: RowArray) -> NDArray[np.float32]:
        """Scale of an int8 array."""
        return self._store.scale(array)

    def pieces(self, array: RowArray, count: int = _SPLIT_IDS) -> Iterator[NDArray[Any]]:
        """Rows of an array in the order of the store, at most `count` at a time."""
        for rows in stored_rows(self._store, array, _SCAN_BYTES):
            shaped = rows.reshape(rows.shape[0], *array.row_shape)
            for at in range(0, shaped.shape[0], count):
                yield shaped[at : at + count]

    def _rows(self, name: str, array: RowArray) -> Rows:
        where, dtype = str(self._store.path / array.path), numpy_dtype(array.dtype)
        form = SourceRows(name, dtype, array.row_shape, array.num_rows, array.source, where, array)
        return Rows(form, partial(self.pieces, array))

    def _section(self, relation: Relation, name: str, dtype: str, section: str) -> Rows:
        where = f"{self._store.path / relation.path}, {name}s"
        form = SourceRows(name, np.dtype(dtype), (), relation.num_edges, "dense", where)
        return Rows(form, partial(self._section_pieces, relation, section))

    def _section_pieces(
        self, relation: Relation, section: str, count: int
    ) -> Iterator[NDArray[Any]]:
        for _, block in graph_blocks(self._store, relation, _SCAN_BYTES):
            values: NDArray[Any] = getattr(block, section)
            for at in range(0, values.size, count):
                yield values[at : at + count]


class _StoredEdges:
    """Edges in block order, by node numbers inside each type."""

    def __init__(self, source: StoredSource, relation: Relation) -> None:
        self._store, self._relation = source._store, relation
        self._firsts = [source.types[name].first for name in (relation.src, relation.dst)]
        self.path, self.where = (
            self._store.path / "zarr.json",
            str(self._store.path / relation.path),
        )
        self.num_edges = relation.num_edges

    def pieces(self, count: int) -> EdgePieces:
        src, dst = self._firsts
        for targets, sources in stored_edges(self._store, self._relation, count):
            yield sources - sources.dtype.type(src), targets - targets.dtype.type(dst)

    def place(self, end: int, row: int) -> str:
        return f"{self.where}: {('source', 'target')[end]} {row}"
