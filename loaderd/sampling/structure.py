"""Structure of a batch: sampled hop by hop from its roots, with any way to draw neighbors."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.order import compact_records
from blockstore.kernels.picks import BY_SOURCE, BY_WEIGHT, LATEST, UNIFORM, UNTIL, Column, Rule
from loaderd.memory.blob import Written, joined
from loaderd.memory.workspace import Workspace, WorkspaceFull
from loaderd.plans.base import Plan, Unit
from loaderd.plans.roots import Forest, Roots, drop_seed_edges
from loaderd.sampling.records import flat
from loaderd.sampling.renumbering import Renumbering

IDENTITY = np.empty(0, np.uint32)  # as an order of entries: as they come
NO_TREES = np.empty(0, np.uint32)
NO_FOREST = Forest(np.empty(0, np.int64), np.empty(0, np.uint64), False)


class Structure(NamedTuple):
    """How far a workspace is filled after sampling."""

    nodes_per_hop: tuple[int, ...]
    edges_per_hop: tuple[tuple[int, ...], ...]
    num_nodes: int
    num_edges: int
    frontiers: tuple[int, ...]  # nodes that each hop expanded
    num_seeds: int
    num_ends: int = 0  # of seed edges and their negatives

    @property
    def num_counts(self) -> int:
        """Entries of `counts`: one a frontier node and relation, of all hops."""
        hops = zip(self.frontiers, self.edges_per_hop, strict=True)
        return sum(frontier * len(edges) for frontier, edges in hops)


class StructureArrays(NamedTuple):
    """The arrays of a batch's structure, wherever and however they are kept."""

    nodes: tuple[NDArray[Any], ...]  # id_dtype: store ids, seeds first; in pieces
    counts: Written  # uint32: edges of each frontier node, hop by hop and relation by relation
    local: Written  # uint32: local source of each edge
    edge_ids: Written  # ids or records of edges, if asked for, as `flat` gives them
    places: Written  # int64: places of the seeds among the session's
    ends: Written  # uint32: local ends of seed edges and negatives
    trees: Written  # uint32: of each node, if edges are sampled up to a time
    times: Written  # int64: of the seeds, likewise


def structure_arrays(work: Workspace, structure: Structure) -> StructureArrays:
    """The structure arrays in a workspace after sampling."""
    return StructureArrays(
        (work.n_id[: structure.num_nodes],),
        joined([work.counts[: structure.num_counts]]),
        joined([work.local[: structure.num_edges]]),
        joined([flat(work.records[: structure.num_edges], work.record)]),
        joined([work.index[: structure.num_seeds]]),
        joined([work.ends[: structure.num_ends]]),
        joined([work.trees[: structure.num_nodes]]),
        joined([work.times[: structure.num_seeds]]),
    )


Drawn = Callable[..., object]  # called with the ends of a range of a frontier
Draw = Callable[[Column, Workspace, Drawn], None]  # draws for a frontier


def nothing(*_: int) -> None:
    """A `Drawn` that does nothing: draws are looked at later."""


# (relation, mask): gives the marked blocks in groups, each held in turn
HeldBlocks = Callable[[int, NDArray[np.uint8]], Iterator[NDArray[np.int64]]]


def sample_hops(draw: Draw, plan: Plan, unit: Unit, work: Workspace, roots: Roots) -> Structure:
    """Fill the workspace with a batch's structure, hop by hop.

    draw   puts the picks of a column into `work.draws` at `work.starts`, and counts them; reports
           one range of the column after the other, in order

    Raises WorkspaceFull, and what `draw` raises.
    """
    place_roots(roots, work)
    num_nodes, edge, used, low = roots.nodes.size, 0, 0, 0
    nodes_per_hop, edges_per_hop, frontiers = [num_nodes], [], []
    with Renumbering(work, num_nodes) as numbers:
        for hop, fanouts in enumerate(plan.resolved.fanouts):
            if plan.resolved.frontier == "layer":
                low = 0
            frontier = work.n_id[low:num_nodes]
            trees = work.trees[low:num_nodes]
            seeds_first = low == 0 and bool(roots.excluded)
            low, found = num_nodes, []
            frontiers.append(frontier.size)
            if frontier.size >= work.starts.size or used + frontier.size > work.counts.size:
                raise WorkspaceFull
            for r in range(len(fanouts)):
                counts = work.counts[used : used + frontier.size]
                used += frontier.size
                if fanouts[r] == 0:
                    counts[:] = 0
                    found.append(0)
                    continue
                column = make_column(plan, unit, hop, r, frontier, counts, trees, roots.forest)
                number = _Numbers(numbers, work, counts, trees, edge)
                if seeds_first:
                    draw(column, work, nothing)
                    drop_seed_edges(
                        roots.excluded, r, work.starts, work.draws, work.starts, work.record_draws,
                        counts,
                    )  # fmt: skip
                    number(0, frontier.size)
                else:
                    draw(column, work, number)
                found.append(number.edge - edge)
                edge = number.edge
            num_nodes = numbers.num_nodes
            nodes_per_hop.append(num_nodes - low)
            edges_per_hop.append(tuple(found))
    return Structure(
        tuple(nodes_per_hop), tuple(edges_per_hop), num_nodes, edge, tuple(frontiers),
        roots.places.size, roots.ends.size,
    )  # fmt: skip


class _Numbers:
    """Gives the draws of a frontier local ids, one range of its nodes after the other."""

    def __init__(
        self,
        numbers: Renumbering,
        work: Workspace,
        counts: NDArray[np.uint32],
        trees: NDArray[np.uint32],
        edge: int,
    ) -> None:
        """`edge`: place of the first edge among those of the batch."""
        self._numbers, self._work, self._counts, self._trees = numbers, work, counts, trees
        self.edge = edge  # after the last one

    def __call__(self, low: int, high: int) -> None:
        """Number the draws of nodes [low, high) of the frontier.  Raises WorkspaceFull."""
        work, counts, starts = self._work, self._counts[low:high], self._work.starts[low:high]
        if work.record.size:
            compact_records(work.record_draws, starts, counts, counts.size, work.records, self.edge)
        self.edge = self._numbers.add(work.draws, starts, counts, self.edge, self._trees[low:high])


def place_roots(roots: Roots, work: Workspace) -> None:
    """Copy the roots of a batch into its workspace.  Raises WorkspaceFull."""
    if roots.nodes.size > work.n_id.size:
        raise WorkspaceFull
    work.n_id[: roots.nodes.size] = roots.nodes
    work.index[: roots.places.size] = roots.places
    work.ends[: roots.ends.size] = roots.ends
    work.times[: roots.times.size] = roots.times
    if roots.forest is not None:
        work.trees[: roots.nodes.size] = np.arange(roots.nodes.size)


def make_column(
    plan: Plan,
    unit: Unit,
    hop: int,
    relation: int,
    frontier: NDArray[Any],
    counts: NDArray[np.uint32],
    trees: NDArray[np.uint32],
    forest: Forest | None,
) -> Column:
    """One hop of a batch over one relation; `trees` of its nodes count if there is a forest."""
    resolved, kind = plan.resolved, UNIFORM
    fanout = resolved.fanouts[hop][relation]
    if forest is not None:
        kind = LATEST if forest.last else UNTIL
    else:
        trees, forest = NO_TREES, NO_FOREST
        if resolved.weighted and fanout >= 0:
            kind = BY_WEIGHT
        elif resolved.labor is not None and fanout >= 0:
            kind = BY_SOURCE
    if kind == BY_SOURCE:
        key = plan.source_key(unit.epoch, unit.step, hop)
    else:
        key = plan.hop_key(unit.epoch, unit.step, hop, relation)
    rule = Rule(
        fanout, resolved.replace, kind, np.uint64(key), trees, forest.limits, forest.numbers
    )
    return Column(frontier, relation, counts, rule)
