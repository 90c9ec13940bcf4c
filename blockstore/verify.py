"""Checks all of a store: each checksum and each cross-reference.

What a graph block says of itself is checked as it is read (`validate.GraphCheck`): its place in the
object index, its offsets and its sources.  Here is what takes more than one block to check.

An array and its copy need not be in memory together: 64-bit digests of the rows, or of the columns,
that were copied are taken in one pass over the array, and compared in one over the copy.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import (
    EXTEND_FOLDER,
    OWNERS_FOLDER,
    ROOT,
    STRIPE_FOLDER,
    Halo,
    HaloColumns,
    HopSet,
    NodeType,
    Relation,
    RowArray,
    blocked_arrays,
    edge_layout,
    shard_path,
)
from blockstore.kernels.digest import digest_columns
from blockstore.kernels.order import distinct
from blockstore.owners import MAP_FILES, check_owners, list_owners, read_owners
from blockstore.pack import unpack_block
from blockstore.part import PART, StorePart, part_of
from blockstore.store import Store, open_store, read_rows, scan_blocks, scan_rows
from blockstore.stripes import STRIPES
from blockstore.validate import copied_arrays


@dataclass(slots=True)
class VerifyReport:
    """What was checked and found good."""

    blocks: int = 0
    pages: int = 0
    nodes: int = 0
    edges: int = 0
    bytes: int = 0
    strays: tuple[str, ...] = ()  # files in the folder that are not of the store
    foreign_maps: tuple[str, ...] = ()  # owner maps of another store, or of this before a change
    part: str = ""  # which part of a store it is; what is here of it was checked
    stripes: str = ""  # where its blocks are, if they are dealt over disks


def verify_store(path: Path) -> VerifyReport:
    """Read all of a store.  Raises NotAStore, UnsupportedVersion, CorruptBlock: the first fault.

    Memory: two id arrays of the largest type, two bits for each source edge, and about 40 bytes for
    each slot of a type's halos: copies are compared with what they are copies of by 64-bit digests,
    each array read once, in order.
    """
    store, report = open_store(path), VerifyReport()
    for relation in store.manifest.relations:
        _check_columns(store, relation, relation, report)
    for node_type in store.manifest.types:
        _check_ids(store, node_type)
        report.nodes += node_type.num_nodes
        if node_type.hubs is not None or node_type.halo is not None:
            _check_copies(store, node_type, report)
        for hops in node_type.hops.values():
            _check_hops(store, node_type, hops)
    for array in store.manifest.row_arrays():
        _check_rows(store, array, report)
    # an owner map of before the store was changed is no fault of the store
    facts = {name: check_owners(store, name)[0] for name in list_owners(store)}
    fingerprint = store.manifest.fingerprint
    report.foreign_maps = tuple(n for n, f in facts.items() if f.fingerprint != fingerprint)
    if store.part is not None:
        _check_part(store, store.part)
        report.part = str(store.part)
    report.stripes = str(store.stripes or "")
    report.strays = _strays(store)
    return report


def _check_part(store: Store, part: StorePart) -> None:
    """Check that its owner map is here, and gives the rows that the part says are here."""
    found = read_owners(store, part.owners)
    names = part.owners, found.digest
    if part_of(store.manifest, found.owner, part.server, found.owners, names) != part:
        raise CorruptBlock(
            f"{store.path / PART}: rows of the {part}, digest {part.digest}, expected those of the "
            f"map, digest {found.digest}; make the part again"
        )


def _strays(store: Store) -> tuple[str, ...]:
    """Files that are not of the store, by path in it, sorted."""
    own = {ROOT, *store.manifest.files}
    own |= {PART} if store.part else set()
    own |= {STRIPES} if store.stripes else set()
    for path, geometry, ndim in blocked_arrays(store.manifest):
        if store.stripes is None or path not in store.stripes.arrays:
            own |= {shard_path(path, shard, ndim) for shard in range(geometry.num_shards)}
    own |= {f"{OWNERS_FOLDER}/{name}/{file}" for name in list_owners(store) for file in MAP_FILES}
    found = {
        str(Path(folder, name).relative_to(store.path))
        for folder, _, names in os.walk(store.path)
        for name in names
    }
    others = tuple(f"{folder}/" for folder in (EXTEND_FOLDER, STRIPE_FOLDER))
    return tuple(sorted(name for name in found - own if not name.startswith(others)))


def _check_rows(store: Store, array: RowArray, report: VerifyReport) -> None:
    file = store.rows(array)
    present = [(0, file.geometry.num_blocks)] if file.holes is None else file.holes.present()
    for low, high in present:
        for _, blocks in scan_blocks(file, start=low, stop=high):
            report.blocks += blocks.shape[0]
            report.bytes += blocks.nbytes
        report.pages += (high - low) * file.geometry.pages_per_block


def _check_ids(store: Store, node_type: NodeType) -> None:
    """Check that original_id and store_id are inverse to each other."""
    where = store.path / node_type.store_id.path
    original = read_rows(store, node_type.original_id).astype(np.int64)
    for first, rows in scan_rows(store, node_type.store_id):
        places = rows.astype(np.int64) - node_type.first
        wrong = np.flatnonzero(original[places] != np.arange(first, first + rows.size))
        if wrong.size:
            bad = first + int(wrong[0])
            raise CorruptBlock(
                f"{where}[{bad}]: store id {rows[bad - first]} does not lead back to it, expected "
                f"original_id to be its inverse"
            )


def _check_hops(store: Store, node_type: NodeType, hops: HopSet) -> None:
    """Check that each node occurs once, and that labels and hop 0 are those of the type.

    Memory: ids of the type and, if the set has as many nodes, four times those.
    """
    where = store.path / hops.nodes.path
    nodes = read_rows(store, hops.nodes)
    distinct, first = np.unique(nodes, return_index=True)
    if distinct.size != nodes.size:
        again = nodes[np.setdiff1d(np.arange(nodes.size), first)]
        raise CorruptBlock(f"{where}: node {again[0]} occurs twice, expected each once")
    feature, hop = node_type.features.get(hops.feature), next(iter(hops.operators.values()))[0]
    if feature is None:
        raise CorruptBlock(f"{where}: hops of {hops.feature!r}, which the type has not")
    places = read_rows(store, node_type.store_id)[nodes].astype(np.int64) - node_type.first
    if hops.label is not None and node_type.label is not None:
        _compare_rows(store, node_type.label, hops.label, places)
    if feature.dtype == hop.dtype and not feature.scale_path:
        _compare_rows(store, feature, hop, places)


def _check_columns(
    store: Store, relation: Relation, columns: Relation | HaloColumns, report: VerifyReport
) -> None:
    """The blocks of a relation, or of the columns of its halo slots.  Raises CorruptBlock."""
    manifest, file, path = store.manifest, store.graph(columns), store.path / columns.path
    capacity = edge_layout(manifest, relation).capacity(manifest.block_bytes)
    ids = _EdgeIds(relation) if columns is relation and relation.edge_id_dtype else None
    owed = 0  # edges of the last column that are still to come
    for first, blocks in scan_blocks(file):
        for number, raw in enumerate(blocks, first):
            where = f"{path}, block {number}"
            block = unpack_block(raw, where)
            header, carried = block.header, min(owed, capacity)
            if header.num_carried != carried:
                raise CorruptBlock(
                    f"{where}: {header.num_carried} carried edges, expected {carried}"
                )
            owed -= carried
            if header.num_nodes:
                owed = header.last_degree - int(block.degrees_here()[-1])
            if ids is not None and block.edge_ids is not None:
                ids.add(block.edge_ids, where)
        report.blocks += blocks.shape[0]
        report.bytes += blocks.nbytes
    if ids is not None:
        ids.end(str(path))
    report.pages += file.crcs.size
    report.edges += columns.num_edges if columns is relation else 0


class _EdgeIds:
    """Edge ids of a relation: in range and each at most once, by two bits for a source edge."""

    def __init__(self, relation: Relation) -> None:
        self._limit = bits = 2 * relation.num_source_edges
        # if ids are few out of very many, they are kept: no table is larger than the store
        self._kept: list[NDArray[np.int64]] | None = None
        if bits > 1024 * max(1024, relation.num_edges):
            self._kept, bits = [], 0
        self._seen = np.zeros(-(-bits // 8), np.uint8)

    def add(self, edge_ids: NDArray[Any], where: str) -> None:
        """Add those of one block.  Raises CorruptBlock."""
        if edge_ids.size == 0:
            return
        if int(edge_ids.max()) >= self._limit:
            raise CorruptBlock(
                f"{where}: edge id {int(edge_ids.max())}, expected less than {self._limit}"
            )
        ids = edge_ids.astype(np.int64)
        if self._kept is not None:
            self._kept.append(ids)
            return
        byte, bit = ids >> 3, (1 << (ids & 7)).astype(np.uint8)
        if (self._seen[byte] & bit).any():
            _raise_twice(where)
        _check_once(ids, where)
        np.bitwise_or.at(self._seen, byte, bit)

    def end(self, where: str) -> None:
        """Finish, after all have been added.  Raises CorruptBlock."""
        if self._kept:
            _check_once(np.concatenate(self._kept), where)


def _check_once(ids: NDArray[np.int64], where: str) -> None:
    if distinct(ids).size != ids.size:
        _raise_twice(where)


def _raise_twice(where: str) -> None:
    raise CorruptBlock(f"{where}: an edge id occurs twice, expected each once")


def _check_copies(store: Store, node_type: NodeType, report: VerifyReport) -> None:
    """Check the hubs and halos of a type.  Raises CorruptBlock."""
    hubs = _check_hubs(store, node_type)
    halo = node_type.halo
    if halo is None:
        return
    nodes = _check_slots(store, node_type, halo, hubs)
    for array, copy in copied_arrays(node_type, halo):
        if store.rows(array).holes is None:  # rows that are not here cannot be compared
            _compare_rows(store, array, copy, nodes - node_type.first)
    for relation in store.manifest.relations:
        if relation.dst == node_type.name and relation.halo is not None:
            _check_columns(store, relation, relation.halo, report)
            _compare_columns(store, relation, relation.halo, nodes)


def _check_hubs(store: Store, t: NodeType) -> NDArray[np.int64]:
    """Check that each occurs once; returns their ids, ascending."""
    if t.hubs is None:
        return np.empty(0, np.int64)
    where = store.path / t.hubs.path
    hubs = np.sort(read_rows(store, t.hubs).astype(np.int64))
    if (np.diff(hubs) == 0).any():
        twice = int(hubs[:-1][np.diff(hubs) == 0][0])
        raise CorruptBlock(f"{where}: hub {twice} occurs twice, expected each once")
    return hubs


def _check_slots(
    store: Store, t: NodeType, halo: Halo, hubs: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Groups are those of partitions, from outside of them, then the hubs; returns the nodes."""
    count, offsets = t.num_partitions, store.halo_offsets(t).astype(np.int64)
    nodes = read_rows(store, halo.nodes).astype(np.int64)
    where = store.path / halo.nodes.path
    group = np.repeat(np.arange(count + 1), np.diff(offsets))
    bad = np.flatnonzero((np.diff(nodes) <= 0) & (group[1:] == group[:-1]))
    if bad.size:
        raise CorruptBlock(
            f"{where}[{bad[0] + 1}]: store id {nodes[bad[0] + 1]} after {nodes[bad[0]]}, expected "
            "ascending ids in a group"
        )
    if not np.array_equal(nodes[offsets[count] :], hubs):
        raise CorruptBlock(f"{where}: the last group has other nodes than hubs, expected the hubs")
    if count:
        parts = store.partition_offsets(t).astype(np.int64)
        inside = np.flatnonzero(np.searchsorted(parts[1:], nodes, "right") == group)
        inside = inside[group[inside] < count]
        if inside.size:
            raise CorruptBlock(
                f"{where}[{inside[0]}]: node {nodes[inside[0]]} is in partition "
                f"{group[inside[0]]} itself, expected nodes from outside"
            )
    return nodes


def _compare_rows(store: Store, array: RowArray, copy: RowArray, rows: NDArray[np.int64]) -> None:
    """`rows`: int64 (slots,), the row of `array` that each row of `copy` is a copy of."""
    if (array.dtype, array.row_shape) != (copy.dtype, copy.row_shape):
        raise CorruptBlock(
            f"{store.path / copy.path}: rows of {copy.dtype} {copy.row_shape}, expected "
            f"{array.dtype} {array.row_shape}"
        )
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    expected = np.empty(rows.size, np.uint64)
    for first, held in scan_rows(store, array):
        low, high = np.searchsorted(ordered, [first, first + held.shape[0]])
        expected[order[low:high]] = _row_digests(held, ordered[low:high] - first)
    for first, held in scan_rows(store, copy):
        count = held.shape[0]
        digests = _row_digests(held, np.arange(count))
        bad = np.flatnonzero(digests != expected[first : first + count])
        if bad.size:
            at = first + int(bad[0])
            raise CorruptBlock(
                f"{store.path / copy.path}[{at}]: another row than {array.path}[{rows[at]}], "
                "expected a copy of it: ingest again, or restore the file"
            )


def _row_digests(rows: NDArray[np.generic], chosen: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Digests of some rows, by words of four bytes if rows are whole words."""
    raw: NDArray[np.uint8] | NDArray[np.uint32]
    raw = np.ascontiguousarray(rows).reshape(rows.shape[0], -1).view(np.uint8)
    if raw.shape[1] % 4 == 0 and raw.ctypes.data % 4 == 0:
        raw = raw.view(np.uint32)
    digests = np.zeros(chosen.size, np.uint64)
    digest_columns(raw, np.arange(rows.shape[0] + 1), chosen, digests)
    return digests


def _compare_columns(
    store: Store, relation: Relation, halo: HaloColumns, nodes: NDArray[np.int64]
) -> None:
    """`nodes`: int64 (slots,), the node whose column each slot has a copy of."""
    distinct, which = np.unique(nodes, return_inverse=True)
    expected = _column_digests(store, relation, distinct)[which]
    found = _column_digests(store, halo, np.arange(nodes.size))
    bad = np.flatnonzero(found != expected)
    if bad.size:
        raise CorruptBlock(
            f"{store.path / halo.path}: column of slot {bad[0]}: other edges than node "
            f"{nodes[bad[0]]} has in {relation.path}, expected a copy of its column: ingest again, "
            "or restore the file"
        )


def _column_digests(
    store: Store, columns: Relation | HaloColumns, chosen: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Digests of these columns, ascending: uint64 (chosen,)."""
    digests = np.zeros(chosen.size, np.uint64)
    for number, blocks in scan_blocks(store.graph(columns)):
        for i in range(blocks.shape[0]):
            block = unpack_block(blocks[i], f"{store.path / columns.path}, block {number + i}")
            header = block.header
            begins = np.zeros(header.num_nodes + 2, np.int64)  # the carried column's, then others
            begins[1] = header.num_carried
            begins[2:] = header.num_carried + np.cumsum(block.degrees_here())
            first = header.first_node - 1
            low, high = np.searchsorted(chosen, [first, first + header.num_nodes + 1])
            digest_columns(block.edge_words(), begins, chosen[low:high] - first, digests[low:high])
    return digests
