"""Expected numbers of distinct nodes in batches of sampled neighborhoods; pure functions.

Edges are drawn at random between nodes so that each node has its degrees on average and no two
nodes have two edges: u has an edge to v with probability 1 - exp(-x_u y_v).  (Without the second
condition two nodes of degree 30,000 in a graph of 19 M edges would have 47 between them, and nodes
of low degree too few edges to hubs.)  An expanded column of degree d takes a given one of its edges
with probability min(1, fanout / d).  So all out-edges of a node are alike, and a node with k of
them is not found with probability (1 - seed) * (1 - hit)^k.  If edges have reverses, a node that
expands an edge back was not found through that edge, so only its other edges count.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tools.model.graph import Counts, Graph

_ROUNDS, _EXACT = 300, 1e-6


class Occupancy(NamedTuple):
    """Expected contents of one batch, from which those of any number of batches follow."""

    graph: Graph
    ends: Counts  # (classes, classes) share of a class's out-edges that lead into each class
    seed: Counts  # (classes,) probability that a node is a seed of a batch
    hit: Counts  # (classes,) probability that a batch takes a given in-edge of a node
    found: tuple[Counts, ...]  # by hop, seeds first: (classes,) probability to be found there first
    edges: tuple[float, ...]  # of a batch, by hop

    @property
    def nodes(self) -> tuple[float, ...]:
        """Nodes of a batch, by hop."""
        return tuple(float(self.graph.sizes @ found) for found in self.found)

    def wanted(self, batches: float) -> Counts:
        """(classes,) probability that a node is in any of `batches` batches of one epoch.

        They expand the same columns with the same probabilities, so the mean is taken over columns
        before the product over edges: a neighbor of a hub is missed repeatedly for the same reason.
        """
        missed = self.ends @ (1 - self.hit) ** batches
        seed = np.maximum(0.0, 1 - self.seed * batches)  # each node is a seed once per epoch
        found: Counts = 1 - seed * missed**self.graph.out
        return found

    def expanded(self, hop: int, batches: float) -> Counts:
        """(classes,) probability that any of `batches` batches expands a node in a hop."""
        found: Counts = 1 - (1 - self.found[hop]) ** batches
        return found


def occupy(graph: Graph, fanouts: Sequence[int], batch_size: float) -> Occupancy:
    """The expected contents of batches of `batch_size` seeds, drawn without replacement.

    fanouts   by hop, -1: all neighbors.  A hop expands nodes newly found by the previous one
    """
    ends = mix(graph)
    seed = graph.seeds * min(1.0, batch_size / graph.num_seeds)
    others = np.maximum(0.0, graph.out - graph.undirected)
    hit = np.zeros_like(seed)
    absent, apart = 1 - seed, 1 - seed  # not found so far; not found through all edges but one
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
    """(classes, classes) share of a class's out-edges that lead into each class."""
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
