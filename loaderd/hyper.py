"""Hyperbatches of one session: batches sampled many at a time, their rows brought in together.

Two threads: one samples the next hyperbatch while the other brings in the rows of this one, group
after group.  What they make are jobs whose rows have entries in the cache; the engine hands those
out.  Batches are numbered in their run; a batch's rows stay until the client has released it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from loaderd.errors import BatchFailed
from loaderd.plans.base import Plan, Unit
from loaderd.rowcache import Needs, RowCache
from loaderd.topology import Structure

ALIGN = 64


class StructureArea:
    """Arrays one behind the other in a piece of memory, all freed at once."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory, self._used = memory, 0
        self._lock = threading.Lock()
        self.left = 0  # batches whose structure still is needed

    def take(self, dtype: DTypeLike, count: int) -> NDArray[Any] | None:
        """Room for `count` items; None where there is no more.  Any thread may call."""
        item = np.dtype(dtype)
        size = -(-count * item.itemsize // ALIGN) * ALIGN
        with self._lock:
            start = self._used
            if start + size > self._memory.size:
                return None
            self._used = start + size
        return self._memory[start : start + count * item.itemsize].view(item)

    def copy(self, values: NDArray[Any]) -> NDArray[Any] | None:
        """A copy of an array; None where there is no room."""
        out = self.take(values.dtype, values.size)
        if out is not None:
            out[:] = values
        return out

    def reset(self) -> None:
        """Everything is free again."""
        self._used = self.left = 0

    @property
    def used(self) -> int:
        """Bytes taken."""
        return self._used


class Sampled(NamedTuple):
    """A batch's structure, compact: what stands in a workspace after sampling."""

    batch: int  # its number in the run
    unit: Unit
    structure: Structure
    nodes: NDArray[Any]  # id_dtype: store ids, seeds first
    counts: NDArray[np.uint32]
    local: NDArray[np.uint32]
    edge_ids: NDArray[Any]
    area: StructureArea


class _Cancelled(Exception):
    """The run has ended."""


@dataclass(eq=False)
class _Run:
    """What the client has started."""

    number: int
    epoch: int
    step: int  # that is sampled next
    stride: int
    batches: int = 0  # sampled so far
    released: set[int] = field(default_factory=set)  # out of order
    oldest: int = 0  # first batch not released


class _Hyperbatch(NamedTuple):
    run: _Run
    batches: list[Sampled]
    area: StructureArea


class Sampler(Protocol):
    """What samples a hyperbatch: each batch by itself, or hop by hop over blocks."""

    def sample(
        self, units: Sequence[Unit], first: int, area: StructureArea, cancelled: Callable[[], bool]
    ) -> list[Sampled]:
        """The first of these batches that the area holds, numbered from `first` on."""


class Hand(Protocol):
    """Where finished batches go: the engine."""

    def admit(self, run: int, batches: Sequence[Sampled], cached: bool) -> bool:
        """Take batches in order; their rows are in the cache, or else are for the engine to bring.

        Returns False where the run has ended: the batches' structure is not needed any more.
        """

    def failed(self, run: int, unit: Unit, error: BaseException) -> None:
        """The run ends here."""


class Hyper:
    """Samples, groups, brings in, admits.  Closed by `close`, which waits for both threads."""

    def __init__(
        self,
        plan: Plan,
        sampler: Sampler,
        cache: RowCache | None,
        areas: Sequence[StructureArea],
        size: int,
        hand: Hand,
    ) -> None:
        """`size`: batches of a hyperbatch, at most.  Without a cache rows are the engine's."""
        self._plan, self._sampler, self.cache, self.size = plan, sampler, cache, size
        self._hand = hand
        self._free = list(areas)
        self._changed = threading.Condition()
        self._run: _Run | None = None
        self._stopped = self._closed = False
        self._queue: deque[_Hyperbatch] = deque()
        self._cached_run: _Run | None = None  # of the numbers in the cache
        self.counters = {"hyperbatches": 0, "groups": 0, "batches_sampled": 0}
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for name, loop in (("hyper-sample", self._sample), ("hyper-gather", self._gather))
        ]
        for thread in self._threads:
            thread.start()

    # -- from the engine --------------------------------------------------------------------------

    def begin(self, run: int, epoch: int, step: int, stride: int) -> None:
        """A new run; the one before ends."""
        with self._changed:
            self._run = _Run(run, epoch, step, stride)
            self._stopped = False
            self._changed.notify_all()

    def stop(self) -> None:
        """The run ends, no other begins yet."""
        with self._changed:
            self._run = None
            self._changed.notify_all()

    def released(self, run: int, batch: int) -> None:
        """The client is done with a batch."""
        with self._changed:
            if self._run is None or self._run.number != run:
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
        """End both threads."""
        with self._changed:
            self._closed = True
            self._run = None
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- threads ----------------------------------------------------------------------------------

    def _guard(self, loop: Callable[[], None]) -> None:
        while not self._closed:
            loop()

    def _drop(self, area: StructureArea, batches: int) -> None:
        """So many batches less need the area; called under the lock."""
        area.left -= batches
        if area.left == 0:
            area.reset()
            self._free.append(area)
            self._changed.notify_all()

    def _may_sample(self) -> bool:
        run = self._run
        more = run is not None and run.step < self._plan.num_steps and not self._stopped
        return self._closed or (more and bool(self._free))

    def _sample(self) -> None:
        """One hyperbatch."""
        with self._changed:
            self._changed.wait_for(self._may_sample)
            run = self._run
            if self._closed or run is None:
                return
            area = self._free.pop()
            area.left = 1  # this thread's
        units = []
        for step in range(run.step, self._plan.num_steps, run.stride)[: self.size]:
            units.append(self._plan.unit(run.epoch, step))
        try:
            sampled = self._sampler.sample(units, run.batches, area, lambda: run is not self._run)
            if not sampled and run is self._run:
                raise BatchFailed("a batch's structure takes more than there is room for")
        except BaseException as error:
            self._fail(run, units[0], error)
            sampled = []
        with self._changed:
            area.left += len(sampled)
            if sampled:
                run.batches += len(sampled)
                run.step += run.stride * len(sampled)
                self.counters["hyperbatches"] += 1
                self.counters["batches_sampled"] += len(sampled)
                self._queue.append(_Hyperbatch(run, sampled, area))
                self._changed.notify_all()
            self._drop(area, 1)

    def _gather(self) -> None:
        """One hyperbatch's rows."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._queue))
            if self._closed:
                return
            hyperbatch = self._queue.popleft()
        run, todo = hyperbatch.run, list(hyperbatch.batches)
        try:
            self._begin_in_cache(run)
            while todo:
                if run is not self._run:
                    raise _Cancelled
                count = self._bring(run, todo)
                if not self._hand.admit(run.number, todo[: max(1, count)], count > 0):
                    raise _Cancelled
                del todo[: max(1, count)]
        except _Cancelled:
            pass
        except BaseException as error:
            self._fail(run, todo[0].unit, error)
        with self._changed:
            if todo:
                self._drop(hyperbatch.area, len(todo))

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
        needs = [Needs(s.batch, (s.nodes,)) for s in todo]
        count = self.cache.count_fitting(needs)
        if count:
            self.cache.bring(needs[:count], needs[count:], lambda known: self._oldest(run, known))
            self.counters["groups"] += 1
        return count

    def _oldest(self, run: _Run, known: int) -> int:
        """The first batch not released, once it is another than `known`."""

        def moved() -> bool:
            return self._closed or run is not self._run or run.oldest > known

        with self._changed:
            self._changed.wait_for(moved)
            if self._closed or run is not self._run:
                raise _Cancelled
            return run.oldest

    def _fail(self, run: _Run, unit: Unit, error: BaseException) -> None:
        with self._changed:
            if run is not self._run:
                return
            self._stopped = True
        self._hand.failed(run.number, unit, error)
