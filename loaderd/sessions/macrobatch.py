"""Macro-batches: a few partitions are loaded at a time, and minibatches sampled inside them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from blockstore import concurrency
from blockstore.format import NodeType, row_geometry
from blockstore.kernels.rows import NO_ROW
from loaderd.api.errors import Refused
from loaderd.api.protocol import MacroBatch, Skipped
from loaderd.memory.ledger import EdgeItems, ServedRows, SessionNeed, served_rows
from loaderd.memory.slots import SHORT_WAIT_S
from loaderd.memory.workspace import Carver, Sizes
from loaderd.monitoring.trace import READ_MACRO, SERVE_MACRO, STAGE
from loaderd.plans.base import Unit, Wanted
from loaderd.plans.macrobatch import MacrobatchPlan, SeedGroups
from loaderd.sampling.macrobatch.files import MacroFiles
from loaderd.sampling.macrobatch.graph import MacroGraph, MacroShared, carve_macro
from loaderd.sampling.macrobatch.loader import Key, MacroLoader, MacroMemory, Span
from loaderd.sampling.macrobatch.sizing import MacroSizing, size_macrobatches
from loaderd.sampling.rows import Addressed, nothing_missing
from loaderd.sampling.structure import Structure
from loaderd.sessions.base import Allocation, Kind, SessionRequest, StoreResources
from loaderd.sessions.build import BatchInProgress, BatchSpec, sample_from
from loaderd.sessions.resolve import seed_type
from loaderd.sessions.sampled import SampledSession
from loaderd.sessions.sizing import (
    SMALLER,
    BatchMemory,
    ResolvedRequest,
    SessionSizing,
    ask,
    check_room,
    choose_need,
    explained_shortage,
    min_slots,
    minimum_of,
    needs_of,
    resolve_sampled,
    size_minibatches,
    take_memory,
    take_seeds,
)

_RANKS_HERE = 8  # ranks of a job that room is left for; others are assumed elsewhere


class Partitions(NamedTuple):
    """The seeds, memory and sizes of a session's macro-batches."""

    groups: SeedGroups
    memories: list[MacroMemory]
    sizing: MacroSizing


class MacrobatchSession(SampledSession):
    """Batches that are sampled inside the macro-batches that a thread of the session reads."""

    _has_threads, _from_pool = True, False

    def __init__(
        self,
        resources: StoreResources,
        number: int,
        spec: BatchSpec,
        served: list[ServedRows],
        memory: BatchMemory,
        partitions: Partitions,
    ) -> None:
        assert isinstance(spec.plan, MacrobatchPlan)
        self._macro_plan = spec.plan
        self._groups, memories, self._sizing = partitions
        super().__init__(resources, number, spec, served, memory)
        self._node_rows = len(_rows_of(served, NodeType))  # they come before those of edges
        self._nothing_missing = nothing_missing(served)
        self._in: dict[tuple[int, int], MacroMemory] = {}  # run and step -> its macro-batch
        self._needed: Key | None = None  # of the batch that could not begin
        self._waiting_since = 0  # ns; for what is needed first
        self._loader = MacroLoader(self._macro_plan, memories, self._lock, self)

    def macro_read(self, served: Span, read: Span) -> None:
        for stage, span in ((SERVE_MACRO, served), (READ_MACRO, read)):
            if self._resources.trace is not None and span[0]:
                self._resources.trace.write(STAGE, 0, stage, np.array(span))
        self.wake()

    # -- which macro-batch is needed --------------------------------------------------------------

    @property
    def _macro(self) -> MacroBatch:
        macro = self._macro_plan.resolved.macro
        assert macro is not None
        return macro

    def _begin(self) -> None:
        self._loader.begin()
        self._waiting_since = 0

    def _want(self, epoch: int, macro: int) -> None:
        wanted = [
            (e, int(m))
            for e in (epoch, epoch + 1)
            for m in np.flatnonzero(self._macro_plan.epoch_layout(e).steps)
        ]
        self._loader.want([key for key in wanted if key >= (epoch, macro)])

    def _next_wanted(self) -> Wanted | None:
        self._needed = None
        while (wanted := super()._next_wanted()) is not None and self._skips_passes(wanted):
            pass
        return wanted

    def _skips_passes(self, wanted: Wanted) -> bool:
        """Whether passes over a macro-batch are left out here; the consumer is told.

        No further pass begins if the session need not wait for the next macro-batch.
        """
        if not self._macro.waiting:
            return False
        unit = self._plan.unit(wanted.epoch, wanted.step)
        if unit.cycle == 0:
            return False
        layout = self._macro_plan.epoch_layout(unit.epoch)
        first, steps = int(layout.first_step[unit.macro]), int(layout.steps[unit.macro])
        ready = self._loader.is_next_ready((unit.epoch, unit.macro))
        if (unit.step - first) % steps or not ready:
            return False
        to = int(layout.first_step[unit.macro + 1])
        self._deliver(Skipped(session=self.number, run=wanted.run, step=unit.step, to=to))
        return True

    def _acquire(self, run: int, unit: Unit) -> bool:
        """Hold the macro-batch of a unit until its batch is gone; False: it is not there yet."""
        key: Key = (unit.epoch, unit.macro)
        self._want(*key)
        memory, now = self._loader.acquire(key), concurrency.perf_counter_ns()
        if memory is None:
            self._needed, self._waiting_since = key, self._waiting_since or now
            return False
        if self._waiting_since:
            self._loader.counters["macro_wait_ns"] += now - self._waiting_since
            self._waiting_since = 0
        self._in[run, unit.step] = memory
        # a trainer between two epochs asks for nothing: have the next macro-batch read meanwhile
        end = self._macro_plan.epoch_layout(unit.epoch).first_step[unit.macro + 1]
        if unit.step + 1 == end * self._plan.together:
            self._want(unit.epoch, unit.macro + 1)
        return True

    def _gone(self, job: BatchInProgress) -> None:
        self._loader.release(self._in.pop((job.run, job.unit.step)))

    # -- batches inside it ------------------------------------------------------------------------

    def _graph(self, job: BatchInProgress) -> MacroGraph:
        with self._lock:
            return self._in[job.run, job.unit.step].graph

    def _structure(self, job: BatchInProgress) -> Structure:
        unit, spec = job.unit, self._spec
        roots = self._groups.roots(self._macro_plan, unit, spec.seeds)
        return sample_from(self._graph(job), spec.plan, unit, job.workspace, roots)

    def _address(self, job: BatchInProgress) -> Addressed:
        work, graph = job.workspace, self._graph(job)
        assert job.structure is not None
        num_nodes = job.structure.num_nodes
        for a, addresses in enumerate(work.addresses[: self._node_rows]):
            graph.address(work.n_id[:num_nodes], a, addresses)
            addresses[num_nodes : job.num_items] = NO_ROW  # of edges
        if self._node_rows == len(work.addresses):
            return self._nothing_missing
        return super()._address(job)

    # -- the rest of what `SampledSession` asks ---------------------------------------------------

    def waits(self) -> bool:
        with self._lock:
            needed = self._needed
            held_up = needed is not None and self._loader.is_held_up(needed)
            return self._state.waits or held_up

    def _stop(self) -> None:
        self._loader.stop()

    def _end_threads(self) -> None:
        self._loader.join()

    def _own_counters(self) -> dict[str, int]:
        return self._loader.counters

    def _own_basis(self) -> str:
        return self._sizing.basis()


# -- opening --------------------------------------------------------------------------------------


def partition_files(resources: StoreResources) -> MacroFiles:
    """Locations of a store's partitions, read once for all sessions.  Raises CorruptBlock."""
    served = served_rows(resources.store.manifest)
    return MacroFiles(resources.store, served, resources.first_copied)


class _MacroSize(NamedTuple):
    """What a session needs and gets."""

    need: SessionNeed
    sizes: Sizes
    sizing: SessionSizing
    macro: MacroSizing


def open_macrobatches(resources: StoreResources, opening: SessionRequest) -> MacrobatchSession:
    """A session of macro-batches.  Raises Refused, StoreError: a corrupt block."""
    asked = ask(resources, opening, MacrobatchPlan.name)
    files = resources.shared(partition_files)
    nodes = _rows_of(asked.served, NodeType)
    sized = _size(resources, asked, files)
    minimum = sized.need.minimum + sized.macro.minimum
    with explained_shortage(resources, minimum), resources.allocation() as allocation:
        spec = take_seeds(resources, allocation, asked, sized.need, sized.sizes)
        node_type = seed_type(resources.store.manifest, opening.request)
        groups = SeedGroups(
            spec.seeds, files.offsets[files.type_of[node_type.name]],
            allocation.run(sized.macro.places).view(np.int64)[: spec.seeds.size],
        )  # fmt: skip
        assert isinstance(spec.plan, MacrobatchPlan)
        spec = spec._replace(plan=spec.plan.placed(groups.counts))
        memories = _take_memories(resources, allocation, nodes, files, sized.macro)
        memory = take_memory(resources, allocation, spec.plan, sized.sizes, sized.sizing)
        macro = sized.macro._replace(memories=len(memories))
        partitions = Partitions(groups, memories, macro)
        return MacrobatchSession(resources, opening.number, spec, asked.served, memory, partitions)


def _rows_of(
    served: Sequence[ServedRows], owner: type[NodeType] | type[EdgeItems]
) -> list[ServedRows]:
    return [rows for rows in served if isinstance(rows.node_type, owner)]


def _size(resources: StoreResources, asked: ResolvedRequest, files: MacroFiles) -> _MacroSize:
    """Divide the available slots for a session.

    Raises Refused, which names the least that would do.
    """
    settings, resolved = resources.settings, asked.plan.resolved
    needs, available = needs_of(resources, asked), resources.broker.available()
    minimum, ranks = minimum_of(needs), min(asked.plan.together, _RANKS_HERE)
    macro = size_macrobatches(
        resources.store.manifest, files, _rows_of(asked.served, NodeType), resolved, settings,
        resources.budget.slot_bytes, available - ranks * minimum,
    )  # fmt: skip
    less = SMALLER
    if resolved.macro is not None:
        few = resolved.macro.partitions == 1
        less = "a store of more partitions" if few else "fewer macro_partitions"
    check_room(resources, minimum + macro.minimum, available, less)
    available = max(minimum, (available - macro.slots) // ranks)  # other ranks' batches come later
    need, sizes, available = choose_need(resources, asked, needs, available)
    # only rows of edges pass through: rows of nodes are in the macro-batch
    block_bytes = resources.store.manifest.block_bytes
    row_blocks = sum(
        row_geometry(r.array, block_bytes).num_blocks for r in _rows_of(asked.served, EdgeItems)
    )
    window = asked.window(settings)
    sizing = size_minibatches(need, available, available, row_blocks, settings, window)
    return _MacroSize(need, sizes, sizing, macro)


def _take_memories(
    resources: StoreResources,
    allocation: Allocation,
    served: Sequence[ServedRows],
    files: MacroFiles,
    sizing: MacroSizing,
) -> list[MacroMemory]:
    """Take memory for macro-batches, and read what they share: hubs, tables of slots.

    Raises Refused, CorruptBlock, OSError.
    """
    transit = [allocation.run(sizing.run) for _ in range(sizing.transit)]
    shared = MacroShared(
        resources.store, files, resources.rows._replace(served=served), transit,
        allocation.run(sizing.tables), allocation.run(sizing.hubs), sizing.choice,
    )  # fmt: skip
    runs = [allocation.run(sizing.macro)]
    # One macro-batch is enough; the next is read ahead if there is room for it.  The free slots may
    # lie too far apart for that, because another store has those between them.
    with suppress(Refused):
        while len(runs) < sizing.memories:
            runs.append(allocation.run(sizing.macro, SHORT_WAIT_S))
    manifest = resources.store.manifest
    return [
        MacroMemory(
            MacroGraph(
                shared, carve_macro(Carver(run), manifest, served, sizing.bounds, sizing.choice)
            )
        )
        for run in runs
    ]


MACROBATCH = Kind(resolve_sampled, min_slots, open_macrobatches, every_rank=True)
