"""Hyperbatches of one session: batches sampled many at a time, their rows brought in together.

Two threads: one samples batches into areas as these become free, the other brings in the rows of
as many batches as fit the cache together.  Then the engine hands the batches out.  Batches are
numbered in their run; a batch's rows stay until the client has released it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from blockstore import concurrency
from loaderd.api.errors import BatchFailed
from loaderd.monitoring.trace import ROWS, STAGE, Trace
from loaderd.plans.base import Plan, Unit, Wanted
from loaderd.sampling.failures import run_guarded
from loaderd.sampling.hyperbatch.areas import Sampled, StructureArea
from loaderd.sampling.hyperbatch.entries import Needs
from loaderd.sampling.hyperbatch.sizing import HyperSizing
from loaderd.sampling.hyperbatch.unfinished import SamplingMemory


class RowProvider(Protocol):
    """Brings rows in for batches; called by the gather thread.  `RowCache` is one."""

    rows_wanted: int  # by batches, counted for each of them
    rows_read: int  # so far
    pages_read: int  # of all arrays, 4 KiB each
    runs_read: int  # of pages, in one call each
    stay_rows: int  # that stay in memory
    stay_read: int  # of these, so far

    def begin_run(self) -> None:
        """Batches are numbered from 0 again; rows stay."""

    def age(self) -> None:
        """A group begins: from time to time, counts of uses are reduced."""

    def count_fitting(self, batches: Sequence[Needs]) -> int:
        """How many of the batches, from the first on, fit together; 0: not even the first."""

    def bring(
        self, group: Sequence[Needs], later: Sequence[Needs], oldest: Callable[[int], int]
    ) -> None:
        """Bring in all rows of a group that fits; see `RowCache.bring`."""


class HyperMemory(NamedTuple):
    """Memory of hyperbatches, beside the workspaces in which batches are built."""

    sizing: HyperSizing
    areas: list[StructureArea]
    sampling: SamplingMemory | None  # if batches are sampled together
    cache: RowProvider | None  # None: rows are read batch by batch
    # batches that are likely to be wanted first, sampled already; they lie in the last area
    first: Sequence[Sampled] = ()


class _Cancelled(Exception):
    """The run has ended."""


@dataclass(eq=False)
class _Run:
    """Everything that is built from one `begin` to the next."""

    number: int  # of the first run in it; others may follow
    ahead: deque[Wanted] = field(default_factory=deque)  # asked for, not sampled yet
    batches: int = 0  # sampled so far
    grouped: int = 0  # of these, brought in so far
    released: set[int] = field(default_factory=set)  # out of order
    oldest: int = 0  # first batch not released


class StructureSampler(Protocol):
    """Samples a hyperbatch: each batch by itself, or all hop by hop over blocks."""

    def sample(
        self, units: Sequence[Unit], first: int, area: StructureArea, cancelled: Callable[[], bool]
    ) -> list[Sampled]:
        """Sample as many of the first units as the area holds, numbered from `first` on."""


class BatchOwner(Protocol):
    """The session that wants the batches."""

    def ask(self, run: int, count: int) -> list[Wanted]:
        """The batches that are wanted next, at most so many; none if `run` has ended.

        Each batch is returned once.
        """

    def admit(self, run: int, batches: Sequence[Sampled], cached: bool) -> bool:
        """Take batches in order; if their rows are not `cached`, the engine brings them.

        Returns False if `run` has ended: the batches' structure is not needed any more.
        """

    def failed(self, run: int, wanted: Wanted, error: BaseException) -> None:
        """A batch failed: nothing more comes before the next `begin`."""

    def thread_failed(self, error: Exception) -> None:
        """A thread has ended by an error that nobody foresaw: nothing more comes at all."""


class Hyper:
    """Samples, groups, brings in, admits.  Closed by `close`, which waits for both threads."""

    def __init__(
        self,
        plan: Plan,
        sampler: StructureSampler,
        memory: HyperMemory,
        owner: BatchOwner,
        trace: Trace | None = None,
    ) -> None:
        """Without a cache the engine brings each batch's rows."""
        self._plan, self._sampler, self.cache = plan, sampler, memory.cache
        self.size, self._chunk = memory.sizing.size, memory.sizing.chunk
        # a run begins with one batch, unless passes over the graph sample all at the same cost
        self._begins_with = 1 if memory.sampling is None else len(memory.first) or self._chunk
        self._owner, self._trace = owner, trace
        self._areas, self._free = memory.areas, list(memory.areas)
        self._first = memory.first  # until they are taken
        self._changed = concurrency.Condition()
        self._run: _Run | None = None
        self._stopped = self._closed = False
        self._more = False  # batches may be wanted that this has not asked for yet
        self._sampling = False
        self.waits = False  # rows can be brought in only after the client releases batches
        self._queue: deque[Sampled] = deque()  # of the run, to be brought in
        self._cached_run: _Run | None = None  # the run whose batch numbers the cache has
        self.counters = {
            "hyper_groups": 0,  # of batches brought in together
            "hyper_areas": 0,  # of batches sampled together
            "hyper_sampled": 0,  # batches
            "hyper_sample_ns": 0,  # of the sampling thread at work
            "hyper_bring_ns": 0,  # of the gathering thread at work
            "hyper_release_wait_ns": 0,  # part of it, waiting for the client
        }
        self._threads = [
            concurrency.Thread(
                target=run_guarded,
                args=(partial(self._repeat, loop), self._thread_failed),
                name=name,
                daemon=True,
            )
            for name, loop in (("hyper-sample", self._sample), ("hyper-gather", self._gather))
        ]
        begun: list[concurrency.Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                begun.append(thread)
        except BaseException:  # the system has no more threads: end the one that runs
            self._threads = begun
            self.close()
            raise

    # -- from the engine --------------------------------------------------------------------------

    def begin(self, run: int) -> None:
        """Build what is wanted of this run and later ones; those before it end."""
        with self._changed:
            self._forget()
            self._run = _Run(run)
            self._stopped, self._more = False, True
            self._changed.notify_all()

    def wake(self) -> None:
        """More may be wanted."""
        with self._changed:
            self._more = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the run; no other begins yet."""
        with self._changed:
            self._forget()
            self._run = None
            self._changed.notify_all()

    def released(self, run: int, batch: int) -> None:
        with self._changed:
            if self._run is None or run < self._run.number:
                return
            self._run.released.add(batch)
            while self._run.oldest in self._run.released:
                self._run.released.remove(self._run.oldest)
                self._run.oldest += 1
            self._changed.notify_all()

    def handed_out(self, sampled: Sampled) -> None:
        """A batch's structure is not needed any more."""
        with self._changed:
            self._drop(sampled.area, 1)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._forget()
            self._run = None
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        del self._sampler, self._owner  # they lead back to the session, and nobody uses them now

    # -- threads ----------------------------------------------------------------------------------

    def _repeat(self, loop: Callable[[], None]) -> None:
        while not self._closed:
            loop()

    def _thread_failed(self, error: Exception) -> None:
        with self._changed:  # what is counted under it may be wrong now
            self._stopped = True
            self._changed.notify_all()
        self._owner.thread_failed(error)

    def _drop(self, area: StructureArea, batches: int) -> None:
        """So many batches no longer need the area; called under the lock."""
        area.left -= batches
        if area.left == 0:
            area.reset()
            self._free.append(area)
            self._changed.notify_all()

    def _stage(self, number: int, run: _Run, begun: int) -> int:
        """Record the nanoseconds that a stage took until now, and return them."""
        now = concurrency.perf_counter_ns()
        if self._trace is not None:
            self._trace.write(STAGE, run.number, number, np.array([begun, now]))
        return now - begun

    def _forget(self) -> None:
        """Drop the batches that wait to be brought in; called under the lock."""
        while self._queue:
            self._drop(self._queue.popleft().area, 1)

    def _may_sample(self) -> bool:
        run = self._run
        if self._closed or run is None:
            return self._closed
        return (self._more or bool(run.ahead)) and not self._stopped and bool(self._free)

    def _ask(self, run: _Run) -> bool:
        """Ask what to sample next; returns whether there is any.  By the sampling thread, unlocked.

        A `wake` that comes meanwhile is not missed: the next check asks again.
        """
        maximum = self._chunk if run.batches else max(self._begins_with, len(self._first))
        asked = self._owner.ask(run.number, maximum - len(run.ahead))
        with self._changed:
            run.ahead.extend(asked)
            if run is self._run and len(run.ahead) >= maximum:
                self._more = True
            self._sampling = bool(run.ahead) and run is self._run and not self._stopped
            self._changed.notify_all()
            return self._sampling

    def _sample(self) -> None:
        with self._changed:
            self._changed.wait_for(self._may_sample)
            run = self._run
            if self._closed or run is None:
                return
            area = self._free.pop()
            area.left = 1  # counts this thread
            self._more, self._sampling = False, True
        # the consumer is asked without this lock: its own, of level 4, comes before this one
        if not self._ask(run):
            with self._changed:
                self._drop(area, 1)
            return
        wanted = list(run.ahead)
        sampled: Sequence[Sampled] = []
        begun = concurrency.perf_counter_ns()
        try:
            units = [self._plan.unit(w.epoch, w.step) for w in wanted]
            sampled = self._take_first(units, area)
            if not sampled:
                some = units if run.batches else units[: self._begins_with]
                sampled = self._sampler.sample(
                    some, run.batches, area, lambda: run is not self._run
                )
            if not sampled and run is self._run:
                raise BatchFailed("a batch's structure takes more than there is room for")
        except BaseException as error:
            self._fail(run, wanted[0], error)
        with self._changed:
            if run is self._run:
                area.left += len(sampled)
                run.batches += len(sampled)
                self.counters["hyper_sampled"] += len(sampled)
                self.counters["hyper_areas"] += 1
                self._queue.extend(s._replace(run=run.ahead.popleft().run) for s in sampled)
            self._sampling = False
            self.counters["hyper_sample_ns"] += self._stage(0, run, begun)
            self._changed.notify_all()
            self._drop(area, 1)

    def _take_first(self, units: Sequence[Unit], area: StructureArea) -> Sequence[Sampled]:
        """Those of the session's first batches that these are; if none, the area is empty then.

        By the sampling thread.
        """
        first, self._first = self._first, ()
        pairs = takewhile(lambda pair: pair[0].unit == pair[1], zip(first, units, strict=False))
        found = [sampled for sampled, _ in pairs]
        if first and not found:
            area.rewind()
        return found

    def _may_gather(self) -> bool:
        """Whether a hyperbatch is sampled, or as much of it as there will be."""
        run = self._run
        if self._closed:
            return True
        if run is None or not self._queue:
            return False
        wanted = 1 if self.cache is None else self._group_size(run)
        if self._sampling or len(self._queue) >= wanted:
            return len(self._queue) >= wanted
        more = (self._more or bool(run.ahead)) and not self._stopped
        # areas of batches that are being handed out become free without this thread
        coming = sum(area.left for area in self._areas) > len(self._queue)
        return not (more and (self._free or coming))

    def _group_size(self, run: _Run) -> int:
        """Batches of the next group, at most: the first ones are small, as a client waits."""
        if run.grouped == 0:
            return self._begins_with
        return min(self._chunk, self.size) if run.grouped <= self._begins_with else self.size

    def _gather(self) -> None:
        """Bring in the rows of one group: batches that fit the cache together."""
        with self._changed:
            self._changed.wait_for(self._may_gather)
            run = self._run
            if self._closed or run is None:
                return
            todo = list(self._queue)
            # `stop` may reset the area of a batch as soon as its `left` is 0: while rows are
            # brought in, this thread counts, too
            areas = {id(s.area): s.area for s in todo}.values()
            for area in areas:  # also if the run ends meanwhile
                area.left += 1
        count, begun = -1, concurrency.perf_counter_ns()
        try:
            self._begin_in_cache(run)
            count = self._bring(run, todo)
        except _Cancelled:
            pass
        except BaseException as error:
            unit = todo[0].unit
            self._fail(run, Wanted(todo[0].run, unit.epoch, unit.step), error)
        with self._changed:
            self.counters["hyper_bring_ns"] += self._stage(1, run, begun)
            for area in areas:
                self._drop(area, 1)
            if run is not self._run or count < 0:
                return
            group = [self._queue.popleft() for _ in range(max(1, count))]
            run.grouped += len(group)
            self.counters["hyper_groups"] += 1
        if self._trace is not None:
            for sampled in group:
                nodes = np.concatenate(sampled.arrays.nodes)
                self._trace.write(ROWS, run.number, self.counters["hyper_groups"], nodes)
        if not self._owner.admit(run.number, group, count > 0):
            with self._changed:
                for sampled in group:
                    self._drop(sampled.area, 1)

    def _begin_in_cache(self, run: _Run) -> None:
        if self.cache is None:
            return
        if run is not self._cached_run:
            self.cache.begin_run()
            self._cached_run = run
        self.cache.age()

    def _bring(self, run: _Run, todo: Sequence[Sampled]) -> int:
        """Bring in the rows of the first batches that fit together; returns how many."""
        if self.cache is None:
            return 0
        needs = [Needs(s.batch, s.items, s.unit, s.area.copy) for s in todo]
        count = self.cache.count_fitting(needs[: self._group_size(run)])
        if count:
            self.cache.bring(needs[:count], needs[count:], lambda known: self._oldest(run, known))
        return count

    def _oldest(self, run: _Run, known: int) -> int:
        """The first unreleased batch, as soon as it is later than `known`."""

        def moved() -> bool:
            return self._closed or run is not self._run or run.oldest > known

        begun = concurrency.perf_counter_ns()
        with self._changed:
            self.waits = not moved()
            self._changed.wait_for(moved)
            self.waits = False
            self.counters["hyper_release_wait_ns"] += concurrency.perf_counter_ns() - begun
            if self._closed or run is not self._run:
                raise _Cancelled
            return run.oldest

    def _fail(self, run: _Run, wanted: Wanted, error: BaseException) -> None:
        with self._changed:
            if run is not self._run:
                return
            self._stopped = True
            self._forget()
        self._owner.failed(run.number, wanted, error)
