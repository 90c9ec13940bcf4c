"""Plain minibatches: workers sample one after another, and hand each over when its turn comes.

Sessions of hyperbatches and of macro-batches are sessions of sampled batches, too: they say when a
batch may begin, where its structure and its rows come from, and what must be told when it is gone.

    next step --start--> sampling --> placed, group by group --> filled --> leased --> released
                 a workspace         slots of the session's quota      with the client
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore import concurrency
from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import SessionLost
from loaderd.api.protocol import Attached, BatchReady, LedgerEntry, Release, RowGroup
from loaderd.memory.ledger import EdgeItems, ServedRows, session_entry_name
from loaderd.memory.workspace import Workspace, clear_workspace
from loaderd.plans.base import Unit, Wanted
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.failures import error_text, failure
from loaderd.sampling.rows import Addressed
from loaderd.sampling.structure import Structure
from loaderd.sessions.base import Consumer, Kind, Out, SessionRequest, StoreResources, describe
from loaderd.sessions.build import BatchInProgress, BatchSpec, Placement, RowSizes, SessionState
from loaderd.sessions.sizing import (
    SMALLER,
    BatchMemory,
    ResolvedRequest,
    ask,
    check_possible,
    explained_shortage,
    fit,
    min_slots,
    resolve_sampled,
    size_minibatches,
    take_memory,
    take_seeds,
)

Sample = Callable[[Unit, Workspace], Structure]
# from the seeds, and memory for an order of them, int64 (num_seeds,): how batches are sampled
Prepare = Callable[[BatchSpec, NDArray[np.int64]], tuple[BatchSpec, Sample]]
_WIDEST = 64  # batches in flight up to which a shared session is widened
_SPARE = 8  # free slots that `widen` leaves to the pools


class SampledSession:
    """Methods that begin with an underscore are called under its lock, or by a worker."""

    holds_all = False
    _from_pool = True  # its rows come from the row pool
    _has_threads = False  # threads of its own
    _consumer: Consumer | None = None  # before the first start

    def __init__(
        self,
        resources: StoreResources,
        number: int,
        spec: BatchSpec,
        served: list[ServedRows],
        memory: BatchMemory,
        sample: Sample | None = None,
    ) -> None:
        """`sample`: called by a worker; None: sample around a batch's seeds, in the whole graph."""
        self._sample_batch = sample or partial(resources.builder.structure, spec)
        self.number, self.plan = number, spec.plan.name
        self._resources, self._spec, self._plan = resources, spec, spec.plan
        self._served, self._memory, self._window = served, memory, memory.window
        slot_bytes = resources.budget.slot_bytes
        sizes = RowSizes(tuple(slot_bytes // r.array.row_bytes for r in served), slot_bytes)
        self._state = SessionState(memory.window, memory.quota, sizes)
        self._lock = resources.lock
        self._rows_stayed = self._rows_stay()
        self._newest = Wanted(-1, 0, 0)  # batch that the consumer has asked for
        self._closed = self._freed = False
        self._over = concurrency.Event()  # its threads have ended
        self._counters = dict.fromkeys(
            ("batches", "edges", "rows", "rows_copied", "groups", "sample_ns", "fill_ns"), 0
        )

    # -- what another kind of sampled batches does in its own way ---------------------------------

    def _begin(self) -> None:
        """Called when a run begins: earlier ones have ended."""

    def _start_batches(self) -> None:
        """Have workers begin batches, as many as may be on their way."""
        while not self._resources.draining.is_set() and self._state.may_start():
            work = self._memory.workspaces.try_take_large()  # what it will hold is not known
            if work is None:
                break
            job = None
            try:
                job = self._begin_batch(work)
            finally:
                if job is None:
                    self._memory.workspaces.give(work)
            if job is None:
                break
            self._submit(job, partial(self._sample, job))

    def _begin_batch(self, work: Workspace) -> BatchInProgress | None:
        """The batch that is wanted next; None: none is, or what it is made of is not there yet."""
        if (wanted := self._next_wanted()) is None:
            return None
        unit = self._plan.unit(wanted.epoch, wanted.step)
        if not self._acquire(wanted.run, unit):
            # before this one can begin, a rank that comes late may want an earlier one
            assert self._consumer is not None
            self._consumer.put_back(wanted)
            return None
        return self._state.start(wanted.run, unit, work)

    def _acquire(self, run: int, unit: Unit) -> bool:
        """Whether what a batch is made of is in memory; it stays until `_gone`."""
        del run, unit
        return True

    def _may_place(self, job: BatchInProgress) -> bool:
        """Whether a batch whose turn has come can be placed now; else it is placed when ready."""
        del job
        return True

    def _structure(self, job: BatchInProgress) -> Structure:
        """By a worker: sample a batch into its workspace."""
        return self._sample_batch(job.unit, job.workspace)

    def _address(self, job: BatchInProgress) -> Addressed:
        """By a worker: the places of a batch's rows, into its workspace."""
        return self._resources.assembler.address(job.workspace, job.num_items, 2 * self._window)

    def _write(
        self, job: BatchInProgress, placement: Placement
    ) -> tuple[BatchReady | RowGroup, int]:
        """By a worker: fill a group's slots; its message, and the rows that were copied."""
        return self._resources.builder.fill(self.number, job, placement, self._spec)

    def _built(self, job: BatchInProgress) -> None:
        """A batch has given back its workspace: it is filled, or never will be."""

    def _released(self, job: BatchInProgress) -> None:
        """The client is done with a batch."""

    def _gone(self, job: BatchInProgress) -> None:
        """A batch has been released, or its run has ended."""

    def _stop(self) -> None:
        """Have its own threads begin nothing more; returns at once."""

    def _end_threads(self) -> None:
        """Wait for these threads; called after `_stop`, without the lock."""

    def _taken(self) -> int:
        """Slots of the arena that it has."""
        return self._memory.allocation.charged

    def _free(self) -> None:
        """Give back all slots that it has."""
        self._memory.allocation.free()

    def _own_counters(self) -> dict[str, int]:
        return {}

    def _own_basis(self) -> str:
        """What else it has taken, as text for the ledger."""
        return ""

    # -- what its owner asks ----------------------------------------------------------------------

    def describe(self, request: int) -> Attached:
        rows = tuple(map(_row_spec, self._served))
        attached = describe(
            self, self._resources.store.manifest, request, self._plan, self._window, rows
        )
        attached = structs.replace(attached, partitions=self._spec.partitions)
        if (owners := self._spec.owners) is None:
            return attached
        return structs.replace(attached, owners=owners.digest, num_owners=owners.owners)

    def serves(self, epoch: int) -> bool:
        del epoch
        with self._lock:
            return not self._closed

    def start(self, run: int, consumer: Consumer) -> None:
        with self._lock:
            if self._closed:
                raise SessionLost(f"session {self.number} is not open")
            self._consumer = consumer
            self._recycle_all(self._state.begin(run))
            self._attempt(self._begin)
            self._pump()

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._pump()

    def release(self, release: Release) -> None:
        with self._lock:
            if self._closed:
                return
            done = self._state.release(release.run, release.step, release.group)
            if done is not None:
                self._drop_rows(done)
                self._released(done)
                self._gone(done)
            self._pump()

    def waits(self) -> bool:
        with self._lock:
            return self._state.waits

    @property
    def depth(self) -> int:
        with self._lock:
            return self._state.depth

    def crowded(self, more: int) -> bool:
        return self._from_pool and self._rows_stayed and not self._rows_stay(more)

    def _rows_stay(self, more: int = 0) -> bool:
        """Whether the row pool has room for all rows, and for `more`."""
        return self._resources.broker.pooled_rows() - more >= self._resources.budget.row_blocks

    def widen(self, batches: int) -> None:
        """Allow so many more batches in flight, each with its slots; fewer if few are free."""
        with self._lock:
            if self._closed:
                return
            each = -(-self._state.num_slots // self._window)
            for _ in range(batches if self._window < _WIDEST else 0):
                slots = self._memory.allocation.free_slots(each, _SPARE)
                if not slots:
                    break
                self._state.widen(slots, 1)
                self._window += 1
            self._pump()

    def thread_failed(self, error: Exception) -> None:
        """End the run with an error, and begin no other: the next one needs a new session."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._fail(self._newest, error_text(error))

    def detach(self) -> None:
        # with threads of its own the session closes in the thread `sessions-close`, which waits for
        # them without the lock: they take it to end
        with self._lock:
            self._closed = True
            self._stop()
            self._consumer = None
            if not self._resources.draining.is_set():  # else clients may still read what is leased
                self._recycle_all(self._state.begin(1 << 62))
            if not self._has_threads:
                self._close()
        if self._has_threads:
            self._resources.closer.put(self._close)

    def join(self) -> None:
        self._over.wait()

    def _close(self) -> None:
        try:
            self._end_threads()
        finally:
            with self._lock:
                self._over.set()
                self._free_if_idle()

    def held_bytes(self) -> int:
        with self._lock:
            return self._taken() * self._resources.budget.slot_bytes

    def ledger_entry(self) -> LedgerEntry:
        with self._lock:
            return LedgerEntry(
                session_entry_name([self.number]),
                self.held_bytes(),
                f"{self._memory.workspaces.total} workspaces, each with {self._memory.transit} "
                f"transit slots{self._memory.allocation.tables_text}, seeds"
                f"{_owners_text(self._spec)}, {self._state.num_slots} slots for {self._window} "
                f"batches{self._own_basis()}",
            )

    def counters(self) -> dict[str, int]:
        with self._lock:
            return self._counters | self._own_counters()

    # -- batches on their way ---------------------------------------------------------------------

    def _next_wanted(self) -> Wanted | None:
        if self._consumer is not None and (wanted := self._consumer.next()) is not None:
            self._newest = wanted
            return wanted
        return None

    def _pump(self) -> None:
        """Hand to the workers whatever may go on."""
        self._attempt(self._advance)

    def _attempt(self, step: Callable[[], None]) -> None:
        """Do something for the run.

        An error ends the run and reaches the client.  It does not reach the caller, who may be a
        worker whose batch is finished, or a thread that has read a macro-batch for many sessions.
        """
        try:
            step()
        except Exception as error:
            self._state.failed = True
            self._fail(self._newest, error_text(error))

    def _fail(self, wanted: Wanted, text: str) -> None:
        """End a run with an error, and tell the client."""
        step = wanted.step // self._plan.together
        self._deliver(failure(self.number, wanted, text, step))

    def _deliver(self, message: Out) -> None:
        if self._consumer is not None:
            self._consumer.deliver(message)

    def _advance(self) -> None:
        while (job := self._state.head()) is not None and self._may_place(job):
            placement = self._state.place(job)
            if placement is None:
                break
            self._submit(job, partial(self._fill, job, placement))
        self._start_batches()

    def _submit(self, job: BatchInProgress, step: Callable[[], Callable[[], None]]) -> None:
        self._resources.workers.soon(self.number, lambda: self._run_step(job, step))

    def _sample(self, job: BatchInProgress) -> Callable[[], None]:
        begun = concurrency.perf_counter_ns()
        self._resources.builder.take_structure(job, self._spec, self._structure(job))
        job.addressed = self._address(job)
        took = concurrency.perf_counter_ns() - begun

        def finish() -> None:
            self._counters["sample_ns"] += took
            job.busy = False
            self._pump()

        return finish

    def _fill(self, job: BatchInProgress, placement: Placement) -> Callable[[], None]:
        begun = concurrency.perf_counter_ns()
        message, copied = self._write(job, placement)
        ended = concurrency.perf_counter_ns()
        self._note_filled(job, begun, ended)

        def finish() -> None:
            self._counters["fill_ns"] += ended - begun
            self._count(job, placement, copied)
            ready = self._state.filled(job, placement, message)
            if placement.last:
                self._give_work(job)
            for out in ready:  # batches that nobody wants any more are released here
                self._deliver(out)
            self._pump()

        return finish

    def _note_filled(self, job: BatchInProgress, begun: int, ended: int) -> None:
        """By a worker: a group has been filled, in these ns of a steady clock."""

    def _count(self, job: BatchInProgress, placement: Placement, copied: int) -> None:
        assert job.structure is not None
        self._counters["groups"] += 1
        self._counters["rows_copied"] += copied
        if placement.last:
            self._counters["batches"] += 1
            self._counters["edges"] += job.structure.num_edges
            self._counters["rows"] += job.structure.num_nodes

    def _run_step(self, job: BatchInProgress, step: Callable[[], Callable[[], None]]) -> None:
        """Run one step of a job, then what it returns, under the lock, if the run still goes on.

        Until then the job is `busy` with this worker: whoever ends its run leaves it to the worker.
        An error ends the run and reaches the client.
        """
        try:
            finish = None if job.cancelled else step()
            with self._lock:
                if finish is not None and not job.cancelled:
                    finish()
                    return
        except Exception as error:
            text = error_text(error)
            if job.work is not None:  # its tables may be half filled
                clear_workspace(job.work)
            with self._lock:
                if not job.cancelled:
                    self._state.fail(job)
                    self._recycle(job)
                    self._fail(Wanted(job.run, job.unit.epoch, job.unit.step), text)
                    return
        with self._lock:
            self._state.abandon(job)
            self._recycle(job)
            self._free_if_idle()
            if not self._closed:
                self._pump()

    # -- batches that are gone --------------------------------------------------------------------

    def _give_work(self, job: BatchInProgress) -> None:
        """A batch is built, or never will be: its workspace is free."""
        if job.work is not None:
            self._memory.workspaces.give(job.work)
            job.work = None
        self._built(job)

    def _drop_rows(self, job: BatchInProgress) -> None:
        """Unpin the blocks that a batch's rows are in."""
        if job.addressed is not None:
            self._resources.assembler.drop(job.addressed.pins)
            job.addressed = None

    def _recycle_all(self, jobs: list[BatchInProgress]) -> None:
        for job in jobs:
            self._recycle(job)
        self._free_if_idle()

    def _recycle(self, job: BatchInProgress) -> None:
        self._drop_rows(job)
        if not job.finished:
            self._give_work(job)
        self._gone(job)

    def _idle(self) -> bool:
        return self._memory.workspaces.all_home and self._state.idle

    def _free_if_idle(self) -> None:
        """Give back the memory of a detached session once nobody uses any of it."""
        if self._closed and self._over.is_set() and not self._freed and self._idle():
            self._freed = True
            self._free()
            self._resources.ended(self)


def _owners_text(spec: BatchSpec) -> str:
    if spec.owners is None:
        return ""
    return f", owner map {spec.owners.name} ({spec.owners.owner.nbytes:,} B)"


def _row_spec(rows: ServedRows) -> RowArraySpec:
    """The description of a row array that the client gets."""
    array, of_edges = rows.array, isinstance(rows.node_type, EdgeItems)
    owner = ("", rows.node_type.name) if of_edges else (rows.node_type.name, "")
    return RowArraySpec(rows.name, array.dtype, array.row_shape, array.row_bytes, *owner)


def open_sampled(resources: StoreResources, opening: SessionRequest) -> SampledSession:
    """Open a session of plain minibatches.  Raises Refused, StoreError."""
    return open_session(resources, opening.number, ask(resources, opening, MinibatchPlan.name))


def open_session(
    resources: StoreResources,
    number: int,
    asked: ResolvedRequest,
    prepare: Prepare | None = None,
    ordered: bool = False,
    less: str = SMALLER,
) -> SampledSession:
    """Open a session whose batches workers sample one after another, and take its memory.

    prepare   how it samples; None: around its seeds, in the whole graph
    ordered   whether that takes room for an order of the seeds
    less      what would need less memory, to be named in a refusal

    Raises Refused, StoreError.
    """
    budget, settings = resources.budget, resources.settings
    beside = -(-8 * asked.plan.resolved.num_seeds // budget.slot_bytes) if ordered else 0
    need, sizes, available, pooled = fit(resources, asked, beside, less)
    window = asked.window(settings)
    cut = size_minibatches(need, available, pooled, budget.row_blocks, settings, window)
    with explained_shortage(resources, need.minimum + beside), resources.allocation() as allocation:
        spec, sample = take_seeds(resources, allocation, asked, need, sizes), None
        order = allocation.run(beside).view(np.int64)
        if prepare is not None:
            spec, sample = prepare(spec, order[: spec.seeds.size])
        memory = take_memory(resources, allocation, spec.plan, sizes, cut)
        resources.load_graph()
    return SampledSession(resources, number, spec, asked.served, memory, sample)


SAMPLED = Kind(resolve_sampled, min_slots, open_sampled, check_possible, every_rank=True)
