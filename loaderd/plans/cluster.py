"""Plan `cluster`: whole partitions, and all edges among their nodes, also across partitions.

Source: Chiang et al., Cluster-GCN, KDD 2019 (stochastic multiple partitions, section 3.2).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loaderd.api.errors import Refused
from loaderd.plans.subgraph import Chosen, Facts, GraphAnswers, KeyedDraws, Sampler


@dataclass(frozen=True)
class Cluster(Sampler):
    """An epoch deals all partitions out in a keyed order, each into one batch."""

    name = "cluster"
    partitions: int = 1  # of a batch; others where they do not come out even

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

    def most_nodes(self, facts: Facts) -> int:
        return self._most(facts, facts.part_nodes, facts.num_nodes)

    def most_edges(self, facts: Facts) -> int:
        return min(facts.num_edges, self._most(facts, facts.part_edges, facts.num_edges))

    def _most(self, facts: Facts, sizes: tuple[int, ...], total: int) -> int:
        """Of the largest partitions; until they are known, the least that these can have."""
        together = -(-facts.num_partitions // self.steps(facts))
        if sizes:
            return sum(sorted(sizes)[-together:])
        return total * together // facts.num_partitions

    def choose(self, draws: KeyedDraws, graph: GraphAnswers, nodes: NDArray[np.int64]) -> Chosen:
        count, i = graph.offsets.size - 1, draws.number
        dealt = draws.epoch_order(count)[count * i // draws.total : count * (i + 1) // draws.total]
        ranges = [np.arange(graph.offsets[p], graph.offsets[p + 1]) for p in np.sort(dealt)]
        return Chosen(np.concatenate([nodes, *ranges]))
