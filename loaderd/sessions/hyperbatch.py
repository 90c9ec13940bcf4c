"""Hyperbatches: the batches of `minibatch`, sampled many at a time, their rows in a cache.

Two threads of the session (`loaderd.sampling.hyperbatch.session`) sample batches into areas and
bring in their rows; workers hand each batch over when its turn comes.  If there is no room for
that, or no use for it, plain minibatches serve instead: the batches are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from blockstore import concurrency
from loaderd.api.errors import Refused
from loaderd.api.protocol import BatchReady, RowGroup
from loaderd.memory.blob import Written, made
from loaderd.memory.ledger import ServedRows, SessionNeed
from loaderd.memory.slots import SHORT_WAIT_S
from loaderd.memory.workspace import Sizes, Workspace
from loaderd.monitoring.trace import STAGE
from loaderd.plans.base import Unit, Wanted
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.failures import error_text
from loaderd.sampling.hyperbatch.areas import Sampled
from loaderd.sampling.hyperbatch.compact import expand
from loaderd.sampling.hyperbatch.regions import StayingMember, StayingRegions
from loaderd.sampling.hyperbatch.rowcache import RowCache
from loaderd.sampling.hyperbatch.session import Hyper, HyperMemory, StructureSampler
from loaderd.sampling.hyperbatch.single import BatchSampler, SessionWorkers, Workspaces
from loaderd.sampling.hyperbatch.sizing import HyperSizing, SamplingSlots
from loaderd.sampling.hyperbatch.unfinished import SamplingMemory
from loaderd.sampling.rows import nothing_missing
from loaderd.sampling.structure import Structure
from loaderd.sessions.base import Allocation, Kind, SessionRequest, StoreResources
from loaderd.sessions.build import BatchInProgress, BatchSpec, Placement
from loaderd.sessions.lookahead import LookAhead, SessionDraft, block_sampler, row_cost
from loaderd.sessions.resolve import make_plan
from loaderd.sessions.sampled import SampledSession, open_session
from loaderd.sessions.sizing import (
    BatchMemory,
    ResolvedRequest,
    WorkspaceNeed,
    add_workspaces,
    ask,
    check_possible,
    explained_shortage,
    fit,
    min_slots,
    resolve_sampled,
    size_minibatches,
    size_workspaces,
    take_memory,
    take_seeds,
)

_FILL = 2  # of `loaderd.monitoring.trace.STAGES`


@dataclass(slots=True, eq=False, kw_only=True)
class _SampledBatch(BatchInProgress):
    """A batch that was sampled before its turn came."""

    sampled: Sampled  # its structure, until the batch is built
    cached: bool  # the row cache has its rows
    handed_out: bool = False  # what was sampled is not needed any more


class HyperbatchSession(SampledSession):
    """Batches that two threads of the session sample and bring in ahead of their turn."""

    _has_threads, _from_pool = True, False

    def __init__(
        self,
        resources: StoreResources,
        number: int,
        spec: BatchSpec,
        served: list[ServedRows],
        memory: BatchMemory,
        hyper: HyperMemory,
        staying: StayingMember | None = None,
    ) -> None:
        super().__init__(resources, number, spec, served, memory)
        self._sizing, self._cache, self._staying = hyper.sizing, hyper.cache, staying
        self._nothing_missing = nothing_missing(served)
        sampler = self._make_sampler(hyper)
        self._hyper = Hyper(spec.plan, sampler, hyper, self, resources.trace)

    def _make_sampler(self, hyper: HyperMemory) -> StructureSampler:
        resources, spec = self._resources, self._spec
        workers = SessionWorkers(self._memory.workspaces, resources.workers.later, super().wake)
        if hyper.sampling is None:  # the graph is in memory: blocks gain nothing
            return BatchSampler(self._sample_alone, workers)
        return block_sampler(resources, spec, workers, hyper.sampling)

    def _sample_alone(self, unit: Unit, work: Workspace) -> Structure:
        begun = concurrency.perf_counter_ns()
        structure = self._resources.builder.structure(self._spec, unit, work)
        took = concurrency.perf_counter_ns() - begun
        with self._lock:
            self._counters["sample_ns"] += took
        return structure

    # -- from its threads -------------------------------------------------------------------------

    def ask(self, run: int, count: int) -> list[Wanted]:
        """The batches wanted next, at most `count`; none if `run` has ended."""
        found = list[Wanted]()
        with self._lock:
            if self._state.run == run and not self._resources.draining.is_set():
                while len(found) < count and (wanted := self._next_wanted()) is not None:
                    found.append(wanted)
        return found

    def admit(self, run: int, batches: Sequence[Sampled], cached: bool) -> bool:
        """Queue sampled batches to be handed out in order; False: their run has ended."""
        with self._lock:
            if self._closed or self._state.run != run:
                return False
            for sampled in batches:
                structure = sampled.structure
                job = _SampledBatch(
                    sampled.run, sampled.unit, None, structure=structure, sampled=sampled,
                    cached=cached,
                )  # fmt: skip
                job.addressed = self._nothing_missing
                job.num_items = sum(piece.size for piece in sampled.items)
                job.structure_bytes = self._resources.builder.structure_bytes(
                    structure, sampled.unit, self._spec
                )
                self._state.admit(job)
            self._pump()
        return True

    def failed(self, run: int, wanted: Wanted, error: BaseException) -> None:
        with self._lock:
            if not self._closed and self._state.run == run:
                self._fail(wanted, error_text(error))

    # -- what `SampledSession` asks ---------------------------------------------------------------

    def _begin(self) -> None:
        self._hyper.begin(self._state.run)

    def wake(self) -> None:
        self._hyper.wake()

    def _start_batches(self) -> None:
        """Do nothing: the session's own threads begin batches."""

    def _may_place(self, job: BatchInProgress) -> bool:
        assert isinstance(job, _SampledBatch)
        if job.cached or job.work is not None:
            return True
        job.work = self._memory.workspaces.try_take(job.structure)
        if job.work is not None:  # its rows are to be found first
            job.busy = True
            self._submit(job, lambda: self._sample(job))
        return False

    def _structure(self, job: BatchInProgress) -> Structure:
        assert isinstance(job, _SampledBatch)
        expand(job.sampled, job.workspace)
        return job.sampled.structure

    def _write(
        self, job: BatchInProgress, placement: Placement
    ) -> tuple[BatchReady | RowGroup, int]:
        assert isinstance(job, _SampledBatch)
        if not job.cached or self._cache is None:
            return super()._write(job, placement)
        rows = [
            (f"address:{served.name}", self._addresses(job.sampled, a))
            for a, served in enumerate(self._served)
        ]
        builder, arrays = self._resources.builder, job.sampled.arrays
        return builder.write(self.number, job, placement, self._spec, arrays, rows), 0

    def _addresses(self, sampled: Sampled, served: int) -> Written:
        """Addresses of the rows of a served array, for a batch whose rows are in the cache."""
        cache = self._cache
        assert isinstance(cache, RowCache)
        return made(sampled.items, np.uint64, partial(cache.address, served))

    def _note_filled(self, job: BatchInProgress, begun: int, ended: int) -> None:
        if self._resources.trace is not None:
            self._resources.trace.write(STAGE, job.run, _FILL, np.array([begun, ended]))

    def _built(self, job: BatchInProgress) -> None:
        assert isinstance(job, _SampledBatch)
        if not job.handed_out:
            job.handed_out = True
            self._hyper.handed_out(job.sampled)

    def _released(self, job: BatchInProgress) -> None:
        assert isinstance(job, _SampledBatch)
        self._hyper.released(job.run, job.sampled.batch)

    def waits(self) -> bool:
        with self._lock:
            return self._state.waits or self._hyper.waits

    def _taken(self) -> int:
        return super()._taken() + (0 if self._staying is None else self._staying.num_slots)

    def _free(self) -> None:
        super()._free()
        if self._staying is not None:
            _leave(self._resources, self._staying)

    def _stop(self) -> None:
        self._hyper.stop()

    def _end_threads(self) -> None:
        self._hyper.close()
        if isinstance(self._cache, RowCache):
            self._cache.end()

    def _own_counters(self) -> dict[str, int]:
        rows = self._cache
        if rows is None:
            return self._hyper.counters
        return self._hyper.counters | {
            "hyper_rows_wanted": rows.rows_wanted,  # counted for each batch
            "hyper_rows_read": rows.rows_read,
            "hyper_stay_rows": rows.stay_rows,  # of regions that stay
            "hyper_stay_read": rows.stay_read,  # of these, in memory by now
            "hyper_pages_read": rows.pages_read,  # of all arrays, 4 KiB each
            "hyper_runs_read": rows.runs_read,  # of pages, in one call each
        }

    def _own_basis(self) -> str:
        sizing = self._sizing
        return (
            f"; hyperbatches of {sizing.size}: {sizing.areas} x {sizing.area} slots of structure, "
            f"{sizing.sampling.slots} of scratch, {self._staying_text()}{sizing.rows} slots for "
            f"{sum(share.entries for share in sizing.shares):,} rows that pass, "
            f"{sizing.tables} of tables"
        )

    def _staying_text(self) -> str:
        if self._staying is None or not isinstance(self._cache, RowCache):
            return ""
        return (
            f"{self._staying.num_slots} slots of rows that stay for all sessions of these "
            f"({self._cache.stay_rows:,} in all), "
        )


# -- opening --------------------------------------------------------------------------------------


def open_hyperbatches(resources: StoreResources, opening: SessionRequest) -> SampledSession:
    """Open a session of hyperbatches; for `auto`, of plain ones if all stays in memory.

    Raises Refused, StoreError.
    """
    asked, number = ask(resources, opening, HyperbatchPlan.name), opening.number
    regions = resources.shared(_staying_rows).of(asked.served)
    sized = size_session(resources, asked, regions.num_slots)
    plain = asked._replace(
        plan=make_plan(
            resources.store.manifest, asked.plan.resolved, asked.plan.part, MinibatchPlan.name
        )
    )
    auto = asked.request.plan != HyperbatchPlan.name
    if auto and sized.fits and not opening.crowded:
        return open_session(resources, number, plain)
    with explained_shortage(resources, sized.need.minimum), resources.allocation() as allocation:
        draft = draft_session(resources, asked, sized, allocation)._replace(
            staying=regions.num_slots
        )
        staying = regions.join(opening.alike)
        try:
            with LookAhead(resources, draft) as ahead:
                wanted = ahead.sizing(asked.request.hyperbatch, regions.kept(), opening.alike)
                hyper = None if wanted is None else _take(resources, draft, wanted, staying, ahead)
            if hyper is None:
                _leave(resources, staying)
                return _fall_back(resources, number, draft, plain)
            quota = allocation.slots(hyper.sizing.quota)
            memory = BatchMemory(
                allocation, draft.workspaces, quota, draft.sizing.window, draft.sizing.transit
            )
            return HyperbatchSession(
                resources, number, draft.spec, asked.served, memory, hyper, staying
            )
        except BaseException:
            _leave(resources, staying)
            raise


def _leave(resources: StoreResources, staying: StayingMember) -> None:
    with resources.broker.for_others():
        resources.broker.give(staying.leave())


class _StayingRows:
    """Rows that stay in memory for a store's sessions, by the arrays that the sessions serve."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._found: dict[tuple[int, ...], StayingRegions] = {}

    def of(self, served: Sequence[ServedRows]) -> StayingRegions:
        """Those of these arrays, for sessions that are opened one at a time."""
        arrays = tuple(rows.number for rows in served)
        if arrays not in self._found:
            self._found[arrays] = StayingRegions(served, self._slot_bytes)
        return self._found[arrays]


def _staying_rows(resources: StoreResources) -> _StayingRows:
    return _StayingRows(resources.budget.slot_bytes)


class _HyperSize(NamedTuple):
    """What a session needs, and how much is available to it."""

    need: SessionNeed
    sizes: Sizes
    available: int  # slots, and those of rows that stay
    fits: bool  # graph and rows stay in memory beside it


def size_session(resources: StoreResources, asked: ResolvedRequest, staying: int = 0) -> _HyperSize:
    """Size a session.  Raises Refused: there is too little for any.

    staying   slots of rows that stay for it, too
    """
    budget, broker = resources.budget, resources.broker
    need, sizes, available, pooled = fit(resources, asked, staying=staying)
    plain = size_minibatches(
        need, available, pooled, budget.row_blocks, resources.settings,
        asked.window(resources.settings),
    )  # fmt: skip
    fits = (
        budget.graph_blocks <= broker.graph_preferred
        and pooled - plain.slots(need) >= budget.row_blocks
    )
    return _HyperSize(need, sizes, available + staying, fits)


def draft_session(
    resources: StoreResources, asked: ResolvedRequest, sized: _HyperSize, allocation: Allocation
) -> SessionDraft:
    """Take the seeds, and a workspace to look ahead with."""
    need, sizes, workspaces = sized.need, sized.sizes, Workspaces()
    sizing = size_workspaces(need, sized.available, asked.window(resources.settings))
    spec = take_seeds(resources, allocation, asked, need, sizes)
    add_workspaces(
        resources, allocation, workspaces, sizes,
        WorkspaceNeed(spec.plan.shape(), sizing.workers, sizing.transit),
    )  # fmt: skip
    resources.load_graph()
    return SessionDraft(spec, asked.served, need, sizes, sizing, allocation, workspaces)


def take_sampling(allocation: Allocation, slots: SamplingSlots, slot_bytes: int) -> SamplingMemory:
    """Take memory to sample in.  Raises Refused: the arena's free slots lie too far apart."""
    memory = allocation.run(slots.slots, SHORT_WAIT_S)
    return SamplingMemory.carve(memory, slots.early, slots.begun * slot_bytes)


def _take(
    resources: StoreResources,
    draft: SessionDraft,
    sizing: HyperSizing,
    staying: StayingMember,
    ahead: LookAhead,
) -> HyperMemory | None:
    """Take areas and cache; None if the arena's free slots lie too far apart."""
    allocation, settings = draft.allocation, resources.settings
    try:
        areas, first = ahead.take_areas(sizing.areas, sizing.area)
        sampling = None
        if sizing.sampling.slots:
            sampling = take_sampling(allocation, sizing.sampling, resources.budget.slot_bytes)
            sampling = ahead.begin(sampling, first, sizing.size)
        ahead.close()
        if not sizing.shares:
            return HyperMemory(sizing, areas, sampling, None, first)
        tables = allocation.run(sizing.tables, SHORT_WAIT_S)
        transit = [allocation.run(sizing.run, SHORT_WAIT_S) for _ in range(settings.readers)]
        rows = allocation.slots(sizing.rows)
        with resources.broker.for_others():
            slots = resources.broker.take(sizing.staying)
        staying.add([share.stay for share in sizing.shares], slots)
        cache = RowCache(
            resources.rows._replace(served=draft.served), sizing.shares, tables, rows, transit,
            row_cost(resources, transit), staying,
        )  # fmt: skip
        return HyperMemory(sizing, areas, sampling, cache, first)
    except Refused:
        return None


def _fall_back(
    resources: StoreResources, number: int, draft: SessionDraft, plain: ResolvedRequest
) -> SampledSession:
    """Open a session of plain minibatches.

    All but the seeds is given back and taken again, so that leftovers of the hyperbatches do not
    split the free slots: a budget that holds minibatches holds them here, too.
    """
    assert draft.workspaces.all_home
    need, allocation = draft.need, draft.allocation
    allocation.free(keep=need.seeds)
    broker = resources.broker
    sizing = size_minibatches(
        need, broker.free() + need.seeds, broker.pooled_rows() + need.seeds,
        resources.budget.row_blocks, resources.settings, draft.sizing.window,
    )  # fmt: skip
    memory = take_memory(resources, allocation, plain.plan, draft.sizes, sizing)
    spec = draft.spec._replace(plan=plain.plan)
    return SampledSession(resources, number, spec, plain.served, memory)


HYPERBATCH = Kind(
    resolve_sampled,
    min_slots,
    open_hyperbatches,
    check_possible,
    pool_optional=True,
    every_rank=True,
)
