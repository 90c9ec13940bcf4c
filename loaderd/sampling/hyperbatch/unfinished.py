"""Batches that are sampled in part, of this hyperbatch and of those that follow it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.picks import Column, Draws
from blockstore.kernels.sample import MultiBlockColumns
from loaderd.plans.base import Unit
from loaderd.plans.roots import Excluded, Forest
from loaderd.sampling.hyperbatch.areas import ALIGN, StructureArea, aligned_bytes
from loaderd.sampling.hyperbatch.compact import Sources, move_sources
from loaderd.sampling.structure import Structure


@dataclass(slots=True)
class Frontier:
    """The frontier of a batch over one relation, in the hop that is being sampled."""

    column: Column
    blocks: NDArray[np.int32]
    order: NDArray[np.uint32]
    block_starts: NDArray[np.int32]
    draws: Draws
    multi_block: list[MultiBlockColumns] = field(default_factory=list)

    def count(self, blocks: NDArray[np.int64]) -> int:
        """Its nodes in these blocks."""
        return int((self.block_starts[blocks + 1] - self.block_starts[blocks]).sum())


@dataclass(slots=True)
class UnfinishedBatch:
    """A batch that is sampled in part."""

    unit: Unit
    area: StructureArea  # that holds its arrays
    pieces: list[NDArray[Any]]  # nodes: the seeds, then those each hop found
    index: NDArray[np.int64]  # places of the seeds among the session's
    ends: NDArray[np.uint32]  # of seed edges and negatives
    excluded: tuple[Excluded, ...]
    times: NDArray[np.int64]  # of the seeds, if edges are sampled up to a time
    forest: Forest | None  # likewise
    trees: list[NDArray[np.uint32]]  # of each node, in pieces as the nodes
    counts: list[NDArray[Any]] = field(default_factory=list)
    local: list[Sources] = field(default_factory=list)  # by hop
    records: list[NDArray[Any]] = field(default_factory=list)  # of edges, flat
    items: list[NDArray[Any]] = field(default_factory=list)  # of edges, if these have rows
    edges_per_hop: list[tuple[int, ...]] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)  # nodes, by hop
    frontiers: list[Frontier] = field(default_factory=list)  # of the hop, by relation

    @property
    def num_nodes(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def hop(self) -> int:
        """The hop that comes next, or is being sampled."""
        return len(self.edges_per_hop)

    @property
    def num_bytes(self) -> int:
        """Bytes of its area that it takes."""
        arrays: list[NDArray[Any]] = [
            self.index, self.ends, self.times, *self.pieces, *self.trees,
            *self.counts, *self.records, *self.items,
        ]  # fmt: skip
        for excluded in self.excluded:
            arrays += excluded.starts, excluded.sources
        if self.forest is not None:
            arrays += self.forest.limits, self.forest.numbers
        for sources in self.local:
            arrays += sources.found, sources.low, sources.high
        return aligned_bytes(arrays)

    def move(self, area: StructureArea) -> None:
        """Copy its arrays to another area.  Raises AreaFull."""
        copy = area.copy
        self.index, self.ends, self.times = copy(self.index), copy(self.ends), copy(self.times)
        self.excluded = tuple(
            Excluded(e.relation, copy(e.starts), copy(e.sources)) for e in self.excluded
        )
        if (forest := self.forest) is not None:
            self.forest = Forest(copy(forest.limits), copy(forest.numbers), forest.last)
        self.pieces, self.trees, self.counts, self.records, self.items = (
            list(map(copy, arrays))
            for arrays in (self.pieces, self.trees, self.counts, self.records, self.items)
        )
        self.local = [move_sources(kept, area) for kept in self.local]
        self.area = area


class BegunBatches(NamedTuple):
    """A hyperbatch that is begun before it is asked for."""

    batches: list[UnfinishedBatch]
    area: StructureArea


class SamplingMemory(NamedTuple):
    """Memory of batches that are being sampled."""

    scratch: StructureArea  # of one pass over the graph
    areas: tuple[StructureArea, ...] = ()  # for hyperbatches that are begun early, one for each
    begun: Sequence[BegunBatches] = ()  # those that are begun already, in areas of their own

    @classmethod
    def carve(cls, memory: NDArray[np.uint8], early: int, begun_bytes: int) -> "SamplingMemory":
        """Areas of `begun_bytes` for `early` hyperbatches, and the rest for a pass."""
        ends = [i * begun_bytes for i in range(early + 1)]
        areas = tuple(StructureArea(memory[low:high]) for low, high in pairwise(ends))
        return cls(StructureArea(memory[ends[-1] :]), areas)


def begun_bytes(structure: Structure, id_bytes: int, record_bytes: int) -> int:
    """Bytes that a batch of this structure takes before its last hop is sampled, at most."""
    hops = len(structure.frontiers) - 1
    nodes, counts = sum(structure.nodes_per_hop[: hops + 1]), sum(structure.frontiers[:hops])
    edges = sum(map(sum, structure.edges_per_hop[:hops]))
    seeds = 16 * structure.num_seeds + 4 * structure.num_ends
    arrays = 8 + 8 * hops
    return nodes * id_bytes + counts * 4 + edges * (4 + record_bytes) + seeds + ALIGN * arrays


def scratch_bytes(
    structure: Structure, num_blocks: int, id_bytes: int, record_bytes: int
) -> list[int]:
    """Bytes that a batch of this structure takes while each of its hops is sampled."""
    found = []
    for frontier, edges in zip(structure.frontiers, structure.edges_per_hop, strict=True):
        each = frontier * (4 + 4 + 4 + 8 + 8 * bool(record_bytes)) + 4 * num_blocks + 7 * ALIGN
        node_bytes = frontier * id_bytes + ALIGN  # a copy, if hops expand layers
        # draws of each group of blocks are aligned
        each += (2 * ALIGN + record_bytes) * num_blocks
        draws = sum(edges) * (id_bytes + record_bytes)
        found.append(len(edges) * each + draws + node_bytes)
    return found
