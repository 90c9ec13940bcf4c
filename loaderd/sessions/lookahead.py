"""Sample some minibatches of a session ahead, to learn how much memory batches take.

What was learned is kept for sessions that are opened again with other memory, and for those that
differ in the random seed only.
"""

import contextlib
import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.closing import Closing
from blockstore.format import ITEM_BYTES, PAGE_BYTES
from blockstore.kernels.rowcache import count_new
from loaderd.api.errors import Refused
from loaderd.memory.ledger import ServedRows, SessionNeed, served_rows, structure_bytes
from loaderd.memory.slots import SHORT_WAIT_S
from loaderd.memory.workspace import Sizes, TableKind, workspace_bytes
from loaderd.monitoring.devicecost import RUN_BYTES, DeviceCost
from loaderd.monitoring.logs import log_event
from loaderd.plans.base import Unit
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.hyperbatch.areas import Sampled, StructureArea
from loaderd.sampling.hyperbatch.regions import region_rows, region_shift, rows_by_type
from loaderd.sampling.hyperbatch.session import StructureSampler
from loaderd.sampling.hyperbatch.single import BatchSampler, SessionWorkers, Workspaces, usual_shape
from loaderd.sampling.hyperbatch.sizing import (
    Estimate,
    HyperSizing,
    PassEstimate,
    size_hyperbatches,
)
from loaderd.sampling.hyperbatch.together import BatchRules, BlockSampler
from loaderd.sampling.hyperbatch.unfinished import SamplingMemory, begun_bytes, scratch_bytes
from loaderd.sampling.structure import Structure
from loaderd.sessions.base import Allocation, StoreResources
from loaderd.sessions.build import BatchSpec
from loaderd.sessions.sizing import SessionSizing, WorkspaceNeed, add_workspaces

log = logging.getLogger(__name__)

_BATCHES = 16
_USED_PART = 2  # batches are kept if they take at most a half of the memory they were sampled in
_KEPT = 4  # requests whose batches are known


class Seen(NamedTuple):
    """What the sampled minibatches took."""

    structures: list[Structure]
    area_bytes: int  # of one batch in an area
    wanted: tuple[NDArray[np.int64], ...]  # distinct rows of each region (of all node
    #   types in turn) that the first 1, 2, 4, ... batches want


class _SeenCache:
    """What the newest look-aheads have seen.  Sessions of a daemon are opened one at a time."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Seen] = {}

    def find(self, plan: MinibatchPlan) -> Seen | None:
        return self._found.get(_cache_key(plan))

    def keep(self, plan: MinibatchPlan, seen: Seen) -> None:
        if len(seen.structures) < min(_BATCHES, plan.num_steps):
            return  # more would be seen where there is more room
        key = _cache_key(plan)
        self._found.pop(key, None)  # the newest stands last
        self._found[key] = seen
        while len(self._found) > _KEPT:
            del self._found[next(iter(self._found))]


def _seen_cache(resources: StoreResources) -> _SeenCache:
    del resources
    return _SeenCache()


def _cache_key(plan: MinibatchPlan) -> Hashable:
    """Equal for plans that differ in the random seed only: their batches take as much memory."""
    return structs.replace(plan.resolved, seed=0), plan.part


class SessionDraft(NamedTuple):
    """A session of hyperbatches before their size is known."""

    spec: BatchSpec
    served: list[ServedRows]
    need: SessionNeed
    sizes: Sizes
    sizing: SessionSizing
    allocation: Allocation
    workspaces: Workspaces
    staying: int = 0  # slots of rows that stay already


def sampling_turn(resources: StoreResources) -> concurrency.Lock:
    """The lock that lets one session of a store at a time sample block by block."""
    del resources
    return concurrency.Lock()


def block_sampler(
    resources: StoreResources, spec: BatchSpec, workers: SessionWorkers, memory: SamplingMemory
) -> BlockSampler:
    """A sampler of many batches together, for a graph that is not in memory."""
    rules = BatchRules(
        spec.plan, lambda units, held: resources.builder.roots(spec, units, held), spec.record
    )
    turn = resources.shared(sampling_turn)
    return BlockSampler(rules, resources.topology, workers, memory, turn, resources.trace)


def row_cost(resources: StoreResources, buffers: Sequence[NDArray[np.uint8]]) -> DeviceCost:
    """What reading rows costs, measured through these buffers."""
    first = resources.rows.first_file
    files = range(first, first + len(served_rows(resources.store.manifest)))
    return resources.gauge.cost(files, buffers)


class _FirstBatches(NamedTuple):
    """Batches that a session wants first, as they were sampled to size it."""

    sampled: list[Sampled]
    slots: range  # adjacent ones of the session that begin with them
    used: int  # bytes


class LookAhead(Closing):
    """Sizes a session by sampling some of its batches.

    Meanwhile free slots are lent to the graph, until `close`, at the latest at the end of a `with`.
    """

    def __init__(self, resources: StoreResources, draft: SessionDraft) -> None:
        self._resources, self._draft = resources, draft
        self._loan = contextlib.ExitStack()
        self._first: _FirstBatches | None = None
        # whether batches are sampled hop by hop over blocks
        self._together = resources.broker.graph_preferred < resources.budget.graph_blocks

    def close(self) -> None:
        self._loan.close()

    def sizing(
        self, asked: int, kept: Sequence[NDArray[np.bool_]] = (), alike: int = 1
    ) -> HyperSizing | None:
        """Size a session of hyperbatches, and take its small workspaces; None: no room.

        asked   minibatches of a hyperbatch, 0: as many as fit
        kept    for each node type: which of its regions stay for other sessions; (): none
        alike   sessions that keep regions for one another, this one included, and those to come
        """
        resources, draft = self._resources, self._draft
        cache, plan = resources.shared(_seen_cache), draft.spec.plan
        seen = cache.find(plan) or self._sample()
        if seen is None:
            return None
        cache.keep(plan, seen)
        estimate = self._estimate(seen)._replace(alike=alike)
        if kept:
            estimate = estimate._replace(kept=np.concatenate(kept))
        # One worker has the large workspace.  Batches whose rows are not cached hold one while they
        # are handed out: then one more is added.
        for more in (max(0, resources.settings.workers - 2), 1):
            try:
                self._add_small_workspaces(seen.structures, more, alike)
            except Refused:
                return None
            sizing = self._size(estimate, asked)
            if sizing is None or sizing.shares:
                break
        return sizing

    def _size(self, estimate: Estimate, asked: int) -> HyperSizing | None:
        resources, draft = self._resources, self._draft
        share, settings = resources.settings.session_share, resources.settings
        room = int(self._share(estimate.alike) * share)
        estimate = estimate._replace(first_area=self._first_slots * resources.budget.slot_bytes)
        if estimate.alike > 1:
            with resources.broker.for_others():
                pooled = resources.broker.row_slots(self._paid(estimate.alike)) + self._first_slots
            estimate = estimate._replace(beyond=max(0, int(pooled * share) - room))
        return size_hyperbatches(
            room, resources.rows._replace(served=draft.served), draft.need, estimate,
            settings.readers, draft.sizing.window, asked,
        )  # fmt: skip

    def _share(self, alike: int) -> int:
        """Slots for the session, beside those that it has: the same for all that are alike.

        For several, that is a half, a quarter, ... of the row pool, as `StreamRegistry.fair_share`,
        with its part of what stays already.
        """
        resources, draft, broker = self._resources, self._draft, self._resources.broker
        if alike == 1:
            return broker.row_slots() + self._first_slots
        own = len(draft.allocation) - self._first_slots
        if draft.sizes.table is TableKind.SHARED:
            own += resources.shared_tables().share(alike)
        pooled = broker.num_slots - broker.graph_preferred
        fair = (pooled >> (alike - 1).bit_length()) - own
        return max(0, min(broker.row_slots(self._paid(alike)) + self._first_slots, fair))

    @property
    def _first_slots(self) -> int:
        """Slots with the first batches, which become a part of the session's areas."""
        return 0 if self._first is None else len(self._first.slots)

    def forget(self) -> None:
        """Give back the memory of the first batches, if there are any."""
        first, self._first = self._first, None
        if first is not None:
            self._draft.allocation.give(first.slots)

    def take_areas(self, number: int, size: int) -> tuple[list[StructureArea], list[Sampled]]:
        """Take so many areas of `size` slots; if the last one has the first batches, these, too.

        Raises Refused: the arena's free slots lie too far apart.
        """
        allocation, first = self._draft.allocation, self._first
        found, slots, batches = list[StructureArea](), range(0), list[Sampled]()
        if first is not None and len(first.slots) <= size:
            slots = allocation.extend(first.slots, size)
        if first is not None and len(slots) == size:
            self._first = None
            found = [StructureArea(allocation.memory(slots), first.used)]
            batches = [sampled._replace(area=found[0]) for sampled in first.sampled]
        self.forget()
        while len(found) < number:
            found.insert(0, StructureArea(allocation.run(size, SHORT_WAIT_S)))
        return found, batches

    def begin(self, memory: SamplingMemory, first: Sequence[Sampled], size: int) -> SamplingMemory:
        """Begin the hyperbatches of `size` after the first batches, if the graph is in memory now.

        Else the first of these makes a pass over the graph for each hop.  Returns the memory with
        those that are begun.
        """
        if not first or self._resources.broker.graph_missing:
            return memory
        room = self._resources.allocation()
        try:
            with self._workers(room) as workers:
                sampler = block_sampler(self._resources, self._draft.spec, workers, memory)
                return sampler.begin([sampled.unit for sampled in first], size)
        finally:
            room.free()

    def _paid(self, alike: int) -> int:
        """Its part of the slots of rows that stay already."""
        return self._draft.staying // alike

    def _sample(self) -> Seen | None:
        """Sample some minibatches; None: there is no room.

        If they are those that the session begins with, they are kept for it.
        """
        resources, spec, broker = self._resources, self._draft.spec, self._resources.broker
        begun, allocation = concurrency.monotonic(), self._draft.allocation
        quarter = broker.row_slots() // 4
        size = quarter
        if self._together:  # the smaller it is, the more of the graph is read only once
            size = min(2 * quarter, max(quarter, _BATCHES * self._draft.need.structure))
        try:
            # at the bottom, where what is kept does not divide the slots that are free afterwards
            slots = allocation.adjacent(size, SHORT_WAIT_S, low=True)
        except Refused:
            return None
        used = 0  # slots with batches to keep
        memory = allocation.memory(slots)
        area = StructureArea(memory)
        try:
            found = self._sample_into(area, quarter)
            if not found:
                return None
            seen = self._seen(found)
            taken = -(-area.used // resources.budget.slot_bytes)
            self._measure(memory[taken * resources.budget.slot_bytes :])
            # areas of batches that are sampled one by one hold few of them
            whole = self._together and spec.plan.resolved.shuffle
            if whole and taken <= len(slots) // _USED_PART:
                used = taken
                self._first = _FirstBatches(found, slots[:used], area.used)
            seconds = round(concurrency.monotonic() - begun, 2)
            log_event(log, logging.INFO, "looked ahead", batches=len(found), seconds=seconds)
            return seen
        except Refused:
            return None
        finally:
            allocation.give(slots[used:])

    def _sample_into(self, area: StructureArea, scratch: int) -> list[Sampled]:
        """Sample; block by block that takes so many slots of scratch.  Raises Refused."""
        room = self._resources.allocation()
        try:
            pieces = [StructureArea(room.run(scratch, SHORT_WAIT_S))] if self._together else []
            with self._workers(room) as workers:
                if self._together:
                    self._loan.enter_context(self._resources.broker.lent_to_graph())
                return self._sampler(pieces, workers).sample(self._units(), 0, area, lambda: False)
        finally:
            room.free()

    def _units(self) -> list[Unit]:
        """The batches that are sampled: the first ones of an epoch.

        Seeds that are not shuffled change as the epoch goes on: then some of all its batches.
        """
        plan = self._draft.spec.plan
        every = 1 if plan.resolved.shuffle else max(1, plan.num_steps // _BATCHES)
        steps = range(0, plan.num_steps, every)
        return [plan.unit(0, step) for step in steps[:_BATCHES]]

    def _measure(self, memory: NDArray[np.uint8]) -> None:
        """Measure what reading rows costs, through memory that is not in use."""
        readers = self._resources.settings.readers
        each = min(RUN_BYTES, memory.size // readers) // PAGE_BYTES * PAGE_BYTES
        if each:
            row_cost(self._resources, np.split(memory[: readers * each], readers))

    def _seen(self, found: list[Sampled]) -> Seen:
        types = rows_by_type(self._draft.served)
        sets = [np.zeros(t.num_nodes // 64 + 1, np.uint64) for t in types]
        counts = [np.zeros(region_rows(t).size, np.int64) for t in types]
        curve = list[NDArray[np.int64]]()
        for number, sampled in enumerate(found, 1):
            for nodes in sampled.items:
                for t, known, count in zip(types, sets, counts, strict=True):
                    count_new(
                        nodes, nodes.size, t.first, t.num_nodes, known, region_shift(t), count
                    )
            if number.bit_count() == 1:
                curve.append(np.concatenate([np.empty(0, np.int64), *counts]))
        structures = [sampled.structure for sampled in found]
        area_bytes = -(-sum(sampled.num_bytes for sampled in found) // len(found))
        return Seen(structures, area_bytes, tuple(curve))

    @contextlib.contextmanager
    def _workers(self, room: Allocation) -> Iterator[SessionWorkers]:
        """As many threads as there are workers, if a workspace for each has room, too.

        The worker pool may be busy with other sessions' batches all the time, and an attach that
        waits for it keeps all others waiting.
        """
        draft, workspaces = self._draft, Workspaces()
        workspaces.add(first := draft.workspaces.take())
        need = WorkspaceNeed(draft.spec.plan.shape(), self._resources.settings.workers - 1, 0)
        sizes = draft.sizes
        if sizes.table is TableKind.SHARED:  # for a moment: more tables would stay for good
            sizes = sizes._replace(table=TableKind.HASHED)
        try:
            with contextlib.suppress(Refused):
                add_workspaces(self._resources, room, workspaces, sizes, need, 0.0)
            with concurrency.ThreadPoolExecutor(workspaces.total, "look-ahead") as threads:
                yield SessionWorkers(workspaces, threads.submit, lambda: None)
        finally:
            draft.workspaces.give(first)

    def _sampler(self, scratch: list[StructureArea], workers: SessionWorkers) -> StructureSampler:
        resources, spec = self._resources, self._draft.spec
        if self._together:
            return block_sampler(resources, spec, workers, SamplingMemory(scratch[0]))
        return BatchSampler(lambda u, w: resources.builder.structure(spec, u, w), workers)

    def _add_small_workspaces(self, seen: Sequence[Structure], number: int, alike: int) -> None:
        """Add workspaces beside the large one, in a quarter of the share.  Raises Refused."""
        resources, draft = self._resources, self._draft
        worst = draft.spec.plan.shape()
        # what is sampled by blocks is drawn into the scratch
        fanouts = None if self._together else draft.spec.plan.resolved.fanouts
        shape = usual_shape(seen, worst, fanouts)
        large, small = (workspace_bytes(s, draft.sizes) for s in (worst, shape))
        is_small = small < large * 3 // 4
        room = self._share(alike) // 4 * resources.budget.slot_bytes
        number = min(number, max(1, room // (small if is_small else large)))
        need = WorkspaceNeed(shape if is_small else worst, number, draft.sizing.transit, is_small)
        while True:
            try:
                add_workspaces(
                    resources, draft.allocation, draft.workspaces, draft.sizes, need, SHORT_WAIT_S
                )
                return
            except Refused:
                if not self._first_slots:
                    raise
                self.forget()  # rather sample the first batches again

    def _estimate(self, found: Seen) -> Estimate:
        plan, seen = self._draft.spec.plan, found.structures
        shape, builder = plan.shape(), self._resources.builder
        worst = Structure(
            (*shape.frontier, 0), shape.edges, shape.nodes, shape.total_edges, shape.frontier,
            shape.seeds, shape.ends,
        )  # fmt: skip
        return Estimate(
            plan.num_steps,
            max(builder.structure_bytes(s, plan.unit(0, 0), self._draft.spec) for s in seen),
            found.area_bytes,
            max(s.num_nodes + s.num_edges * (self._draft.spec.record.items > 0) for s in seen),
            # areas have no owners: they are added when a batch is handed out
            structure_bytes(shape, self._draft.sizes._replace(owner_bytes=0)),
            found.wanted,
            self._passes(seen, worst) if self._together else None,
        )

    def _passes(self, seen: Sequence[Structure], worst: Structure) -> PassEstimate:
        """Estimate what sampling by passes over the graph takes."""
        resources, record = self._resources, 4 * self._draft.spec.record.size
        manifest = resources.store.manifest
        blocks = max(r.num_blocks for r in manifest.relations)
        ids = ITEM_BYTES[manifest.id_dtype]
        absent = resources.budget.graph_blocks - resources.broker.graph_preferred
        scratch = [scratch_bytes(s, blocks, ids, record) for s in seen]
        return PassEstimate(
            max(map(sum, scratch)),
            max(map(max, scratch)),
            max(scratch_bytes(worst, blocks, ids, record)),
            max(begun_bytes(s, ids, record) for s in seen),
            len(worst.frontiers) - 1,
            absent * resources.budget.slot_bytes,
        )
