"""Everything that can be checked of a store: each checksum and each cross-reference."""

import os
from pathlib import Path

import numpy as np

from blockstore.errors import CorruptBlock
from blockstore.format import (
    EXTEND_FOLDER,
    OWNERS_FOLDER,
    ROOT,
    HopSet,
    NodeType,
    RowArray,
    blocked_arrays,
    shard_path,
)
from blockstore.owners import MAP_FILES, check_owners, list_owners, read_owners
from blockstore.part import PART, StorePart, part_of
from blockstore.store import Store, open_store, read_rows, scan_blocks, scan_rows
from blockstore.verify_copies import check_copies, compare_rows
from blockstore.verify_graph import VerifyReport, check_columns


def verify_store(path: Path) -> VerifyReport:
    """Read all of a store.  Raises NotAStore, UnsupportedVersion, CorruptBlock: the first fault.

    Memory: two id arrays of the largest type, two bits for each source edge, and about 40 bytes for
    each slot of a type's halos: copies are compared with what they are copies of by 64-bit digests,
    each array read once, in order.
    """
    store, report = open_store(path), VerifyReport()
    for relation in store.manifest.relations:
        check_columns(store, relation, relation, report)
    for node_type in store.manifest.types:
        _check_ids(store, node_type)
        report.nodes += node_type.num_nodes
        if node_type.hubs is not None or node_type.halo is not None:
            check_copies(store, node_type, report)
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
    report.strays = _strays(store)
    return report


def _check_part(store: Store, part: StorePart) -> None:
    """Its owner map is here, and gives the rows that it says are here."""
    found = read_owners(store, part.owners)
    names = part.owners, found.digest
    if part_of(store.manifest, found.owner, part.server, found.owners, names) != part:
        raise CorruptBlock(
            f"{store.path / PART}: rows of the {part}, digest {part.digest}, expected those of the "
            f"map, digest {found.digest}; make the part again"
        )


def _strays(store: Store) -> tuple[str, ...]:
    """Files that are not of the store, by path in it, sorted."""
    own = {ROOT, *store.manifest.files, *([PART] if store.part else [])}
    for path, geometry, ndim in blocked_arrays(store.manifest):
        own |= {shard_path(path, shard, ndim) for shard in range(geometry.num_shards)}
    own |= {f"{OWNERS_FOLDER}/{name}/{file}" for name in list_owners(store) for file in MAP_FILES}
    found = {
        str(Path(folder, name).relative_to(store.path))
        for folder, _, names in os.walk(store.path)
        for name in names
    }
    return tuple(sorted(name for name in found - own if not name.startswith(f"{EXTEND_FOLDER}/")))


def _check_rows(store: Store, array: RowArray, report: VerifyReport) -> None:
    file = store.rows(array)
    present = [(0, file.geometry.num_blocks)] if file.holes is None else file.holes.present()
    for low, high in present:
        for _, blocks in scan_blocks(file, start=low, stop=high):
            report.blocks += blocks.shape[0]
            report.bytes += blocks.nbytes
        report.pages += (high - low) * file.geometry.pages_per_block


def _check_ids(store: Store, node_type: NodeType) -> None:
    """original_id and store_id undo each other."""
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
    """Each node occurs once; labels and hop 0 are those of the type.

    Memory: ids of the type and, where the set has as many nodes, four times those.
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
        compare_rows(store, node_type.label, hops.label, places)
    if feature.dtype == hop.dtype and not feature.scale_path:
        compare_rows(store, feature, hop, places)
