"""A planted partition with power-law weights, drawn by counter: any chunk alone, without tables."""

import numpy as np

from blockstore.kernels.jit import njit
from blockstore.kernels.random import draw_below, permute

_UNIT = 1 << 53


@njit(nogil=True, cache=True)
def draw_rank(key, pair, end, num_nodes, exponent):
    """Draw a rank by weight, inverting the cumulative weights: r ~ u**(1 / (1 - exponent))."""
    u = (draw_below(key, pair, end, _UNIT) + 0.5) / _UNIT
    rank = np.int64(num_nodes * u ** (1.0 / (1.0 - exponent)))
    return min(rank, num_nodes - 1)


@njit(nogil=True, cache=True)
def make_pairs(first, num_nodes, classes, homophily, exponent, key, id_key, src, dst):
    """Make the pairs from `first` on, each as two consecutive edges, one in each direction.

    src, dst   int64 (2 * pairs,)   out
    """
    for i in range(src.size // 2):
        pair = first + i
        a = draw_rank(key, pair, 0, num_nodes, exponent)
        b = draw_rank(key, pair, 1, num_nodes, exponent)
        if draw_below(key, pair, 2, _UNIT) < homophily * _UNIT:
            b = b - b % classes + a % classes
            if b >= num_nodes:
                b -= classes
        if a == b:  # avoid self-loops: take the next node of the class, or the next node
            b = a + classes if a + classes < num_nodes else a % classes
            if a == b:
                b = (a + 1) % num_nodes
        u, v = permute(a, num_nodes, id_key), permute(b, num_nodes, id_key)
        src[2 * i], dst[2 * i] = u, v
        src[2 * i + 1], dst[2 * i + 1] = v, u
