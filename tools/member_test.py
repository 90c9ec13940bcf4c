"""Draws from whole columns with a test of each neighbor: what filtered columns are held against."""

import numpy as np
from numba import njit

from blockstore.kernels.picks import pick_positions, scratch_size


@njit(nogil=True, cache=True)
def draw_tested(words, indptr, sources, nodes, num, fanout, key, starts, draws, counts):
    """As `kernels.members.draw_members`, of columns that were not filtered.

    indptr   int64 (nodes + 1,)   columns by node
    sources  integers             all of them; members are told by `words`

    Two looks at a column: one counts members, the other finds the picked ones among them.
    """
    scratch = np.full(scratch_size(fanout), -1, np.int64)
    picks = np.empty(fanout, np.int64)
    for i in range(num):
        low, high = indptr[nodes[i]], indptr[nodes[i] + 1]
        found = np.int64(0)
        for k in range(low, high):
            word = words[2 * (np.int64(sources[k]) >> 6)]
            found += np.int64((word >> (np.uint64(sources[k]) & np.uint64(63))) & np.uint64(1))
        counts[i] = min(found, fanout)
        if found > fanout:
            pick_positions(picks, 0, found, fanout, False, nodes[i], key, scratch)
        else:
            for k in range(found):
                picks[k] = k
        place = np.int64(0)
        for k in range(low, high):
            word = words[2 * (np.int64(sources[k]) >> 6)]
            if (word >> (np.uint64(sources[k]) & np.uint64(63))) & np.uint64(1):
                for j in range(np.int64(counts[i])):
                    if picks[j] == place:
                        draws[starts[i] + j] = sources[k]
                place += 1
