"""Partition the nodes, from all columns of a graph, in memory or streamed.

Streaming partitioners place nodes by descending degree, and read all columns in each pass.  So an
external sort first brings columns into that order, and renames both ends by it: a pass then reads
one file from beginning to end, and the partitions of the most frequent nodes lie side by side.
Besides the pieces, memory is a few bytes a node and a number for each class in each partition,
whatever the number of edges.

A node is attracted by the sources of its in-edges and, by default, by the targets of its out-edges:
some nodes have only those, such as papers that cite nobody or authors that nothing points to.  If
every node has as many out-edges as in-edges the graph is assumed to be symmetric, and in-edges
alone are used, which give the same partition.
"""

from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.closing import Closing
from blockstore.errors import BudgetTooSmall
from blockstore.format import Partitioning
from blockstore.kernels.random import make_key, permute_range
from blockstore.units import format_bytes
from preprocess.files.array_file import remove_file
from preprocess.kernels.edges import count_ids
from preprocess.kernels.levels import assign_places, take_counts
from preprocess.kernels.partition import Adjacent, make_balance, place_nodes
from preprocess.partition.metis import check_installed, metis_bytes, metis_partition
from preprocess.partition.partition import (
    PartitionOptions,
    class_costs,
    class_limits,
    group_caps,
    table_bytes,
    visited_fits,
)
from preprocess.partition.report import count_kept, make_report
from preprocess.pipeline.progress import Progress
from preprocess.stages.columns import ColumnFile, Renaming, renamed_edges, scan_columns
from preprocess.stages.csc import COLUMN_BYTES, Widths, sorted_columns
from preprocess.stages.labels import NodeClasses
from preprocess.stages.order import NodeOrder, at_random, by_degree

_VISITED = "visited"  # temporary file of this stage
_PURPOSE = 0x5061_7274  # part of the random key that no other draw uses


class Partitioned(NamedTuple):
    """A partition, and the report about it."""

    partition: NDArray[np.uint32]  # (num_nodes,)
    report: Partitioning
    pass_edges: int  # edges that each pass read; 0 if it was not streamed


def partition_nodes(
    columns: ColumnFile,
    classes: NodeClasses,
    settings: PartitionOptions,
    seed: int,
    share: int,
    work: Path,
    progress: Progress,
) -> Partitioned:
    """Find a partition by the method of `settings`.

    columns  of all nodes, by id
    share    bytes for sorting, reading and tables of classes

    Raises BudgetTooSmall; BadInput: METIS is not installed.
    """
    num_nodes, k = classes.of_node.size, settings.num_partitions
    if not settings.is_streamed:
        partition = np.zeros(num_nodes, np.uint32)
        check_installed(settings.method)
        if settings.method == "metis" and k > 1:
            _check_room(metis_bytes(columns), share, "METIS, which holds the whole graph")
            partition = metis_partition(columns, k, progress)
        elif k > 1:
            key = np.uint64(make_key(seed, _PURPOSE, 0, 0, 0))
            permute_range(0, num_nodes, num_nodes, key, partition)
            partition %= np.uint32(k)  # sizes differ by one at most
        kept = count_kept(columns, partition, classes, share, progress)
        report = make_report(settings, classes, partition, kept, 0)
        return Partitioned(partition, report, 0)
    tables = table_bytes(settings, classes.num_classes + 1)
    why = f"{classes.num_classes + 1} classes in each of {k:,} partitions"
    _check_room(4 * tables, share, why)
    with Visits(columns, settings, seed, share, work, progress) as visits:
        of_node = np.empty(num_nodes, np.uint16)
        take_counts(classes.of_node, visits.order, 0, of_node)
        ranked = NodeClasses(of_node, classes.num_classes)
        partition, evaluations = _place(visits.columns, ranked, settings, share, progress)
        found = np.empty(num_nodes, np.uint32)
        found[visits.order] = partition
        if visits.both_ways:
            kept = count_kept(columns, found, classes, share, progress)
        else:
            kept = count_kept(visits.columns, partition, ranked, share, progress)
        report = make_report(settings, ranked, partition, kept, evaluations)
        return Partitioned(found, report, visits.columns.num_edges)


def _check_room(need: int, share: int, why: str) -> None:
    if need > share:
        raise BudgetTooSmall(
            f"--mem: found {format_bytes(share)} to partition with, expected "
            f"{format_bytes(need)} for {why}; give {format_bytes(need - share)} more"
        )


class Visits(Closing):
    """Columns in the order in which nodes are visited; both ends are positions in this order.

    If weights are given, the heaviest nodes are visited first.  If columns also hold out-edges,
    sources are then marked: twice their position, plus 1 if the edge leaves the column's node.
    """

    def __init__(
        self,
        columns: ColumnFile,
        settings: PartitionOptions,
        seed: int,
        share: int,
        work: Path,
        progress: Progress,
        weights: NDArray[np.uint32] | None = None,
    ) -> None:
        self._path: Path | None = None
        num_nodes, num_edges = columns.degrees.size, columns.num_edges
        degrees = _degrees_both_ways(columns, settings, share, progress)
        self.both_ways = degrees is not columns.degrees
        if settings.visit == "source" and not self.both_ways:
            self.order = np.arange(num_nodes, dtype=np.uint32)
            self.columns = columns
            return
        if settings.visit == "degree":
            order = by_degree(degrees if weights is None else weights)
        elif settings.visit == "random":
            order = at_random(num_nodes, make_key(seed, _PURPOSE, 1, 0, 0))
        else:
            order = np.arange(num_nodes, dtype=np.uint32)
        counts, rank = np.empty(num_nodes, np.uint32), np.empty(num_nodes, np.uint32)
        take_counts(degrees, order, 0, counts)
        assign_places(order, 0, num_nodes, rank)
        del order, degrees
        num_edges *= 2 if self.both_ways else 1
        if not visited_fits(num_edges, share, columns.in_memory):
            self._path = work / _VISITED
            self._path.unlink(missing_ok=True)
        self.columns = ColumnFile(self._path, num_nodes, num_edges)
        share -= self.columns.held_bytes
        marked = weights is not None and self.both_ways
        names = Renaming(rank, 0, self.both_ways, marked)
        widths = Widths.of("uint32", num_nodes << marked, None, num_edges)
        longest = int(counts.max(initial=0)) * widths.sort_bytes + COLUMN_BYTES
        _check_room(longest // 3 * 4 + 4, share, "sorting the edges of one node")
        for some in sorted_columns(
            renamed_edges(columns, names, share // 4, progress), counts, widths, False, share, work,
            progress,
        ):  # fmt: skip
            self.columns.append(some)
        self.columns.finish()
        self.order = NodeOrder.from_rank(rank).order

    def close(self) -> None:
        """Remove the file of the columns, if there is one."""
        if self._path is not None:
            self.columns.close()
            remove_file(self._path)


def _degrees_both_ways(
    columns: ColumnFile, settings: PartitionOptions, share: int, progress: Progress
) -> NDArray[np.uint32]:
    """Number of edges that attract each node; `columns.degrees` itself if only in-edges count."""
    if settings.neighbors == "in":
        return columns.degrees
    degrees = np.zeros(columns.degrees.size, np.uint32)
    with closing(scan_columns(columns, "count out-edges", share, progress)) as pieces:
        for sources in pieces:
            count_ids(sources, 0, degrees)
    if settings.neighbors == "auto" and np.array_equal(degrees, columns.degrees):
        return columns.degrees
    degrees += columns.degrees
    return degrees


def _place(
    columns: ColumnFile,
    classes: NodeClasses,
    settings: PartitionOptions,
    share: int,
    progress: Progress,
) -> tuple[NDArray[Any], int]:
    """(partition of each node, number of scores computed); nodes are numbered in visit order."""
    k = settings.num_partitions
    of_node, sizes = classes.of_node, classes.sizes
    if not settings.knows_classes:
        of_node, sizes = np.zeros_like(of_node), np.array([of_node.size])
    groups = np.arange(sizes.size) < sizes.size - 1
    caps = group_caps(settings, [int(sizes[~groups].sum()), int(sizes[groups].sum())])
    costs = class_costs(settings, sizes, columns.num_edges, caps[groups.astype(np.int64)])
    balance = make_balance(k, groups.astype(np.uint8), caps, class_limits(settings, sizes), costs)
    partition = np.full(of_node.size, k, settings.dtype)
    adjacent = Adjacent(np.zeros(k + 1, np.uint32), np.zeros(k + 2, np.int64))
    linear = settings.method == "ldg"
    evaluations = 0
    no_edges = np.empty(0, np.uint32)  # ends a pass: the remaining nodes have no edges
    for number in range(1, settings.passes + 1):
        node, skip, found = 0, 0, 0
        name = f"pass {number} of {settings.passes}"
        with closing(scan_columns(columns, name, share, progress)) as pieces:
            for sources in chain(pieces, [no_edges]):
                node, skip, found, evaluated = place_nodes(
                    node, skip, found, columns.degrees, sources, of_node, partition, balance,
                    adjacent, linear,
                )  # fmt: skip
                evaluations += int(evaluated)
        assert node == of_node.size
    return partition, evaluations
