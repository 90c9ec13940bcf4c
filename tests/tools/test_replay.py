"""Replayed caches against plain Python, and against the least that trying everything finds."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.replay import (
    LRU,
    NEXT_USE,
    OPTIMAL,
    PRESENT_FIRST,
    SECOND_CHANCE,
    replay_blocks,
    replay_rows,
)
from tools.traces import needs_of

IDS = 7
groups_of = st.lists(st.sets(st.integers(0, IDS - 1), max_size=3), min_size=1, max_size=6)
compiled = settings(deadline=None, max_examples=50)  # the first call compiles
many_groups_of = st.lists(st.sets(st.integers(0, 29), max_size=9), min_size=1, max_size=30)


def needs(groups, num_ids):
    return needs_of([np.array(sorted(g), np.int64) for g in groups], num_ids)


def rows_read(groups, room, policy, look=1, num_ids=IDS):
    listed = needs(groups, num_ids)
    read = np.full(listed.ids.size, 9, np.uint8)
    assert replay_rows(*listed, room, num_ids, policy, look, read) == -1
    assert set(read.tolist()) <= {0, 1}
    return int(read.sum())


def blocks_read(hops, room, policy, num_ids=IDS):
    return int(replay_blocks(*needs(hops, num_ids), room, num_ids, policy))


def least(groups, room, held=frozenset(), together=True):
    """Reads, whatever is kept; `together`: a group's ids are all held at once, and stay."""
    if not groups:
        return 0
    need = frozenset(groups[0])
    must = need if together else frozenset()
    others = sorted((held | need) - must)
    spare = min(len(others), room - len(must))
    kept = [must | frozenset(some) for some in combinations(others, spare)]
    return len(need - held) + min(least(groups[1:], room, k, together) for k in kept)


def naive_rows(groups, room, policy, look):
    """One group after the other, by dictionaries; entries are numbered, the lowest goes first."""
    entries, hand, reads = [None] * room, 0, 0
    last, uses = {}, {}
    for time, group in enumerate(groups):
        if (time + 1) % 8 == 0 and policy == NEXT_USE:
            uses = {i: n // 2 for i, n in uses.items()}

        def coming(i, time=time):
            return next((t for t in range(time + 1, len(groups)) if i in groups[t]), 10**6)

        def rank(i, time=time, coming=coming, uses=uses):
            if policy == OPTIMAL:
                return -coming(i)
            if policy == LRU:
                return last[i]
            return (1, -coming(i)) if coming(i) <= time + look else (0, uses[i])

        absent = sorted(set(group) - set(entries))
        reads += len(absent)
        while absent and entries.count(None) < len(absent):
            spare = [e for e, i in enumerate(entries) if i is not None and i not in group]
            if policy != SECOND_CHANCE:
                entries[min(spare, key=lambda e: (rank(entries[e]), e))] = None
                continue
            if hand in spare and uses[entries[hand]]:
                uses[entries[hand]] = 0
            elif hand in spare:
                entries[hand] = None
            hand = (hand + 1) % room
        for i in absent:
            entries[entries.index(None)] = i
            uses[i] = 0
        for i in group:
            last[i], uses[i] = time, min(uses[i] + 1, 15)
    return reads


def naive_blocks(hops, room, policy):
    """One access after the other."""
    slots, reads, hand = {}, 0, 0  # slot -> [block, mark]
    for time, block in enumerate((b for hop in hops for b in sorted(hop)), 1):
        here = next((s for s, (b, _) in slots.items() if b == block), None)
        if here is None:
            reads += 1
            if policy == LRU:
                free = [s for s in range(room) if s not in slots]
                here = free[0] if free else min(slots, key=lambda s: slots[s][1])
            else:
                while slots.get(hand, [0, 0])[1]:
                    slots[hand][1] = 0
                    hand = (hand + 1) % room
                here, hand = hand, (hand + 1) % room
        slots[here] = [block, time if policy == LRU else 1]
    return reads


@given(groups_of, st.integers(3, 6))
@compiled
def test_optimal_rows_are_what_brute_force_finds(groups, room):
    assert rows_read(groups, room, OPTIMAL) == least(groups, room)


@given(groups_of, st.integers(1, 5))
@compiled
def test_optimal_blocks_are_what_brute_force_finds(hops, room):
    assert blocks_read(hops, room, OPTIMAL) == least(hops, room, together=False)


@given(many_groups_of, st.integers(9, 20), st.integers(1, 4))
@compiled
def test_rows_are_those_of_plain_python(groups, room, look):
    found = [
        rows_read(groups, room, policy, look, 30)
        for policy in (OPTIMAL, NEXT_USE, LRU, SECOND_CHANCE)
    ]
    expected = [
        naive_rows(groups, room, policy, look) for policy in (OPTIMAL, NEXT_USE, LRU, SECOND_CHANCE)
    ]
    assert found == expected
    assert found[0] == min(found)


@given(many_groups_of, st.integers(1, 20))
@compiled
def test_blocks_are_those_of_plain_python(hops, room):
    policies = (LRU, SECOND_CHANCE)
    found = [blocks_read(hops, room, policy, 30) for policy in policies]
    assert found == [naive_blocks(hops, room, policy) for policy in policies]
    best = blocks_read(hops, room, OPTIMAL, 30)
    assert best <= min(*found, blocks_read(hops, room, PRESENT_FIRST, 30))


@given(many_groups_of, st.integers(9, 20))
@compiled
def test_one_who_sees_to_the_end_is_optimal(groups, room):
    assert rows_read(groups, room, NEXT_USE, len(groups), 30) == rows_read(
        groups, room, OPTIMAL, 1, 30
    )


def test_all_hops_over_all_blocks_read_what_has_no_room():
    hops = [set(range(IDS))] * 5
    for policy in (OPTIMAL, PRESENT_FIRST):
        assert blocks_read(hops, 3, policy) == IDS + 4 * (IDS - 3)
    assert blocks_read(hops, 3, LRU) == 5 * IDS


def test_a_block_held_for_a_later_hop_stays():
    hops = [{0, 1}, {2, 3}, {0, 1}]
    assert blocks_read(hops, 3, OPTIMAL) == 4
    assert blocks_read(hops, 3, PRESENT_FIRST) == 6


def test_a_group_without_room_is_named():
    listed = needs([{0}, {0, 1, 2}], IDS)
    assert replay_rows(*listed, 2, IDS, LRU, 1, np.empty(4, np.uint8)) == 1
