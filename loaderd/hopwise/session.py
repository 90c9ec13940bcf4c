"""One session of hop-wise batches: a thread that has them brought and hands them over, in order."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from blockstore import concurrency
from loaderd.batch.failures import error_text, failure
from loaderd.hopwise.shelf import Arrival
from loaderd.hopwise.source import Answer, Source
from loaderd.meter import Meter
from loaderd.plans.base import Unit
from loaderd.plans.chunks import HopPlan
from loaderd.protocol import ChunkReady, ErrorReply, Release, SessionStatus, Start

Deliver = Callable[[int, ChunkReady | ErrorReply], None]


@dataclass(slots=True)
class _Job:
    """A batch on its way."""

    run: int
    unit: Unit
    buffer: int
    arrival: Arrival
    answer: Answer | None = None
    error: BaseException | None = None


class HopSession:
    """Credits and order of one session.  As many batches are on their way as have a buffer."""

    def __init__(
        self,
        number: int,
        plan: HopPlan,
        window: int,
        depth: int,
        deliver: Deliver,
    ) -> None:
        """Serves nothing until `open`.

        window   batches pushed and not released, at most: each has a buffer
        depth    of these, that are being read at once
        """
        self.number, self.plan, self.window = number, plan, window
        self._depth, self._deliver = depth, deliver
        self._source: Source
        self._changed = concurrency.Condition()
        self._free = list(range(window))
        self._lent: dict[tuple[int, int], int] = {}  # run and step -> buffer
        self._run, self._epoch, self._stride = -1, 0, 1
        self._next = plan.num_steps
        self._stop, self._failed = concurrency.Event(), False
        self.stopped = self._stop.is_set  # whether it ends; does not lead back to the session
        self.batches = 0
        self.meter = Meter()
        self._thread = concurrency.Thread(target=self._serve, name=f"hops-{number}", daemon=True)

    def open(self, source: Source) -> None:
        """Take batches from here."""
        self._source = source
        self._thread.start()

    def start(self, start: Start) -> None:
        """A new run: leases of earlier ones are taken back.  One that is not newer does nothing."""
        with self._changed:
            if start.run <= self._run:
                return
            self._free += self._lent.values()
            self._lent.clear()
            self._begin_run(start)

    def proceed(self, start: Start) -> None:
        """A new run behind one of which every batch has been handed over: leases stay."""
        with self._changed:
            assert self._next >= self.plan.num_steps
            self._begin_run(start)

    def _begin_run(self, start: Start) -> None:
        self._run, self._epoch, self._stride = start.run, start.epoch, start.stride
        self._next, self._failed = start.step, False
        self.meter.begin(len(range(start.step, self.plan.num_steps, start.stride)))
        self._changed.notify_all()

    @property
    def waits(self) -> bool:
        """Whether no batch is brought before the client releases others."""
        with self._changed:
            return len(self._lent) == self.window and self._next < self.plan.num_steps

    def release(self, release: Release) -> None:
        """The client is done with a batch."""
        with self._changed:
            key = release.run, release.step
            if release.group == 0 and key in self._lent:
                self._free.append(self._lent.pop(key))
                self.batches += 1
                self.meter.released()
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin no more; returns at once."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until nothing is on its way."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def counts(self) -> dict[str, int]:
        """Batches and rows so far, and how long it had batches or had none."""
        with self._changed:
            return {"batches": self.batches, "rows": self.meter.rows} | self.meter.times()

    def status(self) -> SessionStatus:
        """As `loaderd status` shows it."""
        with self._changed:
            steps = self.plan.num_steps
            times = self.meter.times()
            return SessionStatus(
                session=self.number,
                plan=self.plan.name,
                seeds=self.plan.resolved.seeds,
                epoch=self._epoch,
                step=min(self._next, steps),
                num_steps=steps,
                in_flight=self.window - len(self._free),
                window=self.window,
                batches=self.batches,
                rows=self.meter.rows,
                owner="",  # the shell knows
                ready_ns=times["ready_ns"],
                starved_ns=times["starved_ns"],
            )

    def _serve(self) -> None:
        coming: deque[_Job] = deque()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.stopped() or coming or self._may_begin())
                if self.stopped():
                    break
                begins = len(coming) < self._depth and self._may_begin()
                job = self._begin() if begins else None
            if job is not None:
                self._ask(job)
                coming.append(job)
            if job is None or not coming[0].arrival.readings:
                self._hand_over(coming.popleft())
        for job in coming:
            _settle(job)

    def _may_begin(self) -> bool:
        return bool(self._free) and self._next < self.plan.num_steps

    def _begin(self) -> _Job:
        unit = self.plan.unit(self._epoch, self._next)
        self._next += self._stride
        return _Job(self._run, unit, self._free.pop(), Arrival())

    def _ask(self, job: _Job) -> None:
        try:
            job.answer = self._source.ask(job.unit, job.buffer, job.arrival)
        except Exception as error:
            job.error = error

    def _hand_over(self, job: _Job) -> None:
        """Wait for a batch; it goes to the client, or its buffer is free."""
        error = _settle(job)
        with self._changed:
            if job.run != self._run or self._failed or self.stopped():
                self._free.append(job.buffer)
            elif error is not None:
                self._free.append(job.buffer)
                self._failed = True  # what else comes of this run is dropped
                self._next = self.plan.num_steps
                self.meter.end()
                text = error_text(error)
                self._deliver(self.number, failure(self.number, job.unit, job.run, text))
            else:
                self._lent[job.run, job.unit.step] = job.buffer
                self.meter.handed(job.unit.num_seeds)
                self._deliver(self.number, self._message(job))

    def _message(self, job: _Job) -> ChunkReady:
        unit, answer = job.unit, job.answer
        assert answer is not None
        return ChunkReady(
            session=self.number,
            run=job.run,
            epoch=unit.epoch,
            step=unit.step,
            num_rows=unit.num_seeds,
            form=answer.form,
            first=answer.first,
            counts=answer.counts,
            places=answer.places,
            index=answer.numbers,
        )


def _settle(job: _Job) -> BaseException | None:
    """Wait until nothing of a batch is on its way; the first error."""
    try:
        job.arrival.wait()
    except Exception as error:
        return job.error or error
    return job.error
