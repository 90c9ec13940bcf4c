"""How many columns fit into what is left of a graph block."""

from blockstore.kernels.columns import edges_start, packed_size
from blockstore.kernels.jit import njit


@njit(nogil=True, cache=True)
def count_fitting(degrees, at, num_nodes, num_edges, block_bytes, bits, capacity):
    """Columns from `at` on that fit into a block that has num_nodes columns and num_edges edges.

    degrees   int64 (columns,)
    bits      of an edge in each section: `EdgeLayout.bits`
    capacity  a longer column is a multi-block column and never fits

    Returns (columns, edges), int64.  Sizes as in `EdgeLayout.sections`.
    """
    columns = edges = 0
    for j in range(at, degrees.size):
        if degrees[j] > capacity:
            break
        nodes, total = num_nodes + columns + 1, num_edges + edges + degrees[j]
        fill = (
            edges_start(nodes) + packed_size(total, bits[0]) + (total * bits[1] // 8 + 7) // 8 * 8
        )
        fill += (total * bits[2] // 8 + 7) // 8 * 8 + total * bits[3] // 8
        if fill > block_bytes:
            break
        columns += 1
        edges += degrees[j]
    return columns, edges
