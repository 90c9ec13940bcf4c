"""Caches replayed over what was needed, under several policies.

Arguments that the kernels share:

ids      int64 (n,)           what is needed: ids[starts[t] : starts[t + 1]] at time t, each once
starts   int64 (times + 1,)
after    int64 (n,)           the next time that needs the id, `times` if none does
room     int                  entries of the cache
num_ids  int                  ids lie below
"""

import numpy as np
from numba import njit

OPTIMAL, NEXT_USE, LRU, SECOND_CHANCE, PRESENT_FIRST = range(5)
_MOST_USES, _HALVE_EVERY = 15, 8  # as the daemon counts them


@njit(cache=True)
def _level(policy, time, look, times, after, last, uses):
    """What goes first is lowest; 0 to times + _MOST_USES."""
    if policy == OPTIMAL:
        return times - after
    if policy == NEXT_USE:
        if after > min(time + look, times - 1):
            return min(uses, _MOST_USES)
        return _MOST_USES + 1 + min(time + look, times - 1) - after
    return last


@njit(cache=True)
def replay_rows(ids, starts, after, room, num_ids, policy, look, read):
    """Groups whose ids must all be held at once, in a cache of `room` entries.

    policy   OPTIMAL, NEXT_USE, LRU, SECOND_CHANCE     read   uint8 (ids.size,)   out: 1 if absent

    Of equals the one in the lowest entry goes.  Returns -1, or the first group that has no room.
    """
    times = starts.size - 1
    entry_of, needed = np.full(num_ids, -1, np.int64), np.full(num_ids, -1, np.int64)
    held, coming, last = (
        np.full(room, -1, np.int64),
        np.zeros(room, np.int64),
        np.zeros(room, np.int64),
    )
    uses, counts = np.zeros(room, np.int64), np.zeros(times + _MOST_USES + 2, np.int64)
    free, hand = room, 0
    for time in range(times):
        absent = 0
        if policy == NEXT_USE and (time + 1) % _HALVE_EVERY == 0:
            uses >>= 1
        for i in range(starts[time], starts[time + 1]):
            needed[ids[i]] = time
            read[i] = entry_of[ids[i]] < 0
            absent += int(read[i])
        if starts[time + 1] - starts[time] > room:
            return time
        short = absent - free
        if short > 0 and policy == SECOND_CHANCE:
            while short > 0:
                own = held[hand]
                if own >= 0 and needed[own] != time:
                    if uses[hand]:
                        uses[hand] = 0
                    else:
                        entry_of[own], held[hand] = -1, -1
                        short -= 1
                        free += 1
                hand = hand + 1 if hand + 1 < room else 0
        elif short > 0:
            counts[:] = 0
            for e in range(room):
                if held[e] >= 0 and needed[held[e]] != time:
                    counts[_level(policy, time, look, times, coming[e], last[e], uses[e])] += 1
            bound, before = 0, 0
            while before + counts[bound] < short:
                before += counts[bound]
                bound += 1
            at_bound = short - before
            for e in range(room):
                if held[e] >= 0 and needed[held[e]] != time:
                    level = _level(policy, time, look, times, coming[e], last[e], uses[e])
                    if level < bound or (level == bound and at_bound > 0):
                        at_bound -= np.int64(level == bound)
                        entry_of[held[e]], held[e] = -1, -1
                        free += 1
        e = 0
        for i in range(starts[time], starts[time + 1]):
            entry = entry_of[ids[i]]
            if entry < 0:
                while held[e] >= 0:
                    e += 1
                entry = e
                held[e], entry_of[ids[i]], uses[e] = ids[i], e, 0
                free -= 1
            coming[entry], last[entry] = after[i], time
            uses[entry] = min(uses[entry] + 1, _MOST_USES)
    return -1


@njit(cache=True)
def replay_blocks(ids, starts, after, room, num_ids, policy):
    """Hops that need their blocks one at a time; returns how many are read.

    policy   OPTIMAL, PRESENT_FIRST, LRU, SECOND_CHANCE
    """
    times, reads = starts.size - 1, 0
    held = np.zeros(num_ids, np.bool_)
    if policy in (LRU, SECOND_CHANCE):
        slots, used, hand = np.full(room, -1, np.int64), np.full(room, -1, np.int64), 0
        where = np.full(num_ids, -1, np.int64)
        for i in range(ids.size):
            slot = where[ids[i]]
            if slot < 0:
                reads += 1
                if policy == LRU:
                    slot = np.argmin(used)
                else:
                    while used[hand] > 0:
                        used[hand] = 0
                        hand = hand + 1 if hand + 1 < room else 0
                    slot = hand
                    hand = hand + 1 if hand + 1 < room else 0
                if slots[slot] >= 0:
                    where[slots[slot]] = -1
                slots[slot], where[ids[i]] = ids[i], slot
            used[slot] = i if policy == LRU else 1
        return reads
    coming = np.full(num_ids, times, np.int64)
    for time in range(times):
        own = ids[starts[time] : starts[time + 1]]
        for i in range(own.size):
            reads += int(not held[own[i]])
            coming[own[i]] = after[starts[time] + i]
        if policy == OPTIMAL:
            for i in range(own.size):
                held[own[i]] = True
            some = np.flatnonzero(held)
            held[some[np.argsort(coming[some], kind="mergesort")[room:]]] = False
        else:
            kept = 0
            was = held.copy()
            held[:] = False
            for present in (False, True):
                for i in range(own.size - 1, -1, -1):
                    if kept < room and was[own[i]] == present:
                        held[own[i]] = True
                        kept += 1
    return reads
