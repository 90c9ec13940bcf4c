"""Plans `ladies` and `fastgcn`: a hop draws so many nodes for all of the nodes before it together.

A fanout is the number of nodes that a hop draws, with replacement.  Edges lead to the nodes that
were there before the hop, from these and from those that it adds.

Sources: Zou et al., Layer-Dependent Importance Sampling, NeurIPS 2019; Chen, Ma and Xiao, FastGCN,
ICLR 2018.  With P the adjacency matrix over in-degrees, LADIES draws source u in proportion to the
sum of P[v, u]^2 over the nodes v of the layer: that is a node v in proportion to 1 / degree, then
one of its neighbors.  No table of candidates is needed for it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loaderd.api.errors import Refused
from loaderd.plans.subgraph import Chosen, Facts, GraphAnswers, KeyedDraws, Sampler

_GRAIN = 1 << 53  # of a uniform draw


@dataclass(frozen=True)
class FastGcn(Sampler):
    """Neighbors of nodes that are drawn uniformly from the whole graph, whatever the layer.

    Source u is drawn in proportion to the sum of P[v, u] over all v; the paper takes the squares.
    """

    name, rooted, layered = "fastgcn", True, True

    def check(self, facts: Facts) -> None:
        if min(facts.fanouts) < 1:
            raise Refused(
                f"plan {self.name!r}: fanouts {list(facts.fanouts)}, expected the number of nodes "
                "that each hop draws, 1 or more"
            )

    def most_nodes(self, facts: Facts) -> int:
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
    """Neighbors of nodes of the layer."""

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
