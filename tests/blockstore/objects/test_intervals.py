"""Which groups are expected last, in orders that have one answer."""

import numpy as np

from blockstore.objects.intervals import UseIntervals

GROUPS = 200


def used(order: list[int]) -> UseIntervals:
    found = UseIntervals(GROUPS)
    for group in order:
        found.use(np.array([group]))
    return found


def farthest(found: UseIntervals, count: int) -> list[int]:
    return found.farthest(np.arange(GROUPS))[:count].tolist()


def test_in_a_cycle_the_last_used_is_the_farthest() -> None:
    found = used([*range(GROUPS)] * 3 + [*range(50)])
    assert set(farthest(found, 30)) == set(range(20, 50))


def test_of_groups_used_twice_shortly_those_are_that_were() -> None:
    """Each comes again 5 uses later, then after a whole cycle: the newest five come at once."""
    order = [g % GROUPS for i in range(3 * GROUPS + 100) for g in (i, i - 5) if g >= 0]
    last = farthest(used(order), 30)
    assert not set(range(95, 100)) & set(last)
    assert np.mean([60 <= group < 95 for group in last]) > 0.9


def test_of_hot_and_cold_groups_the_oldest_is() -> None:
    rng = np.random.default_rng(1)
    chance = 1 / np.arange(1, GROUPS + 1) ** 1.5
    order = rng.choice(GROUPS, 20_000, p=chance / chance.sum()).tolist()
    last = {group: i for i, group in enumerate(order)}
    oldest = sorted(range(GROUPS), key=lambda group: last.get(group, -1))[:20]
    assert len(set(farthest(used(order), 20)) & set(oldest)) >= 15


def test_numbers_of_uses_may_pass_32_bits() -> None:
    found = used([*range(GROUPS)] * 3)
    before = farthest(found, GROUPS)
    moved = UseIntervals(GROUPS)
    shift = (1 << 32) - 300
    moved._now, moved._counts = found._now + shift, found._counts
    moved._last[:] = found._last + np.uint32(shift & 0xFFFFFFFF)
    assert farthest(moved, GROUPS) == before
