"""Structures of batches in pieces, as a daemon sends them, and what a loop makes of them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from clients.connection.buffers import ArrayInPieces, ExpandedNodes


class Structure(NamedTuple):
    """The edges of a batch."""

    src: np.ndarray  # (edges,)
    counts: Sequence[np.ndarray]  # by hop: (nodes that it expands,) edges of each
    firsts: Sequence[int]  # by hop

    def sent(self, rng: np.random.Generator) -> tuple[ArrayInPieces, list[ExpandedNodes]]:
        hops = zip(self.counts, self.firsts, strict=True)
        return in_pieces(self.src, rng), [ExpandedNodes(in_pieces(c, rng), f) for c, f in hops]

    def expected(self) -> np.ndarray:
        """int64 (2, edges)."""
        dst = [
            first + node
            for counts, first in zip(self.counts, self.firsts, strict=True)
            for node, count in enumerate(counts.tolist())
            for _ in range(count)
        ]
        return np.array([self.src.tolist(), dst], np.int64).reshape(2, -1)


def in_pieces(values: np.ndarray, rng: np.random.Generator) -> ArrayInPieces:
    """Up to four pieces, read-only as an arena is."""
    values.flags.writeable = False
    ends = [0, *sorted(rng.integers(0, values.size + 1, 3).tolist()), values.size]
    pieces = [(a, values[a:b]) for a, b in pairwise(ends) if b > a]
    return ArrayInPieces(values.dtype.str, values.size, iter(pieces))


def structures(rng: np.random.Generator) -> list[Structure]:
    """Hops that expand new nodes, or all so far; without edges; of every dtype that is sent."""
    found = []
    for sizes, largest in (([5], 3), ([7, 30, 200], 9), ([3, 1], 1), ([2, 0, 0], 2)):
        for layers in (False, True):
            for dtype in (np.uint16, np.uint32):
                ends = np.cumsum(sizes).tolist()
                frontiers = ends if layers else sizes
                counts = [rng.integers(0, largest, n).astype(np.uint32) for n in frontiers]
                num_edges = int(sum(int(c.sum()) for c in counts))
                src = rng.integers(0, 1 << 8 * dtype().itemsize, num_edges).astype(dtype)
                firsts = [0] * len(sizes) if layers else [0, *ends[:-1]]
                found.append(Structure(src, counts, firsts))
    return found


def ids(rng: np.random.Generator) -> list[np.ndarray]:
    """Ids of every dtype that is sent, the largest of each among them."""
    kinds = (np.uint16, np.uint32, np.int64, np.uint64)
    limit = 2**63
    return [
        np.append(rng.integers(0, 1000, n), min(np.iinfo(kind).max, limit - 1)).astype(kind)
        for kind in kinds
        for n in (0, 1, 300)
    ]
