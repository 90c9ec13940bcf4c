"""Everything that can be checked of a store: each checksum and each cross-reference."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.fingerprint import make_fingerprint
from blockstore.format import (
    NodeType,
    Relation,
    RowArray,
    giant_capacity,
    side_arrays,
)
from blockstore.store import Store, open_store, read_rows, scan_blocks, scan_rows
from blockstore.unpack import GraphBlock, unpack_block


@dataclass(slots=True)
class VerifyReport:
    """What was looked at and found good."""

    blocks: int = 0
    pages: int = 0
    nodes: int = 0
    edges: int = 0
    bytes: int = 0


def verify_store(path: Path) -> VerifyReport:
    """Read all of a store.  Raises NotAStore, UnsupportedVersion, CorruptBlock: the first fault.

    Memory: two id arrays of the largest type and two bits for each source edge.
    """
    store, report = open_store(path), VerifyReport()
    _check_fingerprint(store)
    sizes = {t.name: t.num_nodes for t in store.manifest.types}
    for relation in store.manifest.relations:
        _GraphCheck(store, relation, report).run()
        for split in relation.splits.values():
            if split.row_shape == ():
                _check_range(store, split, relation.num_source_edges)
            else:
                _check_range(store, split, np.array([sizes[relation.src], sizes[relation.dst]]))
    for node_type in store.manifest.types:
        _check_ids(store, node_type)
        for split in node_type.splits.values():
            _check_range(store, split, node_type.num_nodes)
        _check_partitions(store, node_type)
        report.nodes += node_type.num_nodes
    for array in store.manifest.row_arrays():
        _check_rows(store, array, report)
    return report


def _check_fingerprint(store: Store) -> None:
    manifest, digests = store.manifest, {}
    for path, dtype, size in side_arrays(manifest):
        digests[path] = hashlib.blake2b(store.side(path, dtype, size).tobytes()).digest()
    found = make_fingerprint(manifest, digests)
    if found != manifest.fingerprint:
        raise CorruptBlock(
            f"{store.path / 'zarr.json'}: content has fingerprint {found}, expected "
            f"{manifest.fingerprint}; a file was replaced: ingest again, or restore it"
        )


def _check_rows(store: Store, array: RowArray, report: VerifyReport) -> None:
    file = store.rows(array)
    for _, blocks in scan_blocks(file):
        report.blocks += blocks.shape[0]
        report.bytes += blocks.nbytes
    report.pages += file.crcs.size


def _check_ids(store: Store, node_type: NodeType) -> None:
    """original_id and store_id undo each other."""
    where = store.path / node_type.store_id.path
    size = node_type.num_nodes
    original = read_rows(store, node_type.original_id).astype(np.int64)
    for first, rows in scan_rows(store, node_type.store_id):
        places = rows.astype(np.int64) - node_type.first
        sound = (places >= 0) & (places < size)
        sound[sound] = original[places[sound]] == (first + np.flatnonzero(sound))
        if not sound.all():
            bad = first + int(np.flatnonzero(~sound)[0])
            raise CorruptBlock(
                f"{where}[{bad}]: store id {rows[bad - first]} does not lead back to it, expected "
                f"original_id to be its inverse"
            )


def _check_partitions(store: Store, node_type: NodeType) -> None:
    if not node_type.partition_offsets_path:
        return
    path, count = node_type.partition_offsets_path, node_type.num_partitions
    offsets = store.side(path, np.uint64, count + 1).astype(np.int64)
    ends = [node_type.first, node_type.first + node_type.num_nodes]
    if [offsets[0], offsets[-1]] != ends or (np.diff(offsets) < 0).any():
        raise CorruptBlock(
            f"{store.path / path}: partitions from {offsets[0]} to {offsets[-1]}, expected "
            f"ascending offsets from {ends[0]} to {ends[1]}"
        )


def _check_range(store: Store, array: RowArray, limit: int | NDArray[np.int64]) -> None:
    """`limit`: of every number in a row, or one for each of its columns."""
    for first, rows in scan_rows(store, array):
        outside = (rows < 0) | (rows >= limit)
        bad = np.flatnonzero(outside.reshape(rows.shape[0], -1).any(axis=1))
        if bad.size:
            raise CorruptBlock(
                f"{store.path / array.path}[{first + bad[0]}]: id {rows[bad[0]]}, expected 0 to "
                f"{limit - 1}"
            )


class _GraphCheck:
    """The blocks of one relation, in order."""

    def __init__(self, store: Store, relation: Relation, report: VerifyReport) -> None:
        manifest = store.manifest
        self._store, self._relation, self._report = store, relation, report
        types = {t.name: t for t in manifest.types}
        self._src, self._dst = types[relation.src], types[relation.dst]
        widths = relation.item_bytes(manifest.id_dtype)
        self._capacity = giant_capacity(manifest.block_bytes, *widths)
        self._sections = [bool(width) for width in widths[1:]]
        self._first_node = store.first_node(relation)
        self._first_edge = store.first_edge(relation) if relation.first_edge_path else None
        self._next = self._dst.first  # column that must come next
        self._owed = 0  # edges of the last column that are still to come
        self._edges = 0
        bits = 2 * relation.num_source_edges if relation.edge_id_dtype else 0
        self._seen = np.zeros(-(-bits // 8), np.uint8)

    def run(self) -> None:
        """Raises CorruptBlock."""
        relation = self._relation
        file = self._store.graph(relation)
        path = self._store.path / relation.path
        number = -1
        for first, blocks in scan_blocks(file):
            for i in range(blocks.shape[0]):
                number = first + i
                where = f"{path}, block {number}"
                self._check(number, unpack_block(blocks[i], where), where)
            self._report.blocks += blocks.shape[0]
            self._report.bytes += blocks.nbytes
        end = self._dst.first + self._dst.num_nodes
        if self._next != end or self._owed or int(self._first_node[-1]) != self._next:
            raise CorruptBlock(f"{path}: columns end at {self._next}, expected {end}")
        if self._edges != relation.num_edges:
            raise CorruptBlock(f"{path}: {self._edges} edges, expected {relation.num_edges}")
        for array in relation.features.values():
            if array.num_rows != relation.num_edges:
                raise CorruptBlock(
                    f"{self._store.path / array.path}: {array.num_rows} rows, expected "
                    f"{relation.num_edges}, one an edge"
                )
        self._report.pages += file.crcs.size
        self._report.edges += self._edges

    def _check(self, number: int, block: GraphBlock, where: str) -> None:
        header = block.header
        if header.first_node != self._next or int(self._first_node[number]) != self._next:
            raise CorruptBlock(
                f"{where}: first column {header.first_node}, object index "
                f"{int(self._first_node[number])}, expected {self._next}"
            )
        if self._first_edge is not None and int(self._first_edge[number]) != self._edges:
            raise CorruptBlock(
                f"{where}: {int(self._first_edge[number])} edges before it, expected {self._edges}"
            )
        found = [s is not None for s in (block.edge_ids, block.weights, block.times)]
        if found != self._sections:
            raise CorruptBlock(
                f"{where}: edge ids, weights, times: found {found}, expected {self._sections}"
            )
        carried = min(self._owed, self._capacity)
        if header.num_carried != carried:
            raise CorruptBlock(f"{where}: {header.num_carried} carried edges, expected {carried}")
        self._owed -= carried
        degrees = block.degrees_here()
        offsets = block.offsets.astype(np.int64)
        total = int(degrees.sum()) + carried
        if (
            (degrees < 0).any()
            or total != header.num_edges
            or (offsets[0] != header.edges_start + carried)
        ):
            raise CorruptBlock(f"{where}: offsets do not add up to {header.num_edges} edges")
        if header.num_nodes:
            self._owed = header.last_degree - int(degrees[-1])
            if self._owed < 0 or (self._owed and int(degrees[-1]) != self._capacity):
                raise CorruptBlock(
                    f"{where}: last column has {header.last_degree} edges, {degrees[-1]} of them "
                    "here"
                )
        self._check_sources(block, where)
        if block.edge_ids is not None:
            self._check_edge_ids(block.edge_ids, where)
        self._next += header.num_nodes
        self._edges += header.num_edges

    def _check_sources(self, block: GraphBlock, where: str) -> None:
        first, last = self._src.first, self._src.first + self._src.num_nodes
        ids = block.sources
        if ids.size and (int(ids.min()) < first or int(ids.max()) >= last):
            bad = int(np.flatnonzero((ids < first) | (ids >= last))[0])
            raise CorruptBlock(
                f"{where}, edge {bad}: source {ids[bad]}, expected {first} to {last - 1}"
            )

    def _check_edge_ids(self, edge_ids: NDArray[Any], where: str) -> None:
        """In range and, over the whole relation, each at most once: two bits for a source edge."""
        limit = 2 * self._relation.num_source_edges
        ids = edge_ids.astype(np.int64)
        if ids.size == 0:
            return
        if int(ids.max()) >= limit:
            raise CorruptBlock(f"{where}: edge id {int(ids.max())}, expected less than {limit}")
        byte, bit = ids >> 3, (1 << (ids & 7)).astype(np.uint8)
        if (self._seen[byte] & bit).any() or np.unique(ids).size != ids.size:
            raise CorruptBlock(f"{where}: an edge id occurs twice, expected each once")
        np.bitwise_or.at(self._seen, byte, bit)
