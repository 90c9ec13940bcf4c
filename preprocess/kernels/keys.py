"""Keys of any bytes: hashed, and found in a table.

Keys lie one behind the other: key i is data[offsets[i] : offsets[i + 1]].  A hash guides; only
equal bytes are equal.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import prefetch, wrap_add
from blockstore.kernels.jit import njit
from blockstore.kernels.random import mix

DEFINE, REFER, ADD = 0, 1, 2  # a key must be new; must be held; is added where it is not held
DONE, NO_ROOM, TWICE, UNKNOWN = 0, 1, 2, 3
WAITS = np.uint32(2**32 - 1)  # number of a key that is not in a full table
_AHEAD = 16  # keys between asking for a table's entry and using it
_BYTE, _WORD = np.uint64(8), np.uint64(0x9E3779B97F4A7C15)


class KeyTable(NamedTuple):
    """Keys in memory, numbered as they come."""

    # (a power of two,) number + 1 of a key, at its hash or behind; 0: none
    slots: NDArray[np.uint32]
    hashes: NDArray[np.uint64]  # (room,) of the keys held
    starts: NDArray[np.int64]  # (room + 1,) where each lies in `held`
    held: NDArray[np.uint8]  # their bytes
    counts: NDArray[np.int64]  # (1,) keys held


class HashedKeys(NamedTuple):
    """Keys that are asked for."""

    offsets: NDArray[np.int64]  # (keys + 1,)
    data: NDArray[np.uint8]
    hashes: NDArray[np.uint64]  # (keys,)


@njit(nogil=True, cache=True)
def hash_keys(offsets, data, out):
    """A hash of each key.

    offsets  int64 (keys + 1,)
    data     uint8
    out      uint64 (keys,)   out
    """
    for i in range(offsets.size - 1):
        start, stop = offsets[i], offsets[i + 1]
        value = np.uint64(stop - start)
        while start < stop:
            word = np.uint64(0)
            last = min(start + 8, stop)
            for at in range(last - 1, start - 1, -1):
                word = word << _BYTE | np.uint64(data[at])
            value = mix(wrap_add(value, _WORD) ^ word)
            start = last
        out[i] = value


@njit(nogil=True, cache=True)
def find_keys(table, keys, first, how, is_full, out):
    """The number of each key in a table, from key `first` on; keys are numbered as they come.

    table    KeyTable
    keys     HashedKeys
    how      int              DEFINE, REFER or ADD
    is_full  bool             none is added: one that is not held WAITS
    out      uint32 (keys,)   out

    Returns (key where it stopped, why): NO_ROOM in the table, TWICE a key that was to be new, whose
    number is in `out`, UNKNOWN one that was to be held, or DONE.
    """
    slots, hashes, starts, held, counts = (
        table.slots, table.hashes, table.starts, table.held, table.counts
    )  # fmt: skip
    offsets, data, hashed = keys.offsets, keys.data, keys.hashes
    mask = np.uint64(slots.size - 1)
    for i in range(first, hashed.size):
        # what a key is compared with hangs on its slot: three steps, each asked for in time
        if i + 3 * _AHEAD < hashed.size:
            prefetch(slots, np.int64(hashed[i + 3 * _AHEAD] & mask))
        if i + 2 * _AHEAD < hashed.size:
            number = np.int64(slots[np.int64(hashed[i + 2 * _AHEAD] & mask)]) - 1
            prefetch(hashes, number)
            prefetch(starts, number)
        if i + _AHEAD < hashed.size:
            number = np.int64(slots[np.int64(hashed[i + _AHEAD] & mask)]) - 1
            if number >= 0:
                prefetch(held, starts[number])
        start, size = offsets[i], offsets[i + 1] - offsets[i]
        at = np.int64(hashed[i] & mask)
        number = np.int64(slots[at]) - 1
        while number >= 0:
            if hashes[number] == hashed[i] and starts[number + 1] - starts[number] == size:
                begin, k = starts[number], 0
                while k < size and held[begin + k] == data[start + k]:
                    k += 1
                if k == size:
                    break
            at = (at + 1) & np.int64(mask)
            number = np.int64(slots[at]) - 1
        if number >= 0:
            out[i] = number
            if how == DEFINE:
                return i, TWICE
            continue
        if is_full:
            out[i] = WAITS
            continue
        if how == REFER:
            return i, UNKNOWN
        number = counts[0]
        if number == hashes.size or starts[number] + size > held.size:
            return i, NO_ROOM
        slots[at] = number + 1
        hashes[number] = hashed[i]
        begin = starts[number]
        for k in range(size):
            held[begin + k] = data[start + k]
        starts[number + 1] = begin + size
        counts[0] = number + 1
        out[i] = number
    return hashed.size, DONE


@njit(nogil=True, cache=True)
def fill_slots(slots, hashes, count):
    """Enter `count` keys, by their hashes, into slots that are all 0."""
    mask = np.int64(slots.size - 1)
    for number in range(count):
        at = np.int64(hashes[number] & np.uint64(mask))
        while slots[at]:
            at = (at + 1) & mask
        slots[at] = number + 1
