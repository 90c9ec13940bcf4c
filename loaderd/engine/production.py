"""Batches of one store on their way: what may go on goes to the workers; what is built, out."""

from collections.abc import Callable, Sequence

import numpy as np

from blockstore import concurrency
from loaderd.batch.failures import error_text, failure
from loaderd.batch.rows import RowAssembler
from loaderd.engine.attachment import Attachment
from loaderd.engine.build import Builder
from loaderd.engine.floor import Floor
from loaderd.engine.session import Job, Placement
from loaderd.errors import ShuttingDown
from loaderd.hyper.session import Sampled
from loaderd.memory.slots import SlotBroker
from loaderd.memory.workspace import clear_workspace
from loaderd.plans.base import Unit
from loaderd.protocol import BatchReady, ChunkReady, ErrorReply, RowGroup, Skipped
from loaderd.trace import STAGE, Trace

Out = BatchReady | RowGroup | ChunkReady | Skipped | ErrorReply
Deliver = Callable[[int, Out], None]


class Production:
    """Carries the sessions of one store on.  `lock` guards these and whatever they hold."""

    def __init__(
        self,
        floor: Floor,
        builder: Builder,
        assembler: RowAssembler,
        broker: SlotBroker,
        trace: Trace | None,
        deliver: Deliver,
    ) -> None:
        self._floor, self._builder, self._assembler = floor, builder, assembler
        self._broker, self._trace, self._deliver = broker, trace, deliver
        self.lock = concurrency.RLock()
        self.ended = concurrency.Condition(self.lock)
        self.ending: list[Attachment] = []  # closed, and not idle yet
        self.draining = False
        self._counters = {"batches": 0, "edges": 0, "rows": 0, "rows_copied": 0, "groups": 0}
        self._busy_ns = {"sample_ns": 0, "fill_ns": 0}

    def wait_ended(self, wait_s: float) -> None:
        """Wait until sessions that end have given back what they hold; no longer than so.

        Raises ShuttingDown: what is lent stays so then.
        """
        with self.ended:
            self.ended.wait_for(lambda: self.draining or not self.ending, wait_s)
            if self.draining:
                raise ShuttingDown("the daemon is shutting down")

    def drain(self) -> None:
        """Start nothing more."""
        with self.ended:
            self.draining = True
            self.ended.notify_all()

    def counters(self) -> dict[str, int]:
        """Of all batches so far."""
        return self._counters | self._busy_ns

    def admit(
        self,
        session: int,
        attachment: Attachment,
        run: int,
        batches: Sequence[Sampled],
        cached: bool,
    ) -> bool:
        """Batches of a hyperbatch are ready to be handed out; False where their run has ended."""
        with self.lock:
            state = attachment.state
            if attachment.closed or state.run != run:
                return False
            for sampled in batches:
                job = Job(run, sampled.unit, None, sampled, cached, sampled.structure)
                job.addressed = attachment.nothing_missing()
                job.num_items = sampled.structure.num_nodes
                job.structure_bytes = self._builder.structure_bytes(
                    sampled.structure, sampled.unit, attachment
                )
                state.admit(job)
            self.pump(session, attachment)
        return True

    def hyper_failed(
        self, session: int, attachment: Attachment, run: int, unit: Unit, error: BaseException
    ) -> None:
        """Nothing more comes of a run."""
        with self.lock:
            if not attachment.closed and attachment.state.run == run:
                attachment.meter.end()
                self._deliver(session, failure(session, unit, run, error_text(error)))

    def note_stage(self, number: int, begin: int, end: int) -> None:
        """Record a stage that no run of hyperbatches has."""
        if self._trace is not None:
            self._trace.write(STAGE, 0, number, np.array([begin, end]))

    def macro_failed(
        self, session: int, attachment: Attachment, run: int, error: BaseException
    ) -> None:
        """A macro-batch that a run waits for could not be read: it ends."""
        with self.lock:
            state = attachment.state
            if attachment.closed or state.run != run or state.next_step >= state.num_steps:
                return
            unit = attachment.plan.unit(state.epoch, state.next_step)
            state.next_step = state.num_steps
            attachment.meter.end()
            self._deliver(session, failure(session, unit, state.run, error_text(error)))

    def pump_open(self, session: int, attachment: Attachment) -> None:
        """Go on with a session for which something has changed."""
        with self.lock:
            if not attachment.closed:
                self.pump(session, attachment)

    def pump(self, session: int, attachment: Attachment) -> None:
        """Hand to the workers whatever may go on; called under the lock."""
        self.attempt(session, attachment, lambda: self._hand_on(session, attachment))

    def attempt(self, session: int, attachment: Attachment, step: Callable[[], None]) -> None:
        """Do something for the run of a session; called under the lock.

        An error ends the run and reaches the client.  It does not reach the caller, who may be a
        worker whose batch is finished, or a thread that has read a macro-batch for many sessions.
        """
        state = attachment.state
        try:
            step()
        except Exception as error:
            unit = Unit(state.epoch, state.next_step, 0, 0)
            state.next_step = state.num_steps
            attachment.meter.end()
            self._deliver(session, failure(session, unit, state.run, error_text(error)))

    def _hand_on(self, session: int, attachment: Attachment) -> None:
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
        while not self.draining and state.may_start():
            if attachment.macro is not None and self._skipped(session, attachment):
                continue
            unit = attachment.plan.unit(state.epoch, state.next_step)
            work = attachment.workspaces.try_take_large()  # what it will hold is not known
            if work is None:
                break
            acquired = False
            try:
                acquired = attachment.macro is None or attachment.macro.acquire(unit)
            finally:
                if not acquired:
                    attachment.workspaces.give(work)
            if not acquired:
                break
            self._submit(session, attachment, state.start(unit, work), None)

    def _skipped(self, session: int, attachment: Attachment) -> bool:
        """Whether passes over a macro-batch are left out here; the client is told."""
        state = attachment.state
        assert attachment.macro is not None
        step, to = state.next_step, attachment.macro.skip(state.epoch, state.next_step)
        if to != step:
            state.next_step = to
            self._deliver(session, Skipped(session=session, run=state.run, step=step, to=to))
        return to != step

    def _submit(
        self, session: int, attachment: Attachment, job: Job, placement: Placement | None
    ) -> None:
        def sample() -> Callable[[], None]:
            begun = concurrency.perf_counter_ns()
            if job.sampled is None:
                self._builder.sample(job, attachment)
            else:
                self._builder.adopt(job, attachment)
            self.sampled(concurrency.perf_counter_ns() - begun)

            def finish() -> None:
                job.busy = False
                self.pump(session, attachment)

            return finish

        def fill() -> Callable[[], None]:
            assert placement is not None
            begun = concurrency.perf_counter_ns()
            if job.cached:
                self._builder.adopt(job, attachment)
            message, copied = self._builder.fill(session, job, placement, attachment)
            ended = concurrency.perf_counter_ns()
            if self._trace is not None and job.sampled is not None:
                self._trace.write(STAGE, job.run, 2, np.array([begun, ended]))

            def finish() -> None:
                self._busy_ns["fill_ns"] += ended - begun
                self._count(job, placement, copied)
                for out in attachment.state.filled(job, placement, message):
                    if isinstance(out, BatchReady):
                        edges = sum(map(sum, out.edges_per_hop))
                        attachment.meter.handed(sum(out.nodes_per_hop), edges)
                    self._deliver(session, out)
                if placement.last:
                    self._give_work(attachment, job)
                self.pump(session, attachment)

            return finish

        step = sample if placement is None else fill
        self._floor.soon(session, lambda: self._guard(session, attachment, job, step))

    def _give_work(self, attachment: Attachment, job: Job) -> None:
        """A batch is built, or never will be: its workspace and its structure are free."""
        if job.work is not None:
            attachment.workspaces.give(job.work)
            job.work = None
        if job.sampled is not None and attachment.hyper is not None and not job.handed_out:
            job.handed_out = True
            attachment.hyper.handed_out(job.sampled)

    def _guard(
        self,
        session: int,
        attachment: Attachment,
        job: Job,
        step: Callable[[], Callable[[], None]],
    ) -> None:
        """Run one step of a job, and under the lock what it returns, if the run still goes on.

        The job is this worker's, `busy`, until then: whoever ends its run leaves it to the worker.
        An error ends the run and reaches the client.
        """
        try:
            finish = None if job.cancelled else step()
            with self.lock:
                if finish is not None and not job.cancelled:
                    finish()
                    return
        except Exception as error:
            text = error_text(error)
            if job.work is not None:  # its tables may be half filled
                clear_workspace(job.work)
            with self.lock:
                if not job.cancelled:
                    attachment.state.fail(job)
                    attachment.meter.end()
                    self._recycle(attachment, job)
                    self._deliver(session, failure(session, job.unit, job.run, text))
                    return
        with self.lock:
            attachment.state.abandon(job)
            self._recycle(attachment, job)
            self.close_if_idle(attachment)
            if not attachment.closed:
                self.pump(session, attachment)

    def end(self, attachment: Attachment, jobs: list[Job]) -> None:
        """Jobs of an ended run that no worker has."""
        for job in jobs:
            self._recycle(attachment, job)
        self.close_if_idle(attachment)

    def _recycle(self, attachment: Attachment, job: Job) -> None:
        if job.addressed is not None:
            self._assembler.drop(job.addressed.pins)
            job.addressed = None
        if not job.finished:
            self._give_work(attachment, job)
        if attachment.macro is not None:
            attachment.macro.release(job.unit)

    def close_if_idle(self, attachment: Attachment) -> None:
        """Give back the memory of a closed session once nobody has anything of it."""
        ended = attachment.background is None or attachment.background_ended
        if attachment.closed and ended and attachment.idle:
            attachment.close(self._broker)
            if attachment in self.ending:
                self.ending.remove(attachment)
                self.ended.notify_all()

    def _count(self, job: Job, placement: Placement, copied: int) -> None:
        assert job.structure is not None
        self._counters["groups"] += 1
        self._counters["rows_copied"] += copied
        if placement.last:
            self._counters["batches"] += 1
            self._counters["edges"] += job.structure.num_edges
            self._counters["rows"] += job.structure.num_nodes

    def later(self, step: Callable[[], None]) -> None:
        """Have a worker do what no client waits for yet."""
        self._floor.later(step)

    def sampled(self, took_ns: int) -> None:
        """Count a worker's time."""
        with self.lock:
            self._busy_ns["sample_ns"] += took_ns


class MacroNews:
    """What a session's macro-batches tell."""

    def __init__(self, production: Production) -> None:
        self._production = production
        self._owner: tuple[int, Attachment] | None = None

    def belong(self, session: int, attachment: Attachment) -> None:
        """Whose they are."""
        self._owner = session, attachment

    def ready(self) -> None:
        """A macro-batch has been loaded: batches of it may be built."""
        if self._owner is not None:
            self._production.pump_open(*self._owner)

    def failed(self, run: int, error: BaseException) -> None:
        """One that a run needs could not be."""
        if self._owner is not None:
            self._production.macro_failed(*self._owner, run, error)

    def stage(self, number: int, begin: int, end: int) -> None:
        """A stage is over."""
        self._production.note_stage(number, begin, end)
