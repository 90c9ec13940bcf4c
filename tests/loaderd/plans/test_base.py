"""How seeds are shared by steps and ranks: each seed once, no step larger than its bounds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from loaderd.api.errors import Refused
from loaderd.api.protocol import HomePlacement, HopBatches, Labor, MacroBatch
from loaderd.plans.base import EVERY_RANK, Part, count_steps, share
from loaderd.plans.chunks import HopPlan
from loaderd.plans.macrobatch import MacrobatchPlan, share_steps
from loaderd.plans.minibatch import GraphBounds, MinibatchPlan
from tests.loaderd.samples import RESOLVED


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
    minimum = np.minimum(-(-counts // batch), counts // world)
    total = int(minimum.sum()) + min(more, int((counts // world - minimum).sum()))
    steps = share_steps(counts, total, batch, world)
    assert steps.sum() == total
    assert (steps >= minimum).all()
    assert (steps <= counts // world).all()
    if more:
        sizes = counts / np.maximum(steps, 1)
        grown = np.flatnonzero(steps > minimum)
        for g in grown:  # it had the most seeds a step before it got its last one
            before = counts[g] / max(steps[g] - 1, 1)
            others = sizes[(steps < counts // world) & (np.arange(sizes.size) != g)]
            assert others.size == 0 or before >= others.max() - 1e-9 or steps[g] == 1


@pytest.mark.parametrize("family", ["neighbor", "macro", "hops"])
def test_a_cycle_has_the_draws_of_its_epochs_again(family: str):
    """Of every plan, and each epoch of the cycle another."""
    hops = HopBatches(("sym",), 1, "cr", 8, 1, False) if family == "hops" else None
    macro = MacroBatch(4, 2, 1, False, False, False) if family == "macro" else None
    labor = Labor() if family == "neighbor" else None
    resolved = structs.replace(
        RESOLVED, family=family, hops=hops, macro=macro, labor=labor, cycle=3, num_seeds=200
    )

    def draws(epoch: int) -> Any:
        if family == "hops":
            plan = HopPlan(resolved, Part())
            return plan.ranges(plan.unit(epoch, 1)).tolist()
        bounds = GraphBounds(1000, (5000,))
        if family == "macro":
            macros = MacrobatchPlan(resolved, Part(), bounds, np.full(4, 50))
            unit = macros.unit(epoch, 1)
            out = np.empty(unit.num_seeds, np.int64)
            macros.order(unit, out)
            layout = macros.epoch_layout(epoch)
            return out.tolist(), [m.tolist() for m in layout.members]
        plan = MinibatchPlan(resolved, Part(), bounds)
        return plan.epoch_key(epoch), plan.hop_key(epoch, 1, 0, 0), plan.source_key(epoch, 1, 0)

    first = [draws(epoch) for epoch in range(3)]
    assert first[0] != first[1] != first[2]
    assert [draws(epoch) for epoch in range(3, 9)] == first * 2
    unit = MinibatchPlan(
        structs.replace(resolved, hops=None, macro=None), Part(), GraphBounds(1000, (5000,))
    ).unit(7, 1)
    assert unit.epoch == 7  # as the client is told


def test_a_unit_at_home_is_the_whole_batch_and_a_rank():
    """Of one rank, and of all ranks of a job: a rank may own all of the largest batch."""
    resolved = structs.replace(RESOLVED, num_seeds=202, batch_size=50, fanouts=((2,), (3,)))
    bounds, home = GraphBounds(1000, (5000,)), HomePlacement()
    alone = MinibatchPlan(resolved, Part(2, 4, home), bounds)
    whole = MinibatchPlan(resolved, Part(EVERY_RANK, 4, home), bounds)
    ranges = MinibatchPlan(resolved, Part(2, 4), bounds)
    assert (alone.num_steps, whole.num_steps) == (4, 16)  # a tail of 2 joined the last batch
    for step in range(4):
        unit = alone.unit(1, step)
        assert (unit.start, unit.stop, unit.rank) == (
            50 * step,
            202 if step == 3 else 50 + 50 * step,
            2,
        )
        assert [whole.unit(1, 4 * step + r)[2:4] for r in range(4)] == [unit[2:4]] * 4
        assert [whole.unit(1, 4 * step + r).rank for r in range(4)] == [0, 1, 2, 3]
        assert ranges.unit(1, step).rank == -1
    for plan in (alone, whole):
        assert plan.shape().seeds == plan.shape().placed == 53
    assert (ranges.shape().seeds, ranges.shape().placed) == (14, 0)
