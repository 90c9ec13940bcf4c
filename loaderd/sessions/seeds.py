"""Turn the seeds that a client names into a table of store ids in the arena."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, Manifest, NodeType, Relation, RowArray
from blockstore.kernels.order import find_outside, map_range
from blockstore.pack import unpack_block
from blockstore.store import Store, scan_blocks, scan_rows
from loaderd.api.errors import Refused
from loaderd.api.protocol import Resolved
from loaderd.plans.roots import EndTable
from loaderd.sessions.resolve import find_relation

SCAN_BYTES = 4 << 20
MAX_LISTED = 1 << 23  # edge ids of a split: sorting them takes 64 MiB


def count_seeds(
    node_type: NodeType, split: str, ids: NDArray[np.int64] | None, mask_size: int = 0
) -> int:
    """Count the seeds that the request names.

    mask_size   length of the mask over the type's nodes that the ids come from; 0: no mask

    Raises Refused: unknown split, id out of range, a mask over another number of nodes.
    """
    check_mask(node_type, mask_size)
    if split == "all":
        return node_type.num_nodes
    if split:
        if split not in node_type.splits:
            names = ", ".join([*node_type.splits, "all"])
            raise Refused(
                f"split {split!r} is not in the store: it has {names}, of type {node_type.name!r}"
            )
        return node_type.splits[split].num_rows
    if ids is None:
        raise Refused("seeds: neither a split nor ids were given")
    bad = find_outside(ids, node_type.num_nodes)
    if bad >= 0:
        raise Refused(
            f"input_nodes[{bad}] is {ids[bad]}, outside [0, {node_type.num_nodes}) of type "
            f"{node_type.name!r}"
        )
    return ids.size


def check_mask(node_type: NodeType, mask_size: int) -> None:
    """Raises Refused: a mask over another number of nodes; 0: there is none."""
    if mask_size not in (0, node_type.num_nodes):
        raise Refused(
            f"input_nodes: a mask over {mask_size} nodes, expected one over the "
            f"{node_type.num_nodes} of type {node_type.name!r}"
        )


def count_edges(
    manifest: Manifest, relation: Relation, split: str, ids: NDArray[np.int64] | None
) -> int:
    """Count the seed edges that the request names.  Raises Refused: unknown split, id out of range.

    ids   int64 (2 * edges,)   original ids: all sources, then all targets
    """
    if split == "all":
        return relation.num_edges
    if split:
        if split not in relation.splits:
            names = ", ".join([*relation.splits, "all"])
            raise Refused(f"split {split!r} of edges is not in the store: it has {names}")
        num_rows = relation.splits[split].num_rows
        if not relation.splits[split].row_shape:
            _check_positions(relation, split, num_rows)
        return num_rows
    if ids is None:
        raise Refused("seed edges: neither a split nor ids were given")
    for row, (ends, name) in enumerate(zip(np.split(ids, 2), _ends(relation), strict=True)):
        num_nodes = next(t.num_nodes for t in manifest.types if t.name == name)
        bad = find_outside(ends, num_nodes)
        if bad >= 0:
            raise Refused(
                f"edge_label_index[{row}, {bad}] is {ends[bad]}, outside [0, {num_nodes}) of "
                f"type {name!r}"
            )
    return ids.size // 2


def _check_positions(relation: Relation, split: str, num_rows: int) -> None:
    """Check a split that lists edge ids.  Raises Refused."""
    if relation.edge_id_dtype is None:
        raise Refused(
            f"split {split!r} of edges lists edge ids, the store has none; ingest with --edge-ids, "
            "or give the edges as edge_label_index"
        )
    if num_rows > MAX_LISTED:
        raise Refused(
            f"split {split!r} of edges lists {num_rows} edge ids, expected at most {MAX_LISTED}; "
            "make it one of pairs of nodes"
        )


def _ends(relation: Relation) -> tuple[str, str]:
    return relation.src, relation.dst


def table_items(
    manifest: Manifest, relation: Relation | None, split: str, resolved: Resolved
) -> int:
    """The size of a session's table of seeds, in ids.

    relation   of seeds that are edges; None: they are nodes
    """
    if relation is None:
        return resolved.num_seeds
    if split == "all":  # edges before each block
        return -(-8 * (relation.num_blocks + 1) // ITEM_BYTES[manifest.id_dtype])
    return 2 * resolved.num_seeds


def lookup_items(split: str, resolved: Resolved) -> int:
    """Original ids that are read from the store while a table of seeds is made: int64.

    0 if the request brings them, or the seeds are all nodes or edges.
    """
    return resolved.num_seeds if split not in ("", "all") else 0


def fill_edges(
    store: Store,
    relation: Relation,
    resolved: Resolved,
    split: str,
    ids: NDArray[np.int64] | None,
    scratch: NDArray[np.int64],
    out: NDArray[Any],
) -> EndTable:
    """The table of seed edges in the order given: store ids of their ends; of "all", block offsets.

    scratch  int64 (lookup_items,)     holds original ids meanwhile
    out      id_dtype (table_items,)   what the table is made of

    Passes over the inverse maps on disk, once for each end; for a split that lists edge ids, over
    the graph.  Raises CorruptBlock, Refused.
    """
    manifest, spec = store.manifest, resolved.edges
    assert spec is not None
    ends, first_edge = out[:0].reshape(2, 0), np.empty(0, np.uint64)
    if split == "all":
        first_edge = out.view(np.uint64)[: relation.num_blocks + 1]
        first_edge[:] = store.first_edge(relation)
    elif ids is None and not relation.splits[split].row_shape:
        ends = out.reshape(2, -1)
        listed = _original_ids(store, relation.splits[split], scratch)
        _find_listed(store, relation, split, listed, ends)
    else:
        ends = out.reshape(2, -1)
        for row, name in enumerate(_ends(relation)):
            if ids is None:
                given = _original_ids(store, relation.splits[split], scratch, row)
            else:
                given = np.split(ids, 2)[row]
            node_type = next(t for t in manifest.types if t.name == name)
            _look_up(store, node_type, given, ends[row])
    ranges = {t.name: (t.first, t.num_nodes) for t in manifest.types}
    return EndTable(
        spec, find_relation(manifest, spec.relation),
        find_relation(manifest, spec.reverse) if spec.exclude == "reverse" else -1,
        ranges[relation.src], ranges[relation.dst], ends, first_edge,
    )  # fmt: skip


def _original_ids(
    store: Store, array: RowArray, out: NDArray[np.int64], column: int = 0
) -> NDArray[np.int64]:
    """One column of an array of original ids, int64 (rows,), written to `out`."""
    for first, rows in scan_rows(store, array, SCAN_BYTES):
        out[first : first + rows.shape[0]] = rows.reshape(rows.shape[0], -1)[:, column]
    return out


def _look_up(store: Store, node_type: NodeType, ids: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Store ids of original ids, id_dtype (ids,): one pass over the inverse map on disk."""
    for first, rows in scan_rows(store, node_type.store_id, SCAN_BYTES):
        map_range(ids, first, rows, out)


def _find_listed(
    store: Store, relation: Relation, split: str, edge_ids: NDArray[np.int64], ends: NDArray[Any]
) -> None:
    """Find the ends of the edges of these ids, in their order; sorts `edge_ids`."""
    order = np.argsort(edge_ids)
    edge_ids.sort()
    found = 0
    for first, blocks in scan_blocks(store.graph(relation), SCAN_BYTES):
        for i, raw in enumerate(blocks):
            block = unpack_block(raw, f"{relation.path}, block {first + i}")
            assert block.edge_ids is not None
            own = block.edge_ids.astype(np.int64)
            places = np.minimum(np.searchsorted(edge_ids, own), edge_ids.size - 1)
            hit = np.flatnonzero(edge_ids[places] == own)
            to = order[places[hit]]
            header = block.header
            columns = np.arange(header.first_node, header.first_node + header.num_nodes)
            carried = np.full(header.num_carried, header.first_node - 1, np.int64)
            targets = np.concatenate([carried, np.repeat(columns, block.degrees_here())])
            ends[0, to], ends[1, to] = block.sources[hit], targets[hit]
            found += hit.size
    if found != edge_ids.size:
        raise Refused(
            f"split {split!r} of edges: {found} of its {edge_ids.size} edge ids are in the store, "
            "expected each, once; give the edges as edge_label_index"
        )


def fill_seeds(
    store: Store,
    node_type: NodeType,
    split: str,
    ids: NDArray[np.int64] | None,
    scratch: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    """Write the store ids of the seeds, in the order given.

    scratch  int64 (lookup_items,)  holds original ids meanwhile
    out      id_dtype (num_seeds,)  store ids

    Passes over the inverse map on disk once.  Raises CorruptBlock.
    """
    if split == "all":
        for first, rows in scan_rows(store, node_type.store_id, SCAN_BYTES):
            out[first : first + rows.size] = rows
        return
    given = _original_ids(store, node_type.splits[split], scratch) if ids is None else ids
    _look_up(store, node_type, given, out)
