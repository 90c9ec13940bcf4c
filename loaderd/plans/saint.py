"""Plans `saint-node`, `saint-edge`, `saint-walk`: subgraphs of GraphSAINT.

Source: Zeng et al., GraphSAINT, ICLR 2020, algorithm 2.  As in its code, and in PyG's: nodes are
drawn in proportion to their in-degree, as targets of uniformly drawn edges; edges uniformly.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loaderd.api.errors import Refused
from loaderd.plans.subgraph import Chosen, Facts, GraphAnswers, KeyedDraws, Sampler


@dataclass(frozen=True)
class Saint(Sampler):
    """What the three have in common: any number of subgraphs makes an epoch."""

    num_steps: int = 0  # subgraphs of an epoch, of all ranks; 0: with as many nodes as the graph

    def check(self, facts: Facts) -> None:
        if not facts.num_edges or self.most_nodes(facts) < 1:
            raise Refused(
                f"plan {self.name!r}: subgraphs of {self.most_nodes(facts)} nodes of a graph of "
                f"{facts.num_edges} edges, expected one or more of each"
            )

    def steps(self, facts: Facts) -> int:
        return self.num_steps or -(-facts.num_nodes // self.most_nodes(facts))

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

    def most_nodes(self, facts: Facts) -> int:
        return min(self.budget, facts.num_nodes)

    def drawn(self, draws: KeyedDraws, graph: GraphAnswers) -> NDArray[np.int64]:
        return graph.edges(draws.below(graph.num_edges, self.budget))[1]


@dataclass(frozen=True)
class SaintEdge(Saint):
    """Both ends of uniformly drawn edges."""

    name = "saint-edge"
    budget: int = 3000  # edges that are drawn, with replacement

    def most_nodes(self, facts: Facts) -> int:
        return min(2 * self.budget, facts.num_nodes)

    def drawn(self, draws: KeyedDraws, graph: GraphAnswers) -> NDArray[np.int64]:
        return np.concatenate(graph.edges(draws.below(graph.num_edges, self.budget)))


@dataclass(frozen=True)
class SaintWalk(Saint):
    """Nodes of random walks against the direction of the edges, from uniformly drawn roots."""

    name = "saint-walk"
    roots: int = 2000  # that are drawn, with replacement
    length: int = 2  # steps of each walk

    def most_nodes(self, facts: Facts) -> int:
        return min(self.roots * (self.length + 1), facts.num_nodes)

    def drawn(self, draws: KeyedDraws, graph: GraphAnswers) -> NDArray[np.int64]:
        seen = [draws.below(graph.num_nodes, self.roots)]
        for step in range(1, self.length + 1):
            seen.append(graph.walk(seen[-1], draws.key(step)))
        return np.concatenate(seen)
