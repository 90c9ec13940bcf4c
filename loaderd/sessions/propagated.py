"""Propagated features: a thread requests the rows of the next batches, and hands them over.

It needs no worker and no workspace: arrays are wholly in memory, shared by all sessions, or are
read through buffers of the session (`loaderd.sampling.propagated.source`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from blockstore import concurrency
from loaderd.api.contents import RowArraySpec
from loaderd.api.errors import Refused, SessionLost, Shortage
from loaderd.api.protocol import Attached, ChunkReady, LedgerEntry, Release
from loaderd.memory.ledger import enough_mem, session_entry_name
from loaderd.memory.slots import SHORT_WAIT_S
from loaderd.plans.base import Part, Unit, Wanted
from loaderd.plans.chunks import HopPlan, hop_set, resolve_hops
from loaderd.sampling.failures import error_text, failure, run_guarded
from loaderd.sampling.propagated.files import HopArray, chosen_arrays
from loaderd.sampling.propagated.sizing import HopSizing, shortage_text, size_hops
from loaderd.sampling.propagated.source import (
    Answer,
    ArrayCache,
    CachedRanges,
    CachedRows,
    PassingRanges,
    PassingRows,
    PendingRead,
    ResidentArray,
    RowSource,
)
from loaderd.sessions.base import (
    Allocation,
    Consumer,
    Kind,
    SessionRequest,
    StoreResources,
    describe,
)


class PropagatedMemory(NamedTuple):
    """The memory that a session has taken."""

    sizing: HopSizing
    allocation: Allocation  # buffers
    cache: ArrayCache
    held: list[ResidentArray]  # arrays of the cache that are in memory for it

    def free(self) -> None:
        """Give all of it back; nothing may be in flight."""
        self.allocation.free()
        self.cache.give(self.held)


@dataclass(slots=True)
class _PropagatedBatch:
    """A batch in flight."""

    wanted: Wanted
    unit: Unit
    buffer: int
    arrival: PendingRead
    answer: Answer | None = None
    error: BaseException | None = None


class PropagatedSession:
    """Credits and order of one session.  As many batches are in flight as have a buffer."""

    def __init__(
        self,
        resources: StoreResources,
        number: int,
        plan: HopPlan,
        arrays: Sequence[HopArray],
        memory: PropagatedMemory,
        source: RowSource,
        stop: concurrency.Event,
    ) -> None:
        """`stop`: set when the session ends; the source looks at it, too."""
        self.number, self.plan = number, plan.name
        self._resources, self._plan, self._arrays = resources, plan, arrays
        self._memory, self._source, self._stop = memory, source, stop
        self._window, self._depth = memory.sizing.window, memory.sizing.depth
        self._changed = concurrency.Condition(resources.lock)
        self._free = list(range(self._window))
        self._leased: dict[tuple[int, int], int] = {}  # run and step -> buffer
        self._run = -1  # first run that goes on
        self._newest = Wanted(-1, 0, 0)  # batch that the consumer has asked for
        self._consumer: Consumer | None = None
        self._more = False  # the consumer may want batches: ask it
        self._batches = self._rows = 0
        self._over = concurrency.Event()
        self._thread = concurrency.Thread(
            target=run_guarded, args=(self._serve, self._thread_failed), name=f"hops-{number}",
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    # -- what its owner asks ----------------------------------------------------------------------

    def describe(self, request: int) -> Attached:
        rows = tuple(
            RowArraySpec(a.name, a.array.dtype, a.array.row_shape, a.row_bytes)
            for a in self._arrays
        )
        return describe(
            self, self._resources.store.manifest, request, self._plan, self._window, rows
        )

    def serves(self, epoch: int) -> bool:
        del epoch
        return not self._stop.is_set()

    def start(self, run: int, consumer: Consumer) -> None:
        with self._changed:
            if self._stop.is_set():
                raise SessionLost(f"session {self.number} is not open")
            self._free += self._leased.values()
            self._leased.clear()
            self._run, self._consumer = run, consumer
            self.wake()

    def wake(self) -> None:
        with self._changed:
            self._more = True
            self._changed.notify_all()

    def waits(self) -> bool:
        with self._changed:
            return len(self._leased) == self._window

    @property
    def depth(self) -> int:
        return self._window

    @property
    def holds_all(self) -> bool:
        return self._memory.sizing.held

    def crowded(self, more: int) -> bool:
        del more
        return False

    def widen(self, batches: int) -> None:
        """Each batch in flight has its buffer from the start."""

    def release(self, release: Release) -> None:
        with self._changed:
            key = release.run, release.step
            if release.group == 0 and key in self._leased:
                self._free.append(self._leased.pop(key))
                self._batches += 1
                self._changed.notify_all()

    def detach(self) -> None:
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        self._resources.closer.put(self._close)

    def join(self) -> None:
        self._over.wait()

    def _close(self) -> None:
        try:
            self._thread.join()
            self._consumer = None
            self._memory.free()
            self._resources.ended(self)
        finally:
            self._over.set()

    def counters(self) -> dict[str, int]:
        with self._changed:
            return {"batches": self._batches, "rows": self._rows}

    def held_bytes(self) -> int:
        return len(self._memory.allocation) * self._resources.budget.slot_bytes

    def ledger_entry(self) -> LedgerEntry:
        return LedgerEntry(
            session_entry_name([self.number]), self.held_bytes(),
            self._memory.sizing.basis(len(self._arrays)),
        )  # fmt: skip

    # -- its thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        coming: deque[_PropagatedBatch] = deque()
        try:
            while not self._stop.is_set():
                self._serve_once(coming)
        finally:
            for job in coming:
                _settle(job)

    def _thread_failed(self, error: Exception) -> None:
        """End the run with an error, and begin no other: the next one needs a new session."""
        with self._changed:
            self._stop.set()
            if self._consumer is not None:
                text = error_text(error)
                self._consumer.deliver(failure(self.number, self._newest, text))

    def _serve_once(self, coming: deque[_PropagatedBatch]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or coming or self._may_begin())
            if self._stop.is_set():
                return
            begins = len(coming) < self._depth and self._may_begin()
            job = self._begin() if begins else None
        if job is not None:
            self._ask(job)
            coming.append(job)
        if coming and (job is None or not coming[0].arrival.readings):
            self._hand_over(coming.popleft())

    def _may_begin(self) -> bool:
        return bool(self._free) and self._more

    def _begin(self) -> _PropagatedBatch | None:
        wanted = None if self._consumer is None else self._consumer.next()
        if wanted is None:
            self._more = False
            return None
        self._newest = wanted
        unit = self._plan.unit(wanted.epoch, wanted.step)
        return _PropagatedBatch(wanted, unit, self._free.pop(), PendingRead())

    def _ask(self, job: _PropagatedBatch) -> None:
        try:
            job.answer = self._source.ask(job.unit, job.buffer, job.arrival)
        except Exception as error:
            job.error = error

    def _hand_over(self, job: _PropagatedBatch) -> None:
        """Wait for a batch; send it to the client, or free its buffer."""
        error, wanted = _settle(job), job.wanted
        with self._changed:
            over = wanted.run < self._run or self._consumer is None or self._stop.is_set()
            if over or error is not None:
                self._free.append(job.buffer)
            if over or self._consumer is None:
                return
            if error is not None:
                self._run, self._more = wanted.run + 1, False  # later batches are dropped
                self._consumer.deliver(failure(self.number, wanted, error_text(error)))
            else:
                self._leased[wanted.run, wanted.step] = job.buffer
                self._rows += job.unit.num_seeds
                self._consumer.deliver(self._message(job))

    def _message(self, job: _PropagatedBatch) -> ChunkReady:
        unit, answer = job.unit, job.answer
        assert answer is not None
        return ChunkReady(
            session=self.number,
            run=job.wanted.run,
            epoch=unit.epoch,
            step=unit.step,
            num_rows=unit.num_seeds,
            form=answer.form,
            first=answer.first,
            counts=answer.counts,
            places=answer.places,
            index=answer.numbers,
        )


def _settle(job: _PropagatedBatch) -> BaseException | None:
    """Wait until nothing of a batch is in flight; returns the first error."""
    try:
        job.arrival.wait()
    except Exception as error:
        return job.error or error
    return job.error


# -- opening --------------------------------------------------------------------------------------


def _open(
    resources: StoreResources, number: int, plan: HopPlan, arrays: list[HopArray], size: HopSizing
) -> PropagatedSession:
    """Open a session with this much memory.  Raises Refused."""
    stop, cache = concurrency.Event(), resources.shared(array_cache)
    resident = cache.take(arrays) if size.held else []
    try:
        with resources.allocation() as allocation:
            take = partial(allocation.run, wait_s=SHORT_WAIT_S)
            transit = [take(size.run) for _ in range(size.transit)]
            buffers = [take(size.buffer)]
            try:
                while len(buffers) < size.window:
                    buffers.append(take(size.buffer))
            except Refused:  # free slots lie too far apart: a smaller window
                pass
            size = size._replace(window=len(buffers), depth=min(size.depth, len(buffers)))
            source: RowSource
            reader, place_of = resources.reader, resources.arena.place_of
            if size.held and size.ranges:
                source = CachedRanges(plan, resident)
            elif size.held:
                source = CachedRows(plan, resident, buffers, place_of, stop.is_set)
            elif size.ranges:
                source = PassingRanges(plan, arrays, reader, [place_of(b) for b in buffers])
            else:
                cost = resources.gauge.cost([a.file for a in arrays], transit)
                source = PassingRows(plan, arrays, reader, buffers, place_of, transit, cost)
            memory = PropagatedMemory(size, allocation, cache, resident)
            return PropagatedSession(resources, number, plan, arrays, memory, source, stop)
    except BaseException:
        cache.give(resident)
        raise


def array_cache(resources: StoreResources) -> ArrayCache:
    """The arrays that are wholly in memory, for all sessions of a store."""
    return ArrayCache(
        resources.broker, resources.arena, resources.reader, resources.budget.slot_bytes
    )


def open_propagated(resources: StoreResources, opening: SessionRequest) -> PropagatedSession:
    """Open a session; its arrays are held in memory if they fit.  Raises Refused, StoreError."""
    manifest, number, request = resources.store.manifest, opening.number, opening.request
    resolved = resolve_hops(manifest, request)
    hops = resolved.hops
    assert hops is not None
    plan = HopPlan(resolved, Part(request.rank, request.world_size))
    arrays = chosen_arrays(
        manifest, hop_set(manifest, request)[1], hops.operators, hops.hops, hops.labels,
        resources.first_propagated,
    )  # fmt: skip

    def sizing(held: bool) -> HopSizing:
        return size_hops(
            plan, arrays, resources.settings, resources.budget, resources.broker.available(),
            resources.shared(array_cache).missing_slots(arrays), request.window, held,
        )  # fmt: skip

    best = sizing(held=True)
    if best.held:
        try:
            return _open(resources, number, plan, arrays, best)
        except Refused:  # free slots lie too far apart
            best = sizing(held=False)
    try:
        return _open(resources, number, plan, arrays, best)
    except Shortage:  # free slots that are not adjacent are of no use
        budget, minimum, free = resources.budget, best.minimum, resources.broker.free()
        free = free if free < minimum else 0
        slot = budget.slot_bytes
        enough = enough_mem(resources.settings, budget.unused_bytes, (minimum - free) * slot)
        raise Refused(shortage_text(minimum * slot, free * slot, enough)) from None


PROPAGATED = Kind(
    lambda manifest, request, _: resolve_hops(manifest, request),
    lambda *_: 0,  # what a session needs depends on the arrays that are in memory already
    open_propagated,
    resizable=False,
)
