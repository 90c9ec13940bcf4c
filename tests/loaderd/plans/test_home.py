"""Which rank trains which seed: against a plain reference, one seed after another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.plans.base import Part, share
from loaderd.plans.home import merge_times, models_of, place_seeds, times_of

BATCHES = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(st.just(ranks), st.lists(st.integers(0, ranks - 1), min_size=ranks))
)


def merged_naively(times: list[int], groups: list[int], num_times: int, kept: int) -> list[int]:
    left = list(range(num_times))
    for _ in range(num_times - kept):
        left.remove(min(left, key=times.count))
    turns, found = dict.fromkeys(groups, 0), list[int]()
    for time, group in zip(times, groups, strict=True):
        if time in left:
            found.append(time)
        else:
            found.append(left[turns[group] % kept])
            turns[group] += 1
    return found


@given(BATCHES)
def test_models_are_contiguous_shares(batch):
    ranks, owners = batch
    size = len(owners)
    expected = [r for r in range(ranks) for _ in share(0, 1, size, size, Part(r, ranks))]
    assert models_of(size, ranks).tolist() == expected


@given(BATCHES)
def test_a_model_visits_each_rank_at_one_time(batch):
    ranks, owners = batch
    times, models = times_of(np.array(owners), ranks), models_of(len(owners), ranks)
    assert ((models + times) % ranks).tolist() == owners
    assert ((times >= 0) & (times < ranks)).all()


@given(BATCHES, st.integers(1, 6), st.booleans())
def test_times_are_merged_as_one_seed_after_another(batch, kept, by_model):
    ranks, owners = batch
    kept = min(kept, ranks)
    times = times_of(np.array(owners), ranks)
    groups = models_of(len(owners), ranks) if by_model else np.array(owners)
    found = merge_times(times, groups, ranks, kept)
    assert found.tolist() == merged_naively(times.tolist(), groups.tolist(), ranks, kept)
    assert len(set(found.tolist())) <= kept


@given(BATCHES, st.integers(0, 6))
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_seeds_are_placed_by_model(dtype, batch, kept):
    ranks, owners = batch
    kept, size = min(kept, ranks), len(owners)
    placed = place_seeds(np.array(owners, dtype), ranks, kept)
    assert placed.dtype == np.uint16
    if kept in (0, ranks):
        assert placed.tolist() == owners
        return
    models, times = models_of(size, ranks).tolist(), times_of(np.array(owners), ranks).tolist()
    merged = merged_naively(times, models, ranks, kept)
    assert placed.tolist() == [(m + t) % ranks for m, t in zip(models, merged, strict=True)]
