"""The blocks and pages that hold a partition, or a group of copies, for macro-batches.

Parts are numbered as in the store: parts 0 to k - 1 are the partitions, parts k to 2 k - 1 their
halos, and part 2 k the hubs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import (
    PAGE_BYTES,
    BlockGeometry,
    HaloColumns,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    edge_layout,
    row_geometry,
)
from blockstore.store import BlockedFile, Store
from loaderd.memory.ledger import ServedRows, copied_rows

_RUN_PAGES = 128  # of a run, at most: eight reads of 512 KiB at once keep a disk at its rate


class RelationBlocks(NamedTuple):
    """Graph blocks of one relation, or of its copies."""

    file: int  # number in the reader
    first_node: NDArray[np.int64]  # (blocks + 1,)
    first_edge: NDArray[np.int64]  # (blocks + 1,)
    low: NDArray[np.int64]  # (parts,) first block of each part
    high: NDArray[np.int64]  # (parts,) after the last block of each part


class MacroRows(NamedTuple):
    """One served row array, or its copies."""

    file: int
    array: RowArray
    geometry: BlockGeometry


class Pages(NamedTuple):
    """Rows of one array as runs of pages of whole shards."""

    shard: int  # the first
    first: NDArray[np.int64]  # (shards,) first page of each
    counts: NDArray[np.int64]  # (shards,)

    @property
    def total(self) -> int:
        return int(self.counts.sum())


def copied_files(store: Store, served: Sequence[ServedRows]) -> list[BlockedFile]:
    """Files of halos and hubs, in the order in which `MacroFiles` numbers them."""
    files = [store.graph(r.halo) for r in store.manifest.relations if r.halo]
    return files + [store.rows(a) for r in served if (a := copied_rows(r)) is not None]


class MacroFiles:
    """Blocks, pages and edges of every part of a partitioned store."""

    def __init__(self, store: Store, served: Sequence[ServedRows], first_copied: int) -> None:
        """`first_copied`: number, in the reader, of the first of `copied_files`.

        Raises CorruptBlock.
        """
        manifest = store.manifest
        self.num_partitions = max(t.num_partitions for t in manifest.types)
        self.offsets = [_offsets(store, t, self.num_partitions) for t in manifest.types]
        self.copies = [_copies(store, t, self.num_partitions) for t in manifest.types]
        self.type_of = {t.name: i for i, t in enumerate(manifest.types)}
        self.columns: list[RelationBlocks] = []
        self.copied_columns: list[RelationBlocks | None] = []
        number = first_copied
        for r, relation in enumerate(manifest.relations):
            t = self.type_of[relation.dst]
            self.columns.append(_columns(store, manifest, relation, relation, r, self.offsets[t]))
            copied = None
            if relation.halo is not None:
                copied = _columns(store, manifest, relation, relation.halo, number, self.copies[t])
                number += 1
            self.copied_columns.append(copied)
        self.rows: list[MacroRows] = []
        self.copied_rows: list[MacroRows | None] = []
        for a, rows in enumerate(served):
            self.rows.append(_rows(manifest, rows.array, len(manifest.relations) + a))
            array = copied_rows(rows)
            self.copied_rows.append(None if array is None else _rows(manifest, array, number))
            number += array is not None

    def nodes_of(self, node_type: int, part: int) -> tuple[int, int]:
        """[first, stop) of a partition's store ids, or of a group's slots."""
        partitions = self.num_partitions
        bounds = self.offsets[node_type] if part < partitions else self.copies[node_type]
        i = part if part < partitions else part - partitions
        return int(bounds[i]), int(bounds[i + 1])

    def pages(self, a: int, first_node: int, node_type: int, part: int) -> Pages:
        """Pages of the array of number `a` that hold a part's rows."""
        low, high = self.nodes_of(node_type, part)
        if part < self.num_partitions:
            return row_pages(self.rows[a], low - first_node, high - first_node)
        copied = self.copied_rows[a]
        assert copied is not None
        return row_pages(copied, low, high)


def row_pages(rows: MacroRows, first: int, stop: int) -> Pages:
    """Pages that hold rows [first, stop) of an array."""
    if first >= stop:
        return Pages(0, np.empty(0, np.int64), np.empty(0, np.int64))
    geometry, row_bytes = rows.geometry, rows.array.row_bytes
    low, start = _byte_of(geometry, row_bytes, first)
    high, last = _byte_of(geometry, row_bytes, stop - 1)
    size = high - low + 1
    begin, end = np.zeros(size, np.int64), np.zeros(size, np.int64)
    begin[0] = start // PAGE_BYTES
    end[:] = geometry.blocks_per_shard * geometry.pages_per_block
    end[-1] = -(-(last + row_bytes) // PAGE_BYTES)
    return Pages(low, begin, end - begin)


def cut_runs(shard: int, first: int, pages: int) -> NDArray[np.int64]:
    """Adjacent pages as runs that are read by one call each: int64 (runs, 3)."""
    starts = np.arange(first, first + pages, _RUN_PAGES)
    runs = np.empty((starts.size, 3), np.int64)
    runs[:, 0], runs[:, 1] = shard, starts
    runs[:, 2] = np.minimum(_RUN_PAGES, first + pages - starts)
    return runs


def _byte_of(geometry: BlockGeometry, row_bytes: int, row: int) -> tuple[int, int]:
    """Shard of a row, and where in its file it begins."""
    block, inside = divmod(row, geometry.rows_per_block)
    shard, at = geometry.locate(block)
    return shard, at + inside * row_bytes


def _rows(manifest: Manifest, array: RowArray, file: int) -> MacroRows:
    return MacroRows(file, array, row_geometry(array, manifest.block_bytes))


def _offsets(store: Store, node_type: NodeType, partitions: int) -> NDArray[np.int64]:
    """First node of each partition, then the end; a type without partitions is in the first."""
    if not node_type.partition_offsets_path:
        offsets = np.full(partitions + 1, node_type.first + node_type.num_nodes, np.int64)
        offsets[0] = node_type.first
        return offsets
    return store.partition_offsets(node_type).astype(np.int64)


def _copies(store: Store, node_type: NodeType, partitions: int) -> NDArray[np.int64]:
    """First slot of each group, then all; int64 (partitions + 2,)."""
    if node_type.halo is None:
        return np.zeros(partitions + 2, np.int64)
    return store.halo_offsets(node_type).astype(np.int64)


def _columns(
    store: Store,
    manifest: Manifest,
    relation: Relation,
    columns: Relation | HaloColumns,
    file: int,
    bounds: NDArray[np.int64],
) -> RelationBlocks:
    """Blocks of the parts whose columns lie between `bounds`."""
    first_node = store.first_node(columns).astype(np.int64)
    first_edge = store.first_edge(columns).astype(np.int64)
    capacity = edge_layout(manifest, relation).capacity(manifest.block_bytes)
    starts = first_node[:-1]
    at = np.searchsorted(starts, bounds, "right") - 1  # block in which a column begins
    low, high = at[:-1].copy(), at[1:].copy()
    if starts.size:
        # the block in which the next part begins holds the end of this one
        full = np.diff(first_edge)[np.maximum(high - 1, 0)] == capacity
        high += (first_node[np.maximum(high, 0)] < bounds[1:]) | ((high > 0) & full)
        high[bounds[1:] >= first_node[-1]] = starts.size
        low = np.maximum(low, 0)
    empty = (bounds[1:] == bounds[:-1]) | (starts.size == 0)
    low[empty], high[empty] = 0, 0
    return RelationBlocks(file, first_node, first_edge, low, high)


class Bounds(NamedTuple):
    """The most that any macro-batch takes."""

    nodes: tuple[int, ...]  # members of each type
    copies: tuple[int, ...]  # slots of each type that are looked at
    edges: tuple[int, ...]  # of each relation
    blocks: tuple[int, ...]  # of each relation
    pages: int  # of rows, hubs not counted


class HubBounds(NamedTuple):
    """What hubs take permanently."""

    pages: int  # of rows
    blocks: int  # graph blocks


def bound(
    files: MacroFiles, served: Sequence[ServedRows], size: int, halos: bool, hubs: bool
) -> Bounds:
    """The most that a macro-batch of `size` partitions takes, whichever they are."""
    k = files.num_partitions
    own, extra = np.arange(k), np.arange(k, 2 * k)
    groups = [own, extra] if halos else [own]
    nodes, copies, edges, blocks, pages = [], [], [], [], 0
    for t in range(len(files.offsets)):
        counts = np.diff(files.offsets[t])
        slots = np.diff(files.copies[t])
        hub = int(slots[k]) * hubs
        maximum = _largest(slots[:k], size) * halos
        copies.append(maximum + hub)
        nodes.append(min(_largest(counts, size) + maximum + hub, int(counts.sum())))
    for columns, copied in zip(files.columns, files.copied_columns, strict=True):
        each = columns.first_edge[columns.high] - columns.first_edge[columns.low]
        edge, block = _largest(each, size), _largest(columns.high - columns.low, size)
        if copied is not None:
            each = copied.first_edge[copied.high] - copied.first_edge[copied.low]
            count = copied.high - copied.low
            edge += _largest(each[:k], size) * halos + int(each[k]) * hubs
            block += _largest(count[:k], size) * halos + int(count[k]) * hubs
        edges.append(edge)
        blocks.append(block)
    for rows in served:
        a, t = rows.number, files.type_of[rows.node_type.name]
        for parts in groups if files.copied_rows[a] is not None else groups[:1]:
            each = np.array([files.pages(a, rows.node_type.first, t, int(p)).total for p in parts])
            pages += _largest(each, size)
    return Bounds(tuple(nodes), tuple(copies), tuple(edges), tuple(blocks), pages)


def bound_hubs(files: MacroFiles, served: Sequence[ServedRows]) -> HubBounds:
    part = 2 * files.num_partitions
    pages = sum(
        files.pages(rows.number, 0, files.type_of[rows.node_type.name], part).total
        for rows in served
        if files.copied_rows[rows.number] is not None
    )
    copied = [c for c in files.copied_columns if c is not None]
    return HubBounds(pages, sum(int(c.high[-1] - c.low[-1]) for c in copied))


def _largest(counts: NDArray[np.int64], size: int) -> int:
    """Sum of the `size` largest."""
    return int(np.sort(counts)[::-1][:size].sum())
