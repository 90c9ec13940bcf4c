"""Plans of subgraphs: a sampler chooses nodes, a batch has all edges of the graph among them.

A sampler is a pure function of keyed draws, of the graph's answers, and of the nodes that are there
already.  The plan needs to know only whether it begins at the seeds of a step (`rooted`), or each
step is a draw of its own, whose seeds are those that it happens to choose.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.random import draw_each, make_key, permute_range
from loaderd.api.errors import Refused
from loaderd.api.protocol import Resolved
from loaderd.plans.base import EVERY_RANK, Part, Shape, Unit
from loaderd.plans.minibatch import GraphBounds, MinibatchPlan

_CHOICES = 3 << 60  # in place of a relation in keys: no other draw has it
_UNUSUAL = 8  # most edges of a subgraph, as a multiple of what its nodes have on average
_FEW = 8  # neighbors assumed for a node, if there are fewer on average
MAX_OPTION = 1 << 40
WALKERS = 64  # walkers at one node whose steps are drawn under one key
NO_TREES = np.empty(0, np.int64)


class KeyedDraws(NamedTuple):
    """Random numbers of one hop of one subgraph: equal wherever and whenever they are drawn."""

    seed: int
    epoch: int
    number: int  # of the subgraph in the epoch, of all ranks
    total: int  # subgraphs of an epoch, of all ranks
    hop: int  # of a layered sampler; else 0
    shuffle: bool
    fanouts: tuple[int, ...]  # that the client asked for, hop by hop

    def key(self, what: int = 0) -> int:
        """A key for one kind of draws, uint64: another for each `what` from 0 on."""
        return make_key(self.seed, self.epoch, self.number, self.hop, _CHOICES + what)

    def below(self, bound: int, count: int, what: int = 0) -> NDArray[np.int64]:
        """`count` independent numbers, uniform in [0, bound); bound >= 1."""
        out = np.empty(count, np.int64)
        draw_each(np.uint64(self.key(what)), bound, out)
        return out

    def epoch_order(self, size: int) -> NDArray[np.int64]:
        """The numbers below `size`, in an order of the epoch if it is shuffled."""
        order = np.arange(size)
        if self.shuffle:
            key = make_key(self.seed, self.epoch, 0, 0, 2 * _CHOICES)
            permute_range(0, size, size, np.uint64(key), order)
        return order


class GraphAnswers(Protocol):
    """Queries of samplers to a graph; nodes are store ids, neighbors are sources of in-edges.

    Answers are read through the daemon's block reader, and depend on the arguments alone.
    """

    num_nodes: int
    num_edges: int
    offsets: NDArray[np.int64]  # (partitions + 1,) first node of each, then the end; (0,): none

    def edges(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(sources, targets) of edges by their place, each in [0, num_edges)."""

    def degrees(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """In-edges of each node."""

    def neighbors(
        self, nodes: NDArray[np.int64], fanout: int, key: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(counts, neighbors): min(degree, fanout) of each node, drawn without replacement.

        fanout  1 or more, or -1: all; if a node is given twice, its draws are the same
        """

    def walk(self, nodes: NDArray[np.int64], key: int) -> NDArray[np.int64]:
        """A neighbor of each node, all drawn independently; the node itself if it has none."""


class Facts(NamedTuple):
    """Sizes that bound the work of a sampler."""

    num_nodes: int
    num_edges: int
    seeds: int  # of one rank's step, at most; if the sampler is not rooted, of the session
    fanouts: tuple[int, ...]
    world_size: int
    num_partitions: int
    part_nodes: tuple[int, ...] = ()  # of each partition; (): not known yet
    part_edges: tuple[int, ...] = ()  # in-edges of its nodes, at most; likewise


class Chosen(NamedTuple):
    """Nodes of a subgraph, store ids in any order, repeated or not; the roots need not be there."""

    nodes: NDArray[np.int64]
    trees: NDArray[np.int64] = NO_TREES  # place of each node's root, if the sampler has `trees`


@dataclass(frozen=True)
class Sampler:
    """Chooses nodes.  Fields of a subclass are its options: integers, each with a default."""

    name: ClassVar[str]  # of the plan that clients ask for
    rooted: ClassVar[bool] = False  # a subgraph begins at the seeds of its step
    trees: ClassVar[bool] = False  # of rooted ones: each root has nodes and edges of its own
    # of rooted ones: each hop adds nodes, and edges from all nodes to those before it
    layered: ClassVar[bool] = False
    max_edges: int = 0  # of a subgraph, to size its memory; 0: as `edge_bound` says

    @classmethod
    def of(cls, options: Mapping[str, int]) -> Self:
        """The sampler with these options.  Raises Refused: one is unknown, or out of range."""
        names = [f.name for f in fields(cls)]
        for name, value in options.items():
            if name not in names:
                raise Refused(
                    f"plan {cls.name!r}: found the option {name!r}, expected some of "
                    f"{', '.join(names)}"
                )
            if not 0 <= value <= MAX_OPTION:
                raise Refused(f"plan {cls.name!r}: {name} is {value}, expected 0 to {MAX_OPTION}")
        return cls(**options)

    def check(self, facts: Facts) -> None:
        """Raises Refused: it cannot sample from this store, or with these options."""

    def steps(self, facts: Facts) -> int:
        """Subgraphs of an epoch, of all ranks together; not asked of rooted samplers."""
        raise NotImplementedError

    def node_bound(self, facts: Facts) -> int:
        """Nodes of a subgraph, with its roots, at most."""
        raise NotImplementedError

    def edge_bound(self, facts: Facts) -> int:
        """Edges of a subgraph for which there is memory: a batch with more of them fails."""
        average = max(_FEW, -(-facts.num_edges // max(1, facts.num_nodes)))
        maximum = _UNUSUAL * average * self.node_bound(facts)
        return maximum if self.trees else min(maximum, facts.num_edges)

    def choose(self, draws: KeyedDraws, graph: GraphAnswers, nodes: NDArray[np.int64]) -> Chosen:
        """The nodes of a subgraph, or, if layered, those that a hop adds.

        nodes  for a rooted sampler, those that are there already: its roots, in their order, and,
               if it is layered, all that earlier hops have added; else none
        """
        raise NotImplementedError


class SubgraphPlan(MinibatchPlan):
    """Steps of a sampler; rooted ones share the seeds of an epoch as minibatches do."""

    def __init__(
        self, resolved: Resolved, part: Part, bounds: GraphBounds, sampler: Sampler,
        part_nodes: tuple[int, ...] = (), part_edges: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """`part_nodes`, `part_edges`: as of `Facts`.  Raises Refused."""
        super().__init__(resolved, part, bounds)
        assert resolved.subgraph is not None
        self.name, self.sampler = sampler.name, sampler
        seeds = super()._max_seeds() if sampler.rooted else resolved.num_seeds
        self._facts = Facts(
            bounds.num_nodes, sum(bounds.num_edges), seeds,
            tuple(row[0] for row in resolved.fanouts), part.world_size,
            resolved.subgraph.partitions, part_nodes, part_edges,
        )  # fmt: skip
        sampler.check(self._facts)
        if not sampler.rooted:
            self._num_steps = -(-sampler.steps(self._facts) // part.world_size)

    def sized(self, part_nodes: tuple[int, ...], part_edges: tuple[int, ...]) -> "SubgraphPlan":
        """The plan, once the partitions of the store are known."""
        bounds, sampler = self._bounds, self.sampler
        return SubgraphPlan(self.resolved, self.part, bounds, sampler, part_nodes, part_edges)

    def unit(self, epoch: int, step: int) -> Unit:
        return super().unit(epoch, step) if self.sampler.rooted else Unit(epoch, step, 0, 0)

    def draws(self, unit: Unit, hop: int) -> KeyedDraws:
        """The draws of one hop of a unit."""
        part, r, number = self.part, self.resolved, unit.step
        if part.rank != EVERY_RANK:
            number = number * part.world_size + part.rank
        total = self._num_steps * part.world_size
        epoch = unit.epoch % r.cycle if r.cycle else unit.epoch
        return KeyedDraws(r.seed, epoch, number, total, hop, r.shuffle, self._facts.fanouts)

    def shape(self) -> Shape:
        facts, sampler = self._facts, self.sampler
        nodes = max(1, sampler.node_bound(facts))
        edges = max(sampler.max_edges or sampler.edge_bound(facts), nodes, WALKERS, *facts.fanouts)
        hops = len(facts.fanouts) if sampler.layered else 1
        return Shape(min(facts.seeds, nodes), (nodes,) * hops, ((edges,),) * hops, nodes)


def option_values(sampler: Sampler) -> dict[str, int]:
    """All options with their values, in order of their names."""
    return {name: getattr(sampler, name) for name in sorted(f.name for f in fields(sampler))}
