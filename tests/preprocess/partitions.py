"""Streaming partitioners in plain Python, meant to be read; graphs for them; given partitions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.format import Manifest
from preprocess.ingest import graph
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.partition.partition import PartitionOptions, class_costs, class_limits, group_caps
from preprocess.sources.source import Source
from preprocess.stages.partition import Partitioned, partition_nodes
from tests.preprocess.quiet import QUIET


def ingest_parts(
    parts: np.ndarray, source: Source, target: Path, options: IngestOptions
) -> Manifest:
    """An ingest that finds this partition of its nodes, uint32, numbered through all types."""

    def found(*given: Any) -> Partitioned:
        return partition_nodes(*given)._replace(partition=parts)

    asked = PartitionOptions(int(parts.max()) + 1, method="random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "partition_nodes", found)
        return ingest(source, target, replace(options, partition=asked), QUIET).manifest


def drawn_by(columns: list[list[int]], settings: PartitionOptions) -> list[list[int]]:
    """Nodes that draw each node, out of its in-neighbours."""
    outward: list[list[int]] = [[] for _ in columns]
    for v, column in enumerate(columns):
        for u in column:
            outward[u].append(v)
    balanced = all(len(a) == len(b) for a, b in zip(columns, outward, strict=True))
    if settings.neighbors == "in" or (settings.neighbors == "auto" and balanced):
        return columns
    return [a + b for a, b in zip(columns, outward, strict=True)]


class Shelf:
    """The partitions of one class, ascending by the nodes of the class that they hold."""

    def __init__(self, num_partitions: int) -> None:
        self.sizes = [0] * num_partitions
        self.ascending = list(range(num_partitions))

    def put_in(self, p: int) -> None:
        """It goes behind the others of its size."""
        last = max(i for i, q in enumerate(self.ascending) if self.sizes[q] == self.sizes[p])
        self._swap(self.ascending.index(p), last)
        self.sizes[p] += 1

    def take_out(self, p: int) -> None:
        """It goes before the others of its size."""
        first = min(i for i, q in enumerate(self.ascending) if self.sizes[q] == self.sizes[p])
        self._swap(self.ascending.index(p), first)
        self.sizes[p] -= 1

    def _swap(self, i: int, j: int) -> None:
        order = self.ascending
        order[i], order[j] = order[j], order[i]


def stream(
    columns: list[list[int]], classes: Sequence[int], num_classes: int, settings: PartitionOptions
) -> list[int]:
    """Partition of each node; of GAP, FENNEL and LDG.

    columns   in-neighbours of each node
    classes   of each node; num_classes: no training node
    """
    columns = drawn_by(columns, settings)
    k, n = settings.num_partitions, len(columns)
    if settings.method != "gap":
        classes, num_classes = [0] * n, 0
    sizes = np.bincount(classes, minlength=num_classes + 1)
    caps = group_caps(settings, [int(sizes[-1]), int(sizes[:-1].sum())])
    group = [0 if c == num_classes else 1 for c in range(num_classes + 1)]
    costs = class_costs(settings, sizes, sum(map(len, columns)), np.array([caps[g] for g in group]))
    limits = class_limits(settings, sizes)
    shelves = [Shelf(k) for _ in sizes]
    loads = [[0] * k, [0] * k]
    found: list[int | None] = [None] * n
    for _ in range(settings.passes):
        for v in sorted(range(n), key=lambda v: (-len(columns[v]), v)):
            c, g = classes[v], group[classes[v]]
            shelf, cap, old = shelves[c], int(caps[g]), found[v]
            neighbours = [found[u] for u in columns[v]]
            if old is not None:
                shelf.take_out(old)
                loads[g][old] -= 1

            def cost(p: int, shelf: Shelf = shelf, c: int = c) -> float:
                return float(costs[c][shelf.sizes[p]])

            def score(p: int, near: Any = neighbours, shelf: Shelf = shelf, cap: int = cap) -> Any:
                if settings.method == "ldg":
                    return near.count(p) * (1.0 - shelf.sizes[p] / cap)
                return near.count(p) - cost(p)

            is_open = [loads[g][p] < cap for p in range(k)]
            emptiest = next(p for p in shelf.ascending if is_open[p])
            near = {p for p in neighbours if p is not None and is_open[p]}
            adjacent = sorted(p for p in near if shelf.sizes[p] < limits[c])
            best = max(adjacent, key=score, default=None)
            nothing = 0.0 if settings.method == "ldg" else -cost(emptiest)
            chosen = emptiest if best is None or nothing > score(best) else best
            shelf.put_in(chosen)
            loads[g][chosen] += 1
            found[v] = chosen
    return [p for p in found if p is not None]


def communities(
    num_nodes: int, num_groups: int, degree: int, seed: int
) -> tuple[list[tuple[int, int]], Any]:
    """(source, target) of edges both ways, four of five inside a group; the group of each node."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, num_groups, num_nodes)
    members = [np.flatnonzero(group == g) for g in range(num_groups)]
    pairs = set()
    for v in range(num_nodes):
        for _ in range(degree // 2):
            near = rng.random() < 0.8
            u = int(rng.choice(members[group[v]])) if near else int(rng.integers(num_nodes))
            if u != v:
                pairs |= {(u, v), (v, u)}
    return sorted(pairs), group
