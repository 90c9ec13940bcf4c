"""Hop sets: which nodes they have, and that labels and hop 0 are those of the type."""

import numpy as np

from blockstore.errors import CorruptBlock
from blockstore.format import HopSet, NodeType
from blockstore.store import Store, read_rows
from blockstore.verify_copies import compare_rows


def check_hops(store: Store, node_type: NodeType, hops: HopSet) -> None:
    """Everything but the values of hops from 1 on.  Raises CorruptBlock.

    Memory: ids of the type and, where the set has as many nodes, four times those.
    """
    where = store.path / hops.nodes.path
    nodes = read_rows(store, hops.nodes)
    bad = np.flatnonzero((nodes < 0) | (nodes >= node_type.num_nodes))
    if bad.size:
        raise CorruptBlock(
            f"{where}[{bad[0]}]: node {nodes[bad[0]]}, expected 0 to {node_type.num_nodes - 1}"
        )
    seen = np.zeros(node_type.num_nodes, np.bool_)
    seen[nodes] = True
    if np.count_nonzero(seen) != nodes.size:
        again = nodes[np.setdiff1d(np.arange(nodes.size), np.unique(nodes, return_index=True)[1])]
        raise CorruptBlock(f"{where}: node {again[0]} occurs twice, expected each once")
    if not hops.operators:
        raise CorruptBlock(f"{where}: no operator, expected one at least")
    first = next(iter(hops.operators.values()))[:1]
    for name, chain in hops.operators.items():
        for hop, array in enumerate(chain):
            if array.num_rows != nodes.size or array.rows_per_block == 0:
                raise CorruptBlock(
                    f"{store.path / array.path}: {array.num_rows} rows, {array.rows_per_block} a "
                    f"block, expected {nodes.size} without gaps"
                )
            if hop == 0 and array != first[0]:
                raise CorruptBlock(
                    f"{where}: hop 0 of {name} is {array.path}, expected {first[0].path}"
                )
        if not chain:
            raise CorruptBlock(f"{where}: {name} has no hops, expected hop 0 at least")
    places = read_rows(store, node_type.store_id)[nodes].astype(np.int64) - node_type.first
    if hops.label is not None and node_type.label is not None:
        compare_rows(store, node_type.label, hops.label, places)
    feature = node_type.features.get(hops.feature)
    if feature is None:
        raise CorruptBlock(f"{where}: hops of {hops.feature!r}, which the type has not")
    if feature.dtype == first[0].dtype and not feature.scale_path:
        compare_rows(store, feature, first[0], places)
