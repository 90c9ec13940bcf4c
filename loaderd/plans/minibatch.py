"""Plan `minibatch`: plain neighbor sampling, one batch after the other."""

from typing import NamedTuple

from blockstore.kernels.random import make_epoch_key, make_key
from loaderd.api.protocol import Resolved
from loaderd.plans.base import EVERY_RANK, Part, Shape, Unit, count_steps, drawn_epoch, share
from loaderd.plans.roots import num_ends

_SOURCES = 7 << 60  # in place of a relation in keys: no other draw has it


class GraphBounds(NamedTuple):
    """What a plan must know about the store to bound its work."""

    num_nodes: int
    num_edges: tuple[int, ...]  # per relation
    inner: int = 0  # nodes of the largest macro-batch's partitions; 0: not known


class MinibatchPlan:
    """Neighbor sampling without replacement; a hop expands newly found nodes only, as in PyG."""

    name = "minibatch"

    def __init__(self, resolved: Resolved, part: Part, bounds: GraphBounds) -> None:
        """Raises Refused: fewer seeds than ranks."""
        self.resolved = resolved
        self.part = part
        self._bounds = bounds
        self._trees = resolved.temporal is not None  # nodes are not shared between seeds
        self._num_steps = count_steps(resolved.num_seeds, resolved.batch_size, part.world_size)
        self.together = part.world_size if part.rank == EVERY_RANK else 1  # positions of a step

    @property
    def num_steps(self) -> int:
        """Global batches of an epoch, or positions if the plan is for every rank."""
        return self._num_steps * self.together

    def unit(self, epoch: int, step: int) -> Unit:
        """This part's share of global batch `step`, a position if the plan is for every rank."""
        r, part, position = self.resolved, self.part, step
        if part.rank == EVERY_RANK:
            step, rank = divmod(position, part.world_size)
            part = part._replace(rank=rank)
        asked = Part() if part.home else part
        own = share(step, self._num_steps, r.num_seeds, r.batch_size, asked)
        return Unit(epoch, position, own.start, own.stop, rank=part.rank if part.home else -1)

    def epoch_key(self, epoch: int) -> int:
        return int(make_epoch_key(self.resolved.seed, drawn_epoch(self.resolved, epoch)))

    def hop_key(self, epoch: int, step: int, hop: int, relation: int) -> int:
        epoch, step = drawn_epoch(self.resolved, epoch), self._drawn_step(step)
        return int(make_key(self.resolved.seed, epoch, step, hop, relation))

    def source_key(self, epoch: int, step: int, hop: int) -> int:
        """`step`: or a position, as in `hop_key`.  All relations share it, and agree on sources."""
        labor = self.resolved.labor
        assert labor is not None
        run = self._drawn_step(step) // labor.batch_dependency
        hop, epoch = 0 if labor.layer_dependency else hop, drawn_epoch(self.resolved, epoch)
        return int(make_key(self.resolved.seed, epoch, run, hop, _SOURCES))

    def _drawn_step(self, step: int) -> int:
        """The number by which a step's draws are keyed."""
        return step // self.together

    def _max_seeds(self) -> int:
        """Most seeds of one rank's share of a step."""
        world = self.part.world_size
        # with the tail that joins the last batch
        largest = min(self.resolved.num_seeds, self.resolved.batch_size + world - 1)
        # all seeds of a batch may have one owner
        return largest if self.part.home else -(-largest // world)

    def _max_expanded(self, frontier: int, repeated: int) -> int:
        """Nodes of a frontier that have draws; arguments as of `_max_edges`."""
        del repeated
        return frontier

    def shape(self) -> Shape:
        """Worst case of a step: every draw finds a new node, until the graph is used up."""
        units = seeds = self._max_seeds()
        ends = 0
        if self.resolved.edges is not None:
            ends = num_ends(self.resolved.edges, units)
            seeds = ends if self._trees else min(ends, self._bounds.num_nodes)
        layers = self.resolved.frontier == "layer"
        # a node that is given as a seed several times is expanded as often, other nodes once
        repeated = seeds if self.resolved.edges is None else 0
        frontier, edges, nodes = [seeds], [], seeds
        for fanouts in self.resolved.fanouts:
            expanded = self._max_expanded(frontier[-1], repeated)
            found = tuple(
                self._max_edges(expanded, repeated, fanout, total)
                for fanout, total in zip(fanouts, self._bounds.num_edges, strict=True)
            )
            edges.append(found)
            new = sum(found) if self._trees else min(sum(found), self._bounds.num_nodes)
            nodes += new
            whole = nodes if self._trees else min(nodes, self._bounds.num_nodes + seeds)
            frontier.append(whole if layers else new)
            repeated *= layers
        if not self._trees:
            nodes = min(nodes, self._bounds.num_nodes + seeds)
        placed = units if self.part.home else 0
        return Shape(units, tuple(frontier[:-1]), tuple(edges), nodes, ends, placed)

    def _max_edges(self, frontier: int, repeated: int, fanout: int, total: int) -> int:
        """Edges that a hop finds over a relation of `total` edges.

        repeated   nodes of the frontier that may be equal to others of it
        """
        if fanout < 0:
            return total
        if self.resolved.replace:
            return frontier * fanout
        fanout = min(fanout, total)
        if self._trees:
            return frontier * fanout
        return min(frontier * fanout, total + repeated * fanout)
