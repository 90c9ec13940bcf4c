"""Plans `shadow` and `induced`: what neighbor sampling finds, and all edges among it.

Source: Zeng et al., Decoupling the Depth and Scope of Graph Neural Networks, NeurIPS 2021: each
root has a subgraph of its own (`shadow`).  With one subgraph of all roots (`induced`), batches are
those of PyG's NeighborLoader with subgraph_type="induced".
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.renumber import NODE_BITS
from loaderd.api.errors import Refused
from loaderd.plans.subgraph import NO_TREES, Chosen, Facts, GraphAnswers, KeyedDraws, Sampler

_NODE = (1 << NODE_BITS) - 1


@dataclass(frozen=True)
class Induced(Sampler):
    """Neighbors, without replacement, of newly found nodes."""

    name, rooted = "induced", True

    def check(self, facts: Facts) -> None:
        if 0 in facts.fanouts:
            raise Refused(
                f"plan {self.name!r}: fanouts {list(facts.fanouts)}, expected 1 or more of each "
                "hop, or -1 (all neighbors)"
            )

    def most_nodes(self, facts: Facts) -> int:
        found = expanded = 1
        for fanout in facts.fanouts:
            most = expanded * fanout if fanout > 0 else facts.num_nodes
            expanded = min(most, facts.num_nodes)
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
    """A subgraph for each root: a node is another one in each of them."""

    name, trees = "shadow", True
