"""Some minibatches of a session, sampled as they will be, to know what batches take."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, PAGE_BYTES
from blockstore.io.arena import Arena
from blockstore.store import Store
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
from loaderd.engine.attachment import Attachment
from loaderd.engine.build import Builder
from loaderd.errors import Refused
from loaderd.hyper.cut import Estimate, HyperCut, cut_hyper
from loaderd.hyper.session import Sampled, Sampler, StructureArea
from loaderd.hyper.single import BatchSampler, Crew
from loaderd.hyper.together import scratch_bytes
from loaderd.memory.ledger import Budget, EngineSettings, SessionNeed
from loaderd.memory.slots import LOOK_WAIT_S, SlotBroker

_BATCHES = 16
_LEAST_BUFFER = 16 * PAGE_BYTES  # that a device is measured through

BlockSampling = Callable[[Attachment, Crew, StructureArea], Sampler]
Measure = Callable[[Sequence[NDArray[np.uint8]]], DeviceCost]


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


class LookAhead:
    """Looks at sessions of one engine."""

    def __init__(
        self,
        store: Store,
        settings: EngineSettings,
        budget: Budget,
        broker: SlotBroker,
        arena: Arena,
        builder: Builder,
        sampling: BlockSampling,
        measure: Measure,
    ) -> None:
        """`sampling`: where the graph is not in memory.  `measure`: the device, through buffers."""
        self._store, self._settings, self._budget = store, settings, budget
        self._broker, self._arena, self._builder = broker, arena, builder
        self._sampling, self._measure = sampling, measure
        self._first_nodes = [store.first_node(r).astype(np.int64) for r in store.manifest.relations]

    def _together(self) -> bool:
        """Whether batches are sampled hop by hop over blocks."""
        return self._broker.graph_wish < self._budget.graph_blocks

    def look(self, attachment: Attachment, crew: Crew) -> Ahead | None:
        """The first minibatches, in memory that is given back; None where it has no room."""
        plan, slot, broker = attachment.plan, self._budget.slot_bytes, self._broker
        units = [plan.unit(0, step) for step in range(min(_BATCHES, plan.num_steps))]
        parts = [broker.row_slots() // 4 * (1 + self._together()), broker.row_slots() // 4]
        firsts: list[int] = []
        try:
            for count in parts[: 1 + self._together()]:
                firsts.append(broker.take_run(count, LOOK_WAIT_S))
            memories = [
                self._arena.data[first * slot : (first + count) * slot]
                for first, count in zip(firsts, parts, strict=False)
            ]
            area, *scratch = [StructureArea(memory) for memory in memories]
            sampler: Sampler = (
                self._sampling(attachment, crew, scratch[0])
                if self._together()
                else BatchSampler(lambda u, w: self._builder.structure(attachment, u, w), crew)
            )
            found = sampler.sample(units, 0, area, lambda: False)
            if not found:
                return None
            samples = [_sample_of(sampled) for sampled in found]
            manifest = self._store.manifest
            look = look_at(manifest, attachment.served, self._first_nodes, samples)
            structures = tuple(sampled.structure for sampled in found)
            buffers = self._buffers(memories[0])
            cost = self._measure(buffers) if buffers[0].size >= _LEAST_BUFFER else FLASH
            return Ahead(structures, look, cost)
        except Refused:
            return None
        finally:
            for first, count in zip(firsts, parts, strict=False):
                broker.give(list(range(first, first + count)))

    def _buffers(self, memory: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Memory in buffers, one a reader thread."""
        each = min(RUN_BYTES, memory.size // self._settings.readers)
        each -= each % PAGE_BYTES
        return [memory[i * each : (i + 1) * each] for i in range(self._settings.readers)]

    def _cut(
        self, attachment: Attachment, ahead: Ahead, estimate: Estimate, asked: int
    ) -> HyperCut | None:
        """The memory of a session of hyperbatches; takes its small workspaces.

        asked   minibatches of a hyperbatch, 0: as many as have room
        """
        broker, settings = self._broker, self._settings
        try:
            attachment.take_small_workspaces(
                broker, self._arena, ahead.structures, settings.workers
            )
        except Refused:
            return None
        room = int(broker.row_slots() * settings.session_share)  # not the graph's
        return cut_hyper(
            room, self._budget.slot_bytes, attachment.need, estimate,
            attachment.served, self._store.manifest.id_dtype, settings.readers, attachment.window,
            asked, attachment.plan.num_steps,
        )  # fmt: skip

    def _estimate(self, attachment: Attachment, ahead: Ahead) -> Estimate:
        plan, seen = attachment.plan, ahead.structures
        shape = plan.shape()
        worst = Structure(
            (*shape.frontier, 0), shape.edges, shape.nodes, shape.total_edges, shape.frontier,
            shape.ends,
        )  # fmt: skip
        rows = [growth.counts for growth in ahead.look.rows]
        return Estimate(
            max(self._builder.structure_bytes(s, plan.unit(0, 0), attachment) for s in seen),
            max(s.num_nodes for s in seen),
            max(self._scratch_bytes(s, attachment) for s in seen) * self._together(),
            self._scratch_bytes(worst, attachment),
            tuple(sum(counts) for counts in zip(*rows, strict=True)) or (0,),
        )

    def _scratch_bytes(self, structure: Structure, attachment: Attachment) -> int:
        manifest = self._store.manifest
        edge_ids = attachment.edge_id_bytes if attachment.plan.resolved.edge_ids else 0
        blocks = max(r.num_blocks for r in manifest.relations)
        return scratch_bytes(structure, blocks, ITEM_BYTES[manifest.id_dtype], edge_ids)

    def prospect(self, attachment: Attachment, crew: Crew, asked: int) -> Prospect:
        """What the session would get, by either plan, and what that reads."""
        manifest, slot = self._store.manifest, self._budget.slot_bytes
        steps, need = attachment.plan.num_steps, attachment.need
        ahead = self.look(attachment, crew)
        rooms = Rooms(self._broker.graph_slots(), attachment.plain_blocks)
        if ahead is None:
            return Prospect(need, steps, attachment.fits, rooms, None, None, None, None, None)
        look, cost, block = ahead.look, ahead.cost, manifest.block_bytes
        estimate, hyper = self._estimate(attachment, ahead), None
        cut = self._cut(attachment, ahead, estimate, asked)
        plain = minibatch_reads(look, rooms, block, slot, steps)
        if cut is not None:
            hyper = hyperbatch_reads(
                look, attachment.served, cut, rooms, cost, manifest, slot, steps
            )
        return Prospect(need, steps, attachment.fits, rooms, ahead, estimate, cut, plain, hyper)


def _sample_of(sampled: Sampled) -> Sample:
    """Its nodes in one piece; a hop expands the last of the nodes found before it."""
    structure = sampled.structure
    ends = np.cumsum(structure.nodes_per_hop)[: len(structure.frontiers)].tolist()
    frontiers = tuple(
        (end - size, end) for end, size in zip(ends, structure.frontiers, strict=True)
    )
    return Sample(np.concatenate(sampled.nodes), frontiers, structure.num_edges)
