"""Compact structures of batches that wait for their turn, smaller than in a message.

Nodes are numbered as edges find them.  So the local source of an edge takes one bit if it is the
next new node, and three bytes, rarely four, if it was found before; counts, which are at most the
fanout, are kept in bytes.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.renumber import join_sources, split_sources
from loaderd.memory.blob import Written, joined
from loaderd.memory.workspace import Workspace
from loaderd.plans.base import Unit
from loaderd.sampling.hyperbatch.areas import AreaFull, Sampled, StructureArea, aligned_bytes
from loaderd.sampling.records import flat, section
from loaderd.sampling.structure import Structure, StructureArrays, structure_arrays


class Sources(NamedTuple):
    """Local sources of edges, as `split_sources` keeps them."""

    new: int  # local id of the first node that these edges find
    found: NDArray[np.uint64]  # a bit an edge: its source is the next new node
    low: NDArray[np.uint16]  # of the others: the lower 16 bits of their local ids
    high: NDArray[Any]  # uint8 or uint16: the rest


def keep_sources(
    local: NDArray[np.uint32], new: int, num_nodes: int, area: StructureArea
) -> Sources:
    """Keep local sources of edges that find nodes `new` to `num_nodes` - 1.  Raises AreaFull."""
    others = local.size - (num_nodes - new)
    room = others + 1  # one more is read, but not kept
    high = np.uint8 if num_nodes <= 1 << 24 else np.uint16
    kept = Sources(
        new, area.take(np.uint64, -(-local.size // 64)), area.take(np.uint16, room),
        area.take(high, room),
    )  # fmt: skip
    left = split_sources(local, kept)
    assert left == others, "each new node is found by one edge, in order"
    return kept


def kept_sources(kept: Sources, num_edges: int) -> Written:
    """Local sources of so many edges, uint32, restored."""
    return Written(np.dtype(np.uint32), num_edges, partial(join_sources, kept))


def move_sources(kept: Sources, area: StructureArea) -> Sources:
    """A copy in another area.  Raises AreaFull."""
    return Sources(kept.new, area.copy(kept.found), area.copy(kept.low), area.copy(kept.high))


def keep_counts(counts: NDArray[np.uint32], area: StructureArea) -> NDArray[Any]:
    """Edges of frontier nodes, in bytes if they are no more than 255.  Raises AreaFull."""
    out = area.take(np.uint8 if counts.max(initial=0) < 256 else np.uint32, counts.size)
    out[:] = counts
    return out


def compact(
    batch: int, unit: Unit, structure: Structure, work: Workspace, area: StructureArea
) -> Sampled | None:
    """Copy a sampled batch from its workspace to the area; returns None if it has no room."""
    nodes, *found = structure_arrays(work, structure)
    counts, local = work.counts[: structure.num_counts], work.local[: structure.num_edges]

    def keep(array: Written) -> NDArray[Any]:
        out = area.take(array.dtype, array.size)
        array.write(0, out)
        return out

    try:
        kept_nodes = tuple(map(area.copy, nodes))
        kept_counts = keep_counts(counts, area)
        sources = keep_sources(local, structure.nodes_per_hop[0], structure.num_nodes, area)
        others = list(map(keep, found[2:]))
        edges: tuple[NDArray[Any], ...] = ()
        if work.record.items:
            items = section(work.records[: structure.num_edges], work.record, "items")
            edges = (area.copy(items),)
    except AreaFull:
        return None
    arrays = StructureArrays(
        kept_nodes, joined([kept_counts], counts.dtype), kept_sources(sources, local.size),
        *(joined([array]) for array in others),
    )  # fmt: skip
    taken = aligned_bytes([*kept_nodes, kept_counts, *sources[1:], *others, *edges])
    return Sampled(batch, unit, structure, arrays, area, edges=edges, num_bytes=taken)


def expand(sampled: Sampled, work: Workspace) -> None:
    """Copy a compact batch back to a workspace."""
    arrays = sampled.arrays
    for array, out in (
        (joined(arrays.nodes), work.n_id),
        (arrays.counts, work.counts),
        (arrays.local, work.local),
        (arrays.edge_ids, flat(work.records, work.record)),
        (arrays.places, work.index),
        (arrays.ends, work.ends),
        (arrays.trees, work.trees),
        (arrays.times, work.times),
    ):
        array.write(0, out[: array.size])
