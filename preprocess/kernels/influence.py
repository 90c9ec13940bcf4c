"""Influence of nodes on training nodes: random walks, top scores, and what macro-batches keep.

Many walks go against the edges at the same time, each in a lane.  The score of node v in lane l is
scores[v * width + l].
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import LANES, add_lanes, prefetch
from blockstore.kernels.jit import njit

AHEAD = 32  # edges between prefetching a node's entry and using it


@njit(nogil=True, cache=True)
def keep_half(in_degrees, scores, width, out):
    """The score that stays at a node in one step: half, or all if it has no in-edge.

    in_degrees   uint32 (num_nodes,)
    scores, out  floats (num_nodes * width,)
    """
    for v in range(in_degrees.size):
        share = 0.5 if in_degrees[v] else 1.0
        for i in range(v * width, (v + 1) * width):
            out[i] = scores[i] * share


@njit(nogil=True, cache=True)
def push_shares(first, degrees, sources, in_degrees, scores, width, out):
    """Divide the other half equally among the sources of a node's in-edges.

    first        int64                  node of the first column
    degrees      int64 (columns,)       edges of each column in this piece
    sources      integers (edges,)
    in_degrees   uint32 (num_nodes,)    all edges of each column
    scores, out  floats (num_nodes * width,)   `out`: added to, column by column, edge by edge

    Columns whose scores are all 0 are skipped.
    """
    share = np.empty(width, scores.dtype)
    at = np.int64(0)
    for i in range(degrees.size):
        stop = at + degrees[i]
        some = False
        if stop > at:
            part = 0.5 / in_degrees[first + i]
            for j in range(width):
                score = scores[(first + i) * width + j]
                share[j] = score * part
                some |= score > 0
        if some:
            for k in range(at, stop):
                if k + AHEAD < sources.size:
                    prefetch(out, np.int64(sources[k + AHEAD]) * width)
                place = np.int64(sources[k]) * width
                if width == LANES:
                    add_lanes(out, place, share)
                else:
                    for j in range(width):
                        out[place + j] += share[j]
        at = stop


@njit(nogil=True, cache=True)
def count_digits(bits, width, prefix, shift, digits, counts):
    """Count the digits of the scores that begin with `prefix`, for each lane (radix select).

    bits     uint32 (num_nodes * width,)   positive float32 scores, ordered as integers; 0: none
    prefix   uint32 (width,)               bits of a score above the `digits` bits from `shift` on
    counts   int64 (width, 2**digits)      out
    """
    counts[:] = 0
    mask = np.uint32((1 << digits) - 1)
    low, high = np.uint32(shift), np.uint32(min(shift + digits, 31))
    for v in range(bits.size // width):
        for j in range(width):
            value = bits[v * width + j]
            if value and value >> high == prefix[j]:
                counts[j, (value >> low) & mask] += 1


@njit(nogil=True, cache=True)
def take_top(bits, width, minimum, ties, starts, out):
    """Nodes with the highest scores of each lane, ascending.

    bits     uint32 (num_nodes * width,)   as in `count_digits`
    minimum  uint32 (width,)               every higher score is taken
    ties     int64 (width,)                how many scores equal to it are taken, in node order
    starts   int64 (width,)                where each lane's nodes go in `out`; advanced to the end
    out      uint64                        out: nodes
    """
    for v in range(bits.size // width):
        for j in range(width):
            value = bits[v * width + j]
            if value == 0 or value < minimum[j]:
                continue
            if value == minimum[j]:
                if ties[j] == 0:
                    continue
                ties[j] -= 1
            out[starts[j]] = v
            starts[j] += 1


class Loaded(NamedTuple):
    """Nodes that are loaded with each partition."""

    marks: NDArray[np.uint8]  # (num_nodes,) 1: the in-edges of this node are counted
    hubs: NDArray[np.uint8]  # (num_nodes,) 1: always loaded
    times: NDArray[np.uint32]  # (num_nodes,) number of a node's groups: its partition, and halos
    stamps: NDArray[np.uint32]  # (num_nodes,) 1 + the last part whose halo held each node
    offsets: NDArray[np.int64]  # (types, parts + 1) store ids
    halo: NDArray[np.uint64]  # (slots,) nodes of all halos, part by part
    halo_starts: NDArray[np.int64]  # (parts + 1,)


class Sums(NamedTuple):
    """Sums of `add_kept`."""

    state: NDArray[np.int64]  # (5,) current column or -1, its part or -1, its edges; columns and
    #   edges that are finished
    column: NDArray[np.float64]  # (cases, 3) edges kept of the current column, by partitions, with
    #   hubs, with hubs and halos
    totals: NDArray[np.float64]  # (cases, 3, 2) sums of shares, and of edges


@njit(nogil=True, cache=True)
def add_kept(first, degrees, sources, loaded, dst, chances, sums):
    """Add the expected shares of in-edges of marked nodes whose sources are loaded with them.

    first        int64                     node of the first column
    degrees      int64 (columns,)          edges of each column in this piece
    sources      integers (edges,)
    loaded       Loaded                    its stamps: in and out
    dst          int64                     type of the columns
    chances      float64 (cases, most + 1)  that a node in 0, 1, ... other groups is loaded
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
    """Finish the current column of `add_kept`."""
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
