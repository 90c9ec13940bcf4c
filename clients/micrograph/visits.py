"""Which model visits a rank at which time step, and the seeds of it that are trained there.

Source of the schedule: LeapGNN (docs/derivations/micrographs.md).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clients.cut import BatchCutter
from clients.micrograph.dataset import HomeBatch
from clients.torch import Batch
from loaderd.plans.home import merge_times, times_of


class ModelVisit(NamedTuple):
    """A time step of an iteration, as rank s sees it: model (s - time) mod N is there."""

    time: int
    seeds: NDArray[np.int64]  # places among those of the rank's batch; there may be none


def plan_visits(
    seed_rank: NDArray[np.int64], rank: int, num_ranks: int, time_steps: int
) -> list[ModelVisit]:
    """The visits to a rank in an iteration, at the same times on all ranks.

    seed_rank    of `HomeBatch`
    time_steps   that are left after merging by server: seeds stay on their rank

    Time steps at which no rank has seeds are left out.
    """
    times = times_of(seed_rank, num_ranks)
    if time_steps < num_ranks:
        times = merge_times(times, seed_rank, num_ranks, time_steps)
    own = times[seed_rank == rank]
    return [ModelVisit(time, np.flatnonzero(own == time)) for time in np.unique(times).tolist()]


def visit_batches(
    batch: HomeBatch, rank: int, num_ranks: int, time_steps: int
) -> Iterator[tuple[int, Batch]]:
    """(time step, its batch) of each visit: the batch of its seeds alone, cut out of the rank's."""
    found = plan_visits(batch.seed_rank.cpu().numpy(), rank, num_ranks, time_steps)
    if len(found) == 1:
        yield found[0].time, batch
        return
    cutter = BatchCutter(batch)
    for visit in found:
        seeds = torch.from_numpy(visit.seeds).to(batch.n_id.device)
        yield visit.time, cutter.batch(seeds)
