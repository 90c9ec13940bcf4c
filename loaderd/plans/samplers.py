"""The samplers of subgraphs, by the name of the plan that a client asks for.

A new one is a class derived from `Sampler`: here, or outside of the daemon, named by
`loaderd serve --samplers MODULE:CLASS`.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.renumber import NODE_BITS
from loaderd.api.errors import Refused
from loaderd.plans.subgraph import NO_TREES, Chosen, Facts, GraphAnswers, KeyedDraws, Sampler

_GRAIN = 1 << 53  # values of a uniform draw
_NODE = (1 << NODE_BITS) - 1


@dataclass(frozen=True)
class Cluster(Sampler):
    """Whole partitions, and all edges among their nodes, also across partitions.

    An epoch deals all partitions out in a keyed order, each into one batch.  Source: Chiang et al.,
    Cluster-GCN, KDD 2019 (stochastic multiple partitions, section 3.2).
    """

    name = "cluster"
    partitions: int = 1  # per batch; it varies if they do not divide evenly

    def check(self, facts: Facts) -> None:
        if not facts.num_partitions or self.partitions < 1:
            raise Refused(
                f"plan 'cluster': {self.partitions} of the store's {facts.num_partitions} "
                "partitions a batch, expected at least one; make a store that has some by "
                "`blockstore repartition STORE NEW --partitions 64`"
            )

    def steps(self, facts: Facts) -> int:
        world = facts.world_size
        if facts.num_partitions < world:
            raise Refused(
                f"plan 'cluster': {facts.num_partitions} partitions cannot be dealt out to {world} "
                "ranks; take fewer ranks, or a store of more partitions"
            )
        rounds = -(-facts.num_partitions // (self.partitions * world))
        return min(rounds, facts.num_partitions // world) * world

    def node_bound(self, facts: Facts) -> int:
        return self._maximum(facts, facts.part_nodes, facts.num_nodes)

    def edge_bound(self, facts: Facts) -> int:
        return min(facts.num_edges, self._maximum(facts, facts.part_edges, facts.num_edges))

    def _maximum(self, facts: Facts, sizes: tuple[int, ...], total: int) -> int:
        """Size of the largest partitions; until sizes are known, the least that these can have."""
        together = -(-facts.num_partitions // self.steps(facts))
        if sizes:
            return sum(sorted(sizes)[-together:])
        return total * together // facts.num_partitions

    def choose(self, draws: KeyedDraws, graph: GraphAnswers, nodes: NDArray[np.int64]) -> Chosen:
        count, i = graph.offsets.size - 1, draws.number
        dealt = draws.epoch_order(count)[count * i // draws.total : count * (i + 1) // draws.total]
        ranges = [np.arange(graph.offsets[p], graph.offsets[p + 1]) for p in np.sort(dealt)]
        return Chosen(np.concatenate([nodes, *ranges]))


@dataclass(frozen=True)
class Saint(Sampler):
    """Base of the samplers of GraphSAINT: any number of subgraphs makes an epoch.

    Source: Zeng et al., GraphSAINT, ICLR 2020, algorithm 2.  As in its code, and in PyG's, nodes
    are drawn in proportion to their in-degree, as targets of uniformly drawn edges.
    """

    num_steps: int = 0  # subgraphs per epoch, of all ranks; 0: for as many nodes as the graph has

    def check(self, facts: Facts) -> None:
        if not facts.num_edges or self.node_bound(facts) < 1:
            raise Refused(
                f"plan {self.name!r}: subgraphs of {self.node_bound(facts)} nodes of a graph of "
                f"{facts.num_edges} edges, expected one or more of each"
            )

    def steps(self, facts: Facts) -> int:
        return self.num_steps or -(-facts.num_nodes // self.node_bound(facts))

    def choose(self, draws: KeyedDraws, graph: GraphAnswers, nodes: NDArray[np.int64]) -> Chosen:
        del nodes
        return Chosen(self.drawn(draws, graph))

    def drawn(self, draws: KeyedDraws, graph: GraphAnswers) -> NDArray[np.int64]:
        """Nodes, repeated or not."""
        raise NotImplementedError


@dataclass(frozen=True)
class SaintNode(Saint):
    """Nodes in proportion to their in-degree."""

    name = "saint-node"
    budget: int = 6000  # nodes that are drawn, with replacement

    def node_bound(self, facts: Facts) -> int:
        return min(self.budget, facts.num_nodes)

    def drawn(self, draws: KeyedDraws, graph: GraphAnswers) -> NDArray[np.int64]:
        return graph.edges(draws.below(graph.num_edges, self.budget))[1]


@dataclass(frozen=True)
class SaintEdge(Saint):
    """Both ends of uniformly drawn edges."""

    name = "saint-edge"
    budget: int = 3000  # edges that are drawn, with replacement

    def node_bound(self, facts: Facts) -> int:
        return min(2 * self.budget, facts.num_nodes)

    def drawn(self, draws: KeyedDraws, graph: GraphAnswers) -> NDArray[np.int64]:
        return np.concatenate(graph.edges(draws.below(graph.num_edges, self.budget)))


@dataclass(frozen=True)
class SaintWalk(Saint):
    """Nodes of random walks against the direction of the edges, from uniformly drawn roots."""

    name = "saint-walk"
    roots: int = 2000  # drawn with replacement
    length: int = 2  # steps of each walk

    def node_bound(self, facts: Facts) -> int:
        return min(self.roots * (self.length + 1), facts.num_nodes)

    def drawn(self, draws: KeyedDraws, graph: GraphAnswers) -> NDArray[np.int64]:
        seen = [draws.below(graph.num_nodes, self.roots)]
        for step in range(1, self.length + 1):
            seen.append(graph.walk(seen[-1], draws.key(step)))
        return np.concatenate(seen)


@dataclass(frozen=True)
class FastGcn(Sampler):
    """Neighbors of nodes that are drawn uniformly from the whole graph, whatever the layer.

    A hop draws nodes with replacement for all nodes before it together: the fanout is the number of
    nodes drawn.  Edges lead to the nodes that were there before the hop, from these and from those
    that it adds.  With P the adjacency matrix over in-degrees, source u is drawn in proportion to
    the sum of P[v, u] over all v; the paper takes the squares.  Source: Chen, Ma and Xiao, FastGCN,
    ICLR 2018.
    """

    name, rooted, layered = "fastgcn", True, True

    def check(self, facts: Facts) -> None:
        if min(facts.fanouts) < 1:
            raise Refused(
                f"plan {self.name!r}: fanouts {list(facts.fanouts)}, expected the number of nodes "
                "that each hop draws, 1 or more"
            )

    def node_bound(self, facts: Facts) -> int:
        return min(facts.seeds + sum(facts.fanouts), facts.num_nodes + facts.seeds)

    def choose(self, draws: KeyedDraws, graph: GraphAnswers, nodes: NDArray[np.int64]) -> Chosen:
        targets = self.targets(draws, graph, nodes, draws.fanouts[draws.hop])
        return Chosen(graph.walk(targets, draws.key(1)))

    def targets(
        self, draws: KeyedDraws, graph: GraphAnswers, nodes: NDArray[np.int64], count: int
    ) -> NDArray[np.int64]:
        """The nodes whose neighbors are drawn, with replacement."""
        del nodes
        return draws.below(graph.num_nodes, count)


@dataclass(frozen=True)
class Ladies(FastGcn):
    """Neighbors of nodes of the layer.

    Source u is drawn in proportion to the sum of P[v, u]^2 over the nodes v of the layer: first a
    node v in proportion to 1 / degree, then one of its neighbors.  No table of candidates is
    needed.  Source: Zou et al., Layer-Dependent Importance Sampling, NeurIPS 2019.
    """

    name = "ladies"

    def targets(
        self, draws: KeyedDraws, graph: GraphAnswers, nodes: NDArray[np.int64], count: int
    ) -> NDArray[np.int64]:
        degrees = graph.degrees(nodes)
        nodes, degrees = nodes[degrees > 0], degrees[degrees > 0]
        if not nodes.size:
            return nodes
        ends = np.cumsum(1.0 / degrees)
        at = (draws.below(_GRAIN, count) + 0.5) / _GRAIN * ends[-1]
        drawn: NDArray[np.int64] = np.minimum(np.searchsorted(ends, at, "right"), nodes.size - 1)
        return nodes[drawn]


@dataclass(frozen=True)
class Induced(Sampler):
    """The nodes that neighbor sampling without replacement finds, and all edges among them.

    Batches are those of PyG's NeighborLoader with subgraph_type="induced".
    """

    name, rooted = "induced", True

    def check(self, facts: Facts) -> None:
        if 0 in facts.fanouts:
            raise Refused(
                f"plan {self.name!r}: fanouts {list(facts.fanouts)}, expected 1 or more of each "
                "hop, or -1 (all neighbors)"
            )

    def node_bound(self, facts: Facts) -> int:
        found = expanded = 1
        for fanout in facts.fanouts:
            maximum = expanded * fanout if fanout > 0 else facts.num_nodes
            expanded = min(maximum, facts.num_nodes)
            found += expanded
        found = facts.seeds * min(found, facts.num_nodes)
        return found if self.trees else min(found, facts.num_nodes + facts.seeds)

    def choose(self, draws: KeyedDraws, graph: GraphAnswers, nodes: NDArray[np.int64]) -> Chosen:
        trees = np.arange(nodes.size) if self.trees else np.zeros(nodes.size, np.int64)
        known = new = np.unique(trees << NODE_BITS | nodes)
        for hop, fanout in enumerate(draws.fanouts):
            counts, found = graph.neighbors(new & _NODE, fanout, draws.key(hop))
            new = np.setdiff1d(np.repeat(new & ~_NODE, counts) | found, known)
            known = np.union1d(known, new)
        return Chosen(known & _NODE, known >> NODE_BITS if self.trees else NO_TREES)


@dataclass(frozen=True)
class Shadow(Induced):
    """A subgraph for each root: a node that is in several of them is a different node in each.

    Source: Zeng et al., Decoupling the Depth and Scope of Graph Neural Networks, NeurIPS 2021.
    """

    name, trees = "shadow", True


SAMPLERS: dict[str, type[Sampler]] = {
    sampler.name: sampler
    for sampler in (Cluster, SaintNode, SaintEdge, SaintWalk, Shadow, Induced, Ladies, FastGcn)
}


def register(sampler: type[Sampler]) -> None:
    """Also serve plan `sampler.name` in this process.  Raises ValueError: another has the name."""
    if SAMPLERS.setdefault(sampler.name, sampler) is not sampler:
        raise ValueError(
            f"sampler {sampler.name!r}: found another one of this name, expected a new name"
        )


def load_sampler(place: str) -> None:
    """Register "module:class".  Raises ValueError: there is no such sampler."""
    module, _, name = place.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"sampler {place!r}: expected MODULE:CLASS: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise ValueError(
            f"sampler {place!r}: found {found!r}, expected a class derived from "
            "loaderd.plans.subgraph.Sampler"
        )
    register(found)
