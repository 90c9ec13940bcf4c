"""The stages of one relation: count, columns by source id, node order, columns by store id."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from preprocess.kernels.levels import gather_columns, repeat_targets
from preprocess.options import IngestOptions
from preprocess.progress import Progress
from preprocess.source import Source, SourceRelation
from preprocess.stages.columns import ColumnFile
from preprocess.stages.csc import (
    COLUMN_BYTES,
    Columns,
    ColumnSorter,
    Records,
    Widths,
    cut_buckets,
    sorted_columns,
    source_records,
)
from preprocess.stages.order import NodeOrder, breadth_first
from preprocess.stages.scan import count_edges

_LEAST_READ = 1 << 12  # edges


class GraphStages:
    """A relation on its way into the store.  A context manager: it removes what is on disk."""

    def __init__(
        self,
        source: Source,
        relation: SourceRelation,
        options: IngestOptions,
        widths: Widths,
        share: int,
        work: Path,
        progress: Progress,
    ) -> None:
        self._source, self._relation, self._options = source, relation, options
        self._widths, self._share, self._work, self._progress = widths, share, work, progress
        self._counts = np.empty(0, np.uint32)
        self.longest_bytes = 0  # what sorting the longest column takes
        self._file: ColumnFile | None = None
        self._nodes: NodeOrder | None = None

    def count(self) -> None:
        """Read all edges once: every id is checked, targets are counted."""
        self._counts = count_edges(
            self._source, self._relation, self._options, self._share, self._progress
        )
        longest = int(self._counts.max(initial=0))
        self.longest_bytes = longest * self._widths.sort_bytes + COLUMN_BYTES

    def place_nodes(self) -> NodeOrder | None:
        """The order of the nodes; None: they keep their numbers."""
        if self._options.order == "source":
            return None
        most = int(self._counts.sum(dtype=np.int64))
        edge = self._widths.edge
        each = 4 + (np.dtype(edge).itemsize if edge else 0)
        fits = each * most <= self._share // 3 and self.longest_bytes <= self._share // 4
        in_memory = fits and not self._widths.too_wide
        if not in_memory:
            edge = None  # ids come from the source again
        widths = Widths.of("uint32", self._counts.size, edge, self._relation.num_edges)
        self._file = ColumnFile(self._work / "columns", self._counts.size, most, edge, in_memory)
        self._share -= each * most if in_memory else 0
        for columns in self._sorted(self._from_source(None, edge), self._counts, widths, True):
            self._file.append(columns)
        self._file.finish()
        kept = self._work / "counts"  # not needed while levels are: 4 bytes a node
        self._counts.tofile(kept)
        self._counts = np.empty(0, np.uint32)
        self._nodes = breadth_first(self._file, self._share, self._progress)
        self._counts = np.fromfile(kept, np.uint32)
        kept.unlink()
        return self._nodes

    def columns(self) -> Iterator[Columns]:
        """All columns by store id, in order."""
        widths, file, nodes = self._widths, self._file, self._nodes
        if file is None or nodes is None:
            yield from self._sorted(
                self._from_source(None, widths.edge), self._counts, widths, True
            )
        elif file.in_memory:
            yield from self._gathered(file, nodes)
        elif widths.edge:
            counts, self._counts = self._counts[nodes.order], np.empty(0, np.uint32)
            records = self._from_source(nodes.rank, widths.edge)
            yield from self._sorted(records, counts, widths, True)
        else:
            self._counts = np.empty(0, np.uint32)
            counts = file.degrees[nodes.order]
            yield from self._sorted(self._from_file(file, nodes.rank), counts, widths, False)
        self.close()

    def close(self) -> None:
        """Remove what is on disk, and forget what is in memory."""
        if self._file is not None:
            self._file.__exit__(None, None, None)
            self._file = None
        self._counts = np.empty(0, np.uint32)

    def _from_source(self, rank: NDArray[Any] | None, edge: str | None) -> Iterator[Records]:
        return source_records(
            self._source, self._relation, rank, self._options, bool(edge), self._share // 4,
            self._progress,
        )  # fmt: skip

    def _from_file(self, file: ColumnFile, rank: NDArray[np.uint32]) -> Iterator[Records]:
        """Columns by source id as edges, both ends renamed."""
        step = max(_LEAST_READ, min(1 << 20, self._share // 4 // 64))
        no_ids = np.empty(0, np.int64)
        node, skip = 0, 0
        with self._progress.stage("bucket edges", file.num_edges, "edges") as stage:
            for sources in file.read(0, file.num_edges, step):
                targets = np.empty(sources.size, np.int64)
                node, skip = repeat_targets(node, skip, file.degrees, targets)
                yield Records(
                    rank[targets].astype(np.int64), rank[sources].astype(np.int64), no_ids
                )
                stage.advance(sources.size)

    def _sorted(
        self, records: Iterator[Records], counts: NDArray[np.uint32], widths: Widths, drop: bool
    ) -> Iterator[Columns]:
        return sorted_columns(
            records, counts, widths, drop and self._options.drop_equal, self._share, self._work,
            self._progress,
        )  # fmt: skip

    def _gathered(self, file: ColumnFile, nodes: NodeOrder) -> Iterator[Columns]:
        """Columns by store id from those by source id, all in memory."""
        self._counts = np.empty(0, np.uint32)
        widths, counts = self._widths, file.degrees[nodes.order]
        bounds, sizes = cut_buckets(counts, widths, self._share // 2)
        del counts
        sorter = ColumnSorter(widths, False)
        with self._progress.stage("rename columns", file.num_edges, "edges") as stage:
            for b, size in enumerate(sizes.tolist()):
                low, high = int(bounds[b]), int(bounds[b + 1])
                starts = np.empty(widths.num_groups(high - low) + 1, np.int64)
                values = sorter.values(size)
                gather_columns(
                    nodes.order, low, high, file.starts, file.degrees, file.sources,
                    file.edge_ids, nodes.rank, widths.node_bits, widths.edge_bits,
                    widths.column_bits, starts, values,
                )  # fmt: skip
                yield sorter.from_values(values, starts, low, high - low)
                stage.advance(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
