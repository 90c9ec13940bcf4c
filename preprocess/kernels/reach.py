"""In-edges of training nodes that are loaded with some of the partitions; copies of columns."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.jit import njit


class Loaded(NamedTuple):
    """What is loaded with a partition."""

    marks: NDArray[np.uint8]  # (num_nodes,) 1: the node's in-edges count
    hubs: NDArray[np.uint8]  # (num_nodes,) 1: always loaded
    times: NDArray[np.uint32]  # (num_nodes,) groups that hold each node: its partition, and halos
    stamps: NDArray[np.uint32]  # (num_nodes,) 1 + the last part whose halo held each node
    offsets: NDArray[np.int64]  # (types, parts + 1) store ids
    halo: NDArray[np.uint64]  # (slots,) nodes of all halos, part by part
    halo_starts: NDArray[np.int64]  # (parts + 1,)


class Sums(NamedTuple):
    """What is added up."""

    state: NDArray[np.int64]  # (5,) column in hand or -1, its part or -1, its edges; columns and
    #   edges that are over
    column: NDArray[np.float64]  # (cases, 3) edges kept of the column in hand, by partitions, with
    #   hubs, with halos too
    totals: NDArray[np.float64]  # (cases, 3, 2) sums of shares, and of edges


@njit(nogil=True, cache=True)
def add_kept(first, degrees, sources, loaded, dst, chances, sums):
    """Expected shares of the in-edges of marked nodes whose sources are loaded with their targets.

    first        int64                     node of the first column
    degrees      int64 (columns,)          edges that are here
    sources      integers (edges,)
    loaded       Loaded                    its stamps: in and out
    dst          int64                     type of the columns
    chances      float64 (cases, most + 1)  that a node in so many other groups is loaded
    sums         Sums                      in and out
    """
    marks, hubs, times, stamps = loaded.marks, loaded.hubs, loaded.times, loaded.stamps
    offsets, halo, halo_starts = loaded.offsets, loaded.halo, loaded.halo_starts
    state, column = sums.state, sums.column
    at = np.int64(0)
    for i in range(degrees.size):
        v, stop = first + i, at + degrees[i]
        if stop == at or marks[v] == 0:
            at = stop
            continue
        if v != state[0]:
            end_column(sums)
            state[0] = v
        part = max(np.int64(0), state[1])
        while offsets[dst, part + 1] <= v:
            part += 1
        if part != state[1]:
            state[1] = part
            for k in range(halo_starts[part], halo_starts[part + 1]):
                stamps[np.int64(halo[k])] = part + 1
        for k in range(at, stop):
            u = np.int64(sources[k])
            near = False
            for t in range(offsets.shape[0]):
                near |= offsets[t, part] <= u < offsets[t, part + 1]
            pinned = near or hubs[u] != 0
            held = pinned or stamps[u] == part + 1
            for c in range(chances.shape[0]):
                column[c, 0] += 1.0 if near else chances[c, 1]
                column[c, 1] += 1.0 if pinned else chances[c, 1]
                column[c, 2] += 1.0 if held else chances[c, times[u]]
        state[2] += stop - at
        at = stop


@njit(nogil=True, cache=True)
def end_column(sums):
    """The column in hand is over: `add_kept`."""
    state, column, totals = sums.state, sums.column, sums.totals
    if state[2] > 0:
        for c in range(column.shape[0]):
            for j in range(3):
                totals[c, j, 0] += column[c, j] / state[2]
                totals[c, j, 1] += column[c, j]
        state[3] += 1
        state[4] += state[2]
    column[:] = 0
    state[0] = -1
    state[2] = 0


@njit(nogil=True, cache=True)
def copy_runs(source, starts, sizes, target, places):
    """target[places[i] : + sizes[i]] = source[starts[i] : + sizes[i]], run by run.

    source, target         uint32 (any,)
    starts, sizes, places  int64 (runs,)
    """
    for i in range(starts.size):
        start, place = starts[i], places[i]
        for k in range(sizes[i]):
            target[place + k] = source[start + k]
