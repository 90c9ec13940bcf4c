"""Lazy reverse walks over columns, many at a time, and the nodes of the highest scores.

Scores lie node by node: that of node v in lane l is scores[v * width + l].
"""

import numpy as np

from blockstore.kernels.intrinsics import LANES, add_lanes, prefetch
from blockstore.kernels.jit import njit

AHEAD = 32  # edges


@njit(nogil=True, cache=True)
def keep_half(in_degrees, scores, width, out):
    """What stays where it is in one step: half, or all where there is no in-edge.

    in_degrees   uint32 (num_nodes,)
    scores, out  floats (num_nodes * width,)
    """
    for v in range(in_degrees.size):
        share = 0.5 if in_degrees[v] else 1.0
        for i in range(v * width, (v + 1) * width):
            out[i] = scores[i] * share


@njit(nogil=True, cache=True)
def push_shares(first, degrees, sources, in_degrees, scores, width, out):
    """The other half goes to the sources of in-edges, the same to each edge.

    first        int64                  node of the first column
    degrees      int64 (columns,)       edges of each that are here
    sources      integers (edges,)
    in_degrees   uint32 (num_nodes,)    edges of each column in all
    scores, out  floats (num_nodes * width,)   `out`: added to, column by column, edge by edge

    Columns whose scores are all 0 are passed over.
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
    """How often each digit occurs among the scores that begin as `prefix` says, lane by lane.

    bits     uint32 (num_nodes * width,)   positive float32 scores, in order as integers; 0: none
    prefix   uint32 (width,)               what a score has above `digits` bits from `shift` on
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
    """Nodes of the highest scores of each lane, ascending.

    bits     uint32 (num_nodes * width,)   as in `count_digits`
    minimum    uint32 (width,)               every higher score is taken
    ties     int64 (width,)                of those equal to it, so many, from the first node on
    starts   int64 (width,)                where each lane's nodes go; moved to their ends
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
