"""All columns of a graph, kept between two stages: in memory if they fit, else in one file."""

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.closing import Closing
from preprocess.files.ahead import COPIES, Arrays, read_ahead
from preprocess.files.array_file import ArrayFile
from preprocess.kernels.edges import Records
from preprocess.kernels.levels import STRIDE, advance_columns, rename_columns
from preprocess.pipeline.progress import Progress
from preprocess.stages.csc import FILLERS, RECORD_BYTES, RawEdges, WholeColumns

COLUMNS, DEGREES = "columns", "degrees"  # temporary files
_MIN_READ, _MAX_READ = 1 << 12, 1 << 20  # edges


class ColumnFile(Closing):
    """Degrees, sources and, in memory, edge ids of columns 0, 1, ...; the caller owns the file."""

    def __init__(
        self, path: Path | None, num_nodes: int, num_edges: int = 0, edge: str | None = None
    ) -> None:
        """`path` None: in memory, at most `num_edges`, with edge ids of dtype `edge`."""
        self.degrees = np.zeros(num_nodes, np.uint32)
        self.starts = np.zeros(num_nodes // STRIDE + 1, np.int64)
        self.num_edges = 0
        self._file = None if path is None else ArrayFile(path, np.uint32)
        held = num_edges if path is None else 0
        self.sources = np.empty(held, np.uint32)
        self.edge_ids = np.empty(held if edge else 0, np.dtype(edge or "uint32"))

    @classmethod
    def reopen(cls, path: Path, degrees: NDArray[np.uint32]) -> "ColumnFile":
        columns = cls(path, 0)
        columns.degrees = degrees
        columns.starts = np.zeros(degrees.size // STRIDE + 1, np.int64)
        assert columns._file is not None
        columns.num_edges = columns._file.size
        columns.finish()
        return columns

    @property
    def in_memory(self) -> bool:
        return self._file is None

    @property
    def held_bytes(self) -> int:
        """Bytes of the edges in memory."""
        return self.sources.nbytes + self.edge_ids.nbytes

    def append(self, columns: WholeColumns) -> None:
        """Append the next columns, or more edges of the last one; sources have 32 bits."""
        first, at, size = columns.first, self.num_edges, columns.sources.size
        self.degrees[first : first + columns.degrees.size] += columns.degrees.astype(np.uint32)
        if self._file is not None:
            self._file.append(columns.sources)
        else:
            self.sources[at : at + size] = columns.sources
            if self.edge_ids.size:
                self.edge_ids[at : at + size] = columns.edge_ids
        self.num_edges += size

    def finish(self) -> None:
        strides = self.degrees[: (self.starts.size - 1) * STRIDE].reshape(-1, STRIDE)
        np.cumsum(strides.sum(axis=1, dtype=np.int64), out=self.starts[1:])
        self.sources = self.sources[: self.num_edges]
        self.edge_ids = self.edge_ids[: self.num_edges]

    def read(self, first: int, count: int, step: int) -> Iterator[NDArray[Any]]:
        """Sources of edges [first, first + count) in pieces of `step`, reused by the next one."""
        if self._file is None:
            yield self.sources[first : first + count]
        elif count <= 2 * step:
            yield from self._file.pieces(first, first + count, step)
        else:
            with closing(read_ahead(self._file.pieces(first, first + count, step))) as ahead:
                yield from ahead

    def close(self) -> None:
        """Free the memory, and close the file."""
        self.sources, self.edge_ids = np.empty(0, np.uint32), np.empty(0, self.edge_ids.dtype)
        self.degrees, self.starts = np.empty(0, np.uint32), np.empty(0, np.int64)
        if self._file is not None:
            self._file.close()


def scan_columns(
    columns: ColumnFile, name: str, share: int, progress: Progress
) -> Generator[NDArray[Any]]:
    """Yield all sources, some at a time even if they are in memory, as a progress step `name`."""
    step = max(_MIN_READ, min(_MAX_READ, share // 32))
    with progress.stage(name, columns.num_edges, "edges") as stage:
        for piece in columns.read(0, columns.num_edges, step):
            for first in range(0, piece.size, step):
                some = piece[first : first + step]
                yield some
                stage.advance(some.size)


class Renaming(NamedTuple):
    """How `renamed_edges` turns columns back into edges."""

    rank: NDArray[np.uint32]  # (num_nodes,) new id of each node
    base: int = 0  # new id of the first column, subtracted from targets
    both_ways: bool = False  # whether each edge is also yielded reversed
    marked: bool = False  # whether sources are twice their id, plus 1 in reversed edges


def renamed_edges(
    columns: ColumnFile, names: Renaming, share: int, progress: Progress, span: range | None = None
) -> Iterator[RawEdges]:
    """Edges of columns with both ends renamed; those of a span, or all."""
    fold = 1 + names.both_ways
    each = 4 * (1 + COPIES) + FILLERS * (4 + fold * RECORD_BYTES)
    step = max(_MIN_READ, min(1 << 19, share // each))
    span = range(columns.num_edges) if span is None else span

    def make(node: int, skip: int, read: Arrays, out: Records) -> Records:
        size = read[0].size
        dst, src = out.dst[: fold * size], out.src[: fold * size]
        rename_columns(
            node, skip, columns.degrees, read[0], names.rank, names.base, dst[:size], src[:size]
        )
        if names.both_ways:
            dst[size:], src[size:] = src[:size], dst[:size]
        if names.marked:
            src <<= 1
            src[size:] |= 1
        return Records(dst, src, out.edge_ids[:0])

    node, skip = advance_columns(0, 0, columns.degrees, span.start)
    with progress.stage("bucket edges", len(span), "edges") as stage:
        for some in columns.read(span.start, len(span), step):
            for first in range(0, some.size, step):
                sources = some[first : first + step]
                yield RawEdges((sources,), partial(make, node, skip), fold * sources.size)
                node, skip = advance_columns(node, skip, columns.degrees, sources.size)
                stage.advance(sources.size)
