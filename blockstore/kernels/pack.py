"""How many columns fit into what is left of a graph block."""

from blockstore.kernels.jit import njit


@njit(nogil=True, cache=True)
def count_fitting(
    degrees, at, num_nodes, num_edges, block_bytes, id_bytes, edge_id_bytes, weight_bytes,
    time_bytes, capacity,
):  # fmt: skip
    """Columns from `at` on that fit into a block that has num_nodes columns and num_edges edges.

    degrees   int64 (columns,)
    capacity  a longer column is a multi-block column and never fits

    Returns (columns, edges), int64.  Sizes as in `format.block_fill_bytes`.
    """
    columns = edges = 0
    for j in range(at, degrees.size):
        if degrees[j] > capacity:
            break
        nodes, total = num_nodes + columns + 1, num_edges + edges + degrees[j]
        fill = (64 + 4 * (nodes + 1) + 7) // 8 * 8
        fill += (total * id_bytes + 7) // 8 * 8 + (total * edge_id_bytes + 7) // 8 * 8
        fill += (total * weight_bytes + 7) // 8 * 8 + total * time_bytes
        if fill > block_bytes:
            break
        columns += 1
        edges += degrees[j]
    return columns, edges
