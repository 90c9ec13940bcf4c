"""Home placement: an owner map decides which rank trains each seed of a global batch (LeapGNN).

*Model* d is trained on rank d's contiguous share of the batch.  At time step t it visits rank
(d + t) mod N, so rank s then trains the seeds that it owns of model (s - t) mod N.
"""

import numpy as np
from numpy.typing import NDArray

RANK_BYTES = 2  # of a seed's rank


def models_of(num_seeds: int, num_ranks: int) -> NDArray[np.int64]:
    """The rank whose contiguous share (`loaderd.plans.base.share`) has each position: (seeds,)."""
    return (np.arange(1, num_seeds + 1) * num_ranks - 1) // num_seeds


def times_of(ranks: NDArray[np.integer], num_ranks: int) -> NDArray[np.int64]:
    """The time step at which the model of each seed visits the rank that trains it: (seeds,)."""
    return (ranks - models_of(ranks.size, num_ranks)) % num_ranks


def merge_times(
    times: NDArray[np.int64], groups: NDArray[np.int64], num_times: int, kept: int
) -> NDArray[np.int64]:
    """Time steps of the seeds after those with the fewest seeds are left out, the first of equals.

    times    int64 (seeds,)   below `num_times`
    groups   int64 (seeds,)   group of each seed: its model, or its rank
    kept     number of time steps that are left

    Seeds of a group whose time step is left out go to the remaining steps in turn, the first to the
    earliest, so that what two steps get from one group differs by one seed at most.
    """
    fewest = np.argsort(np.bincount(times, minlength=num_times), kind="stable")
    left = np.sort(fewest[num_times - kept :])
    moved = np.flatnonzero(~np.isin(times, left))
    order = moved[np.argsort(groups[moved], kind="stable")]
    counts = np.bincount(groups[order])
    turns = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)
    merged = times.copy()
    merged[order] = left[turns % kept]
    return merged


def place_seeds(owners: NDArray[np.integer], num_ranks: int, time_steps: int) -> NDArray[np.uint16]:
    """The rank that trains each seed of a global batch: uint16 (seeds,).

    owners       any integers (seeds,)   of the seeds in the order of the batch, below `num_ranks`
    time_steps   left after merging by model; 0: every seed is trained by its owner
    """
    if not time_steps:
        return owners.astype(np.uint16)
    models = models_of(owners.size, num_ranks)
    merged = merge_times((owners - models) % num_ranks, models, num_ranks, time_steps)
    return ((models + merged) % num_ranks).astype(np.uint16)
