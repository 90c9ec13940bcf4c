"""Hubs and halos: which nodes they are, and that copies equal what they are copies of.

An array and its copy need not be in memory together: 64-bit digests of the rows, or of the columns,
that were copied are taken in one pass over the array, and compared in one over the copy.
"""

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.format import Halo, HaloColumns, NodeType, Relation, RowArray
from blockstore.kernels.digest import digest_columns, digest_rows
from blockstore.store import Store, read_rows, scan_blocks, scan_rows
from blockstore.unpack import unpack_block
from blockstore.validate import copied_arrays
from blockstore.verify_graph import VerifyReport, check_columns


def check_copies(store: Store, node_type: NodeType, report: VerifyReport) -> None:
    """Everything about the hubs and halos of a type.  Raises CorruptBlock."""
    hubs = _check_hubs(store, node_type)
    halo = node_type.halo
    if halo is None:
        return
    nodes = _check_slots(store, node_type, halo, hubs)
    for array, copy in copied_arrays(node_type, halo):
        if store.rows(array).holes is None:  # of what is not here nothing can be said
            compare_rows(store, array, copy, nodes - node_type.first)
    for relation in store.manifest.relations:
        if relation.dst == node_type.name and relation.halo is not None:
            check_columns(store, relation, relation.halo, report)
            _compare_columns(store, relation, relation.halo, nodes)


def _check_hubs(store: Store, t: NodeType) -> NDArray[np.int64]:
    """Each occurs once; returns their ids, ascending."""
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


def compare_rows(store: Store, array: RowArray, copy: RowArray, rows: NDArray[np.int64]) -> None:
    """`rows`: int64 (slots,), the row of `array` that each row of `copy` is one of."""
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
        digests = np.empty(high - low, np.uint64)
        digest_rows(_words(held), ordered[low:high] - first, digests)
        expected[order[low:high]] = digests
    for first, held in scan_rows(store, copy):
        digests = np.empty(held.shape[0], np.uint64)
        digest_rows(_words(held), np.arange(held.shape[0]), digests)
        bad = np.flatnonzero(digests != expected[first : first + held.shape[0]])
        if bad.size:
            at = first + int(bad[0])
            raise CorruptBlock(
                f"{store.path / copy.path}[{at}]: another row than {array.path}[{rows[at]}], "
                "expected a copy of it: ingest again, or restore the file"
            )


def _words(rows: NDArray[np.generic]) -> NDArray[np.uint32] | NDArray[np.uint8]:
    """Rows as words, uint32 where they are whole ones."""
    raw = np.ascontiguousarray(rows).reshape(rows.shape[0], -1).view(np.uint8)
    if raw.shape[1] % 4 == 0 and raw.ctypes.data % 4 == 0:
        return raw.view(np.uint32)
    return raw


def _compare_columns(
    store: Store, relation: Relation, halo: HaloColumns, nodes: NDArray[np.int64]
) -> None:
    """`nodes`: int64 (slots,), whose column each is a copy of."""
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
    """Of these columns, ascending: uint64 (chosen,)."""
    digests = np.zeros(chosen.size, np.uint64)
    for number, blocks in scan_blocks(store.graph(columns)):
        for i in range(blocks.shape[0]):
            block = unpack_block(blocks[i], f"{store.path / columns.path}, block {number + i}")
            header = block.header
            begins = np.zeros(header.num_nodes + 2, np.int64)  # of the carried column, then those
            begins[1] = header.num_carried
            begins[2:] = header.num_carried + np.cumsum(block.degrees_here())
            first = header.first_node - 1
            low, high = np.searchsorted(chosen, [first, first + header.num_nodes + 1])
            digest_columns(block.edge_words(), begins, chosen[low:high] - first, digests[low:high])
    return digests
