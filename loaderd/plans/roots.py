"""Roots of batches: seed nodes, or the ends of seed edges and of their negatives."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.links import draw_negatives, drop_excluded, group_excluded
from blockstore.kernels.order import take_ids
from blockstore.kernels.random import permute_range
from blockstore.kernels.renumber import NodeTable, renumber
from loaderd.api.protocol import SeedEdges
from loaderd.plans.base import Plan, Unit

NO_ENDS = np.empty(0, np.uint32)
NO_TIMES = np.empty(0, np.int64)
_TOGETHER = 1 << 16  # seed edges that are looked up in one pass over blocks
_NEGATIVE = 1 << 61  # in place of a hop in keys of negatives: no draw of a neighbor has it

# from places of edges, in the order of the blocks, to (sources, targets, times): store ids, and
# times if they are wanted; if edges have ids, these are written over the places
FindEnds = Callable[[NDArray[np.int64]], tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]]


class Forest(NamedTuple):
    """Trees of a batch, one for each seed node, in their order."""

    limits: NDArray[np.int64]  # latest time of an edge
    numbers: NDArray[np.uint64]  # unique in the epoch
    last: bool  # the latest edges are picked


class Excluded(NamedTuple):
    """Edges of one relation that a batch must not contain, by the place of their target."""

    relation: int
    starts: NDArray[np.uint32]  # (seed nodes + 1,) first edge of each target in `sources`
    sources: NDArray[Any]  # id_dtype, ascending for each target


class Roots(NamedTuple):
    """The nodes at which the sampling of a batch begins."""

    nodes: NDArray[Any]  # id_dtype: store ids of seed nodes, or of ends of edges, each once
    places: NDArray[np.int64]  # of the seeds among the session's; edge ids if all edges are seeds
    ends: NDArray[np.uint32]  # places in `nodes` of the ends of edges, negatives after seeds:
    # sources, then targets; of triplets sources, targets, then negative targets
    excluded: tuple[Excluded, ...]
    times: NDArray[np.int64] = NO_TIMES  # of the seeds, if edges are sampled up to a time
    forest: Forest | None = None  # likewise


class EndTable(NamedTuple):
    """Seed edges of a session, as they stay in memory."""

    spec: SeedEdges
    relation: int
    reverse: int  # relation of the reverse edges; -1: they are not looked for
    sources: tuple[int, int]  # first store id and number of nodes of the type of the sources
    targets: tuple[int, int]
    ends: NDArray[Any]  # id_dtype (2, num_seeds): store ids; (2, 0) if all edges are seeds
    first_edge: NDArray[np.uint64]  # (num_blocks + 1,) if all edges are seeds, else (0,)


def num_negatives(spec: SeedEdges, num: int) -> int:
    return math.ceil(num * spec.amount) if spec.negatives != "none" else 0


def num_ends(spec: SeedEdges, num: int) -> int:
    return 2 * num + num_negatives(spec, num) * (2 if spec.negatives == "binary" else 1)


def seed_places(plan: Plan, unit: Unit, out: NDArray[np.int64]) -> None:
    if plan.resolved.shuffle:
        key = np.uint64(plan.epoch_key(unit.epoch))
        permute_range(unit.start, unit.stop, plan.resolved.num_seeds, key, out)
    else:
        out[:] = np.arange(unit.start, unit.stop)


def node_roots(seeds: NDArray[Any], index: NDArray[np.int64]) -> Roots:
    """The roots of seed nodes; `index`: their places in `seeds`."""
    nodes = np.empty(index.size, seeds.dtype)
    take_ids(seeds, index, index.size, nodes)
    return Roots(nodes, index, NO_ENDS, ())


def timed_roots(
    plan: Plan, unit: Unit, seeds: NDArray[Any], times: NDArray[np.int64], index: NDArray[np.int64]
) -> Roots:
    """The roots of seed nodes with `times` of the session's seeds: each is a tree."""
    roots, own = node_roots(seeds, index), times[index]
    forest = _forest(plan, unit, own, [(0, index.size)])
    return roots._replace(times=own, forest=forest)


def _forest(
    plan: Plan, unit: Unit, times: NDArray[np.int64], columns: Sequence[tuple[int, int]]
) -> Forest:
    """Trees of columns of ends: (which end, how many), of the unit's seeds in turn."""
    temporal = plan.resolved.temporal
    assert temporal is not None
    limits, numbers = [], []
    for end, count in columns:
        draws, seeds = np.divmod(np.arange(count, dtype=np.int64), unit.num_seeds)
        limits.append(times[seeds])
        numbers.append((unit.start + seeds << 20) + (end << 17) + draws)
    limit = np.concatenate(limits)
    if temporal.strict:
        limit -= 1
    return Forest(limit, np.concatenate(numbers).astype(np.uint64), temporal.strategy == "last")


def edge_roots(
    table: EndTable, plan: Plan, units: Sequence[Unit], times: NDArray[np.int64], find: FindEnds
) -> list[Roots]:
    """The roots of seed edges.

    find   if all edges are seeds: called for many units together, so that a block that
           several of them need is held once
    times  of the session's seeds, if they were given
    """
    found: list[Roots] = []
    for group in _groups(units):
        sizes = [unit.num_seeds for unit in group]
        index = np.empty(sum(sizes), np.int64)
        cuts = np.cumsum(sizes)[:-1]
        for unit, part in zip(group, np.split(index, cuts), strict=True):
            seed_places(plan, unit, part)
        own = times[index] if times.size else NO_TIMES
        if table.first_edge.size:
            src, dst, found_times = find(index)
            own = own if times.size else found_times
        else:
            src, dst = table.ends[0][index], table.ends[1][index]
        own_cuts = cuts if own.size else np.zeros_like(cuts)
        parts = (np.split(array, cuts) for array in (index, src, dst))
        found += [
            _roots(table, plan, *each)
            for each in zip(group, *parts, np.split(own, own_cuts), strict=True)
        ]
    return found


def _groups(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units in their order, in groups of at most `_TOGETHER` edges, or one unit."""
    group: list[Unit] = []
    for unit in units:
        if group and sum(u.num_seeds for u in group) + unit.num_seeds > _TOGETHER:
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def _roots(
    table: EndTable,
    plan: Plan,
    unit: Unit,
    index: NDArray[np.int64],
    src: NDArray[Any],
    dst: NDArray[Any],
    times: NDArray[np.int64],
) -> Roots:
    """Draw negatives, number the nodes of all ends, and list what the batch must not contain.

    times   of the edges, if edges are sampled up to a time: then each end is a tree
    """
    spec, num = table.spec, unit.num_seeds
    columns, which = [src, dst], [0, 2]
    if spec.negatives == "binary":
        pairs = (_negatives(table, plan, unit, end, src.dtype) for end in (0, 1))
        columns = [part for pair in zip((src, dst), pairs, strict=True) for part in pair]
        which = [0, 1, 2, 3]
    elif spec.negatives == "triplet":
        columns.append(_negatives(table, plan, unit, 1, src.dtype))
        which.append(3)
    if plan.resolved.temporal is not None:
        nodes = np.concatenate(columns)
        sizes = [(end, column.size) for end, column in zip(which, columns, strict=True)]
        ends = np.arange(nodes.size, dtype=np.uint32)
        return Roots(nodes, index, ends, (), times, _forest(plan, unit, times, sizes))
    nodes, ends = _number(np.concatenate(columns))
    places = (ends[:num], ends[num + num_negatives(spec, num) * (spec.negatives == "binary") :])
    return Roots(nodes, index, ends, _excluded(table, places[0], places[1][:num], src, dst, nodes))


def _negatives(
    table: EndTable, plan: Plan, unit: Unit, end: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Random nodes in place of sources (end 0) or targets (end 1)."""
    out = np.empty(num_negatives(table.spec, unit.num_seeds), dtype)
    key = np.uint64(plan.hop_key(unit.epoch, unit.step, _NEGATIVE, end))
    first, num_nodes = table.targets if end else table.sources
    draw_negatives(key, unit.start, unit.num_seeds, first, num_nodes, out)
    return out


def _number(ends: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.uint32]]:
    """The distinct nodes of some ends in order of first occurrence, and each end's place."""
    size = 1 << (2 * ends.size - 1).bit_length()
    keys = np.full(size, np.iinfo(ends.dtype).max, ends.dtype)
    values = np.empty(size, np.uint32)
    nodes, places = np.empty_like(ends), np.empty(ends.size, np.uint32)
    num, _ = renumber(
        ends, np.zeros(1, np.int64), np.array([ends.size], np.uint32), NodeTable(keys, values),
        nodes, 0, places, 0, None, None,
    )  # fmt: skip
    return nodes[: int(num)], places


def _excluded(
    table: EndTable,
    src_places: NDArray[np.uint32],
    dst_places: NDArray[np.uint32],
    src: NDArray[Any],
    dst: NDArray[Any],
    nodes: NDArray[Any],
) -> tuple[Excluded, ...]:
    """Edges to exclude, by relation: the seed edges and their reverses."""
    if table.spec.exclude == "none":
        return ()
    wanted = {table.relation: [(dst_places, src)]}
    if table.reverse >= 0:
        wanted.setdefault(table.reverse, []).append((src_places, dst))
    excluded = []
    for relation, parts in wanted.items():
        places, sources = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        starts, out = np.empty(nodes.size + 1, np.uint32), np.empty_like(sources)
        group_excluded(places, sources, starts, out)
        excluded.append(Excluded(relation, starts, out))
    return tuple(excluded)


def drop_seed_edges(
    excluded: Sequence[Excluded],
    relation: int,
    starts: NDArray[np.int64],
    draws: NDArray[Any],
    edge_starts: NDArray[np.int64],
    edge_draws: NDArray[Any],
    counts: NDArray[np.uint32],
) -> None:
    """Take excluded edges out of the draws of a frontier that begins with the seed nodes."""
    for edges in excluded:
        if edges.relation == relation:
            drop_excluded(
                edges.starts, edges.sources, starts, draws, edge_starts, edge_draws, counts,
                counts.size,
            )  # fmt: skip
