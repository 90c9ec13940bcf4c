"""Plan `partitions`: all seeds of a macro-batch at once, expanded inside its partitions (JOESTAR).

An epoch deals the partitions out as `macrobatch` does, a macro-batch to each rank in turn: round u
of W ranks has macro-batches u W to u W + W - 1.  What is sampled of a macro-batch is one batch of
the whole graph, in which only nodes of its partitions, the *inner* nodes, are expanded.  Trainers
take their steps from it: the plan says which, too.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from loaderd.api.errors import Refused
from loaderd.plans.base import EVERY_RANK, Shape, Unit
from loaderd.plans.macrobatch import MacrobatchPlan, share_steps


class PartitionPlan(MacrobatchPlan):
    """Its steps are rounds; `epoch_layout` has the trainers' steps in each round."""

    name = "partitions"

    def sized(self, offsets: NDArray[np.int64]) -> Self:
        """The plan, once it is known where partitions begin: int64 (partitions + 1,)."""
        maximum = -(-self._macro.num_partitions // self.num_macros)  # of a macro-batch
        largest = np.sort(np.diff(offsets))[-maximum:]
        bounds = self._bounds._replace(inner=int(largest.sum()))
        return type(self)(self.resolved, self.part, bounds)

    @property
    def num_macros(self) -> int:
        """Equally many for each rank, the fewest with no more partitions than asked for.

        If the store has too few partitions for that, each rank has one less.
        """
        world = self.part.world_size
        return min(-(-super().num_macros // world), self._macro.num_partitions // world) * world

    @property
    def trained_steps(self) -> int:
        """Steps of an epoch that trainers take from what is sampled."""
        return self._steps

    def unit(self, epoch: int, step: int) -> Unit:
        macro = self._drawn_step(step)
        return Unit(epoch, step, 0, int(self.epoch_layout(epoch).seeds[macro]), macro)

    def shape(self) -> Shape:
        found = super().shape()
        return found._replace(named=found.nodes)

    def inner_ranges(self, epoch: int, macro: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Store ids of the inner nodes: int64 (2 n,), ascending, first and stop of each range.

        offsets  int64 (partitions + 1,) first node of each, then the end
        """
        members = self.epoch_layout(epoch).members[macro]
        return np.stack([offsets[members], offsets[members + 1]], axis=1).reshape(-1)

    def _drawn_step(self, step: int) -> int:
        """The macro-batch of a step, or of a position: each has draws of its own."""
        part = self.part
        return step if part.rank == EVERY_RANK else step * part.world_size + part.rank

    def _max_seeds(self) -> int:
        return self.resolved.num_seeds  # a rank may have all of them

    def _max_expanded(self, frontier: int, repeated: int) -> int:
        # until the sizes of partitions are known, the least that the largest macro-batch can have
        inner = self._bounds.inner or self._bounds.num_nodes // self.num_macros
        return min(frontier, inner + repeated)

    def _cuts(self) -> list[int]:
        count = self.num_macros
        return [self._macro.num_partitions * i // count for i in range(1, count)]

    @property
    def _step_size(self) -> int:
        """Seeds of a step, at most, before each rank rounds its share up."""
        return max(1, self.resolved.batch_size - self.part.world_size + 1)

    def _count_sampled(self) -> int:
        """One batch per round.  Raises Refused: fewer partitions than ranks."""
        if not self.num_macros:
            raise Refused(
                f"plan 'partitions': {self._macro.num_partitions} partitions cannot be dealt out "
                f"to {self.part.world_size} ranks; take fewer ranks, or a store of more partitions"
            )
        return self.num_macros // self.part.world_size

    def _count_steps(self, seeds_in: NDArray[np.int64]) -> int:
        rounds = self.num_macros // self.part.world_size
        return -(-int(seeds_in.sum()) // self._step_size) + rounds - 1

    def _share_steps(self, seeds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Steps of each round; every round has at least one."""
        together = np.maximum(1, seeds.reshape(-1, self.part.world_size).sum(axis=1))
        return share_steps(together, self._steps, self._step_size, 1)
