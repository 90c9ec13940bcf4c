"""Expected numbers of different nodes in batches of sampled neighborhoods.  Pure.

Edges are drawn at random between nodes so that each node has its degrees on average and no two
nodes have two edges: u has an edge to v with probability 1 - exp(-x_u y_v).  (Without the second
condition two nodes of degree 30,000 of a graph of 19 M edges would have 47 between them, and nodes
of low degree fewer edges to hubs than they do.)  A column of degree d that is expanded takes a
given one of its edges with probability min(1, fanout / d).  So all out-edges of a node are alike,
and a node with k of them is not found with probability (1 - seed) * (1 - hit)^k.  If edges have
reverses, what a node passes back along an edge was not found through that edge: it has one other
edge less.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tools.model.graph import Counts, Graph

_ROUNDS, _EXACT = 300, 1e-6


class Occupancy(NamedTuple):
    """One batch, in expectation, and from it any number of them."""

    graph: Graph
    ends: Counts  # (classes, classes) of edges that leave the one class, the share into the other
    seed: Counts  # (classes,) probability that a node is a seed of a batch
    hit: Counts  # (classes,) that a batch takes a given in-edge of a node
    found: tuple[Counts, ...]  # of each hop, seeds first: (classes,) that a node is first found
    edges: tuple[float, ...]  # of a batch, by hop

    @property
    def nodes(self) -> tuple[float, ...]:
        """Of a batch, by hop."""
        return tuple(float(self.graph.sizes @ found) for found in self.found)

    def wanted(self, batches: float) -> Counts:
        """(classes,) probability that so many batches of one epoch want a node.

        They expand the same columns with the same probabilities, so the mean is taken over columns
        before the product over edges: a node at a hub is missed again and again for one reason.
        """
        missed = self.ends @ (1 - self.hit) ** batches
        seed = np.maximum(0.0, 1 - self.seed * batches)  # of an epoch each node is a seed once
        found: Counts = 1 - seed * missed**self.graph.out
        return found

    def expanded(self, hop: int, batches: float) -> Counts:
        """(classes,) probability that so many batches expand a node in a hop."""
        found: Counts = 1 - (1 - self.found[hop]) ** batches
        return found


def occupy(graph: Graph, fanouts: Sequence[int], batch_size: float) -> Occupancy:
    """What batches of so many seeds, drawn without replacement, find in expectation.

    fanouts   of each hop, -1: all neighbors.  A hop expands what the one before has found first
    """
    ends = mix(graph)
    seed = graph.seeds * min(1.0, batch_size / graph.num_seeds)
    others = np.maximum(0.0, graph.out - graph.undirected)
    hit = np.zeros_like(seed)
    absent, apart = 1 - seed, 1 - seed  # until now; the same through all edges but one
    found, passed, edges = [seed], seed, list[float]()
    for fanout in fanouts:
        taken = graph.into if fanout < 0 else np.minimum(graph.into, fanout)
        edges.append(float(graph.sizes @ (found[-1] * taken)))
        hit = hit + passed * taken / np.maximum(graph.into, 1e-12)
        missed = ends @ (1 - hit)
        now, now_apart = (1 - seed) * missed**graph.out, (1 - seed) * missed**others
        found.append(absent - now)
        passed, absent, apart = apart - now_apart, now, now_apart
    return Occupancy(graph, ends, seed, hit, tuple(found), tuple(edges))


def mix(graph: Graph) -> Counts:
    """(classes, classes) of the edges that leave nodes of a class, the share into each class."""
    sizes, scale = graph.sizes, np.sqrt(max(1.0, graph.num_edges))
    x, y = graph.out / scale, graph.into / scale
    for _ in range(_ROUNDS):
        edges = -np.expm1(-np.outer(x, y))  # between two nodes
        out, into = edges @ sizes, sizes @ edges
        x_more, y_more = (
            np.where(want > 0, want / np.maximum(have, 1e-300), 1.0)
            for want, have in ((graph.out, out), (graph.into, into))
        )
        if max(np.abs(x_more - 1).max(), np.abs(y_more - 1).max()) < _EXACT:
            break
        x, y = x * np.sqrt(x_more), y * np.sqrt(y_more)
    shares: Counts = edges * sizes / np.maximum(out, 1e-300)[:, np.newaxis]
    return shares
