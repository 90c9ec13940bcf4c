"""Structure of a subgraph: a sampler's queries to the graph, and edges among its nodes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.induced import ChosenNodes
from blockstore.kernels.order import compact_records
from blockstore.kernels.picks import UNIFORM, Column, Rule
from loaderd.memory.workspace import Workspace
from loaderd.plans.base import Unit
from loaderd.plans.roots import Roots
from loaderd.plans.subgraph import WALKERS, Chosen, SubgraphPlan
from loaderd.sampling.renumbering import Renumbering
from loaderd.sampling.structure import NO_FOREST, NO_TREES, Structure, place_roots
from loaderd.sampling.topology import Topology

SAMPLED = 0  # the relation that subgraphs are sampled from


class SampledGraph:
    """Answers samplers out of graph blocks, a workspace's worth of nodes at a time."""

    def __init__(
        self,
        topology: Topology,
        work: Workspace,
        first_edge: NDArray[np.uint64],
        offsets: NDArray[np.int64],
    ) -> None:
        """`first_edge`: uint64 (num_blocks + 1,); `offsets`: as of `GraphAnswers`."""
        self._topology, self._work, self._first_edge = topology, work, first_edge
        self.offsets = offsets
        self.num_nodes = topology.relations[SAMPLED].num_nodes
        self.num_edges = int(first_edge[-1])

    def edges(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        src, dst, _ = self._topology.find_edges(SAMPLED, self._first_edge, places.copy(), False)
        return src.astype(np.int64), dst.astype(np.int64)

    def degrees(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        found, each = np.empty(nodes.size, np.uint32), self._work.blocks.size
        for low in range(0, nodes.size, each):
            column = self._column(nodes[low : low + each], -1, 0, False)
            self._topology.count_edges(column, self._work)
            found[low : low + each] = column.counts
        return found.astype(np.int64)

    def neighbors(
        self, nodes: NDArray[np.int64], fanout: int, key: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._drawn(nodes, fanout, key, False)

    def walk(self, nodes: NDArray[np.int64], key: int) -> NDArray[np.int64]:
        distinct, inverse, counts = np.unique(nodes, return_inverse=True, return_counts=True)
        # nth: how many equal nodes come before each one, which takes that draw of the node
        order, nth = np.argsort(inverse, kind="stable"), np.empty(nodes.size, np.int64)
        nth[order] = np.arange(nodes.size) - np.repeat(np.cumsum(counts) - counts, counts)
        reached, rounds, place = nodes.copy(), nth // WALKERS, np.empty(distinct.size, np.int64)
        for r in range(int(rounds.max(initial=-1)) + 1):
            left = np.minimum(counts - r * WALKERS, WALKERS)
            fanouts = 1 << np.ceil(np.log2(np.maximum(left, 1))).astype(np.int64)
            # draw for frequent nodes apart, or all nodes would have as many draws
            for fanout in np.unique(fanouts[left > 0]).tolist():
                own = np.flatnonzero((fanouts == fanout) & (left > 0))
                found, sources = self._drawn(distinct[own], fanout, key ^ r, True)
                place[:] = -1
                place[own[found > 0]] = np.arange(np.count_nonzero(found)) * fanout
                mine = np.flatnonzero((place[inverse] >= 0) & (rounds == r))
                reached[mine] = sources[place[inverse[mine]] + nth[mine] % WALKERS]
        return reached

    def _column(self, nodes: NDArray[np.int64], fanout: int, key: int, replace: bool) -> Column:
        rule = Rule(
            fanout, replace, UNIFORM, np.uint64(key), NO_TREES, NO_FOREST.limits, NO_FOREST.numbers
        )
        ids = nodes.astype(self._topology.id_dtype)
        return Column(ids, SAMPLED, np.empty(nodes.size, np.uint32), rule)

    def _drawn(
        self, nodes: NDArray[np.int64], fanout: int, key: int, replace: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(counts, sources) of each node's draws."""
        work, counts, found = self._work, [], []
        for low, high in self._cuts(nodes, fanout):
            column = self._column(nodes[low:high], fanout, key, replace)
            self._topology.draw(column, work)
            own = column.counts.astype(np.int64)
            counts.append(own)
            starts = np.repeat(work.starts[: own.size] - (np.cumsum(own) - own), own)
            found.append(work.draws[starts + np.arange(starts.size)].astype(np.int64))
        none = np.empty(0, np.int64)
        return np.concatenate([none, *counts]), np.concatenate([none, *found])

    def _cuts(self, nodes: NDArray[np.int64], fanout: int) -> list[tuple[int, int]]:
        """Ranges of nodes whose draws have room together; those of one node may have too little."""
        room, maximum = self._work.draws.size, self._work.starts.size - 1
        each = np.full(nodes.size, fanout) if fanout >= 0 else self.degrees(nodes)
        ends, cuts, low = np.cumsum(each), [], 0
        while low < nodes.size:
            before = int(ends[low] - each[low])
            high = int(np.searchsorted(ends, before + room, "right"))
            high = max(low + 1, min(high, low + maximum))
            cuts.append((low, high))
            low = high
        return cuts


class SeedTable:
    """The seeds of a session, by store id."""

    def __init__(self, seeds: NDArray[Any], order: NDArray[np.int64]) -> None:
        """`order`: int64 (num_seeds,), out: places of the seeds by store id."""
        order[:] = np.argsort(seeds, kind="stable")
        self._seeds, self._order = seeds, order

    def among(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of the seeds that are among some ascending nodes: of each node the first."""
        at = np.searchsorted(self._seeds, nodes, sorter=self._order)
        places = self._order[np.minimum(at, self._order.size - 1)]
        found: NDArray[np.int64] = places[self._seeds[places] == nodes]
        return found


def sample_subgraph(
    topology: Topology,
    graph: SampledGraph,
    plan: SubgraphPlan,
    unit: Unit,
    work: Workspace,
    roots: Roots,
    chosen: Chosen | None = None,
) -> Structure:
    """Fill the workspace with the structure of a subgraph: roots first, others ascending.

    chosen   what the sampler chose; None: it chooses now, hop by hop if it is layered

    Raises WorkspaceFull: more edges than there is memory for; CorruptBlock, OSError.
    """
    sampler, ids = plan.sampler, topology.id_dtype
    place_roots(roots, work)
    num_roots = roots.nodes.size
    if sampler.trees:
        work.trees[:num_roots] = np.arange(num_roots)
    edge, used, known = 0, 0, num_roots
    nodes_per_hop, edges_per_hop, frontiers = [], [], []
    with Renumbering(work, num_roots) as numbers:
        for hop in range(len(plan.shape().frontier)):
            before = numbers.num_nodes
            if chosen is None or hop:
                nodes = work.n_id[:before].astype(np.int64)
                chosen = sampler.choose(plan.draws(unit, hop), graph, nodes)
            _enter(numbers, chosen, edge, ids, num_roots)
            frontier = before if sampler.layered else numbers.num_nodes
            counts = work.counts[used : used + frontier]
            used += frontier
            trees = work.trees[:frontier] if sampler.trees else NO_TREES
            rule = Rule(-1, False, UNIFORM, np.uint64(0), NO_TREES, *NO_FOREST[:2])
            column = Column(work.n_id[:frontier], SAMPLED, counts, rule)
            found = ChosenNodes(numbers.table, trees if sampler.trees else None)
            topology.keep(column, work, found)
            if work.record.size:
                compact_records(
                    work.record_draws, work.starts, counts, frontier, work.records, edge
                )
            end = numbers.add(work.draws, work.starts, counts, edge, trees)
            edges_per_hop.append((end - edge,))
            frontiers.append(frontier)
            nodes_per_hop.append(numbers.num_nodes - known)
            edge, known = end, numbers.num_nodes
    first = num_roots
    if not sampler.layered:  # all nodes are there before the only hop
        first, nodes_per_hop = known, [0]
    return Structure(
        (first, *nodes_per_hop), tuple(edges_per_hop), known, edge, tuple(frontiers),
        roots.places.size,
    )  # fmt: skip


def _enter(
    numbers: Renumbering, chosen: Chosen, edge: int, ids: np.dtype[Any], num_roots: int
) -> None:
    """Number the nodes that were chosen, after those that are there.

    They are passed as sources of edges, whose local ids are overwritten afterwards.
    """
    if not chosen.trees.size:
        nodes = np.unique(chosen.nodes).astype(ids)
        counts = np.array([nodes.size], np.uint32)
        numbers.add(nodes, np.zeros(1, np.int64), counts, edge, np.zeros(1, np.uint32))
        return
    order = np.lexsort((chosen.nodes, chosen.trees))
    own = np.bincount(chosen.trees, minlength=num_roots)
    numbers.add(
        chosen.nodes[order].astype(ids), np.cumsum(own) - own, own.astype(np.uint32), edge,
        np.arange(num_roots, dtype=np.uint32),
    )  # fmt: skip
