"""How seeds are shared by steps and ranks: each seed once, no step larger than its bounds."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loaderd.api.errors import Refused
from loaderd.plans.base import Part, count_steps, share
from loaderd.plans.macrobatch import share_steps


@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 5))
def test_every_seed_comes_once_and_ranks_differ_by_one(seeds, batch, world):
    assume(batch >= world)
    if seeds < world:
        with pytest.raises(Refused, match=f"{seeds} seeds cannot be shared by {world} ranks"):
            count_steps(seeds, batch, world)
        return
    steps = count_steps(seeds, batch, world)
    found = []
    for step in range(steps):
        parts = [share(step, steps, seeds, batch, Part(rank, world)) for rank in range(world)]
        found += [i for part in parts for i in part]
        sizes = [len(part) for part in parts]
        assert min(sizes) >= 1, "a rank has no seed in a step"
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) <= batch + world - 1
        assert sum(sizes) == batch or step == steps - 1
    assert found == list(range(seeds))


@pytest.mark.parametrize(
    ("seeds", "batch", "world", "steps"),
    [(10, 5, 1, 2), (11, 5, 1, 3), (11, 5, 2, 2), (12, 5, 2, 3), (13, 5, 3, 3), (4, 5, 2, 1)],
)
def test_a_tail_is_a_step_if_every_rank_has_a_seed_of_it(seeds, batch, world, steps):
    assert count_steps(seeds, batch, world) == steps


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 3),
       st.integers(0, 4))  # fmt: skip
def test_no_step_of_a_macro_batch_has_more_seeds_than_a_batch(seeds, batch, world, more):
    counts = np.array(seeds)
    least = np.minimum(-(-counts // batch), counts // world)
    total = int(least.sum()) + min(more, int((counts // world - least).sum()))
    steps = share_steps(counts, total, batch, world)
    assert steps.sum() == total
    assert (steps >= least).all()
    assert (steps <= counts // world).all()
    if more:
        sizes = counts / np.maximum(steps, 1)
        grown = np.flatnonzero(steps > least)
        for g in grown:  # it had the most seeds a step before it got its last one
            before = counts[g] / max(steps[g] - 1, 1)
            others = sizes[(steps < counts // world) & (np.arange(sizes.size) != g)]
            assert others.size == 0 or before >= others.max() - 1e-9 or steps[g] == 1
