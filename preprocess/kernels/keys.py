"""Hash keys of any bytes, and find them in a table.

Keys are concatenated: key i is data[offsets[i] : offsets[i + 1]].  A hash finds candidates; keys
are equal only if their bytes are.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import prefetch, wrap_add
from blockstore.kernels.jit import njit
from blockstore.kernels.random import mix

DEFINE, REFER, ADD = 0, 1, 2  # a key must be new; must be in the table; is added if it is not
DONE, NO_ROOM, TWICE, UNKNOWN = 0, 1, 2, 3
WAITS = np.uint32(2**32 - 1)  # in place of a number: the key is not in the table, which is full
_AHEAD = 16  # keys between prefetching a table's entry and using it
_BYTE, _WORD = np.uint64(8), np.uint64(0x9E3779B97F4A7C15)


class KeyTable(NamedTuple):
    """A hash table of keys, numbered in the order in which they are added."""

    # (a power of two,) number + 1 of a key, at its hash or after it (linear probing); 0: none
    slots: NDArray[np.uint32]
    hashes: NDArray[np.uint64]  # (room,) hashes of the keys
    starts: NDArray[np.int64]  # (room + 1,) where each key begins in `held`
    held: NDArray[np.uint8]  # bytes of the keys
    counts: NDArray[np.int64]  # (1,) number of keys


class HashedKeys(NamedTuple):
    """Keys to look up."""

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
    """Find, or add, keys in a table from key `first` on; writes their numbers to `out`.

    table    KeyTable
    keys     HashedKeys
    how      int              DEFINE, REFER or ADD
    is_full  bool             no key is added; `out` is WAITS for those not in the table
    out      uint32 (keys,)   out

    Returns (key where it stopped, why): NO_ROOM in the table; TWICE, a key that must be new is in
    the table, and its number in `out`; UNKNOWN, a key that must be there is not; or DONE.
    """
    slots, hashes, starts, held, counts = (
        table.slots, table.hashes, table.starts, table.held, table.counts
    )  # fmt: skip
    offsets, data, hashed = keys.offsets, keys.data, keys.hashes
    mask = np.uint64(slots.size - 1)
    for i in range(first, hashed.size):
        # prefetch in three steps: the slot, then its entries, then the bytes to compare with
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
    """Insert `count` keys, by their hashes, into slots that are all 0."""
    mask = np.int64(slots.size - 1)
    for number in range(count):
        at = np.int64(hashes[number] & np.uint64(mask))
        while slots[at]:
            at = (at + 1) & mask
        slots[at] = number + 1
