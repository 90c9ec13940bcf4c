"""Division of an epoch's steps into large batches; pure functions."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from loaderd.plans.base import Part, count_steps, share
from loaderd.plans.partitions import PartitionPlan

LARGE_BATCHES = 12  # per epoch, unless a number of steps is given


class LargeSteps(NamedTuple):
    """An epoch with `steps` batches per large batch, each divided among the ranks."""

    num_seeds: int
    batch_size: int  # of a step, for all ranks together
    world_size: int
    steps: int  # of a large batch; the last one of an epoch may have fewer

    @property
    def num_steps(self) -> int:
        return count_steps(self.num_seeds, self.batch_size, self.world_size)

    @property
    def leaves_tail(self) -> bool:
        """Whether the last step has seeds that lie beyond its large batch.

        Left-over seeds that are fewer than ranks join the last step; but they begin a large batch
        of their own if the previous ones are full.
        """
        tail = self.num_seeds % self.batch_size
        full = self.num_steps % self.steps == 0 and self.num_seeds > self.batch_size
        return full and 0 < tail < self.world_size

    def without_tail(self) -> Self:
        """The same with the fewest further steps per large batch that leave no tail."""
        found = self
        while found.leaves_tail:
            found = found._replace(steps=found.steps + 1)
        return found

    def with_default(self) -> Self:
        """The same with as many steps per large batch as give at most `LARGE_BATCHES`."""
        return self._replace(steps=-(-self.num_steps // LARGE_BATCHES)).without_tail()

    def large(self, step: int) -> int:
        """The number of the large batch that has a step."""
        return step // self.steps

    def of(self, step: int) -> range:
        """The steps of the large batch that has a step, from this step on."""
        return range(step, min((step // self.steps + 1) * self.steps, self.num_steps))

    def seeds(self, step: int, rank: int) -> range:
        """A rank's share of a step, as places among the seeds of its large batch."""
        part = Part(rank, self.world_size)
        own = share(step, self.num_steps, self.num_seeds, self.batch_size, part)
        first = step // self.steps * self.steps * self.batch_size
        return range(own.start - first, own.stop - first)


class PartitionSteps(NamedTuple):
    """Steps of an epoch whose large batches are macro-batches; in each round every rank has one.

    The methods are those of `LargeSteps`.
    """

    num_seeds: NDArray[np.int64]  # (rounds, ranks) seeds of each macro-batch
    first: NDArray[np.int64]  # (rounds + 1,) first step of each round

    @classmethod
    def of_epoch(cls, plan: PartitionPlan, epoch: int) -> Self:
        layout = plan.epoch_layout(epoch)
        return cls(layout.seeds.reshape(-1, plan.part.world_size), layout.first_step)

    def large(self, step: int) -> int:
        return int(np.searchsorted(self.first, step, "right")) - 1

    def of(self, step: int) -> range:
        return range(step, int(self.first[self.large(step) + 1]))

    def seeds(self, step: int, rank: int) -> range:
        number = self.large(step)
        first, stop = self.first[number : number + 2].tolist()
        count, place = int(self.num_seeds[number, rank]), step - first
        steps = stop - first
        return range(count * place // steps, count * (place + 1) // steps)
