"""A batch of several node types: from places in the whole batch to places among nodes of a type."""

from blockstore.kernels.jit import njit


@njit(nogil=True, cache=True)
def type_new_nodes(src, first, stop, src_type, known, kind):
    """Types of the nodes that edges [first, stop) of a relation found; returns how many are known.

    src       uint32 (num_edges,)      place of each edge's source in the batch, whose nodes stand
                                       in order of first occurrence
    src_type  int                      type of the relation's sources
    known     int                      nodes before these edges
    kind      uint8 or uint16 (nodes,) filled from `known` on
    """
    for edge in range(first, stop):
        if src[edge] == known:
            kind[known] = src_type
            known += 1
    return known


@njit(nogil=True, cache=True)
def order_by_type(kind, starts, order, place):
    """Nodes type by type, in a stable order.

    kind    uint8 or uint16 (nodes,)   type of each
    starts  int64 (num_types + 1,)     out: first node of each type in `order`, then their number
    order   uint32 (nodes,)            out: places in the batch
    place   int64 (nodes,)             out: place of each node among those of its type
    """
    starts[:] = 0
    for i in range(kind.size):
        place[i] = starts[kind[i] + 1]
        starts[kind[i] + 1] += 1
    for t in range(starts.size - 1):
        starts[t + 1] += starts[t]
    for i in range(kind.size):
        order[starts[kind[i]] + place[i]] = i


@njit(nogil=True, cache=True)
def place_edges(src, edge, counts, first, place, out_src, out_dst):
    """Edges of one hop and relation, by places among nodes of a type.

    src      uint32 (num_edges,)   places of sources in the batch; those of this hop from `edge` on
    counts   uint32 (frontier,)    edges of each frontier node
    first    int                   place in the batch of the first frontier node
    place    int64 (nodes,)        of each node among those of its type
    out_src  int64 (counts.sum(),) out
    out_dst  int64 (counts.sum(),) out
    """
    at = 0
    for i in range(counts.size):
        for _ in range(counts[i]):
            out_src[at] = place[src[edge + at]]
            out_dst[at] = place[first + i]
            at += 1
