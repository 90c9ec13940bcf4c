"""Macro-batches of one session: the next is read while this one is served.

A thread of its own loads them in the order in which the session needs them, into memories that
nobody uses any more.  Behind an epoch's last comes the next epoch's first.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loaderd.macrograph import MacroGraph
from loaderd.plans.base import Unit
from loaderd.plans.macrobatch import MacrobatchPlan, SeedGroups
from loaderd.trace import READ_MACRO, SERVE_MACRO


@dataclass(slots=True, eq=False)
class _Memory:
    """Room for one macro-batch."""

    graph: MacroGraph
    key: tuple[int, int] | None = None  # epoch and number
    ready: bool = False
    users: int = 0  # batches that are being built, or whose rows a client may read
    first_use: int = 0  # ns of a steady clock; 0 before it
    last_use: int = 0


class Announce(Protocol):
    """What a session's macro-batches tell the engine."""

    def ready(self) -> None:
        """A macro-batch has been loaded."""

    def failed(self, epoch: int, error: BaseException) -> None:
        """One of an epoch could not be."""

    def stage(self, number: int, begin: int, end: int) -> None:
        """One of `loaderd.trace.STAGES` took from `begin` to `end`, ns of a steady clock."""


class Macro:
    """Loads macro-batches ahead of those who sample from them."""

    def __init__(
        self,
        plan: MacrobatchPlan,
        groups: SeedGroups,
        graphs: Sequence[MacroGraph],
        announce: Announce,
    ) -> None:
        """`graphs`: with two of them one is loaded while the other is served."""
        self._plan, self._groups, self._announce = plan, groups, announce
        self._memories = [_Memory(graph) for graph in graphs]
        self._changed = threading.Condition()
        self._wanted: list[tuple[int, int]] = []  # in the order of need; the first is served now
        self._error: tuple[int, int] | None = None
        self._stopped = False
        self._waiting_since = 0  # ns; of the session, for the first that it wants
        self.counters = {
            "macro_loaded": 0,
            "macro_members": 0,
            "macro_read_ns": 0,
            "macro_wait_ns": 0,
        }
        self._thread = threading.Thread(target=self._run, name="macro-read", daemon=True)
        self._thread.start()

    def begin(self, epoch: int, step: int) -> None:
        """A run begins at a step of an epoch; steps behind its end mean that none begins."""
        with self._changed:
            if step < self._plan.num_steps:
                self._want(epoch, self._plan.unit(epoch, step).macro)
            self._error = None
            self._changed.notify_all()

    def _want(self, epoch: int, macro: int) -> None:
        layout = self._plan.epoch_layout(epoch)
        steps = np.flatnonzero(layout.steps[macro:]) + macro
        self._wanted = [(epoch, int(m)) for m in steps]
        after = self._plan.epoch_layout(epoch + 1)
        self._wanted.append((epoch + 1, int(np.flatnonzero(after.steps)[0])))

    def acquire(self, unit: Unit) -> bool:
        """Whether the macro-batch of a unit is there; it stays until `release`."""
        with self._changed:
            if self._wanted and self._wanted[0] != (unit.epoch, unit.macro):
                self._want(unit.epoch, unit.macro)
                self._changed.notify_all()
            memory = self._find(unit)
            if memory is None or not memory.ready:
                self._waiting_since = self._waiting_since or time.perf_counter_ns()
                return False
            if self._waiting_since:
                waited = time.perf_counter_ns() - self._waiting_since
                self.counters["macro_wait_ns"] += waited
                self._waiting_since = 0
            memory.users += 1
            memory.first_use = memory.first_use or time.perf_counter_ns()
            return True

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
        with self._changed:
            after = self._wanted[1] if self._wanted[0] == (epoch, unit.macro) else None
            there = any(m.ready and m.key == after for m in self._memories)
        if (step - first) % steps or not there:
            return step
        return int(layout.first_step[unit.macro + 1])

    def release(self, unit: Unit) -> None:
        """One batch of its macro-batch is gone."""
        with self._changed:
            memory = self._find(unit)
            assert memory is not None
            memory.users -= 1
            assert memory.users >= 0
            if memory.users == 0:
                memory.last_use = time.perf_counter_ns()
                self._changed.notify_all()

    def graph(self, unit: Unit) -> MacroGraph:
        """The macro-batch of a unit that has acquired it."""
        with self._changed:
            memory = self._find(unit)
            assert memory is not None
            return memory.graph

    def place_seeds(self, unit: Unit, out: NDArray[np.int64]) -> None:
        """Places of a unit's seeds among the session's."""
        self._groups.place(self._plan, unit, out)

    def _find(self, unit: Unit) -> _Memory | None:
        for memory in self._memories:
            if memory.key == (unit.epoch, unit.macro):
                return memory
        return None

    @property
    def idle(self) -> bool:
        """Whether nobody uses a macro-batch."""
        return all(memory.users == 0 for memory in self._memories)

    @property
    def waits(self) -> bool:
        """Whether the next one is not read before the client releases batches."""
        with self._changed:
            held = {memory.key for memory in self._memories}
            near = self._wanted[: len(self._memories)]
            return any(key not in held for key in near) and self._next() is None

    def stop(self) -> None:
        """No more are loaded; returns at once."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until the one that is being loaded is there."""
        self.stop()
        self._thread.join()

    def _next(self) -> tuple[_Memory, tuple[int, int]] | None:
        """What is to be loaded, and where to; None while nothing can be."""
        if self._error is not None:
            return None
        near = self._wanted[: len(self._memories)]
        held = {memory.key for memory in self._memories}
        for key in near:
            if key not in held:
                for memory in self._memories:
                    if memory.users == 0 and memory.key not in near:
                        return memory, key
                return None
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and self._next() is None:
                    self._changed.wait()
                if self._stopped:
                    return
                chosen = self._next()
                assert chosen is not None
                memory, key = chosen
                served = memory.first_use, memory.last_use
                memory.key, memory.ready, memory.first_use = key, False, 0
            if served[0]:
                self._announce.stage(SERVE_MACRO, *served)
            self._load(memory, *key)

    def _load(self, memory: _Memory, epoch: int, macro: int) -> None:
        begun = time.perf_counter_ns()
        try:
            memory.graph.load(self._plan.epoch_layout(epoch).members[macro])
        except BaseException as error:
            with self._changed:
                memory.key, self._error = None, (epoch, macro)
            self._announce.failed(epoch, error)
            return
        now = time.perf_counter_ns()
        with self._changed:
            memory.ready = True
            self.counters["macro_loaded"] += 1
            self.counters["macro_read_ns"] += now - begun
            self.counters["macro_members"] += memory.graph.num_members
        self._announce.stage(READ_MACRO, begun, now)
        self._announce.ready()
