"""Macro-batches: a few partitions are loaded at a time, and minibatches sampled inside them.

What is loaded belongs to a job (`loaderd.macro.job`), whose ranks are sessions that share it: each
macro-batch is read once for all of them.  A session says which it needs next, and keeps those that
its batches lie in.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import NodeType
from loaderd.batch.failures import error_text
from loaderd.batch.rows import Addressed
from loaderd.batch.structure import Structure
from loaderd.engine.build import BatchSpec, sample_from
from loaderd.engine.least import least_slots
from loaderd.engine.resolve import seed_type
from loaderd.engine.session import Job as BatchJob
from loaderd.errors import Refused
from loaderd.hyper.single import Workspaces
from loaderd.macro.cache import Key, MacroLease, MacroMemory, MacroReader
from loaderd.macro.cut import MacroCut, cut_macro
from loaderd.macro.files import MacroFiles
from loaderd.macro.graph import MacroGraph, MacroShared, carve_macro
from loaderd.macro.job import Job, Jobs
from loaderd.memory.ledger import ServedRows, SessionNeed, served_rows
from loaderd.memory.slots import LOOK_WAIT_S, WAIT_S
from loaderd.memory.workspace import Carver, Sizes
from loaderd.plans.base import Positions, Unit
from loaderd.plans.macrobatch import MacrobatchPlan, SeedGroups
from loaderd.plans.roots import node_roots
from loaderd.protocol import Attach, LedgerEntry, MacroBatch, Skipped, Start
from loaderd.sessions.base import Kind, StoreResources
from loaderd.sessions.sampled import SampledSession, nothing_missing
from loaderd.sessions.sizing import (
    SMALLER,
    Asked,
    BatchMemory,
    SessionCut,
    add_workspaces,
    ask,
    check_room,
    choose_need,
    cut_session,
    explained_shortage,
    least_of,
    needs_of,
    resolve_sampled,
    take_seeds,
)
from loaderd.trace import STAGE

_RANKS_HERE = 8  # of a job, that room is left for: of the others it is thought elsewhere
_SPARE = 8  # slots of the pools that are left to them, when one more memory is taken


class MacrobatchSession(SampledSession):
    """See `SampledSession`."""

    _has_threads = True  # those of the job end with its last session

    def __init__(
        self,
        resources: StoreResources,
        number: int,
        spec: BatchSpec,
        served: list[ServedRows],
        memory: BatchMemory,
        job: Job,
        reader: MacroReader,
    ) -> None:
        """`reader` has joined the job."""
        assert isinstance(spec.plan, MacrobatchPlan)
        self._macro_plan = spec.plan.placed(job.groups.counts)
        super().__init__(resources, number, spec._replace(plan=self._macro_plan), served, memory)
        self._job, self._reader, self._stride = job, reader, 1
        self._nothing_missing = nothing_missing(served)
        reader.announce = self

    @property
    def _macro(self) -> MacroBatch:
        macro = self._macro_plan.resolved.macro
        assert macro is not None
        return macro

    # -- from the job's threads -------------------------------------------------------------------

    def ready(self) -> None:
        """A macro-batch has been loaded: batches of it may be built."""
        with self._lock:
            if not self._closed:
                self._pump()

    def failed(self, run: int, error: BaseException) -> None:
        """A macro-batch that a run waits for could not be read: it ends."""
        with self._lock:
            state = self._state
            if self._closed or state.run != run or state.next_step >= state.num_steps:
                return
            unit, state.next_step = self._next_unit(), state.num_steps
            self._fail(unit, run, error_text(error))

    def stage(self, number: int, begin: int, end: int) -> None:
        """A stage is over, which is no run's."""
        if self._resources.trace is not None:
            self._resources.trace.write(STAGE, 0, number, np.array([begin, end]))

    # -- which macro-batch is needed --------------------------------------------------------------

    def start(self, start: Start, ranks: tuple[int, ...] = ()) -> None:
        if self._macro.waiting and start.stride > 1:
            raise Refused("reuse while waiting: expected no DataLoader workers beside the one")
        super().start(start, ranks)

    def _begin(self, start: Start, order: Positions) -> None:
        """A step behind the end of the epoch means that no run begins."""
        with self._job.changed:
            reader = self._reader
            self._stride, reader.waiting_since = order.stride, 0
            live, reader.live = reader.live, False  # unless the run really begins
            reader.run = start.run
            if start.step < self._plan.num_steps:
                self._want((start.epoch, self._plan.unit(start.epoch, start.step).macro))
            elif live:  # whatever it was about to need
                self._job.want(reader, [], live=False)

    def _want(self, key: Key) -> None:
        epoch, macro = key
        layout = self._macro_plan.epoch_layout(epoch)
        steps = np.flatnonzero(layout.steps[macro:]) + macro
        wanted = [(epoch, int(m)) for m in steps]
        self._job.want(self._reader, [*wanted, self._first(epoch + 1)], live=True)

    def _first(self, epoch: int) -> Key:
        return epoch, int(np.flatnonzero(self._macro_plan.epoch_layout(epoch).steps)[0])

    def _may_start(self) -> bool:
        while super()._may_start():
            if not self._skip_passes():
                return True
        return False

    def _skip_passes(self) -> bool:
        """Whether passes over a macro-batch are left out here; the client is told.

        No further pass begins if the session need not wait for the next macro-batch.
        """
        state, unit = self._state, self._next_unit()
        if not self._macro.waiting or unit.cycle == 0:
            return False
        layout = self._macro_plan.epoch_layout(unit.epoch)
        first, steps = int(layout.first_step[unit.macro]), int(layout.steps[unit.macro])
        with self._job.changed:
            wanted = self._reader.wanted
            here = len(wanted) > 1 and wanted[0] == (unit.epoch, unit.macro)
            there = here and self._job.is_ready(self._reader, wanted[1])
        if (unit.step - first) % steps or not there:
            return False
        state.next_step = int(layout.first_step[unit.macro + 1])
        self._deliver(
            Skipped(session=self.number, run=state.run, step=unit.step, to=state.next_step)
        )
        return True

    def _acquire(self, unit: Unit) -> bool:
        """Whether the macro-batch of a unit is there; it stays until the batch is gone."""
        reader, key = self._reader, (unit.epoch, unit.macro)
        with self._job.changed:
            if not reader.live or reader.wanted[:1] != [key]:
                self._want(key)
            memory, now = self._job.find(reader), concurrency.perf_counter_ns()
            if memory is None or not memory.ready:
                reader.waiting_since = reader.waiting_since or now
                self._job.changed.notify_all()
                return False
            if reader.waiting_since:
                reader.counters["macro_wait_ns"] += now - reader.waiting_since
                reader.waiting_since = 0
            reader.held.setdefault(key, MacroLease(memory)).count += 1
            memory.users += 1
            memory.first_use = memory.first_use or now
            try:
                self._go_on(unit)
            except BaseException:
                self._unpin(unit)
                raise
            return True

    def _go_on(self, unit: Unit) -> None:
        """What the session needs once a unit is under way."""
        after = unit.step + self._stride
        if after >= self._plan.num_steps:
            self._job.want(self._reader, [self._first(unit.epoch + 1)], live=False)
        elif (macro := self._plan.unit(unit.epoch, after).macro) != unit.macro:
            self._want((unit.epoch, macro))

    def _gone(self, job: BatchJob) -> None:
        self._unpin(job.unit)

    def _unpin(self, unit: Unit) -> None:
        """One batch of its macro-batch is gone."""
        key = (unit.epoch, unit.macro)
        with self._job.changed:
            hold = self._reader.held[key]
            hold.count -= 1
            hold.memory.users -= 1
            assert hold.count >= 0
            if hold.count == 0:
                del self._reader.held[key]
            if hold.memory.users == 0:
                hold.memory.last_use = concurrency.perf_counter_ns()
                self._job.freed()

    # -- batches inside it ------------------------------------------------------------------------

    def _graph(self, unit: Unit) -> MacroGraph:
        """The macro-batch of a unit that has acquired it."""
        with self._job.changed:
            return self._reader.held[unit.epoch, unit.macro].memory.graph

    def _structure(self, job: BatchJob) -> Structure:
        unit, spec = job.unit, self._spec
        index = np.empty(unit.num_seeds, np.int64)
        self._job.groups.place(self._macro_plan, unit, index)
        roots = node_roots(spec.seeds, index)
        return sample_from(self._graph(unit), spec.plan, unit, job.workspace, roots)

    def _address(self, job: BatchJob) -> Addressed:
        work, graph = job.workspace, self._graph(job.unit)
        for a, addresses in enumerate(work.addresses):
            graph.address(work.n_id, job.num_items, a, addresses)
        return self._nothing_missing

    # -- the rest of what `SampledSession` asks ---------------------------------------------------

    def waits(self) -> bool:
        with self._lock, self._job.changed:
            return self._state.waits or self._job.is_held_up(self._reader)

    def _idle(self) -> bool:
        with self._job.changed:
            return super()._idle() and not self._reader.held

    def _stop(self) -> None:
        self._job.stop(self._reader)

    def _end_threads(self) -> None:
        self._job.close(self._reader)

    def _leave(self) -> None:
        self._reader.announce = SILENT  # it led back to the session
        self._job.leave()

    def _own_counters(self) -> dict[str, int]:
        return self._reader.counters

    def _own_basis(self) -> str:
        if self._job.counts(self._reader):
            return self._job.basis()
        return "; macro-batches in the memory of another session of the job"

    def _common_slots(self) -> tuple[int, int]:
        num_slots = self._job.num_slots
        counted = num_slots if self._job.counts(self._reader) else 0
        return num_slots // max(1, self._job.num_sessions), counted


class _Silent:
    """In place of a session that is not open yet, or not any more."""

    def ready(self) -> None:
        """Nobody waits."""

    def failed(self, run: int, error: BaseException) -> None:
        """No run has begun."""

    def stage(self, number: int, begin: int, end: int) -> None:
        """Nobody counts it."""


SILENT = _Silent()


# -- opening --------------------------------------------------------------------------------------


class MacroJobs:
    """What sessions of macro-batches share at one store: its partitions, and the jobs."""

    def __init__(self, resources: StoreResources) -> None:
        """Raises CorruptBlock."""
        served = served_rows(resources.store.manifest)
        self.files = MacroFiles(resources.store, served, resources.first_copied)
        self.jobs = Jobs()

    def ledger_entries(self) -> list[LedgerEntry]:
        """Jobs' memory is counted with one of their sessions."""
        return []


class _Sized(NamedTuple):
    """How much there is for a session."""

    need: SessionNeed
    sizes: Sizes
    cut: SessionCut
    macro: MacroCut | None  # None: the job's memory is there already

    @property
    def least(self) -> int:
        """Slots without which it cannot be served."""
        return self.need.least + (self.macro.least if self.macro else 0)


def open_macrobatches(
    resources: StoreResources, number: int, request: Attach, frame: NDArray[np.int64] | None
) -> MacrobatchSession:
    """A session of a job that is there, or of one of its own.  Raises Refused, StoreError."""
    asked = ask(resources, request, frame, MacrobatchPlan.name)
    resolved, shared = asked.plan.resolved, resources.shared(MacroJobs)
    reader, kind = MacroReader(SILENT), (resolved, request.world_size)
    alone = resolved.macro is not None and resolved.macro.waiting
    job = joined = None if alone else shared.jobs.join(kind, reader)
    try:
        sized = _size(resources, asked, shared.files, job)
        with explained_shortage(resources, sized.least), resources.allocation() as allocation:
            spec, workspaces = (
                take_seeds(resources, allocation, asked, sized.need, sized.sizes),
                Workspaces(),
            )
            add_workspaces(
                resources, allocation, workspaces, sized.sizes, sized.cut.workers,
                sized.cut.transit, worst=spec.plan.shape(),
            )  # fmt: skip
            if job is None:
                assert sized.macro is not None
                node_type = seed_type(resources.store.manifest, request)
                supply = ArenaSupply(resources, shared.files, asked.served, sized.macro)
                job = _open_job(supply, spec, node_type, reader)
            memory = BatchMemory(
                allocation, workspaces, allocation.slots(sized.cut.quota), sized.cut.window,
                sized.cut.transit,
            )  # fmt: skip
            session = MacrobatchSession(resources, number, spec, asked.served, memory, job, reader)
    except BaseException:
        if job is not None:
            job.close(reader)
            job.leave()
        raise
    if joined is None and not alone:
        shared.jobs.add(kind, job)
    return session


def _size(resources: StoreResources, asked: Asked, files: MacroFiles, job: Job | None) -> _Sized:
    """What the session takes, and what its job does, of the slots that are left for it.

    Raises Refused with the least that would do.
    """
    broker, settings, resolved = resources.broker, resources.settings, asked.plan.resolved
    needs, available = needs_of(resources, asked), broker.available()
    least, macro = least_of(needs), None
    ranks = min(asked.plan.part.world_size, _RANKS_HERE)  # that are yet to find room
    if job is None:
        macro = cut_macro(
            resources.store.manifest, files, asked.served, resolved, settings,
            resources.budget.slot_bytes, available - ranks * least,
        )  # fmt: skip
    else:
        share = available if available < broker.pooled() else broker.num_slots  # of all ranks
        if least > available or job.num_slots + least * job.num_sessions > share:
            job.narrow(LOOK_WAIT_S)
            available = broker.available()
        ranks = max(1, ranks + 1 - job.num_sessions)
    less = SMALLER
    if resolved.macro is not None:
        few = resolved.macro.partitions == 1
        less = "a store of more partitions" if few else "fewer macro_partitions"
    check_room(resources, least + (macro.least if macro else 0), available, less)
    available = max(least, (available - (macro.slots if macro else 0)) // ranks)
    need, sizes = choose_need(resources, asked, needs, available)
    # no row passes through: its rows are in the macro-batch
    return _Sized(
        need, sizes, cut_session(need, available, 0, settings, asked.request.window), macro
    )


class ArenaSupply:
    """What the sessions of a job share of the arena, and a run for each macro-batch."""

    def __init__(
        self,
        resources: StoreResources,
        files: MacroFiles,
        served: list[ServedRows],
        cut: MacroCut,
    ) -> None:
        """`read` comes before anything is taken."""
        self.files, self.cut = files, cut
        self._resources, self._served = resources, served
        self._common: list[int] = []  # slots of what all share
        self._shared: MacroShared

    def places(self) -> NDArray[np.int64]:
        """Memory for the seeds, by partition.  Raises Refused."""
        return self._take_run(self.cut.places).view(np.int64)

    def read(self) -> None:
        """Read hubs and the ids of copies.  Raises Refused, CorruptBlock, OSError."""
        resources, cut = self._resources, self.cut
        transit = [self._take_run(cut.run) for _ in range(cut.transit)]
        self._shared = MacroShared(
            resources.store, self.files, self._served, resources.reader, resources.arena.data,
            transit, self._take_run(cut.ids), self._take_run(cut.hubs), cut.choice,
        )  # fmt: skip

    def take(self) -> MacroMemory | None:
        """One more, if there is room right now."""
        if self._resources.broker.available() < self.cut.macro + _SPARE:
            return None
        try:
            return self.wait(0.0)
        except (Refused, MemoryError):  # slots are free, but not side by side
            return None

    def wait(self, wait_s: float = WAIT_S) -> MacroMemory:
        """One more.  Raises Refused: there is no room, even after so long."""
        slots = self._slots(self.cut.macro, wait_s)
        manifest, cut = self._resources.store.manifest, self.cut
        try:
            carver = Carver(self._bytes(slots))
            arrays = carve_macro(carver, manifest, self._served, cut.bounds, cut.choice)
            return MacroMemory(MacroGraph(self._shared, arrays), slots)
        except BaseException:
            self._resources.broker.give(list(slots))
            raise

    def give(self, memories: Sequence[MacroMemory], last: bool) -> None:
        """These are not needed any more; `last`: nor is what all of them shared."""
        slots = [slot for memory in memories for slot in memory.slots]
        if last:
            slots += self._common
            self._common = []
        self._resources.broker.give(slots)

    def num_slots(self, memories: int) -> int:
        """Slots of so many, with what they share."""
        return len(self._common) + memories * self.cut.macro

    def basis(self, memories: int) -> str:
        """The same in words."""
        return self.cut._replace(memories=memories).basis()

    def _slots(self, count: int, wait_s: float) -> range:
        first = self._resources.broker.take_run(count, wait_s)
        return range(first, first + count)

    def _bytes(self, slots: range) -> NDArray[np.uint8]:
        size = self._resources.budget.slot_bytes
        return self._resources.arena.data[slots.start * size : slots.stop * size]

    def _take_run(self, count: int) -> NDArray[np.uint8]:
        slots = self._slots(count, WAIT_S)
        self._common += slots
        return self._bytes(slots)


def _open_job(
    supply: ArenaSupply, spec: BatchSpec, node_type: NodeType, reader: MacroReader
) -> Job:
    """A job for the session whose seeds are there, and others like it.

    Raises Refused, CorruptBlock, OSError; what was taken is given back then.
    """
    files, plan, seeds, memories = supply.files, spec.plan, spec.seeds, list[MacroMemory]()
    assert isinstance(plan, MacrobatchPlan)
    try:
        offsets = files.offsets[files.type_of[node_type.name]]
        groups = SeedGroups(seeds, offsets, supply.places()[: seeds.size])
        plan = plan.placed(groups.counts)
        supply.read()
        for _ in range(supply.cut.memories):
            memories.append(supply.wait())
        job = Job(plan, groups, supply, memories)
    except BaseException:
        supply.give(memories, last=True)
        raise
    job.join(reader)  # nobody has left a job that nobody has joined: it has not ended
    return job


MACROBATCH = Kind(resolve_sampled, least_slots, open_macrobatches)
