"""Time steps against a plain reference: each seed once, in the group of its share and owner."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from clients.cut import cut_batch  # noqa: E402
from clients.micrograph.training import plan_visits, visit_batches  # noqa: E402
from loaderd.plans.base import Part, share  # noqa: E402
from tests.clients.batches import different_fields  # noqa: E402
from tests.clients.micrograph.home_trainer import HomeCase, home_batch  # noqa: E402

GROUPS = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks), st.lists(st.integers(0, ranks - 1), min_size=ranks, max_size=40),
        st.integers(1, ranks),
    )
)  # fmt: skip


def groups_naively(owners: list[int], num_ranks: int, kept: int) -> dict[tuple[int, int], list]:
    """Positions by (time, server), time steps with the fewest moved to others of the server."""
    size = len(owners)
    found: dict[tuple[int, int], list[int]] = {}
    for model in range(num_ranks):
        for position in share(0, 1, size, size, Part(model, num_ranks)):
            server = owners[position]
            found.setdefault(((server - model) % num_ranks, server), []).append(position)
    totals = [
        sum(len(group) for (time, _), group in found.items() if time == t) for t in range(num_ranks)
    ]
    left = list(range(num_ranks))
    for _ in range(num_ranks - kept):
        left.remove(min(left, key=lambda t: totals[t]))
    for server in range(num_ranks):
        moved = sorted(
            position
            for time in set(range(num_ranks)) - set(left)
            for position in found.pop((time, server), [])
        )
        for turn, position in enumerate(moved):
            found.setdefault((left[turn % kept], server), []).append(position)
    return {key: sorted(group) for key, group in found.items()}


@settings(deadline=None)
@given(GROUPS)
def test_groups_are_those_of_the_reference(case):
    num_ranks, owners, kept = case
    expected, found = groups_naively(owners, num_ranks, kept), {}
    times = []
    for rank in range(num_ranks):
        own = np.flatnonzero(np.array(owners) == rank)
        visits = plan_visits(np.array(owners), rank, num_ranks, kept)
        times.append([visit.time for visit in visits])
        for time, seeds in visits:
            if seeds.size:
                found[time, rank] = own[seeds].tolist()
    assert found == expected
    assert sorted(p for group in found.values() for p in group) == list(range(len(owners)))
    assert all(own == times[0] for own in times)
    assert len(times[0]) <= kept


@pytest.mark.parametrize("time_steps", [1, 3, 4])
def test_batches_are_those_of_the_seeds_alone(time_steps):
    case = HomeCase(ranks=4)
    for rank in range(4):
        batch = home_batch(case, 0, rank)
        visits = plan_visits(batch.seed_rank.numpy(), rank, 4, time_steps)
        found = list(visit_batches(batch, rank, 4, time_steps))
        assert [time for time, _ in found] == [time for time, _ in visits]
        for (_, one), (_, seeds) in zip(found, visits, strict=True):
            assert different_fields(one, cut_batch(batch, torch.from_numpy(seeds))) == []
    assert sum(home_batch(case, 0, rank).batch_size for rank in range(4)) == 9
