"""What ingest should give, in plain Python meant to be read; and a source made of arrays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.options import IngestOptions
from preprocess.source import SourceRelation, SourceRows

Edge = tuple[int, int, int]  # target, source, id


def stored_edges(edges: list[tuple[int, int]], options: IngestOptions) -> list[Edge]:
    """The edges that a store holds, sorted; `edges` are (source, target) in the source's order."""
    found: list[Edge] = []
    for i, (src, dst) in enumerate(edges):
        if src == dst and options.self_loops == "drop":
            continue
        found.append((dst, src, i))
        if options.undirected and src != dst:
            found.append((src, dst, i + len(edges)))
    found.sort()
    if options.drop_equal:
        found = [e for k, e in enumerate(found) if k == 0 or found[k - 1][:2] != e[:2]]
    return found


def breadth_first(num_nodes: int, edges: list[Edge], max_levels: int) -> list[int]:
    """The node of each place."""
    sources: list[list[int]] = [[] for _ in range(num_nodes)]
    for dst, src, _ in edges:
        sources[dst].append(src)
    linked = {node for dst, src, _ in edges for node in (dst, src)}
    roots = sorted((v for v in range(num_nodes) if sources[v]), key=lambda v: (-len(sources[v]), v))
    order: list[int] = []
    frontier: list[int] = []
    wanted = 1
    for _ in range(max_levels):
        if not frontier:
            frontier = [v for v in roots if v not in order][:wanted]
            wanted *= 2
        else:
            seen = set(order)
            finder: dict[int, int] = {}
            for place, v in enumerate(frontier):
                for u in sources[v]:
                    if u not in seen:
                        finder.setdefault(u, place)
            frontier = sorted(finder, key=lambda u: (finder[u], u))
        order += frontier
    left = [v for v in range(num_nodes) if v not in set(order)]
    return order + [v for v in left if v in linked] + [v for v in left if v not in linked]


class ArraySource:
    """A source held in memory: one type, one relation; rows by name."""

    def __init__(self, num_nodes: int, edges: Any, rows: dict[str, NDArray[Any]] | None = None):
        self.layout, self.where, self.files, self.undirected = "arrays", "arrays", [], False
        self.num_nodes = {"node": num_nodes}
        self._edges = np.array(edges, np.int64).reshape(-1, 2).T
        self.relations = (SourceRelation("node", "to", "node", self._edges.shape[1], "edges"),)
        self._rows = rows or {}

    def edges(
        self, relation: SourceRelation, count: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for first in range(0, relation.num_edges, count):
            part = self._edges[:, first : first + count].copy()
            yield part[0], part[1]
            part[:] = -1  # arrays are reused

    def edge_rows(self, relation: SourceRelation) -> list[SourceRows]:
        return []

    def edge_splits(self, relation: SourceRelation) -> list[SourceRows]:
        return []

    def _facts(self, name: str) -> SourceRows:
        rows = self._rows[name]
        return SourceRows(name, rows.dtype, rows.shape[1:], rows.shape[0], "dense", name)

    def features(self, node_type: str) -> list[SourceRows]:
        return [self._facts(name) for name in self._rows if name.startswith("x")]

    def label(self, node_type: str) -> SourceRows | None:
        return self._facts("y") if "y" in self._rows else None

    def splits(self, node_type: str) -> list[SourceRows]:
        return [self._facts(n) for n in ("train", "valid", "test") if n in self._rows]

    def rows(self, rows: SourceRows, count: int) -> Iterator[NDArray[Any]]:
        held = self._rows[rows.name]
        for first in range(0, rows.num_rows, count):
            yield held[first : first + count].copy()
