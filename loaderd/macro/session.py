"""Macro-batches as one session sees them: which it needs next, and those its batches lie in."""

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from loaderd.macro.graph import MacroGraph
from loaderd.macro.job import Job
from loaderd.macro.shelf import Hold, Key, Reader
from loaderd.plans.base import Unit
from loaderd.plans.macrobatch import MacrobatchPlan


class Macro:
    """One session of a job."""

    def __init__(self, plan: MacrobatchPlan, job: Job, reader: Reader) -> None:
        """`reader` has joined the job."""
        self._plan, self._job, self._reader = plan, job, reader
        self._stride = 1
        self.counters = reader.counters

    def begin(self, run: int, epoch: int, step: int, stride: int) -> None:
        """A run begins at a step of an epoch; steps behind its end mean that none begins."""
        with self._job.changed:
            self._stride, self._reader.waiting_since = stride, 0
            live, self._reader.live = self._reader.live, False  # unless the run really begins
            self._reader.run = run
            if step < self._plan.num_steps:
                self._want((epoch, self._plan.unit(epoch, step).macro))
            elif live:  # whatever it was about to need
                self._job.want(self._reader, [], live=False)

    def _want(self, key: Key) -> None:
        epoch, macro = key
        layout = self._plan.epoch_layout(epoch)
        steps = np.flatnonzero(layout.steps[macro:]) + macro
        wanted = [(epoch, int(m)) for m in steps]
        self._job.want(self._reader, [*wanted, self._first(epoch + 1)], live=True)

    def _first(self, epoch: int) -> Key:
        return epoch, int(np.flatnonzero(self._plan.epoch_layout(epoch).steps)[0])

    def acquire(self, unit: Unit) -> bool:
        """Whether the macro-batch of a unit is there; it stays until `release`."""
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
            reader.held.setdefault(key, Hold(memory)).count += 1
            memory.users += 1
            memory.first_use = memory.first_use or now
            try:
                self._go_on(unit)
            except BaseException:
                self.release(unit)
                raise
            return True

    def _go_on(self, unit: Unit) -> None:
        """What the session needs once a unit is under way."""
        after = unit.step + self._stride
        if after >= self._plan.num_steps:
            self._job.want(self._reader, [self._first(unit.epoch + 1)], live=False)
        elif (macro := self._plan.unit(unit.epoch, after).macro) != unit.macro:
            self._want((unit.epoch, macro))

    def skip(self, epoch: int, step: int) -> int:
        """The step that comes next: this one, or one behind passes that are left out.

        No further pass begins where the session need not wait for the next macro-batch.
        """
        macro = self._plan.resolved.macro
        assert macro is not None
        unit = self._plan.unit(epoch, step)
        if not macro.waiting or unit.cycle == 0:
            return step
        layout = self._plan.epoch_layout(epoch)
        first, steps = int(layout.first_step[unit.macro]), int(layout.steps[unit.macro])
        with self._job.changed:
            wanted = self._reader.wanted
            here = len(wanted) > 1 and wanted[0] == (epoch, unit.macro)
            there = here and self._job.is_ready(self._reader, wanted[1])
        if (step - first) % steps or not there:
            return step
        return int(layout.first_step[unit.macro + 1])

    def release(self, unit: Unit) -> None:
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

    def graph(self, unit: Unit) -> MacroGraph:
        """The macro-batch of a unit that has acquired it."""
        with self._job.changed:
            return self._reader.held[unit.epoch, unit.macro].memory.graph

    def place_seeds(self, unit: Unit, out: NDArray[np.int64]) -> None:
        """Places of a unit's seeds among the session's."""
        self._job.groups.place(self._plan, unit, out)

    @property
    def idle(self) -> bool:
        """Whether no batch of the session lies in a macro-batch."""
        with self._job.changed:
            return not self._reader.held

    @property
    def waits(self) -> bool:
        """Whether the next one is not read before the client releases batches."""
        with self._job.changed:
            return self._job.is_held_up(self._reader)

    @property
    def held_slots(self) -> int:
        """Its part of the job's memory."""
        return self._job.num_slots // max(1, self._job.num_sessions)

    @property
    def counted_slots(self) -> int:
        """The job's memory, for one of its sessions; 0 for the others."""
        return self._job.num_slots if self._job.counts(self._reader) else 0

    def basis(self) -> str:
        """As a line of the ledger says it."""
        if self._job.counts(self._reader):
            return self._job.basis()
        return "; macro-batches in the memory of another session of the job"

    def stop(self) -> None:
        """The session needs no more; returns at once."""
        self._job.stop(self._reader)

    def close(self) -> None:
        """Wait until what is being loaded is there, if it is for nobody else."""
        self._job.close(self._reader)

    def leave(self) -> None:
        """Behind `close`, once it is idle: the job's memory is not needed for this session."""
        self._job.leave()
