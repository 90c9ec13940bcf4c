"""Everything that can be checked of a store: each checksum and each cross-reference."""

import os
from pathlib import Path

import numpy as np

from blockstore.errors import CorruptBlock
from blockstore.format import EXTEND_FOLDER, ROOT, NodeType, RowArray, blocked_arrays, shard_path
from blockstore.store import Store, open_store, read_rows, scan_blocks, scan_rows
from blockstore.verify_copies import check_copies
from blockstore.verify_graph import RelationVerifier, VerifyReport
from blockstore.verify_hops import check_hops


def verify_store(path: Path) -> VerifyReport:
    """Read all of a store.  Raises NotAStore, UnsupportedVersion, CorruptBlock: the first fault.

    Memory: two id arrays of the largest type, two bits for each source edge, and about 40 bytes for
    each slot of a type's halos: copies are compared with what they are copies of by 64-bit digests,
    each array read once, in order.
    """
    store, report = open_store(path), VerifyReport()
    for relation in store.manifest.relations:
        RelationVerifier(store, relation, report).run()
    for node_type in store.manifest.types:
        _check_ids(store, node_type)
        report.nodes += node_type.num_nodes
        if node_type.hubs is not None or node_type.halo is not None:
            check_copies(store, node_type, report)
        for hops in node_type.hops.values():
            check_hops(store, node_type, hops)
    for array in store.manifest.row_arrays():
        _check_rows(store, array, report)
    report.strays = _strays(store)
    return report


def _strays(store: Store) -> tuple[str, ...]:
    """Files that are not of the store, by path in it, sorted."""
    own = {ROOT, *store.manifest.files}
    for path, geometry, ndim in blocked_arrays(store.manifest):
        own |= {shard_path(path, shard, ndim) for shard in range(geometry.num_shards)}
    found = {
        str(Path(folder, name).relative_to(store.path))
        for folder, _, names in os.walk(store.path)
        for name in names
    }
    return tuple(sorted(name for name in found - own if not name.startswith(f"{EXTEND_FOLDER}/")))


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
