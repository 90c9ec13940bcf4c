"""Streaming partitioning: place one node after the other in the partition of its neighbours.

Nodes have classes: one for each label of training nodes, and one for all other nodes.  The more
nodes of a class a partition holds, the more another one costs; a partition is closed to training
nodes, or to others, once it holds as many as the cap of this group.  For each class, partitions are
kept sorted by size, so that the cheapest one is found, and the order updated, in O(1).

Owner maps have few owners, with loads instead of classes: nodes and edges have weights there.

Source: GAP, the thesis on HANOI, Algorithm 2; FENNEL, Tsourakakis et al., WSDM 2014; LDG, Stanton
and Kliot, KDD 2012.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.intrinsics import prefetch
from blockstore.kernels.jit import njit
from blockstore.kernels.random import permute
from preprocess.kernels.levels import AHEAD


class Balance(NamedTuple):
    """Nodes of each class in each partition, and the cost of one more node."""

    sizes: NDArray[np.int32]  # (classes, k): number of nodes
    ascending: NDArray[np.int32]  # (classes, k): partitions by size
    places: NDArray[np.int32]  # (classes, k): place of each partition in `ascending`
    costs: NDArray[np.float64]  # (classes, k): cost of one more node
    bases: NDArray[np.int64]  # (classes,): where each class begins in `firsts` and `prices`
    firsts: NDArray[np.int32]  # for each size: first place of a partition of at least this size
    prices: NDArray[np.float64]  # for each size: cost of one more node
    groups: NDArray[np.uint8]  # (classes,): 1 for training nodes, 0 for others
    loads: NDArray[np.int64]  # (2, k): nodes of each group
    caps: NDArray[np.int64]  # (2,): maximum loads
    limits: NDArray[np.int64]  # (classes,): nodes beyond which no more join their neighbours


class Adjacent(NamedTuple):
    """Scratch to count the neighbours of a node."""

    counts: NDArray[np.uint32]  # (k + 1,) neighbours in each partition; zeros between nodes
    partitions: NDArray[np.int64]  # (k + 2,) partitions whose count is not zero


@njit(nogil=True, cache=True, inline="always")
def _swap(ascending, places, c, i, j):
    p, q = ascending[c, i], ascending[c, j]
    ascending[c, i], ascending[c, j] = q, p
    places[c, p], places[c, q] = j, i


@njit(nogil=True, cache=True, inline="always")
def _put_in(balance, c, p):
    """Add a node of class c to partition p, which is swapped with the last one of its size."""
    size = np.int64(balance.sizes[c, p])
    above = balance.bases[c] + size + 1
    last = np.int64(balance.firsts[above]) - 1
    _swap(balance.ascending, balance.places, c, balance.places[c, p], last)
    balance.firsts[above] = last
    balance.sizes[c, p] = size + 1
    balance.costs[c, p] = balance.prices[above]
    balance.loads[balance.groups[c], p] += 1


@njit(nogil=True, cache=True, inline="always")
def _take_out(balance, c, p):
    """Remove a node of class c from p, which is swapped with the first one of its size."""
    size = np.int64(balance.sizes[c, p])
    at = balance.bases[c] + size
    first = np.int64(balance.firsts[at])
    _swap(balance.ascending, balance.places, c, balance.places[c, p], first)
    balance.firsts[at] = first + 1
    balance.sizes[c, p] = size - 1
    balance.costs[c, p] = balance.prices[at - 1]
    balance.loads[balance.groups[c], p] -= 1


@njit(nogil=True, cache=True)
def place_nodes(
    node, skip, num_adjacent, degrees, sources, classes, partition, balance, scratch, linear
):
    """Place each node whose column ends in a piece in the best partition that is open to it.

    node, skip    column of the first edge here, and the number of its edges in earlier pieces
    num_adjacent  int64                  number of partitions in `scratch` from those edges
    degrees       uint32 (num_nodes,)    in the order of the columns, like all arrays of nodes
    sources       uint32 (edges,)        of this column and the following ones; empty: all other
                                         columns have no edges
    classes       uint16 (num_nodes,)
    partition     uint16 or uint32 (num_nodes,)   in and out; k: none yet
    scratch       Adjacent
    linear        bool                   neighbours count less the fuller a partition is (LDG);
                                         else the cost is subtracted from their number

    The best is the adjacent partition with the highest score, of equals the first by number; or the
    one with the fewest nodes of the class, if that is better.

    Returns (node, skip, num_adjacent) for the next piece, and the number of scores computed.
    """
    at, evaluated = np.int64(0), np.int64(0)
    none = np.int64(balance.sizes.shape[1])
    counts, adjacent = scratch.counts, scratch.partitions
    while node < degrees.size:
        degree = np.int64(degrees[node])
        here = min(degree - skip, sources.size - at)
        for i in range(at, at + here):
            if i + AHEAD < sources.size:
                prefetch(partition, np.int64(sources[i + AHEAD]))
            p = np.int64(partition[sources[i]])
            adjacent[num_adjacent] = p
            num_adjacent += counts[p] == 0
            counts[p] += np.uint32(1)
        at += here
        skip += here
        if skip < degree:
            break
        c = np.int64(classes[node])
        group = np.int64(balance.groups[c])
        cap, limit = balance.caps[group], balance.limits[c]
        old = np.int64(partition[node])
        if old != none:
            _take_out(balance, c, old)
        found, best = none, -np.inf
        for i in range(num_adjacent):
            p = adjacent[i]
            count = np.float64(counts[p])
            counts[p] = np.uint32(0)
            if p == none or balance.loads[group, p] >= cap or balance.sizes[c, p] >= limit:
                continue
            evaluated += 1
            if linear:
                score = count * (1.0 - np.float64(balance.sizes[c, p]) / np.float64(cap))
            else:
                score = count - balance.costs[c, p]
            if score > best or (score == best and p < found):
                found, best = p, score
        i = 0
        while balance.loads[group, balance.ascending[c, i]] >= cap:
            i += 1
        emptiest = np.int64(balance.ascending[c, i])
        evaluated += 1
        if found == none or (0.0 if linear else -balance.costs[c, emptiest]) > best:
            found = emptiest
        _put_in(balance, c, found)
        partition[node] = found
        node += 1
        skip, num_adjacent = np.int64(0), np.int64(0)
    return node, skip, num_adjacent, evaluated


class NodeWeights(NamedTuple):
    """Weights of nodes and edges, in the order of the columns."""

    node: NDArray[np.float32]  # (num_nodes,): load that a node adds to its partition
    edge: NDArray[np.float32]  # (num_nodes,): weight of each in-edge of a node
    marked: bool  # sources are twice the node, plus 1 for out-edges; else edges are symmetric


class WeightedLoads(NamedTuple):
    """Loads of partitions, and the prices of more load."""

    loads: NDArray[np.float64]  # (k,)
    sizes: NDArray[np.int64]  # (k,): number of nodes
    prices: NDArray[np.float64]  # (k,): price of one more unit of load
    near: NDArray[np.float64]  # (k + 1,): weight of edges to neighbours; zeros between nodes
    cap: float  # maximum load
    price: float  # FENNEL's, per root of the load

    @classmethod
    def empty(cls, k: int, cap: float, price: float) -> "WeightedLoads":
        zeros = np.zeros(k), np.zeros(k, np.int64), np.zeros(k), np.zeros(k + 1)
        return cls(*zeros, cap, price)


@njit(nogil=True, cache=True, inline="always")
def _add_load(balance, p, load, nodes):
    balance.loads[p] = max(0.0, balance.loads[p] + load)
    balance.sizes[p] += nodes
    balance.prices[p] = balance.price * np.sqrt(balance.loads[p])


@njit(nogil=True, cache=True)
def _cheapest(balance, load):
    """The partition with room whose neighbours exceed its cost most; resets `near` to zeros.

    Of equals the one with the fewest nodes, or the first; if none has room, the least loaded one.
    """
    found, best, fits = np.int64(-1), 0.0, False
    for p in range(balance.loads.size):
        room = balance.loads[p] + load <= balance.cap
        score = balance.near[p] - load * balance.prices[p] if room else -balance.loads[p]
        balance.near[p] = 0.0
        if found < 0 or (room and not fits):
            found, best, fits = np.int64(p), score, room
        elif room == fits:
            fewer = score == best and balance.sizes[p] < balance.sizes[found]
            if score > best or fewer:
                found, best = np.int64(p), score
    balance.near[balance.near.size - 1] = 0.0
    return found


@njit(nogil=True, cache=True)
def place_weighted(node, skip, degrees, sources, weights, partition, balance):
    """Place each node whose column ends in a piece in the best of all partitions with room.

    As `place_nodes`, with weights: partitions are few, so that all are compared, and have loads
    instead of nodes by class.

    node, skip  column of the first edge here, and the number of its edges in earlier pieces
    degrees     uint32 (num_nodes,)   in the order of the columns, like all arrays of nodes
    sources     uint32 (edges,)       of this column and the following ones; empty: all other
                                      columns have no edges
    weights     NodeWeights
    partition   uint16 (num_nodes,)   in and out; k: none yet
    balance     WeightedLoads         in and out

    Returns (node, skip) for the next piece.
    """
    at, none = np.int64(0), balance.loads.size
    edge, shift = weights.edge, np.uint32(weights.marked)
    while node < degrees.size:
        degree = np.int64(degrees[node])
        here = min(degree - skip, sources.size - at)
        own = np.float64(edge[node])
        for i in range(at, at + here):
            if i + AHEAD < sources.size:
                prefetch(partition, np.int64(sources[i + AHEAD] >> shift))
                prefetch(edge, np.int64(sources[i + AHEAD] >> shift))
            u = np.int64(sources[i] >> shift)
            weight = own
            if shift == 0:
                weight += edge[u]
            elif sources[i] & np.uint32(1):
                weight = np.float64(edge[u])
            balance.near[partition[u]] += weight
        at += here
        skip += here
        if skip < degree:
            break
        load, old = np.float64(weights.node[node]), np.int64(partition[node])
        if old != none:
            _add_load(balance, old, -load, -1)
        found = _cheapest(balance, load)
        _add_load(balance, found, load, 1)
        partition[node] = found
        node += 1
        skip = np.int64(0)
    return node, skip


@njit(nogil=True, cache=True)
def place_clusters(table, loads, key, found, balance):
    """Assign clusters of nodes to partitions, in a keyed order, repeatedly until none moves.

    table    float64 (clusters, clusters)   weight of the edges between each two, symmetric
    loads    float64 (clusters,)
    found    int64 (clusters,)              in and out: partition of each; k: none yet
    balance  WeightedLoads                  in and out
    """
    for _ in range(50):
        moved = False
        for i in range(loads.size):
            c = permute(i, loads.size, key)
            for other in range(loads.size):
                if other != c:
                    balance.near[found[other]] += table[c, other]
            old = found[c]
            if old != balance.loads.size:
                _add_load(balance, old, -loads[c], -1)
            found[c] = _cheapest(balance, loads[c])
            _add_load(balance, found[c], loads[c], 1)
            moved |= found[c] != old
        if not moved:
            break


@njit(nogil=True, cache=True)
def weigh_between(node, skip, degrees, sources, edge, partition, table):
    """Add up the weights of a piece's edges by the partitions of target and source.

    node, skip  column of the first edge here, and the number of its edges in earlier pieces
    degrees     uint32 (num_nodes,)
    sources     uint32 (edges,)
    edge        float32 (num_nodes,)  weight of each in-edge of a node
    partition   uint16 (num_nodes,)
    table       float64 (k, k)        in and out

    Returns (node, skip) for the next piece.
    """
    at = np.int64(0)
    while at < sources.size:
        here = min(np.int64(degrees[node]) - skip, sources.size - at)
        p, weight = partition[node], np.float64(edge[node])
        for i in range(at, at + here):
            if i + AHEAD < sources.size:
                prefetch(partition, np.int64(sources[i + AHEAD]))
            table[p, partition[sources[i]]] += weight
        at += here
        skip += here
        if skip == np.int64(degrees[node]):
            node += 1
            skip = np.int64(0)
    return node, skip


@njit(nogil=True, cache=True)
def count_members(partition, classes, table):
    """table[c, p] = nodes of class c in partition p; int64 (classes, k), zeros at first."""
    for v in range(partition.size):
        table[classes[v], partition[v]] += 1


@njit(nogil=True, cache=True)
def count_inside(node, skip, degrees, sources, partition, classes, other, totals):
    """Count the edges of a piece whose source is in the partition of their target.

    node, skip  column of the first edge here, and the number of its edges in earlier pieces
    degrees     uint32 (num_nodes,)
    sources     uint32 (edges,)
    partition   uint16 or uint32 (num_nodes,)
    classes     uint16 (num_nodes,)   `other`: class of nodes that are not for training
    totals      int64 (3,)            in and out: edges inside; edges into training nodes; those of
                                      them that are inside

    Returns (node, skip) for the next piece.
    """
    at = np.int64(0)
    while at < sources.size:
        degree = np.int64(degrees[node])
        here = min(degree - skip, sources.size - at)
        p, inside = partition[node], np.int64(0)
        for i in range(at, at + here):
            if i + AHEAD < sources.size:
                prefetch(partition, np.int64(sources[i + AHEAD]))
            inside += partition[sources[i]] == p
        totals[0] += inside
        if classes[node] != other:
            totals[1] += here
            totals[2] += inside
        at += here
        skip += here
        if skip == degree:
            node += 1
            skip = np.int64(0)
    return node, skip


def make_balance(
    num_partitions: int,
    groups: NDArray[np.uint8],
    caps: NDArray[np.int64],
    limits: NDArray[np.int64],
    prices: list[NDArray[np.float64]],
) -> Balance:
    """The `Balance` of empty partitions.

    groups   uint8 (classes,)   1 for training nodes, 0 for others
    caps     int64 (2,)         of each group
    limits   int64 (classes,)   of each class
    prices   float64            of each class, for sizes 0, 1, ..., up to one above the greatest
    """
    shape = (groups.size, num_partitions)
    lengths = np.array([p.size for p in prices], np.int64)
    bases = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    flat = np.concatenate(prices)
    firsts = np.full(flat.size, num_partitions, np.int32)
    firsts[bases] = 0
    return Balance(
        sizes=np.zeros(shape, np.int32),
        ascending=np.tile(np.arange(num_partitions, dtype=np.int32), (shape[0], 1)),
        places=np.tile(np.arange(num_partitions, dtype=np.int32), (shape[0], 1)),
        costs=np.repeat(flat[bases], num_partitions).reshape(shape),
        bases=bases,
        firsts=firsts,
        prices=flat,
        groups=groups,
        loads=np.zeros((2, num_partitions), np.int64),
        caps=caps,
        limits=limits,
    )
