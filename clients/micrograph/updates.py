"""Optimizer steps out of home batches, by models that stay or that visit the owners of seeds."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from clients.micrograph.dataset import HomeBatch
from clients.micrograph.migrate import RankRing
from clients.micrograph.visits import visit_batches
from clients.ranks import FlatGradients, Ranks
from clients.torch import Batch

LossOf = Callable[[Batch], tuple[Tensor, Tensor]]  # summed over labelled seeds, and how many


class Averaging(NamedTuple):
    """How the models of the ranks are kept together.

    sync_every   optimizer steps between two averages of the models; 1: gradients are added up in
                 each step, so that all models are one
    migrate      models travel between time steps; they must with `sync_every` over 1
    """

    sync_every: int = 1
    migrate: bool = False


class HomeUpdates:
    """One iteration after another on the batches of a rank.

    With `sync_every` 1 parameters do not change between the time steps of an iteration, and a sum
    of gradients does not depend on the model to which a part of it is booked.  So migration changes
    the gradient by rounding alone, and so does each number of time steps.  With more, each model
    takes its optimizer steps on its own seeds, and travels with its optimizer's state.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        averaging: Averaging,
    ) -> None:
        """All ranks make theirs at the same time."""
        self._gradients, self._optimizer, self._ranks = gradients, optimizer, ranks
        self._averaging = averaging
        self._ring = RankRing(ranks) if averaging.migrate else None
        # the model here is that of the rank so many before this one; None: all models are one
        self._time: int | None = None
        self._sums = torch.zeros(2, dtype=torch.float64)  # losses since the last average
        self.averaged = True  # all ranks have the same model

    def take(
        self, batch: HomeBatch, time_steps: int, loss_of: LossOf, last: bool
    ) -> tuple[float, int]:
        """Train one iteration: sum of the losses, and how many, on all ranks together.

        time_steps   that are left after merging by server
        last         the models are averaged after this iteration, in any case

        With `sync_every` the sums are those since the last average, and 0 before the next one.
        """
        gradients = self._gradients
        gradients.clear()
        ranks = self._ranks
        for time, visit in visit_batches(batch, ranks.rank, ranks.world_size, time_steps):
            self._travel(time)
            if visit.batch_size:
                gradients.add(*loss_of(visit))
        alone = self._averaging.sync_every > 1
        loss, labelled = gradients.mean(everywhere=not alone)
        self._optimizer.step()
        if not alone:
            self._time = None
            return loss, labelled
        self._sums += torch.tensor([loss, labelled], dtype=torch.float64)
        self.averaged = last or (batch.step + 1) % self._averaging.sync_every == 0
        return self._average() if self.averaged else (0.0, 0)

    def _travel(self, time: int) -> None:
        """Have the model of this time step here."""
        before, self._time = self._time, time
        if self._ring is None or before is None or before == time:
            return
        parts = [self._gradients.flat]
        if self._averaging.sync_every > 1:
            parts += self._model()
        values = torch.cat([part.flatten() for part in parts])
        self._ring.shift(values, time - before)
        _scatter(values, parts)

    def _average(self) -> tuple[float, int]:
        """Put the mean of all models, and of their optimizers' state, in the place of each.

        With the state, all ranks go on from one point: what rank 0 saves is all there is to save.
        """
        parts = self._model()
        values = torch.cat([part.flatten() for part in parts])
        self._ranks.add_up(values)
        _scatter(values / self._ranks.world_size, parts)
        self._time = None
        loss, labelled = self._ranks.total(*self._sums.tolist())
        self._sums.zero_()
        return loss, int(labelled)

    def _model(self) -> list[Tensor]:
        """Parameters, and what the optimizer keeps of each: nothing before its first step.

        Numbers of steps are no part of it: they are the same for all models.
        """
        found = [p.detach() for group in self._optimizer.param_groups for p in group["params"]]
        kept = [
            value
            for state in self._optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and name != "step"
        ]
        return found + kept


def _scatter(values: Tensor, parts: list[Tensor]) -> None:
    """Flat values to the tensors that they were made of."""
    for part, own in zip(
        parts, values.split_with_sizes([part.numel() for part in parts]), strict=True
    ):
        part.copy_(own.view_as(part))
