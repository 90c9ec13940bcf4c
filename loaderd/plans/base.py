"""A plan: a pure function from resolved parameters and a position to a unit of work."""

from typing import NamedTuple, Protocol

from loaderd.api.errors import Refused
from loaderd.api.protocol import HomePlacement, Resolved


class Part(NamedTuple):
    """The share of each global batch that is wanted: that of one trainer, or of one server.

    rank   or `EVERY_RANK`
    home   an owner map decides which seeds a rank gets; None: a range of the batch
    """

    rank: int = 0
    world_size: int = 1
    home: HomePlacement | None = None


EVERY_RANK = -1  # as a part's rank: the batches of all ranks of a job, one after another


class Wanted(NamedTuple):
    """A batch that somebody waits for."""

    run: int  # grows with each epoch that is begun
    epoch: int
    step: int  # or, if one session serves all ranks of a job, the position `step * world + rank`


class Unit(NamedTuple):
    """One piece of work: seeds at positions [start, stop) of the epoch's order.

    In a macro-batch: of the order of its seeds, in pass `cycle` over them.
    """

    epoch: int
    step: int  # or a position, see `Wanted`
    start: int
    stop: int
    macro: int = -1  # number of the macro-batch in the epoch
    cycle: int = 0
    rank: int = -1  # whose seeds are wanted, if an owner map divides them; -1: all are

    @property
    def num_seeds(self) -> int:
        """Seeds at these positions, those of all ranks."""
        return self.stop - self.start


class Shape(NamedTuple):
    """Bounds on one unit of work, for the ledger; items, not bytes."""

    seeds: int  # nodes or edges
    frontier: tuple[int, ...]  # nodes that hop h expands, at most
    edges: tuple[tuple[int, ...], ...]  # [hop][relation] edges found, at most
    nodes: int  # in the batch, at most
    ends: int = 0  # of seed edges and their negatives, at most
    placed: int = 0  # seeds of all ranks, if an owner map divides them
    named: int = 0  # nodes whose store ids come with the batch

    @property
    def total_edges(self) -> int:
        return sum(sum(hop) for hop in self.edges)


class Plan(Protocol):
    """A plan is pure: any daemon with the same store answers (resolved, epoch, step) alike."""

    name: str
    resolved: Resolved
    part: Part

    @property
    def num_steps(self) -> int:
        """Units of every epoch, the same for every part."""

    def unit(self, epoch: int, step: int) -> Unit:
        """The work of one step for this part."""

    def epoch_key(self, epoch: int) -> int:
        """Key of the epoch's order of seeds (`kernels.random.permute`), uint64."""

    def hop_key(self, epoch: int, step: int, hop: int, relation: int) -> int:
        """Key of the draws of one hop over one relation, uint64; the same for all parts."""

    def source_key(self, epoch: int, step: int, hop: int) -> int:
        """Key of the ranks of sources under LABOR, uint64; the same for all relations and parts."""

    def shape(self) -> Shape:
        """Bounds for the ledger."""


def drawn_epoch(resolved: Resolved, epoch: int) -> int:
    """The epoch whose draws are used: `epoch` itself, or its place in a cycle of epochs."""
    return epoch % resolved.cycle if resolved.cycle else epoch


def count_steps(num_seeds: int, batch_size: int, world_size: int) -> int:
    """Global batches of an epoch; a tail smaller than `world_size` joins the batch before it.

    Raises Refused: fewer seeds than ranks.
    """
    if num_seeds < world_size:
        raise Refused(f"{num_seeds} seeds cannot be shared by {world_size} ranks")
    steps, tail = divmod(num_seeds, batch_size)
    if steps == 0:
        return 1
    return steps + (tail >= world_size)


def share(step: int, num_steps: int, num_seeds: int, batch_size: int, part: Part) -> range:
    """Positions of one part's contiguous share of a global batch; shares differ by one seed."""
    start = step * batch_size
    stop = num_seeds if step == num_steps - 1 else start + batch_size
    size = stop - start
    return range(
        start + size * part.rank // part.world_size,
        start + size * (part.rank + 1) // part.world_size,
    )
