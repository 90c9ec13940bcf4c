"""Breadth-first order of the nodes: a function of the graph alone, found level by level.

Roots by descending in-degree, ties by id.  A level's new nodes stand in the order of (their
earliest discoverer, id).  Where a level finds nothing, the next roots are taken: one at first,
twice as many each time.  After MAX_LEVELS levels the rest keeps its order by id.  Isolated nodes
come last.

Memory: 20 bytes a node (degree, rank, best, order, roots) and 8 bytes a node of the widest level.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.io.buffers import byte_view
from blockstore.io.files import read_exact, write_exact
from preprocess.kernels import (
    UNSET,
    assign_ranks,
    expand_frontier,
    expand_level,
    take_roots,
)
from preprocess.progress import Progress
from preprocess.stages.csc import Columns

MAX_LEVELS = 4096
NODE_BYTES = 28
_FEW = 2048  # frontier nodes that are read one by one


class ColumnFile:
    """Sources of all columns, in order: in memory where they fit, else on disk."""

    def __init__(self, path: Path, num_nodes: int, num_edges: int, mem_bytes: int) -> None:
        """`num_edges`: at most so many."""
        self.degrees = np.zeros(num_nodes, np.uint32)
        self._path, self._mem_bytes, self._filled = path, mem_bytes, 0
        self.in_memory = 4 * num_edges + 8 * num_nodes <= mem_bytes
        self._held = np.empty(num_edges if self.in_memory else 0, np.uint32)
        self.starts: NDArray[np.int64] = np.empty(0, np.int64)
        self._fd = -1
        if not self.in_memory:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, columns: Columns) -> None:
        """The next columns."""
        first, size = columns.first, columns.sources.size
        self.degrees[first : first + columns.degrees.size] = columns.degrees
        if self.in_memory:
            self._held[self._filled : self._filled + size] = columns.sources
        elif size:
            raw = byte_view(columns.sources)
            write_exact(self._fd, raw, 4 * self._filled, str(self._path))
        self._filled += size

    def finish(self) -> None:
        """All columns are there."""
        if self.in_memory:
            self.starts = np.zeros(self.degrees.size, np.int64)
            np.cumsum(self.degrees[:-1], dtype=np.int64, out=self.starts[1:])
        else:
            os.fdatasync(self._fd)

    @property
    def sources(self) -> NDArray[np.uint32]:
        """All of them, where they are in memory."""
        return self._held

    def pieces(self) -> Iterator[tuple[NDArray[np.uint32], NDArray[Any]]]:
        """(nodes, their sources) in order of id, read in large pieces."""
        most = max(1 << 16, self._mem_bytes // 16)
        total = np.cumsum(self.degrees, dtype=np.int64)
        first = done = 0
        while first < self.degrees.size:
            last = max(first + 1, int(np.searchsorted(total, done + most // 4, side="right")))
            yield self._read(first, last, done, int(total[last - 1]) - done)
            first, done = last, int(total[last - 1])

    def few(self, nodes: NDArray[np.uint32]) -> Iterator[tuple[NDArray[np.uint32], NDArray[Any]]]:
        """(one node, its sources) for each of a few nodes."""
        total = np.concatenate([[0], np.cumsum(self.degrees, dtype=np.int64)])
        for node in np.sort(nodes).tolist():
            yield self._read(node, node + 1, int(total[node]), int(self.degrees[node]))

    def _read(
        self, first: int, last: int, start: int, count: int
    ) -> tuple[NDArray[np.uint32], NDArray[Any]]:
        out = np.empty(count, np.uint32)
        if count:
            read_exact(self._fd, [byte_view(out)], 4 * start, str(self._path))
        return np.arange(first, last, dtype=np.uint32), out

    def close(self) -> None:
        """Remove what is on disk."""
        if self._fd >= 0:
            os.close(self._fd)
            self._path.unlink(missing_ok=True)


def breadth_first(columns: ColumnFile, progress: Progress) -> tuple[Any, Any]:
    """(order, rank), uint32 (num_nodes,) both: node of each place, place of each node."""
    num_nodes = columns.degrees.size
    rank = np.full(num_nodes, UNSET, np.uint32)
    best = np.full(num_nodes, UNSET, np.uint32)
    order = np.empty(num_nodes, np.uint32)
    roots = _roots(columns.degrees)
    at, wanted, placed = 0, 1, 0
    low = high = 0  # ranks of the frontier
    with progress.stage("breadth-first order", num_nodes, "nodes") as stage:
        for _ in range(MAX_LEVELS):
            if low == high:
                at, taken = take_roots(roots, at, wanted, rank, order[placed:])
                wanted *= 2
                if taken == 0:
                    break
            else:
                taken = _expand(columns, low, high, rank, best, order)
            assign_ranks(order[placed : placed + taken], placed, rank)
            low, high = placed, placed + taken
            placed = high
            stage.advance(taken)
        _append_rest(columns.degrees, best, rank, order, placed)
    return order, rank


def _roots(degrees: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Nodes with in-edges, by descending degree, then id."""
    nodes = np.flatnonzero(degrees)
    keys = (np.uint64(UNSET) - degrees[nodes].astype(np.uint64)) << np.uint64(32)
    keys |= nodes.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(UNSET)).astype(np.uint32)


def _expand(
    columns: ColumnFile,
    low: int,
    high: int,
    rank: NDArray[np.uint32],
    best: NDArray[np.uint32],
    order: NDArray[np.uint32],
) -> int:
    """Put the nodes that the frontier order[low:high] discovers behind it; returns their number."""
    frontier, touched, count = order[low:high], order[high:], 0
    if columns.in_memory:
        count = expand_frontier(
            frontier, columns.starts, columns.sources, columns.degrees, rank, best, touched, 0
        )
    else:
        for nodes, sources in columns.few(frontier) if high - low <= _FEW else columns.pieces():
            count = expand_level(
                nodes, columns.degrees, sources, low, high, rank, best, touched, count
            )
    found = touched[:count]
    keys = best[found].astype(np.uint64) << np.uint64(32) | found
    keys.sort()
    found[:] = (keys & np.uint64(UNSET)).astype(np.uint32)
    return int(count)


def _append_rest(
    degrees: NDArray[np.uint32],
    best: NDArray[np.uint32],
    rank: NDArray[np.uint32],
    order: NDArray[np.uint32],
    placed: int,
) -> None:
    """What no level has placed, by id: first the nodes with an edge, then the isolated ones.

    A node without in-edges that is a source of a placed node was discovered; one that is a source
    of unplaced nodes only (more than MAX_LEVELS levels away) counts as isolated here.
    """
    left = rank == UNSET
    linked = left & ((degrees > 0) | (best != UNSET))
    for group in (np.flatnonzero(linked), np.flatnonzero(left & ~linked)):
        order[placed : placed + group.size] = group
        assign_ranks(order[placed : placed + group.size], placed, rank)
        placed += group.size
