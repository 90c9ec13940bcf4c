"""Some minibatches of a session, sampled as they will be, to know what batches take."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import ITEM_BYTES, PAGE_BYTES
from loaderd.batch.structure import Structure
from loaderd.devicecost import FLASH, RUN_BYTES, DeviceCost
from loaderd.engine.advice import (
    Look,
    Reads,
    Rooms,
    Sample,
    choose_equal,
    hyperbatch_reads,
    look_at,
    minibatch_reads,
)
from loaderd.engine.build import BatchSpec
from loaderd.errors import Refused
from loaderd.hyper.cut import Estimate, HyperCut, cut_hyper
from loaderd.hyper.session import Sampled, Sampler, StructureArea
from loaderd.hyper.single import BatchSampler, Crew, Workspaces, usual_shape
from loaderd.hyper.together import BlockSampler, scratch_bytes
from loaderd.memory.ledger import ServedRows, SessionNeed, served_rows
from loaderd.memory.slots import LOOK_WAIT_S
from loaderd.memory.workspace import Sizes, workspace_bytes
from loaderd.protocol import LedgerEntry
from loaderd.sessions.base import Allocation, StoreResources
from loaderd.sessions.sizing import SessionCut, add_workspaces

_BATCHES = 16
_LEAST_BUFFER = 16 * PAGE_BYTES  # that a device is measured through


class Ahead(NamedTuple):
    """What was seen."""

    structures: tuple[Structure, ...]
    look: Look
    cost: DeviceCost


class Prospect(NamedTuple):
    """What a session would get, and what a step of it would read."""

    need: SessionNeed
    num_steps: int
    fits: bool  # graph and rows stay in memory
    rooms: Rooms
    ahead: Ahead | None  # None: there was no room to look
    estimate: Estimate | None  # the same
    cut: HyperCut | None  # None: no room for hyperbatches, or no use of them
    plain: Reads | None  # of a step of plan `minibatch`
    hyper: Reads | None  # of a step of plan `hyperbatch`

    def choice(self) -> str:
        """The plan that `auto` takes: of equal batches those whose reading takes less."""
        if self.fits or self.ahead is None or self.plain is None or self.hyper is None:
            return choose_equal(0.0, None)
        cost = self.ahead.cost
        return choose_equal(self.plain.seconds(cost), self.hyper.seconds(cost))


class Draft(NamedTuple):
    """A session of hyperbatches of which it is not known yet how large they are."""

    spec: BatchSpec
    served: list[ServedRows]
    need: SessionNeed
    sizes: Sizes
    cut: SessionCut
    fits: bool  # graph and rows stay in memory beside it
    plain_blocks: int  # of rows that would stay, were its batches built one by one
    allocation: Allocation
    workspaces: Workspaces


class SamplingTurn:
    """Sampling block by block: one session at a time, of those at one store."""

    def __init__(self, resources: StoreResources) -> None:
        del resources
        self.lock = concurrency.Lock()

    def ledger_entries(self) -> list[LedgerEntry]:
        """It takes nothing."""
        return []


def block_sampler(
    resources: StoreResources, spec: BatchSpec, crew: Crew, scratch: StructureArea
) -> BlockSampler:
    """Samples batches together: the graph is not in memory."""
    manifest = resources.store.manifest
    edge_ids = max((r.edge_id_dtype or "uint32" for r in manifest.relations), default="uint32")
    return BlockSampler(
        spec.plan, lambda units, held: resources.builder.roots(spec, units, held),
        resources.topology, resources.graph, crew, scratch, resources.shared(SamplingTurn).lock,
        manifest.id_dtype, edge_ids, resources.trace,
    )  # fmt: skip


def row_cost(resources: StoreResources, buffers: Sequence[NDArray[np.uint8]]) -> DeviceCost:
    """What reading rows costs, measured through these buffers."""
    first = resources.first_rows
    files = range(first, first + len(served_rows(resources.store.manifest)))
    return resources.gauge.cost(files, buffers)


class LookAhead:
    """Looks at the first batches of a session."""

    def __init__(self, resources: StoreResources, draft: Draft) -> None:
        self._resources, self._draft = resources, draft
        # in this thread: workers may have other sessions' batches to build all the time, and an
        # attach that waits for them keeps all others waiting
        self._crew = Crew(draft.workspaces, lambda step: step(), lambda: None)
        # whether batches are sampled hop by hop over blocks
        self._together = resources.broker.graph_wish < resources.budget.graph_blocks

    def prospect(self, asked: int) -> Prospect:
        """What the session would get, by either plan, and what that reads.

        asked   minibatches of a hyperbatch, 0: as many as have room
        """
        resources, draft = self._resources, self._draft
        manifest, slot = resources.store.manifest, resources.budget.slot_bytes
        steps, need = draft.spec.plan.num_steps, draft.need
        ahead = self._look()
        rooms = Rooms(resources.broker.graph_slots(), draft.plain_blocks)
        if ahead is None:
            return Prospect(need, steps, draft.fits, rooms, None, None, None, None, None)
        look, cost, block = ahead.look, ahead.cost, manifest.block_bytes
        estimate, hyper = self._estimate(ahead), None
        cut = self._cut(ahead, estimate, asked)
        plain = minibatch_reads(look, rooms, block, slot, steps)
        if cut is not None:
            hyper = hyperbatch_reads(look, draft.served, cut, rooms, cost, manifest, slot, steps)
        return Prospect(need, steps, draft.fits, rooms, ahead, estimate, cut, plain, hyper)

    def _look(self) -> Ahead | None:
        """The first minibatches, in memory that is given back; None if it has no room."""
        resources, spec, broker = self._resources, self._draft.spec, self._resources.broker
        units = [spec.plan.unit(0, step) for step in range(min(_BATCHES, spec.plan.num_steps))]
        parts = [broker.row_slots() // 4 * (1 + self._together), broker.row_slots() // 4]
        try:
            with resources.allocation() as room:
                try:
                    runs = [room.run(n, LOOK_WAIT_S) for n in parts[: 1 + self._together]]
                    area, *scratch = [StructureArea(memory) for memory in runs]
                    found = self._sampler(scratch).sample(units, 0, area, lambda: False)
                    return self._seen(found, runs[0]) if found else None
                finally:
                    room.free()
        except Refused:
            return None

    def _sampler(self, scratch: list[StructureArea]) -> Sampler:
        resources, spec = self._resources, self._draft.spec
        if self._together:
            return block_sampler(resources, spec, self._crew, scratch[0])
        return BatchSampler(lambda u, w: resources.builder.structure(spec, u, w), self._crew)

    def _seen(self, found: list[Sampled], memory: NDArray[np.uint8]) -> Ahead:
        manifest = self._resources.store.manifest
        first_nodes = [
            self._resources.store.first_node(r).astype(np.int64) for r in manifest.relations
        ]
        samples = [_sample_of(sampled) for sampled in found]
        look = look_at(manifest, self._draft.served, first_nodes, samples)
        buffers = self._buffers(memory)
        measured = buffers[0].size >= _LEAST_BUFFER
        cost = row_cost(self._resources, buffers) if measured else FLASH
        return Ahead(tuple(sampled.structure for sampled in found), look, cost)

    def _buffers(self, memory: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Memory in buffers, one a reader thread."""
        readers = self._resources.settings.readers
        each = min(RUN_BYTES, memory.size // readers)
        each -= each % PAGE_BYTES
        return [memory[i * each : (i + 1) * each] for i in range(readers)]

    def _cut(self, ahead: Ahead, estimate: Estimate, asked: int) -> HyperCut | None:
        """The memory of a session of hyperbatches; takes its small workspaces."""
        resources, draft = self._resources, self._draft
        try:
            self._add_small_workspaces(ahead.structures)
        except Refused:
            return None
        settings = resources.settings
        room = int(resources.broker.row_slots() * settings.session_share)  # not the graph's
        return cut_hyper(
            room, resources.budget.slot_bytes, draft.need, estimate, draft.served,
            resources.store.manifest.id_dtype, settings.readers, draft.cut.window, asked,
            draft.spec.plan.num_steps,
        )  # fmt: skip

    def _add_small_workspaces(self, seen: tuple[Structure, ...]) -> None:
        """Beside the large one there is, as many more as there are workers.  Raises Refused."""
        resources, draft = self._resources, self._draft
        worst = draft.spec.plan.shape()
        shape = usual_shape(seen, worst, draft.spec.plan.resolved.fanouts)
        large, small = (workspace_bytes(s, draft.sizes) for s in (worst, shape))
        is_small = small < large * 3 // 4
        # a quarter is for these
        room = resources.broker.row_slots() // 4 * resources.budget.slot_bytes
        count = min(resources.settings.workers - 1, room // (small if is_small else large))
        add_workspaces(
            resources, draft.allocation, draft.workspaces, draft.sizes, max(1, count),
            draft.cut.transit, shape if is_small else None, worst=worst, wait_s=LOOK_WAIT_S,
        )  # fmt: skip

    def _estimate(self, ahead: Ahead) -> Estimate:
        plan, seen = self._draft.spec.plan, ahead.structures
        shape, builder = plan.shape(), self._resources.builder
        worst = Structure(
            (*shape.frontier, 0), shape.edges, shape.nodes, shape.total_edges, shape.frontier,
            shape.ends,
        )  # fmt: skip
        rows = [growth.counts for growth in ahead.look.rows]
        return Estimate(
            max(builder.structure_bytes(s, plan.unit(0, 0), self._draft.spec) for s in seen),
            max(s.num_nodes for s in seen),
            max(self._scratch_bytes(s) for s in seen) * self._together,
            self._scratch_bytes(worst),
            tuple(sum(counts) for counts in zip(*rows, strict=True)) or (0,),
        )

    def _scratch_bytes(self, structure: Structure) -> int:
        manifest, spec = self._resources.store.manifest, self._draft.spec
        edge_ids = spec.edge_id_bytes if spec.plan.resolved.edge_ids else 0
        blocks = max(r.num_blocks for r in manifest.relations)
        return scratch_bytes(structure, blocks, ITEM_BYTES[manifest.id_dtype], edge_ids)


def _sample_of(sampled: Sampled) -> Sample:
    """Its nodes in one piece; a hop expands the last of the nodes found before it."""
    structure = sampled.structure
    ends = np.cumsum(structure.nodes_per_hop)[: len(structure.frontiers)].tolist()
    frontiers = tuple(
        (end - size, end) for end, size in zip(ends, structure.frontiers, strict=True)
    )
    return Sample(np.concatenate(sampled.nodes), frontiers, structure.num_edges)
