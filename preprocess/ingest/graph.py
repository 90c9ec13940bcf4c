"""The stages of graphs: count edges, sort columns by source id, order nodes, sort by store id.

Nodes of all types share one numbering: the first id of the type + the id in the type.  Their order
is found on the union of all relations; then each relation is sorted into columns by store id.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Partitioning
from blockstore.writer import StoreWriter
from preprocess.files.array_file import load_array, save_array
from preprocess.ingest.contents import RelationContents
from preprocess.ingest.plan import IngestJob
from preprocess.kernels.edges import Ends
from preprocess.kernels.levels import HeldColumns, WordBits, gather_columns, take_counts
from preprocess.pipeline.stage import PipelineRun, Stage
from preprocess.pipeline.tasks import Executor, SavedArray, TaskFolder
from preprocess.stages.columns import COLUMNS, DEGREES, ColumnFile
from preprocess.stages.csc import (
    COLUMN_BYTES,
    ColumnSorter,
    WholeColumns,
    Widths,
    cut_buckets,
    sorted_columns,
)
from preprocess.stages.labels import NodeClasses
from preprocess.stages.order import (
    NodeOrder,
    at_random,
    breadth_first,
    by_degree_class,
    group_nodes,
)
from preprocess.stages.partition import partition_nodes
from preprocess.stages.scan import count_edges
from preprocess.stages.spread import (
    EdgeReader,
    EndRanks,
    read_columns,
    read_relation,
    spread_columns,
    spread_counts,
)

RANK, PARTITION = "rank", "partition"  # temporary files


def counts_file(number: int) -> str:
    """Name of the temporary file of the counts of a relation."""
    return f"counts-{number}"


@dataclass(eq=False)
class IngestRun(PipelineRun):
    """The run of an ingest: the store being written, and the graphs between stages."""

    writer: StoreWriter
    job: IngestJob
    executor: Executor | None = None
    _held: ColumnFile | None = None  # columns by source id, in memory
    _nodes: NodeOrder | None = None

    def __post_init__(self) -> None:
        self._share, self._contents = self.job.share, self.job.contents
        self._options = self.job.options

    def count(self) -> int:
        """Read all edges once, check every id, and write the in-degrees of each relation to a file.

        Returns the bytes that sorting the longest column takes.
        """
        longest = 0
        for number, r in enumerate(self._contents.relations):
            counts = self._count(r)
            longest = max(longest, int(counts.max(initial=0)) * r.widths.sort_bytes + COLUMN_BYTES)
            save_array(self.path(counts_file(number)), counts)
        if self._options.needs_columns:
            counts = self._union_counts()
            widths = self._union_widths(None)
            longest = max(longest, int(counts.max(initial=0)) * widths.sort_bytes + COLUMN_BYTES)
        return longest

    def fits(self, longest_bytes: int) -> bool:
        """Whether columns by source id can stay in memory."""
        return self._contents.columns_fit(self._share) and longest_bytes <= self._share // 4

    def columns(self, in_memory: bool) -> None:
        """Sort the union's columns by source id, into memory or the files COLUMNS and DEGREES."""
        if self._held is not None:
            return
        contents, counts = self._contents, self._union_counts()
        total = int(counts.sum(dtype=np.int64))
        edge = None
        if in_memory and len(contents.relations) == 1:
            widths = contents.relations[0].widths
            edge = None if widths.too_wide else widths.edge
        path = None if in_memory else self.path(COLUMNS)
        if path is not None:
            path.unlink(missing_ok=True)
        file = ColumnFile(path, counts.size, total, edge)
        share = self._share - file.held_bytes
        readers = [self._edges(r, None, 0, bool(edge)) for r in contents.relations]
        widths = self._union_widths(edge)
        for columns in self._sorted(readers, counts, widths, self._options.drop_equal, share):
            file.append(columns)
        file.finish()
        if in_memory:
            self._held = file
        else:
            save_array(self.path(DEGREES), file.degrees)
            file.close()

    def partition(self, classes: NodeClasses) -> Partitioning:
        """Partition the nodes (see `stages.partition`), and write the file PARTITION."""
        settings = self._options.partition
        assert settings is not None
        with self._open_columns() as file:
            share = self._share - file.held_bytes
            found = partition_nodes(
                file, classes, settings, self._options.seed, share, self.folder, self.progress
            )
        save_array(self.path(PARTITION), found.partition)
        return found.report

    def order(self) -> list[int]:
        """Write the node order to the file RANK; returns where each (type, partition) begins, then
        the end.
        """
        options, contents = self._options, self._contents
        order = None
        if options.is_breadth_first:
            find = breadth_first if options.order == "bfs" else by_degree_class
            with self._open_columns() as file:
                order = find(file, self._share - file.held_bytes, self.progress)
        elif options.order == "random":
            order = at_random(contents.num_nodes, options.seed)
        bounds = np.array([0, *(t.stop for t in contents.types)], np.int64)
        partition, num_partitions = None, 1
        if options.partition is not None:
            partition = load_array(self.path(PARTITION), np.uint32)
            num_partitions = options.partition.num_partitions
        self._nodes, starts = group_nodes(order, bounds, partition, num_partitions)
        save_array(self.path(RANK), self._nodes.rank)
        found: list[int] = starts.tolist()
        return found

    @property
    def nodes(self) -> NodeOrder | None:
        """The node order, loaded if an earlier run has found it; None: nodes keep their numbers."""
        if self._nodes is None and self._options.renames:
            self._nodes = NodeOrder.from_rank(load_array(self.path(RANK), np.uint32))
        return self._nodes

    def forget_order(self) -> None:
        self._nodes = None

    def sorted_relation(self, number: int, share: int) -> Iterator[WholeColumns]:
        """All columns of a relation by store id, in order; column 0 is the type's first node.

        `share`: bytes of memory, at most the job's share.
        """
        relation, nodes = self._contents.relations[number], self.nodes
        widths, dst = relation.widths, relation.dst
        on_disk = (self.path(COLUMNS)).exists() and self._contents.reads_columns
        if self._held is not None and nodes is not None and self._can_gather(relation):
            yield from self._gathered(self._held, nodes, widths, share - self._held.held_bytes)
            return
        self.release_columns()
        rank = None if nodes is None else SavedArray(self.path(RANK), np.uint32, nodes.rank)
        if nodes is not None and rank is not None and on_disk:
            degrees = SavedArray(self.path(DEGREES), np.uint32)
            counts = np.empty(dst.num_nodes, np.uint32)
            take_counts(degrees.values, nodes.order[dst.first : dst.stop], 0, counts)
            num_edges = int(counts.sum(dtype=np.int64))
            read = partial(read_columns, self.path(COLUMNS), degrees, rank, dst.first)
            columns = EdgeReader(num_edges, True, 1, read)
            yield from self._sorted([columns], counts, widths, False, share)
            return
        counts = load_array(self.path(counts_file(number)), np.uint32)
        if nodes is not None:
            moved = np.empty(counts.size, np.uint32)
            take_counts(counts, nodes.order[dst.first : dst.stop], dst.first, moved)
            counts = moved
        edges = self._edges(relation, rank, dst.first, bool(widths.edge))
        yield from self._sorted([edges], counts, widths, self._options.drop_equal, share)

    def release_columns(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _can_gather(self, relation: RelationContents) -> bool:
        """Whether the columns in memory are the relation's, with edge ids if these are needed."""
        assert self._held is not None
        with_ids = self._held.edge_ids.size == self._held.sources.size
        return len(self._contents.relations) == 1 and (with_ids or not relation.widths.edge)

    def _open_columns(self) -> AbstractContextManager[ColumnFile]:
        if self._held is not None:
            return nullcontext(self._held)
        degrees = load_array(self.path(DEGREES), np.uint32)
        return ColumnFile.reopen(self.path(COLUMNS), degrees)

    def _union_counts(self) -> NDArray[np.uint32]:
        """In-degrees of the nodes in the union of all relations."""
        total = np.zeros(self._contents.num_nodes, np.uint32)
        for number, r in enumerate(self._contents.relations):
            counts = load_array(self.path(counts_file(number)), np.uint32)
            total[r.dst.first : r.dst.stop] += counts
        return total

    def _union_widths(self, edge: str | None) -> Widths:
        num_edges = sum(r.source.num_edges for r in self._contents.relations)
        return Widths.of("uint32", self._contents.num_nodes, edge, num_edges)

    def _edges(
        self, relation: RelationContents, rank: SavedArray | None, base: int, with_ids: bool
    ) -> EdgeReader:
        """Edges by store ids, or by source ids if `rank` is None; columns count from `base`."""
        r, src, dst = relation, relation.src, relation.dst
        ends = Ends(r.undirected, r.keep_loops, src_first=src.first, dst_first=dst.first, base=base)
        spans, source = (slice(src.first, src.stop), slice(dst.first, dst.stop)), self.job.source
        ranks = None if rank is None else EndRanks(rank, *spans)
        read = partial(read_relation, source, r.source, ends, with_ids, ranks)
        return EdgeReader(r.source.num_edges, source.divides(r.source), 1 + r.undirected, read)

    def _count(self, relation: RelationContents) -> NDArray[np.uint32]:
        r, source = relation, self.job.source
        count = partial(count_edges, source, r.source, r.undirected, r.keep_loops, self._share)
        if self.executor is None or not source.divides(r.source):
            return count(self.progress)
        with TaskFolder(self.executor, self.folder, self.progress) as folder:
            return spread_counts(count, r.source.num_edges, r.dst.num_nodes, folder)

    def _sorted(
        self,
        readers: Sequence[EdgeReader],
        counts: NDArray[np.uint32],
        widths: Widths,
        drop_equal: bool,
        share: int,
    ) -> Generator[WholeColumns]:
        """All columns in order, sorted by tasks if there is an executor."""
        if self.executor is None:
            records = (e for r in readers for e in r.read(share // 4, self.progress, None))
            yield from sorted_columns(
                records, counts, widths, drop_equal, share, self.folder, self.progress
            )
            return
        with TaskFolder(self.executor, self.folder, self.progress) as folder:
            yield from spread_columns(
                readers, counts, widths, drop_equal, share, folder, self.progress
            )

    def _gathered(
        self, file: ColumnFile, nodes: NodeOrder, widths: Widths, share: int
    ) -> Iterator[WholeColumns]:
        """Columns by store id, made of the columns by source id in memory."""
        dst = self._contents.relations[0].dst
        order = nodes.order[dst.first : dst.stop]
        counts = np.empty(order.size, np.uint32)
        take_counts(file.degrees, order, 0, counts)
        bounds, sizes = cut_buckets(counts, widths, share // 4 * 3)
        del counts
        sorter = ColumnSorter(widths, False)
        edge_ids = file.edge_ids if widths.edge else file.edge_ids[:0]
        held = HeldColumns(file.starts, file.degrees, file.sources, edge_ids)
        bits = WordBits(widths.node_bits, widths.edge_bits, widths.column_bits)
        with self.progress.stage("rename columns", file.num_edges, "edges") as stage:
            for b, size in enumerate(sizes.tolist()):
                low, high = int(bounds[b]), int(bounds[b + 1])
                starts = np.empty(widths.num_groups(high - low) + 1, np.int64)
                values = sorter.values(size)
                gather_columns(order[low:high], held, nodes.rank, bits, starts, values)
                yield sorter.from_values(values, starts, low, high - low)
                stage.advance(size)


IngestStage = Stage[IngestRun]
