"""Keys of any bytes: hashed, found in a table, spread over buckets and brought back in order.

Keys lie one behind the other: key i is data[offsets[i] : offsets[i + 1]].  In a bucket's file each
has its length before it, 4 bytes, the smallest first.  A hash guides; only equal bytes are equal.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import prefetch, wrap_add
from blockstore.kernels.jit import njit
from blockstore.kernels.random import mix

LENGTH_BYTES = 4
DEFINE, REFER, ADD = 0, 1, 2  # a key must be new; must be held; is added where it is not held
DONE, NO_ROOM, TWICE, UNKNOWN = 0, 1, 2, 3
_AHEAD = 16  # keys between asking for a table's entry and using it
_BYTE, _WORD = np.uint64(8), np.uint64(0x9E3779B97F4A7C15)


class KeyTable(NamedTuple):
    """Keys in memory, numbered as they come."""

    slots: NDArray[
        np.uint32
    ]  # (a power of two,) number + 1 of a key, at its hash or behind; 0: none
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
def find_keys(table, keys, first, how, out):
    """The number of each key in a table, from key `first` on.

    table    KeyTable
    keys     HashedKeys
    how      int              DEFINE, REFER or ADD
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


@njit(nogil=True, cache=True)
def spread_keys(offsets, data, hashed, shift, first, buffers, filled, bucket):
    """Keys into the buffers of their buckets, each behind its length, from key `first` on.

    shift    uint64                     bucket of a key: hash >> shift
    buffers  uint8 (buckets, bytes)     out
    filled   int64 (buckets,)           bytes in each buffer so far
    bucket   uint16 (keys,)             out

    Returns the key where it stopped: its bucket's buffer has no room for it.
    """
    for i in range(first, hashed.size):
        b = np.int64(hashed[i] >> shift)
        start, size = offsets[i], offsets[i + 1] - offsets[i]
        at = filled[b]
        bucket[i] = b
        if at + LENGTH_BYTES + size > buffers.shape[1]:
            return i
        for k in range(LENGTH_BYTES):
            buffers[b, at + k] = size >> 8 * k & 255
        for k in range(size):
            buffers[b, at + LENGTH_BYTES + k] = data[start + k]
        filled[b] = at + LENGTH_BYTES + size
    return hashed.size


@njit(nogil=True, cache=True)
def parse_keys(raw, offsets, data):
    """Keys out of a piece of a bucket's file, as far as they are whole.

    raw      uint8             bytes of the file
    offsets  int64 (most + 1,) out
    data     uint8             out, as large as `raw`

    Returns (keys, bytes of `raw` that they took).
    """
    count, at = 0, np.int64(0)
    offsets[0] = 0
    while count < offsets.size - 1 and at + LENGTH_BYTES <= raw.size:
        size = np.int64(0)
        for k in range(LENGTH_BYTES):
            size |= np.int64(raw[at + k]) << 8 * k
        if at + LENGTH_BYTES + size > raw.size:
            break
        begin = offsets[count]
        for k in range(size):
            data[begin + k] = raw[at + LENGTH_BYTES + k]
        at += LENGTH_BYTES + size
        count += 1
        offsets[count] = begin + size
    return count, at


@njit(nogil=True, cache=True)
def merge_buckets(bucket, first, buffers, taken, filled, out):
    """Values of buckets back into the order in which their keys came, from place `first` on.

    bucket   uint16 (places,)         whose value is next
    buffers  integers (buckets, room)
    taken    int64 (buckets,)         values of each buffer used so far
    filled   int64 (buckets,)         values in each
    out      integers (places,)       out

    Returns the place where it stopped: its bucket's buffer is used up.
    """
    for i in range(first, bucket.size):
        b = bucket[i]
        if taken[b] == filled[b]:
            return i
        out[i] = buffers[b, taken[b]]
        taken[b] += 1
    return bucket.size


@njit(nogil=True, cache=True)
def rank_new(bucket, numbers, first, seen, counts, buffers, filled):
    """Ids for keys where they first appear, from place `first` on, into the list of their bucket.

    bucket   uint16 (places,)
    numbers  uint32 (places,)          of the key in its bucket's table
    seen     int64 (buckets,)          keys of each bucket that have an id
    counts   int64 (1,)                ids given
    buffers  uint64 (buckets, room)    out: ids, in the order of the numbers in the bucket
    filled   int64 (buckets,)          ids in each buffer so far

    Returns the place where it stopped: its bucket's buffer is full.
    """
    for i in range(first, bucket.size):
        b = bucket[i]
        if np.int64(numbers[i]) != seen[b]:
            continue
        if filled[b] == buffers.shape[1]:
            return i
        buffers[b, filled[b]] = counts[0]
        filled[b] += 1
        seen[b] += 1
        counts[0] += 1
    return bucket.size


@njit(nogil=True, cache=True)
def take_ids(numbers, ids, out):
    """out[i] = ids[numbers[i]]."""
    for i in range(numbers.size):
        if i + _AHEAD < numbers.size:
            prefetch(ids, np.int64(numbers[i + _AHEAD]))
        out[i] = ids[numbers[i]]
