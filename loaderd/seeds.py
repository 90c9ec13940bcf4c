"""From the seeds that a client names to a table of store ids in the arena."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import NodeType
from blockstore.kernels.order import map_range
from blockstore.store import Store, scan_rows
from loaderd.errors import Refused

SCAN_BYTES = 4 << 20


def count_seeds(node_type: NodeType, split: str, ids: NDArray[np.int64] | None) -> int:
    """How many seeds the request names.  Raises Refused: unknown split, id out of range."""
    if split == "all":
        return node_type.num_nodes
    if split:
        if split not in node_type.splits:
            names = ", ".join([*node_type.splits, "all"])
            raise Refused(f"split {split!r} is not in the store: it has {names}")
        return node_type.splits[split].num_rows
    if ids is None:
        raise Refused("seeds: neither a split nor ids were given")
    bad = np.flatnonzero((ids < 0) | (ids >= node_type.num_nodes))
    if bad.size:
        raise Refused(
            f"input_nodes[{bad[0]}] is {ids[bad[0]]}, outside [0, {node_type.num_nodes}) of type "
            f"{node_type.name!r}"
        )
    return ids.size


def fill_seeds(
    store: Store,
    node_type: NodeType,
    split: str,
    ids: NDArray[np.int64] | None,
    scratch: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    """Write the store ids of the seeds, in the order given.

    scratch  int64 (num_seeds,)     holds original ids meanwhile; empty for split "all"
    out      id_dtype (num_seeds,)  store ids

    Passes over the inverse map on disk once.  Raises CorruptBlock.
    """
    if split == "all":
        for first, rows in scan_rows(store, node_type.store_id, SCAN_BYTES):
            out[first : first + rows.size] = rows
        return
    if ids is not None:
        scratch[:] = ids
    else:
        for first, rows in scan_rows(store, node_type.splits[split], SCAN_BYTES):
            scratch[first : first + rows.size] = rows
    for first, rows in scan_rows(store, node_type.store_id, SCAN_BYTES):
        map_range(scratch, first, rows, out)
