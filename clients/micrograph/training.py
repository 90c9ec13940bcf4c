"""Iterations of training with home placement (`clients.train --placement home`).

Each model visits the ranks that own its seeds.  Source of the schedule: LeapGNN
(docs/derivations/micrographs.md).
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.optim import Optimizer

from clients.cut import BatchCutter
from clients.micrograph.dataset import HomeBatch, HomeDataset
from clients.ranks import FlatGradients, Ranks
from clients.torch import Batch
from loaderd.plans.home import merge_times, times_of

MERGES = ("server", "model")
MIGRATE = ("never", "always")
LossOf = Callable[[Batch], tuple[Tensor, Tensor]]  # sum over labelled seeds, and their number


class HomeOptions(NamedTuple):
    """How models visit the owners of their seeds, and how they are synchronized."""

    time_steps: int = 1  # per iteration; 0: search for the best number
    by_model: bool = False  # seeds of dropped time steps move to others of the same model
    migrate: bool = False  # models travel between time steps; needed if `sync_every` > 1
    # optimizer steps between two averages of the models; 1: gradients are added up in each step,
    # so all models are the same
    sync_every: int = 1


class ModelVisit(NamedTuple):
    """A time step of an iteration on rank s, which model (s - time) mod N visits."""

    time: int
    seeds: NDArray[np.int64]  # places in the rank's batch; may be empty


def plan_visits(
    seed_rank: NDArray[np.int64], rank: int, num_ranks: int, time_steps: int
) -> list[ModelVisit]:
    """The visits to a rank in an iteration, in the same time steps on all ranks.

    seed_rank    of `HomeBatch`
    time_steps   number left after merging by server, in which seeds stay on their rank

    Time steps in which no rank has seeds are left out.
    """
    times = times_of(seed_rank, num_ranks)
    if time_steps < num_ranks:
        times = merge_times(times, seed_rank, num_ranks, time_steps)
    own = times[seed_rank == rank]
    return [ModelVisit(time, np.flatnonzero(own == time)) for time in np.unique(times).tolist()]


def visit_batches(
    batch: HomeBatch, rank: int, num_ranks: int, time_steps: int
) -> Iterator[tuple[int, Batch]]:
    """(time step, batch) of each visit; the batch is cut out of the rank's for its seeds alone."""
    found = plan_visits(batch.seed_rank.cpu().numpy(), rank, num_ranks, time_steps)
    if len(found) == 1:
        yield found[0].time, batch
        return
    cutter = BatchCutter(batch)
    for visit in found:
        seeds = torch.from_numpy(visit.seeds).to(batch.n_id.device)
        yield visit.time, cutter.batch(seeds)


class MergeSearch:
    """Searches for the number of time steps with the fastest epochs, by measured time only.

    The first epoch has one time step for each rank.  After each epoch that was faster than the
    previous one, there is one less; the first that was not undoes the last change, and ends it.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds, as `time.monotonic`."""
        self.time_steps = num_ranks
        self.ended = num_ranks == 1
        self._num_ranks, self._clock = num_ranks, clock
        self._before = float("inf")  # seconds of the previous epoch
        self._spent = 0.0  # seconds of this epoch before it was resumed
        self._begun = clock()

    def begin_epoch(self) -> None:
        """Call when an epoch begins, or is resumed from a saved state."""
        self._begun = self._clock()

    def end_epoch(self) -> None:
        """Decide the number of time steps of the next epoch."""
        seconds, self._spent, self._begun = self._seconds, 0.0, self._clock()
        if self.ended:
            return
        if seconds >= self._before:
            self.time_steps += 1
            self.ended = True
            return
        self._before = seconds
        # with one time step there is nothing left to merge
        self.ended = self.time_steps == 1
        self.time_steps = max(1, self.time_steps - 1)

    def state_dict(self) -> dict[str, Any]:
        """The state of the search in plain values, also in the middle of an epoch."""
        return {
            "num_ranks": self._num_ranks, "time_steps": self.time_steps, "ended": self.ended,
            "before": self._before, "spent": self._seconds,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume a search; with another number of ranks it begins from scratch."""
        if state["num_ranks"] != self._num_ranks:
            return
        self.time_steps, self.ended = state["time_steps"], state["ended"]
        self._before, self._spent = state["before"], state["spent"]
        self._begun = self._clock()

    @property
    def _seconds(self) -> float:
        """Seconds of this epoch so far."""
        return self._spent + self._clock() - self._begun


class RankRing:
    """A ring of the ranks on a process group of its own, so that nothing else waits for it."""

    def __init__(self, ranks: Ranks) -> None:
        """A collective call: all ranks make theirs at the same time."""
        self._ranks, self._group = ranks, None
        if ranks.world_size > 1:
            limit = timedelta(seconds=ranks.timeout_s)
            self._group = distributed.new_group(timeout=limit)

    def shift(self, values: Tensor, hops: int) -> None:
        """Replace `values`, 1-d, by those of the rank `hops` before this one.

        Both transfers are posted together, so that no two ranks wait for each other.
        """
        rank, world = self._ranks.rank, self._ranks.world_size
        if hops % world == 0:
            return
        arriving = torch.empty_like(values)
        posted = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, values, (rank + hops) % world, self._group),
                distributed.P2POp(distributed.irecv, arriving, (rank - hops) % world, self._group),
            ]
        )
        for transfer in posted:
            transfer.wait()
        values.copy_(arriving)


class HomeTraining:
    """Iterations on the batches of one rank, and the search for the number of their time steps.

    With `sync_every` 1 parameters do not change between the time steps of an iteration, and a sum
    of gradients does not depend on which model adds which part.  So migration, and the number of
    time steps, change the gradient only by rounding.  With a larger `sync_every`, each model takes
    optimizer steps on its own seeds, and travels with its optimizer's state.
    """

    def __init__(
        self,
        options: HomeOptions,
        data: HomeDataset,
        gradients: FlatGradients,
        optimizer: Optimizer,
        ranks: Ranks,
    ) -> None:
        """All ranks make theirs at the same time."""
        self._options, self._data, self._ranks = options, data, ranks
        self._gradients, self._optimizer = gradients, optimizer
        self._ring = RankRing(ranks) if options.migrate else None
        # how many ranks before this one the model here has its home; None: all models are the same
        self._time: int | None = None
        self._sums = torch.zeros(2, dtype=torch.float64)  # losses since the last average
        self.averaged = True  # whether all ranks have the same model
        self._search: MergeSearch | None = None
        if not options.time_steps:
            self._search = MergeSearch(ranks.world_size, time.monotonic)

    @property
    def time_steps(self) -> int:
        return self._options.time_steps if self._search is None else self._search.time_steps

    def begin_epoch(self) -> None:
        """Call on all ranks before batches of an epoch are read."""
        if self._options.by_model:
            self._data.set_time_steps(self.time_steps)
            self._ranks.barrier()  # until no rank reads the previous epoch's stream
            self._data.attached()
            self._ranks.barrier()  # a later rank may find no place in the stream
        if self._search is not None:
            self._search.begin_epoch()

    def update(self, batch: HomeBatch, loss_of: LossOf) -> tuple[float, int]:
        """Train one iteration; returns the sum of the losses and their number, over all ranks.

        With `sync_every` over 1 an iteration that averages models returns the sums since the last
        average, all others 0; the last iteration of an epoch always averages.
        """
        gradients, ranks = self._gradients, self._ranks
        last = batch.step == len(self._data) - 1
        # merging by model was done by the daemon; merging by server keeps seeds on their rank
        kept = ranks.world_size if self._options.by_model else self.time_steps
        gradients.clear()
        for at, visit in visit_batches(batch, ranks.rank, ranks.world_size, kept):
            self._travel(at)
            if visit.batch_size:
                gradients.add(*loss_of(visit))
        alone = self._options.sync_every > 1
        found = gradients.mean(everywhere=not alone)
        self._optimizer.step()
        if alone:
            self._sums += torch.tensor(found, dtype=torch.float64)
            self.averaged = last or (batch.step + 1) % self._options.sync_every == 0
            found = self._average() if self.averaged else (0.0, 0)
        else:
            self._time = None
        if last and self._search is not None:
            self._search.end_epoch()
            self._agree(self._search)
        return found

    def _travel(self, at: int) -> None:
        """Bring the model of this time step here."""
        before, self._time = self._time, at
        if self._ring is None or before is None or before == at:
            return
        parts = [self._gradients.flat]
        if self._options.sync_every > 1:
            parts += self._model()
        values = torch.cat([part.flatten() for part in parts])
        self._ring.shift(values, at - before)
        _scatter(values, parts)

    def _average(self) -> tuple[float, int]:
        """Replace each model, and its optimizer's state, by the mean over all ranks.

        As this includes the state, all ranks continue from one point, which rank 0 alone can save.
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
        """Parameters, and the optimizer's state of each: none before its first step.

        Step counts are left out, as they are the same for all models.
        """
        found = [p.detach() for group in self._optimizer.param_groups for p in group["params"]]
        kept = [
            value
            for state in self._optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and name != "step"
        ]
        return found + kept

    def _agree(self, search: MergeSearch) -> None:
        """Adopt the decision of rank 0, as clocks differ."""
        first = self._ranks.rank == 0
        steps, ended = self._ranks.total(search.time_steps * first, search.ended * first)
        search.time_steps, search.ended = int(steps), bool(ended)

    def state_dict(self) -> dict[str, Any]:
        """The state of the search."""
        return {} if self._search is None else self._search.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the search; from scratch if there was none when the state was saved."""
        if self._search is not None and state:
            self._search.load_state_dict(state)


def _scatter(values: Tensor, parts: list[Tensor]) -> None:
    """Copy flat values back to the tensors that they were made of."""
    for part, own in zip(
        parts, values.split_with_sizes([part.numel() for part in parts]), strict=True
    ):
        part.copy_(own.view_as(part))
