"""Owners of whole partitions of a store: loads of partitions, and balancing of owners."""

import math

import numpy as np
from numpy.typing import NDArray

from blockstore.store import Store, read_rows
from preprocess.errors import BadInput

MAX_OWNERS = 1024  # a table of all pairs takes 8 MiB


def check_partitions(store: Store, owners: int) -> None:
    """Raises BadInput if the store has too few partitions for so many owners, or too many."""
    (node_type,) = store.manifest.types
    found = node_type.num_partitions
    if not owners <= found <= MAX_OWNERS:
        raise BadInput.at(
            store.path, f"{found:,} partitions", f"{owners:,} to {MAX_OWNERS:,}",
            "make others with `blockstore repartition`, or leave out --from-partitions",
        )  # fmt: skip


def partitions_of(store: Store) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
    """The partition of each node, and the training nodes of each partition.

    If the store has no training nodes, all nodes are counted instead.
    """
    (t,) = store.manifest.types
    offsets = store.partition_offsets(t).astype(np.int64)
    sizes = np.diff(offsets)
    partition = np.repeat(np.arange(sizes.size, dtype=np.uint16), sizes)
    split = t.splits.get("train")
    if split is None or not split.num_rows:
        return partition, sizes.astype(np.float64)
    nodes = read_rows(store, t.store_id)[read_rows(store, split)]
    return partition, np.bincount(partition[nodes], minlength=sizes.size).astype(np.float64)


def even_out(
    table: NDArray[np.float64],
    loads: NDArray[np.float64],
    owner: NDArray[np.uint16],
    k: int,
    cap: float,
) -> None:
    """Move partitions away from the owner with the greatest load, or swap them with others, until
    it has at most `cap` or no step helps.  Of equally good steps, take the one that cuts least.

    table   float64 (partitions, partitions)   symmetric
    owner   uint16 (partitions,)               in and out
    """
    totals = np.bincount(owner, loads, k)
    to = np.zeros((loads.size, k))  # weight of the edges between a partition and each owner
    for p in range(k):
        to[:, p] = table[:, owner == p].sum(axis=1)
    while totals.max() > cap:
        full = int(totals.argmax())
        own = np.flatnonzero(owner == full)
        best = (float(totals[full]), -math.inf, -1, -1, -1)  # a step must improve on this
        for other in range(k):
            if other == full:
                continue
            theirs = np.append(np.flatnonzero(owner == other), -1)  # -1: a move without a swap
            back = np.append(loads[theirs[:-1]], 0.0)
            moved = loads[own][:, None] - back
            after = np.maximum(totals[full] - moved, totals[other] + moved)
            gain = (to[own, full] - to[own, other])[:, None]
            cut = gain + np.append(to[theirs[:-1], other] - to[theirs[:-1], full], 0.0)
            i, j = np.unravel_index(np.lexsort((cut.ravel(), after.ravel()))[0], after.shape)
            best = min(
                best, (float(after[i, j]), float(cut[i, j]), int(own[i]), int(theirs[j]), other)
            )
        _, _, away, back_one, other = best
        if away < 0:
            return
        for p, source, target in ((away, full, other), (back_one, other, full)):
            if p >= 0:
                owner[p] = target
                totals[source] -= loads[p]
                totals[target] += loads[p]
                to[:, source] -= table[:, p]
                to[:, target] += table[:, p]
