"""What ingest should give, in plain Python meant to be read; and a source made of arrays."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preprocess.ingest.options import IngestOptions
from preprocess.sources.source import Rows, Source, SourceRelation, SourceRows

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
    seen: set[int] = set()
    for _ in range(max_levels):
        if not frontier:
            frontier = [v for v in roots if v not in seen][:wanted]
            wanted *= 2
        else:
            finder: dict[int, int] = {}
            for place, v in enumerate(frontier):
                for u in sources[v]:
                    if u not in seen:
                        finder.setdefault(u, place)
            frontier = sorted(finder, key=lambda u: (finder[u], u))
        order += frontier
        seen.update(frontier)
    left = [v for v in range(num_nodes) if v not in seen]
    return order + [v for v in left if v in linked] + [v for v in left if v not in linked]


class HeldEdges:
    """Edges in memory, (edges, 2)."""

    def __init__(self, pairs: Any, where: str) -> None:
        self.path, self.where = Path(__file__), where  # a file that does not change
        self.pairs = np.array(pairs, np.int64).reshape(-1, 2)
        self.num_edges = self.pairs.shape[0]

    def pieces(self, count: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for first in range(0, self.num_edges, count):
            part = self.pairs[first : first + count].T.copy()
            yield part[0], part[1]
            part[:] = -1  # arrays are reused

    def place(self, end: int, row: int) -> str:
        return f"{self.where}[{row}, {end}]"


def held_rows(where: str, name: str, array: NDArray[Any]) -> Rows:
    """Rows in memory."""

    def pieces(count: int) -> Iterator[NDArray[Any]]:
        for first in range(0, array.shape[0], count):
            part = array[first : first + count].copy()
            yield part
            if part.dtype.kind != "b":
                part[:] = 77  # arrays are reused

    form = SourceRows(name, array.dtype, array.shape[1:], array.shape[0], "dense", where)
    return Rows(form, pieces)


class ArraySource(Source):
    """A source held in memory: one type, one relation; rows by name."""

    def __init__(self, num_nodes: int, edges: Any, rows: dict[str, NDArray[Any]] | None = None):
        super().__init__(Path("arrays"), {"node": num_nodes})
        self.add_edges(("node", "to", "node"), HeldEdges(edges, "edges"))
        for name, array in (rows or {}).items():
            held = held_rows(name, name, array)
            if name == "y":
                self.add_label("node", held)
            elif name.startswith("x"):
                self.add_array("node", held)
        for name in ("train", "valid", "test"):
            if rows and name in rows:
                self.add_split("node", held_rows(name, name, rows[name]))


class Graph(Source):
    """A source of several types and relations, held in memory; arrays by name."""

    layout = "graph"

    def __init__(self) -> None:
        super().__init__(Path("graph"))
        self.pairs: dict[SourceRelation, NDArray[Any]] = {}  # (edges, 2)
        self.arrays: dict[str, NDArray[Any]] = {}  # where -> array

    def add_type(self, name: str, num_nodes: int, **arrays: NDArray[Any]) -> "Graph":
        """`y`, `train`, `valid` and `test` are what they are called; others are features."""
        self.num_nodes[name] = num_nodes
        for key, array in arrays.items():
            held = self._held(f"{name}.{key}", key, array)
            if key == "y":
                self.add_label(name, held)
            elif key in ("train", "valid", "test"):
                self.add_split(name, held)
            else:
                self.add_array(name, held)
        return self

    def add_relation(
        self, src: str, name: str, dst: str, pairs: Any, splits: Any = None, **arrays: Any
    ) -> "Graph":
        """`pairs`: (source, target) of each edge; arrays have a row an edge."""
        ends, where = (src, name, dst), f"{src}.{name}.{dst}"
        edges = HeldEdges(pairs, where)
        self.add_edges(ends, edges)
        self.pairs[self.relations[-1]] = edges.pairs
        for key, array in arrays.items():
            self.add_array(ends, self._held(f"{where}.{key}", key, array))
        for key, array in (splits or {}).items():
            self.add_split(ends, self._held(f"{where}/{key}", key, array))
        return self

    def _held(self, where: str, name: str, array: NDArray[Any]) -> Rows:
        self.arrays[where] = array
        return held_rows(where, name, array)


def union_edges(source: Any, options: IngestOptions) -> list[Edge]:
    """Edges of all relations, nodes numbered through the types, as the order of nodes sees them."""
    first, at = {}, 0
    for name, num_nodes in source.num_nodes.items():
        first[name], at = at, at + num_nodes
    found: list[Edge] = []
    for r in source.relations:
        for dst, src, i in stored_relation(source, r, options):
            found.append((first[r.dst] + dst, first[r.src] + src, i))
    found.sort()
    if options.drop_equal:
        found = [e for k, e in enumerate(found) if k == 0 or found[k - 1][:2] != e[:2]]
    return found


def stored_relation(source: Any, relation: SourceRelation, options: IngestOptions) -> list[Edge]:
    """Edges of a relation that a store holds, by ids of their types; sorted."""
    pairs = [(u, v) for chunk in source.edges(relation, 7) for u, v in np.stack(chunk, 1).tolist()]
    if relation.src == relation.dst:
        return stored_edges(pairs, options)
    found = sorted((v, u, i) for i, (u, v) in enumerate(pairs))
    if options.drop_equal:
        found = [e for k, e in enumerate(found) if k == 0 or found[k - 1][:2] != e[:2]]
    return found


def node_order(source: Any, options: IngestOptions, max_levels: int) -> list[int]:
    """The node, numbered through the types, of each store id; `random` is not for here."""
    total = sum(source.num_nodes.values())
    edges = union_edges(source, options)
    order = list(range(total))
    if options.order in ("bfs", "degree"):
        order = breadth_first(total, edges, max_levels)
    if options.order == "degree":
        degree = Counter(src for _, src, _ in edges)
        order.sort(key=lambda v: -degree[v].bit_length())
    types = [t for t, count in enumerate(source.num_nodes.values()) for _ in range(count)]
    return sorted(order, key=lambda v: types[v])
