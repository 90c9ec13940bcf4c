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
from blockstore.format import ITEM_BYTES, PAGE_BYTES
from blockstore.kernels.rowcache import count_new
from loaderd.api.errors import Refused
from loaderd.memory.ledger import ServedRows, SessionNeed, served_rows, structure_bytes
from loaderd.memory.slots import SHORT_WAIT_S
from loaderd.memory.workspace import Sizes, TableKind, workspace_bytes
from loaderd.monitoring.devicecost import RUN_BYTES, DeviceCost
from loaderd.monitoring.logs import log_event
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.hyperbatch.regions import region_rows, region_shift, rows_by_type
from loaderd.sampling.hyperbatch.session import (
    Sampled,
    SamplingMemory,
    StructureArea,
    StructureSampler,
)
from loaderd.sampling.hyperbatch.single import BatchSampler, SessionWorkers, Workspaces, usual_shape
from loaderd.sampling.hyperbatch.sizing import (
    Estimate,
    HyperSizing,
    PassEstimate,
    size_hyperbatches,
)
from loaderd.sampling.hyperbatch.together import BatchRules, BlockSampler
from loaderd.sampling.hyperbatch.unfinished import begun_bytes, scratch_bytes
from loaderd.sampling.structure import Structure
from loaderd.sessions.base import Allocation, StoreResources
from loaderd.sessions.build import BatchSpec
from loaderd.sessions.sizing import SessionSizing, WorkspaceNeed, add_workspaces

log = logging.getLogger(__name__)

_BATCHES = 16
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


class LookAhead:
    """Sizes a session by sampling some of its batches."""

    def __init__(self, resources: StoreResources, draft: SessionDraft) -> None:
        self._resources, self._draft = resources, draft
        # whether batches are sampled hop by hop over blocks
        self._together = resources.broker.graph_preferred < resources.budget.graph_blocks

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
                self._add_small_workspaces(seen.structures, more, self._share(alike) // 4)
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
        if estimate.alike > 1:
            with resources.broker.for_others():
                pooled = resources.broker.row_slots(self._paid(estimate.alike))
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
            return broker.row_slots()
        own = len(draft.allocation)
        if draft.sizes.table is TableKind.SHARED:
            own += resources.shared_tables().share(alike)
        pooled = broker.num_slots - broker.graph_preferred
        fair = (pooled >> (alike - 1).bit_length()) - own
        return max(0, min(broker.row_slots(self._paid(alike)), fair))

    def _paid(self, alike: int) -> int:
        """Its part of the slots of rows that stay already."""
        return self._draft.staying // alike

    def _sample(self) -> Seen | None:
        """Sample some minibatches, in memory that is given back; None: there is no room."""
        resources, spec, broker = self._resources, self._draft.spec, self._resources.broker
        # over the whole epoch: seeds that are not shuffled change as it goes on
        every = max(1, spec.plan.num_steps // _BATCHES)
        units = [spec.plan.unit(0, step) for step in range(0, spec.plan.num_steps, every)]
        units = units[:_BATCHES]
        begun = concurrency.monotonic()
        parts = [broker.row_slots() // 4 * (1 + self._together), broker.row_slots() // 4]
        try:
            with resources.allocation() as room:
                try:
                    memory = [room.run(n, SHORT_WAIT_S) for n in parts[: 1 + self._together]]
                    areas = [StructureArea(piece) for piece in memory]
                    with self._workers(room) as workers:
                        sampler = self._sampler(areas[1:], workers)
                        found = sampler.sample(units, 0, areas[0], lambda: False)
                    if not found:
                        return None
                    seen = self._seen(found, areas[0].used)
                    self._measure(memory[0])
                    seconds = round(concurrency.monotonic() - begun, 2)
                    log_event(
                        log, logging.INFO, "looked ahead", batches=len(found), seconds=seconds
                    )
                    return seen
                finally:
                    room.free()
        except Refused:
            return None

    def _measure(self, memory: NDArray[np.uint8]) -> None:
        """Measure what reading rows costs, through memory that is not in use."""
        readers = self._resources.settings.readers
        each = min(RUN_BYTES, memory.size // readers) // PAGE_BYTES * PAGE_BYTES
        if each:
            row_cost(self._resources, np.split(memory[: readers * each], readers))

    def _seen(self, found: list[Sampled], used: int) -> Seen:
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
        return Seen(structures, -(-used // len(found)), tuple(curve))

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
                yield SessionWorkers(workspaces, threads.submit, lambda: None, spare=0)
        finally:
            draft.workspaces.give(first)

    def _sampler(self, scratch: list[StructureArea], workers: SessionWorkers) -> StructureSampler:
        resources, spec = self._resources, self._draft.spec
        if self._together:
            return block_sampler(resources, spec, workers, SamplingMemory(scratch[0]))
        return BatchSampler(lambda u, w: resources.builder.structure(spec, u, w), workers)

    def _add_small_workspaces(self, seen: Sequence[Structure], number: int, room: int) -> None:
        """Add workspaces beside the large one, as many as `room` slots hold.  Raises Refused."""
        resources, draft = self._resources, self._draft
        worst = draft.spec.plan.shape()
        shape = usual_shape(seen, worst, draft.spec.plan.resolved.fanouts)
        large, small = (workspace_bytes(s, draft.sizes) for s in (worst, shape))
        is_small = small < large * 3 // 4
        room *= resources.budget.slot_bytes
        number = min(number, max(1, room // (small if is_small else large)))
        chosen = shape if is_small else worst
        add_workspaces(
            resources, draft.allocation, draft.workspaces, draft.sizes,
            WorkspaceNeed(chosen, number, draft.sizing.transit, is_small), SHORT_WAIT_S,
        )  # fmt: skip

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
