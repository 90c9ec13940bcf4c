"""A batch whose nodes have owners: the edges of one owner, and the rows that owners exchange."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.jit import njit

WORD_BITS = 64


class OwnedNodes(NamedTuple):
    """The nodes of a batch, and which of them one owner has."""

    mine: int  # that owner
    owner: NDArray[np.uint8] | NDArray[np.uint16]  # (nodes,)
    local: NDArray[np.int64]  # (nodes,) place of its nodes among them
    # (nodes, words): a bit for each owner whose edges need the node and that does not own it
    needed_by: NDArray[np.uint64]


@njit(nogil=True, cache=True)
def split_hop(src, counts, first, nodes, sources, targets, needed, sent, sent_to):
    """The edges of one hop into nodes of one owner, and the rows that owners exchange for the hop.

    src       uint32 (edges of the hop,)  place in the batch of each edge's source
    counts    uint32 (frontier,)          edges of each node that the hop expands
    first     int                         place in the batch of the first of these
    nodes     OwnedNodes                  what `needed_by` marks is not listed again, and what is
                                          listed gets marked
    sources   int64 (own edges,)          out: place in the batch of each own edge's source
    targets   int64 (own edges,)          out: place of its target among the own nodes
    needed    uint32 (<= own edges,)      out: places of nodes that own edges need of others
    sent      uint32 (<= other edges,)    out: own nodes, by their places among these, that edges of
                                          others need
    sent_to   uint16, as `sent`           out: who needs each of them

    `needed` and `sent` are in the order in which edges name them.  Returns how many they have.
    """
    mine, owner, local, needed_by = nodes.mine, nodes.owner, nodes.local, nodes.needed_by
    edge = own = num_needed = num_sent = 0
    for i in range(counts.size):
        to = np.int64(owner[first + i])
        word, bit = to // WORD_BITS, np.uint64(1) << np.uint64(to % WORD_BITS)
        for _ in range(counts[i]):
            source = np.int64(src[edge])
            edge += 1
            of = np.int64(owner[source])
            if to == mine:
                sources[own] = source
                targets[own] = local[first + i]
                own += 1
            elif of != mine:
                continue
            if of == to or needed_by[source, word] & bit:
                continue
            needed_by[source, word] |= bit
            if to == mine:
                needed[num_needed] = source
                num_needed += 1
            else:
                sent[num_sent] = local[source]
                sent_to[num_sent] = to
                num_sent += 1
    return num_needed, num_sent
