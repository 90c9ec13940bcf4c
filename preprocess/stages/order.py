"""Orders of the nodes: functions of the graph and a seed alone.

`random`: a keyed permutation.

`bfs`: breadth-first, level by level.  Roots are taken by descending in-degree, ties by id; the new
nodes of a level are ordered by (their earliest discoverer, id).  If a level finds no node, the next
roots are taken: one at first, then twice as many each time.  After MAX_LEVELS levels the other
nodes are ordered by id.  Isolated nodes come last.

`degree`: by classes of out-degree (2**k to 2**(k + 1) - 1), the highest first; breadth-first inside
a class.  Samplers reach a node by its out-edges, so nodes that batches want about equally often lie
side by side, and among these the ones that are linked.

In memory a level visits the columns of its frontier.  On disk it scans all columns or, if that is
less to read, the runs that contain the frontier's columns.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.random import make_key, permute_range
from preprocess.kernels.edges import count_ids
from preprocess.kernels.levels import (
    FOUND,
    UNSET,
    assign_places,
    count_groups,
    degree_classes,
    degree_keys,
    mark_discovered,
    merge_ranges,
    place_discovered,
    place_found,
    place_rest,
    split_order,
    take_roots,
)
from preprocess.pipeline.progress import Progress
from preprocess.stages.columns import ColumnFile, scan_columns

MAX_LEVELS = 4096
_GAP_EDGES = (64 << 10) // 4  # edges that a scan reads in the time that one more read costs
_MAX_STEP = 1 << 20  # edges read at a time
_PURPOSE = 0x4F72_6465  # part of the random key that no other draw uses
_CLASSES = 33  # of degrees below 2**32
_FEW = 32  # a level of at most 1/32 of the nodes is ordered by sorting, and may be read in runs


class NodeOrder(NamedTuple):
    """A new order of nodes, uint32 (num_nodes,) each; source ids are numbered across all types."""

    order: NDArray[np.uint32]  # source id of each store id
    rank: NDArray[np.uint32]  # store id of each source id

    @classmethod
    def from_rank(cls, rank: NDArray[np.uint32]) -> "NodeOrder":
        """The order that belongs to a rank."""
        order = np.empty(rank.size, np.uint32)
        assign_places(rank, 0, rank.size, order)
        return cls(order, rank)


def by_degree(degrees: NDArray[np.uint32], minimum: int = 0) -> NDArray[np.uint32]:
    """Nodes of at least `minimum` in-edges, by descending in-degree, then id; 12 bytes a node."""
    keys = np.empty(degrees.size, np.uint64)
    keys = keys[: int(degree_keys(degrees, minimum, keys))]
    keys.sort()
    return keys.astype(np.uint32)  # the low half: ids


def at_random(num_nodes: int, seed: int) -> NDArray[np.uint32]:
    """Nodes in the order of a keyed permutation."""
    rank, order = np.empty(num_nodes, np.uint32), np.empty(num_nodes, np.uint32)
    permute_range(0, num_nodes, num_nodes, np.uint64(make_key(seed, _PURPOSE, 0, 0, 0)), rank)
    assign_places(rank, 0, num_nodes, order)
    return order


def group_nodes(
    order: NDArray[np.uint32] | None,
    bounds: NDArray[np.int64],
    partition: NDArray[np.uint32] | None,
    num_partitions: int = 1,
) -> tuple[NodeOrder, NDArray[np.int64]]:
    """Group nodes by type, then by partition; inside a group they keep the given order.

    order      uint32 (num_nodes,)   None: by id
    bounds     int64 (types + 1,)    first node of each type, then the end
    partition  uint32 (num_nodes,)   None: a single partition

    Returns the order, and the start of each (type, partition), then the end: int64.
    """
    grouped, starts = _grouped(order, bounds, partition, num_partitions)
    rank = np.empty(grouped.size, np.uint32)
    assign_places(grouped, 0, grouped.size, rank)
    return NodeOrder(grouped, rank), starts


def _grouped(
    order: NDArray[np.uint32] | None,
    bounds: NDArray[np.int64],
    partition: NDArray[np.uint32] | None,
    num_partitions: int,
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The order of `group_nodes`, and the starts of its groups."""
    none = np.empty(0, np.uint32)
    starts = np.zeros((bounds.size - 1) * num_partitions + 1, np.int64)
    where = none if partition is None else partition
    count_groups(bounds, where, num_partitions, starts)
    if order is not None and starts.size == 2:
        return order, starts
    grouped = np.empty(int(bounds[-1]), np.uint32)
    split_order(
        none if order is None else order, bounds, where, num_partitions, starts.copy(), grouped
    )
    return grouped, starts


def breadth_first(columns: ColumnFile, share: int, progress: Progress) -> NDArray[np.uint32]:
    """Nodes in breadth-first order; 20 bytes a node and `share` for reading."""
    num_nodes = columns.degrees.size
    roots = by_degree(columns.degrees, 1)
    rank = np.full(num_nodes, UNSET, np.uint32)
    order = np.empty(num_nodes, np.uint32)
    step = max(1, min(_MAX_STEP, share // 32))
    at, wanted, low, high = 0, 1, 0, 0  # the frontier is order[low:high]
    with progress.stage("breadth-first order", num_nodes, "nodes") as stage:
        for _ in range(MAX_LEVELS):
            if low == high:
                at, placed = take_roots(roots, at, wanted, rank, order, high)
                wanted *= 2
                if placed == high:
                    break
            elif columns.in_memory:
                placed = place_discovered(
                    low, high, columns.starts, columns.degrees, columns.sources, rank, order, high
                )
            else:
                placed = _place_level(columns, low, high, rank, order, step)
            low, high = high, int(placed)
            stage.advance(high - low)
        else:
            for piece in columns.read(0, columns.num_edges, step):
                rank[piece[rank[piece] == UNSET]] = FOUND  # they have an edge
        stage.advance(int(place_rest(columns.degrees, rank, order, high)) - high)
    return order


def by_degree_class(columns: ColumnFile, share: int, progress: Progress) -> NDArray[np.uint32]:
    """Nodes by classes of out-degree, then breadth-first; memory as for `breadth_first`."""
    order = breadth_first(columns, share, progress)
    classes = np.zeros(order.size, np.uint32)
    for sources in scan_columns(columns, "out-degrees", share, progress):
        count_ids(sources, 0, classes)
    degree_classes(classes)
    return _grouped(order, np.array([0, order.size]), classes, _CLASSES)[0]


def _place_level(
    columns: ColumnFile,
    low: int,
    high: int,
    rank: NDArray[np.uint32],
    order: NDArray[np.uint32],
    step: int,
) -> int:
    """Place the nodes that the frontier order[low:high] discovers; returns the new end."""
    few = max(1, rank.size // _FEW)
    touched = order[high : high + few]
    count = 0
    for node, first, edges in _runs(columns, order[low:high], few):
        skip = 0
        for piece in columns.read(first, edges, step):
            node, skip, count = mark_discovered(
                node, skip, columns.degrees, piece, low, high, rank, touched, count
            )
    placed = high + int(count)
    if count > touched.size:
        place_found(rank, low, np.zeros(high - low + 1, np.uint32), order, high)
    else:
        found = touched[:count]
        keys = (rank[found] - FOUND).astype(np.uint64) << np.uint64(32) | found
        keys.sort()
        found[:] = keys.astype(np.uint32)
    assign_places(order, high, placed, rank)
    return placed


def _runs(columns: ColumnFile, frontier: NDArray[np.uint32], few: int) -> list[list[int]]:
    """What to read for a frontier, [first node, first edge, edges] each: runs, or everything."""
    everything = [[0, 0, columns.num_edges]]
    if frontier.size > few:
        return everything
    nodes = np.sort(frontier)
    runs = np.empty((nodes.size, 3), np.int64)
    runs = runs[: merge_ranges(nodes, columns.starts, columns.degrees, _GAP_EDGES, runs)]
    if int(runs[:, 2].sum()) + runs.shape[0] * _GAP_EDGES > columns.num_edges:
        return everything
    return runs.tolist()
