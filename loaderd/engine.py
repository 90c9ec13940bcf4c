"""The engine: one for all plans.  Sessions attach to it; its worker threads build their batches."""

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore.io.arena import Arena
from blockstore.io.reader import BlockReader
from blockstore.pool import BlockPool
from blockstore.store import Store, read_rows
from loaderd.attachment import Attachment, Opening, open_attachment
from loaderd.build import Builder
from loaderd.devicecost import DeviceGauge
from loaderd.errors import Refused, SessionLost, ShuttingDown
from loaderd.failures import error_text, failure
from loaderd.hopdesk import HopDesk
from loaderd.hopfiles import hop_files
from loaderd.hyper import Sampled
from loaderd.hyperdesk import HyperDesk
from loaderd.ledger import EngineSettings, make_budget, served_rows
from loaderd.lookahead import Prospect
from loaderd.macrofiles import MacroFiles, copied_files
from loaderd.meter import add_counts
from loaderd.plans.base import Unit
from loaderd.plans.chunks import METHOD_OF
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.protocol import (
    Attach,
    Attached,
    BatchReady,
    ChunkReady,
    ErrorReply,
    LedgerEntry,
    Release,
    RowGroup,
    SessionStatus,
    Skipped,
    Start,
)
from loaderd.residency import Residency
from loaderd.rows import RowAssembler
from loaderd.session import Job, Placement
from loaderd.slots import WAIT_S, SlotBroker
from loaderd.topology import Topology
from loaderd.trace import STAGE, Trace

_SOON, _LATER, _LAST = range(3)  # what a client waits for, what is sampled ahead, the end


class _Task(NamedTuple):
    """A step for a worker; equal priorities in the order of their numbers."""

    priority: int
    number: int
    step: Callable[[], None] | None


Deliver = Callable[[int, BatchReady | RowGroup | ChunkReady | Skipped | ErrorReply], None]


class Engine:
    """Owns the arena, the readers and the workers of one store.  A context manager."""

    def __init__(self, store: Store, settings: EngineSettings) -> None:
        """Take all memory at once.  Raises BudgetTooSmall, StoreError."""
        self.store, self.settings = store, settings
        self.budget = make_budget(store.manifest, settings)
        self.deliver: Deliver = lambda _session, _message: None
        self._served = served_rows(store.manifest)
        self._stack = ExitStack()
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        self._lock = threading.RLock()
        self._sessions: dict[int, Attachment] = {}
        self._ended = threading.Condition(self._lock)
        self._ending: list[Attachment] = []  # closed, and not idle yet
        self._next_session = 1
        self._tasks: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._task_number = itertools.count()
        self._own_counters: dict[str, int] = {}  # of sessions that have ended
        self._draining = False
        self._closers: list[threading.Thread] = []
        self._counters = {"batches": 0, "edges": 0, "rows": 0, "rows_copied": 0, "groups": 0}
        self._busy_ns = {"sample_ns": 0, "fill_ns": 0}
        self._threads = [
            threading.Thread(target=self._work, name=f"build-{i}", daemon=True)
            for i in range(settings.workers)
        ]
        for thread in self._threads:
            thread.start()

    def _open(self) -> None:
        manifest, budget, stack = self.store.manifest, self.budget, self._stack
        self._trace = Trace(self.settings.trace) if self.settings.trace else None
        if self._trace is not None:
            stack.callback(self._trace.close)
        relations = manifest.relations
        self.arena = stack.enter_context(Arena(budget.num_slots, budget.slot_bytes))
        files = [self.store.graph(r) for r in relations]
        files += [self.store.rows(r.array) for r in self._served]
        first_copied = len(files)
        files += copied_files(self.store, self._served)
        first_hops = len(files)
        files += hop_files(self.store)
        data, slot = self.arena.data, budget.slot_bytes
        self.reader = stack.enter_context(
            BlockReader(files, data, slot, threads=self.settings.readers)
        )
        self._gauge = DeviceGauge(self.reader)
        changed = threading.Condition()
        files = files[:first_copied]
        graph = BlockPool(
            [f.geometry.num_blocks for f in files[: len(relations)]], budget.num_slots
        )
        rows = BlockPool([f.geometry.num_blocks for f in files[len(relations) :]], budget.num_slots)
        self.broker = SlotBroker(
            graph, rows, changed, budget.num_slots, budget.graph_slots, budget.graph_least
        )
        self._opening = Opening(
            self.store, self.settings, budget, self.broker, self.arena, self.reader,
            len(relations), cache(lambda: MacroFiles(self.store, self._served, first_copied)),
        )  # fmt: skip
        self._hops = HopDesk(
            self.store, self.settings, self.broker, self.arena, self.reader, self._gauge,
            first_hops, lambda session, message: self.deliver(session, message),
        )  # fmt: skip
        self.graph = Residency(graph, self.reader, 0, changed)
        self.rows = Residency(rows, self.reader, len(relations), changed)
        share = max(1, (budget.graph_least - 2) // self.settings.workers)
        self.topology = Topology(self.store, self.graph, data, slot, share)
        self.assembler = RowAssembler(
            self._served, self.rows, self.reader, len(relations), data, slot, manifest.block_bytes
        )
        original = np.empty(manifest.num_nodes, np.dtype(manifest.id_dtype))
        for t in manifest.types:
            original[t.first : t.first + t.num_nodes] = read_rows(self.store, t.original_id)
        self.builder = Builder(self.topology, self.assembler, self.arena, original)
        self._hypers = HyperDesk(
            self._opening, self.builder, self.topology, self.graph, self._gauge, self, self._trace
        )

    @property
    def io_mode(self) -> str:
        """How blocks are read: O_DIRECT, or buffered and why."""
        return self.reader.mode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drain()
        for _ in self._threads:
            self._put(_LAST, None)
        for thread in self._threads:
            thread.join()
        self._stack.close()

    # -- sessions ---------------------------------------------------------------------------------

    def attach(self, request: Attach, seeds: NDArray[np.int64] | None) -> Attached:
        """Open a session.  Raises Refused, StoreError; reads the seeds' store ids from disk."""
        if self._draining:
            raise ShuttingDown("the daemon is shutting down")
        with self._ended:  # what sessions that end still hold
            self._ended.wait_for(lambda: not self._ending, WAIT_S)
        with self._lock:
            session, self._next_session = self._next_session, self._next_session + 1
        if request.plan in METHOD_OF:
            return self._hops.attach(session, request)
        announce = _MacroNews(self)
        attachment = open_attachment(self._opening, request, seeds, announce)
        announce.belong(session, attachment)
        try:
            whole = self.budget.graph_slots >= self.budget.graph_blocks
            if whole and attachment.macro is None:
                self.topology.load()
            if attachment.plan.name == HyperbatchPlan.name:
                self._hypers.open(session, attachment, request)
        except BaseException:
            attachment.close(self.broker)
            raise
        with self._lock:
            self._sessions[session] = attachment
        return attachment.describe(self.store.manifest, request.request, session)

    def prospect(self, request: Attach) -> Prospect:
        """What a session would get and need; nothing is kept.  Raises Refused, StoreError."""
        asked = structs.replace(request, plan=HyperbatchPlan.name)
        attachment = open_attachment(self._opening, asked, None, _MacroNews(self))
        try:
            if self.budget.graph_slots >= self.budget.graph_blocks:
                self.topology.load()
            return self._hypers.prospect(attachment, request.hyperbatch)
        finally:
            attachment.close(self.broker)

    def later(self, step: Callable[[], None]) -> None:
        """Have a worker do what no client waits for yet."""
        self._put(_LATER, step)

    def sampled(self, took_ns: int) -> None:
        """Count a worker's time."""
        with self._lock:
            self._busy_ns["sample_ns"] += took_ns

    def _put(self, priority: int, step: Callable[[], None] | None) -> None:
        self._tasks.put(_Task(priority, next(self._task_number), step))

    def admit(
        self,
        session: int,
        attachment: Attachment,
        run: int,
        batches: Sequence[Sampled],
        cached: bool,
    ) -> bool:
        """Batches of a hyperbatch are ready to be handed out; False where their run has ended."""
        with self._lock:
            state = attachment.state
            if attachment.closed or state.run != run:
                return False
            for sampled in batches:
                job = Job(run, sampled.unit, None, sampled, cached, sampled.structure)
                job.addressed = attachment.nothing_missing()
                job.structure_bytes = self.builder.structure_bytes(
                    sampled.structure, sampled.unit, attachment
                )
                state.admit(job)
            self._pump(session, attachment)
        return True

    def hyper_failed(
        self, session: int, attachment: Attachment, run: int, unit: Unit, error: BaseException
    ) -> None:
        """Nothing more comes of a run."""
        with self._lock:
            if not attachment.closed and attachment.state.run == run:
                attachment.meter.end()
                self.deliver(session, failure(session, unit, run, error_text(error)))

    def note_stage(self, number: int, begin: int, end: int) -> None:
        """Record a stage that no run of hyperbatches has."""
        if self._trace is not None:
            self._trace.write(STAGE, 0, number, np.array([begin, end]))

    def macro_failed(
        self, session: int, attachment: Attachment, epoch: int, error: BaseException
    ) -> None:
        """A macro-batch of an epoch could not be read: a run that waits for it ends."""
        with self._lock:
            state = attachment.state
            if attachment.closed or state.epoch != epoch or state.next_step >= state.num_steps:
                return
            unit = attachment.plan.unit(epoch, state.next_step)
            state.next_step = state.num_steps
            attachment.meter.end()
            self.deliver(session, failure(session, unit, state.run, error_text(error)))

    def detach(self, session: int) -> None:
        """Close a session; its memory is free once no worker has a batch of it."""
        if self._hops.detach(session):
            return
        with self._lock:
            attachment = self._sessions.pop(session, None)
            if attachment is None:
                return
            attachment.closed = True
            background = attachment.background
            if background is not None:
                background.stop()
            attachment.meter.end()
            self._ending.append(attachment)
            if not self._draining:  # else clients may still be reading what was lent to them
                self._end(attachment, attachment.state.begin(1 << 62, 0, 1 << 62, 1))
            if background is not None:
                closer = threading.Thread(target=self._close_background, args=(attachment,))
                self._closers.append(closer)
                closer.start()
            else:
                add_counts(self._own_counters, attachment.own_counters())

    def _close_background(self, attachment: Attachment) -> None:
        """In a thread of its own: what is being sampled or read is waited for."""
        assert attachment.background is not None
        attachment.background.close()
        with self._lock:
            attachment.background_ended = True
            add_counts(self._own_counters, attachment.own_counters())
            self._close_if_idle(attachment)
            self._closers.remove(threading.current_thread())

    def start(self, start: Start) -> None:
        """Begin a run: earlier ones of the session end.  A start that is not newer does nothing.

        Raises SessionLost: it is not open, or not any more; Refused: a position that no epoch has.
        """
        if start.step < 0 or start.stride < 1 or start.epoch < 0:
            raise Refused(
                f"epoch {start.epoch}, step {start.step}, stride {start.stride}: "
                "expected 0 or more, 0 or more, 1 or more"
            )
        if self._hops.start(start):
            return
        with self._lock:
            attachment = self._sessions.get(start.session)
            if attachment is None:
                raise SessionLost(f"session {start.session} is not open")
            state = attachment.state
            if start.run <= state.run:
                return
            macro = attachment.plan.resolved.macro
            if macro is not None and macro.waiting and start.stride > 1:
                raise Refused("reuse while waiting: expected no DataLoader workers beside the one")
            self._end(attachment, state.begin(start.run, start.epoch, start.step, start.stride))
            attachment.meter.begin(len(range(start.step, state.num_steps, start.stride)))
            if attachment.hyper is not None:
                attachment.hyper.begin(start.run, start.epoch, start.step, start.stride)
            if attachment.macro is not None:
                attachment.macro.begin(start.epoch, start.step)
            self._pump(start.session, attachment)

    def release(self, release: Release) -> None:
        """A client is done with a row group."""
        if self._hops.release(release):
            return
        with self._lock:
            attachment = self._sessions.get(release.session)
            if attachment is None:
                return
            done = attachment.state.release(release.run, release.step, release.group)
            if done is not None:
                attachment.meter.released()
            if done is not None and done.addressed is not None:
                self.assembler.drop(done.addressed.pins)
            if done is not None and done.sampled is not None and attachment.hyper is not None:
                attachment.hyper.released(done.run, done.sampled.batch)
            if done is not None and attachment.macro is not None:
                attachment.macro.release(done.unit)
            self._pump(release.session, attachment)

    def drain(self) -> None:
        """Start nothing more; returns when no worker is busy.

        What is lent stays so: nobody writes where a client that has not heard of it yet reads.
        """
        with self._lock:
            self._draining = True
            for session in list(self._sessions):
                self.detach(session)
            closers = list(self._closers)
        for closer in closers:
            closer.join()
        idle = threading.Barrier(len(self._threads) + 1)
        for _ in self._threads:
            self._put(_LAST, lambda: _pause(idle))
        idle.wait()
        self._hops.drain()

    def status(
        self,
    ) -> tuple[tuple[LedgerEntry, ...], tuple[SessionStatus, ...], dict[str, int]]:
        """Ledger, sessions and counters as they are now."""
        with self._lock:
            sessions = tuple(a.status(session) for session, a in self._sessions.items())
            taken = [a.ledger_entry(session) for session, a in self._sessions.items()]
            counters = self._counters | self._busy_ns
            own = dict(self._own_counters)
            for attachment in self._sessions.values():
                add_counts(own, attachment.own_counters())
            counters |= own
            if (cost := self._gauge.known) is not None:
                counters["device_run_ns"] = int(cost.run_s * 1e9)
                counters["device_page_ns"] = int(cost.page_s * 1e9)
        reader = self.reader
        counters |= {
            "bytes_read": reader.bytes_read,
            "blocks_read": reader.blocks_read,
            "reads": reader.reads,
            "bytes_written": 0,
            "read_errors": reader.errors,
            "read_retries": reader.retries,
            "slots_in_pools": self.broker.available(),
            "slots_pinned": self.broker.pinned(),
            "read_ns": reader.busy_ns,
            "read_wait_ns": reader.wait_ns,
        }
        for name, residency, files in (
            ("graph", self.graph, len(self.store.manifest.relations)),
            ("row", self.rows, len(self._served)),
        ):
            counters[f"{name}_blocks_present"] = sum(
                residency.pool.num_present(f) for f in range(files)
            )
            counters[f"{name}_blocks_hit"] = residency.hits
            counters[f"{name}_blocks_missed"] = residency.misses
        entries, others, counts = self._hops.status()
        add_counts(counters, counts)
        return (*self.budget.entries(), *taken, *entries), (*sessions, *others), counters

    # -- building ---------------------------------------------------------------------------------

    def pump_open(self, session: int, attachment: Attachment) -> None:
        """Go on with a session for which something has changed."""
        with self._lock:
            if not attachment.closed:
                self._pump(session, attachment)

    def _pump(self, session: int, attachment: Attachment) -> None:
        """Hand to the workers whatever may go on; called under the lock."""
        state = attachment.state
        while (job := state.head()) is not None:
            if job.work is None:
                job.work = attachment.workspaces.try_take(job.structure)
                if job.work is None:
                    break
                if not job.cached:  # its rows are to be found first
                    job.busy = True
                    self._submit(session, attachment, job, None)
                    break
            placement = state.place(job)
            if placement is None:
                break
            self._submit(session, attachment, job, placement)
        if attachment.hyper is not None:
            return
        while not self._draining and state.may_start():
            if attachment.macro is not None and self._skipped(session, attachment):
                continue
            work = attachment.workspaces.try_take()
            if work is None:
                break
            unit = attachment.plan.unit(state.epoch, state.next_step)
            if attachment.macro is not None and not attachment.macro.acquire(unit):
                attachment.workspaces.give(work)
                break
            self._submit(session, attachment, state.start(unit, work), None)

    def _skipped(self, session: int, attachment: Attachment) -> bool:
        """Whether passes over a macro-batch are left out here; the client is told."""
        state = attachment.state
        assert attachment.macro is not None
        step, to = state.next_step, attachment.macro.skip(state.epoch, state.next_step)
        if to != step:
            state.next_step = to
            self.deliver(session, Skipped(session=session, run=state.run, step=step, to=to))
        return to != step

    def _submit(
        self, session: int, attachment: Attachment, job: Job, placement: Placement | None
    ) -> None:
        def sample() -> None:
            begun = time.perf_counter_ns()
            if job.sampled is None:
                self.builder.sample(job, attachment)
            else:
                self.builder.adopt(job, attachment)
            with self._lock:
                self._busy_ns["sample_ns"] += time.perf_counter_ns() - begun
                job.busy = False
                if not job.cancelled:
                    self._pump(session, attachment)

        def fill() -> None:
            assert placement is not None
            begun = time.perf_counter_ns()
            if job.cached:
                self.builder.adopt(job, attachment)
            message, copied = self.builder.fill(session, job, placement, attachment)
            if self._trace is not None and job.sampled is not None:
                span = np.array([begun, time.perf_counter_ns()])
                self._trace.write(STAGE, job.run, 2, span)
            with self._lock:
                self._busy_ns["fill_ns"] += time.perf_counter_ns() - begun
                if job.cancelled:
                    job.busy = False
                    return
                self._count(job, placement, copied)
                for out in attachment.state.filled(job, placement, message):
                    if isinstance(out, BatchReady):
                        edges = sum(map(sum, out.edges_per_hop))
                        attachment.meter.handed(sum(out.nodes_per_hop), edges)
                    self.deliver(session, out)
                if placement.last:
                    self._give_work(attachment, job)
                self._pump(session, attachment)

        step = sample if placement is None else fill
        self._put(_SOON, lambda: self._guard(session, attachment, job, step))

    def _give_work(self, attachment: Attachment, job: Job) -> None:
        """A batch is built, or never will be: its workspace and its structure are free."""
        if job.work is not None:
            attachment.workspaces.give(job.work)
            job.work = None
        if job.sampled is not None and attachment.hyper is not None and not job.handed_out:
            job.handed_out = True
            attachment.hyper.handed_out(job.sampled)

    def _guard(
        self, session: int, attachment: Attachment, job: Job, step: Callable[[], None]
    ) -> None:
        """Run one step of a job; an error ends the run and reaches the client."""
        try:
            if not job.cancelled:
                step()
            else:
                job.busy = False
        except Exception as error:
            text = error_text(error)
            with self._lock:
                if not job.cancelled:
                    attachment.state.fail(job)
                    attachment.meter.end()
                    self._recycle(attachment, job)
                    self.deliver(session, failure(session, job.unit, job.run, text))
                    return
                job.busy = False
        with self._lock:
            if job.cancelled:
                attachment.state.abandon(job)
                self._recycle(attachment, job)
                self._close_if_idle(attachment)
                if not attachment.closed:
                    self._pump(session, attachment)

    def _end(self, attachment: Attachment, jobs: list[Job]) -> None:
        """Jobs of an ended run that no worker has."""
        for job in jobs:
            self._recycle(attachment, job)
        self._close_if_idle(attachment)

    def _recycle(self, attachment: Attachment, job: Job) -> None:
        if job.addressed is not None:
            self.assembler.drop(job.addressed.pins)
            job.addressed = None
        if not job.finished:
            self._give_work(attachment, job)
        if attachment.macro is not None:
            attachment.macro.release(job.unit)

    def _close_if_idle(self, attachment: Attachment) -> None:
        """Give back the memory of a closed session once nobody has anything of it."""
        ended = attachment.background is None or attachment.background_ended
        if attachment.closed and ended and attachment.idle:
            attachment.close(self.broker)
            if attachment in self._ending:
                self._ending.remove(attachment)
                self._ended.notify_all()

    def _count(self, job: Job, placement: Placement, copied: int) -> None:
        assert job.structure is not None
        self._counters["groups"] += 1
        self._counters["rows_copied"] += copied
        if placement.last:
            self._counters["batches"] += 1
            self._counters["edges"] += job.structure.num_edges
            self._counters["rows"] += job.structure.num_nodes

    def _work(self) -> None:
        """A worker thread: one task after the other."""
        while (step := self._tasks.get().step) is not None:
            step()


class _MacroNews:
    """What a session's macro-batches tell."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._owner: tuple[int, Attachment] | None = None

    def belong(self, session: int, attachment: Attachment) -> None:
        """Whose they are."""
        self._owner = session, attachment

    def ready(self) -> None:
        """A macro-batch has been loaded: batches of it may be built."""
        if self._owner is not None:
            self._engine.pump_open(*self._owner)

    def failed(self, epoch: int, error: BaseException) -> None:
        """One could not be."""
        if self._owner is not None:
            self._engine.macro_failed(*self._owner, epoch, error)

    def stage(self, number: int, begin: int, end: int) -> None:
        """A stage is over."""
        self._engine.note_stage(number, begin, end)


def _pause(idle: threading.Barrier) -> None:
    idle.wait()


def default_settings(mem_bytes: int, workers: int = 0, readers: int = 0) -> EngineSettings:
    """Settings with what is 0 chosen for this machine."""
    cores = len(os.sched_getaffinity(0))
    return EngineSettings(mem_bytes, workers or min(4, cores), readers or 8)
