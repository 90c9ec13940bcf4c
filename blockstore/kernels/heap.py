"""The least keys of many, kept in a heap whose worst one is first."""

import numpy as np

from blockstore.kernels.jit import leaf


@leaf
def _worse(keys, places, a, b, last):
    """Whether pick a leaves before pick b."""
    if keys[a] == keys[b]:
        return places[a] < places[b] if last else places[a] > places[b]
    return keys[a] > keys[b]


@leaf
def push(keys, places, count, most, key, place, last):
    """Keep the `most` least keys; of equal ones the first places, or the last; returns the count.

    keys     (most,)         the heap, with
    places   int64 (most,)   where each comes from
    """
    if count < most:
        i = count
        keys[i], places[i] = key, place
        while i > 0 and _worse(keys, places, i, (i - 1) // 2, last):
            up = (i - 1) // 2
            keys[i], keys[up] = keys[up], keys[i]
            places[i], places[up] = places[up], places[i]
            i = up
        return count + 1
    if key > keys[0]:
        return count
    if key == keys[0] and (place < places[0] if last else place > places[0]):
        return count
    keys[0], places[0] = key, place
    i = np.int64(0)
    while 2 * i + 1 < count:
        child = 2 * i + 1
        if child + 1 < count and _worse(keys, places, child + 1, child, last):
            child += 1
        if not _worse(keys, places, child, i, last):
            break
        keys[i], keys[child] = keys[child], keys[i]
        places[i], places[child] = places[child], places[i]
        i = child
    return count
