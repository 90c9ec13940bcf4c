"""All columns of a graph between two stages: in memory where they fit, else in one file."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.io.buffers import byte_view
from blockstore.io.files import read_exact, write_exact
from preprocess.kernels.levels import STRIDE, make_starts
from preprocess.stages.csc import Columns


class ColumnFile:
    """Degrees, sources and, in memory, edge ids of columns 0, 1, ...  A context manager."""

    def __init__(
        self, path: Path, num_nodes: int, num_edges: int, edge: str | None, in_memory: bool
    ) -> None:
        """`num_edges`: at most so many.  `edge`: dtype of edge ids; on disk they are not kept."""
        self.in_memory = in_memory
        self.degrees = np.zeros(num_nodes, np.uint32)
        self.starts = np.zeros(num_nodes // STRIDE + 1, np.int64)
        self.num_edges = 0
        self.sources = np.empty(num_edges if in_memory else 0, np.uint32)
        self.edge_ids = np.empty(num_edges if in_memory and edge else 0, np.dtype(edge or "uint32"))
        self._path, self._fd = path, -1
        if not in_memory:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)

    def append(self, columns: Columns) -> None:
        """The next columns; sources of 32 bits."""
        first, at, size = columns.first, self.num_edges, columns.sources.size
        self.degrees[first : first + columns.degrees.size] = columns.degrees
        if self.in_memory:
            self.sources[at : at + size] = columns.sources
            if self.edge_ids.size:
                self.edge_ids[at : at + size] = columns.edge_ids
        else:
            write_exact(self._fd, byte_view(columns.sources), 4 * at, str(self._path))
        self.num_edges += size

    def finish(self) -> None:
        """All columns are there."""
        make_starts(self.degrees, self.starts)
        self.sources = self.sources[: self.num_edges]
        self.edge_ids = self.edge_ids[: self.num_edges]

    def read(self, first: int, count: int, step: int) -> Iterator[NDArray[Any]]:
        """Sources of edges [first, first + count) in pieces of `step`, reused by the next one."""
        if self.in_memory:
            yield self.sources[first : first + count]
            return
        buffer = np.empty(min(step, count), np.uint32)
        for at in range(first, first + count, max(step, 1)):
            piece = buffer[: min(step, first + count - at)]
            read_exact(self._fd, [byte_view(piece)], 4 * at, str(self._path))
            yield piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.sources, self.edge_ids = np.empty(0, np.uint32), np.empty(0, self.edge_ids.dtype)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)
