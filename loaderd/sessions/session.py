"""One session's batches: what may start, be placed, be released.  No thread, no I/O."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from loaderd.api.protocol import BatchReady, RowGroup
from loaderd.memory.workspace import Workspace
from loaderd.plans.base import Unit
from loaderd.sampling.rows import Addressed
from loaderd.sampling.structure import Structure


class Placement(NamedTuple):
    """Slots for one row group of a batch."""

    group: int
    low: int  # missing nodes order[low:high] belong to it
    high: int
    last: bool
    structure: tuple[int, ...]  # slots; only group 0 has any
    addresses: tuple[int, ...]
    area: tuple[tuple[int, ...], ...]  # per row array
    sequence: int  # of delivery within the run

    def slots(self) -> list[int]:
        return [*self.structure, *self.addresses, *(s for slots in self.area for s in slots)]


@dataclass(slots=True, eq=False)
class BatchInProgress:
    """A batch on its way."""

    run: int
    unit: Unit
    work: Workspace | None  # None: it waits for one, or has given it back
    structure: Structure | None = None
    addressed: Addressed | None = None
    structure_bytes: int = 0
    num_items: int = 0  # nodes, and edges where these have rows
    done: int = 0  # missing nodes that are placed
    groups: int = 0
    busy: bool = True  # a worker has it
    finished: bool = False  # its last group is filled: the workspace is free again
    leases: dict[int, list[int]] = field(default_factory=dict)  # group -> slots not yet released
    cancelled: bool = False

    @property
    def workspace(self) -> Workspace:
        """That of the worker who has the batch."""
        assert self.work is not None
        return self.work


class RowSizes(NamedTuple):
    """What placement must know of the row arrays."""

    rows_per_slot: tuple[int, ...]
    slot_bytes: int

    def address_slots(self, num_rows: int, with_positions: bool) -> int:
        arrays = len(self.rows_per_slot)
        used = arrays * (-(-8 * num_rows // 64) * 64)
        if with_positions:
            used += -(-4 * num_rows // 64) * 64
        return -(-used // self.slot_bytes)

    def area_slots(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-n // per) for n, per in zip(rows, self.rows_per_slot, strict=True))


class SessionState:
    """Credits, order and slots of one session.  The engine calls it under its lock."""

    def __init__(self, window: int, slots: list[int], sizes: RowSizes) -> None:
        """`slots`: the session's own share of the arena for structure, addresses and row areas."""
        self.window, self.sizes = window, sizes
        self.run = -1  # the first that goes on; those before it have ended
        self.failed = False  # nothing more is built before another one begins
        # by run and step, not wholly released
        self.jobs: dict[tuple[int, int], BatchInProgress] = {}
        self._free = list(slots)
        self.num_slots = len(slots)  # free and leased
        # started and not wholly placed, in step order
        self._order: deque[BatchInProgress] = deque()
        self._sequence = self._next_out = 0
        self._outbox: dict[int, list[BatchReady | RowGroup]] = {}
        self.batches = 0
        self._largest = 0  # slots of one group so far

    @property
    def depth(self) -> int:
        """Batches that can be lent at a time, as far as is known: of the window, and of slots."""
        if self._largest == 0:
            return self.window
        return max(1, min(self.window, self.num_slots // self._largest))

    @property
    def waits(self) -> bool:
        """Whether nothing is being built, or would be before leases come back."""
        if any(job.busy for job in self.jobs.values()):
            return False
        return bool(self._order) or len(self.jobs) >= self.window

    def widen(self, slots: list[int], batches: int) -> None:
        self._free += slots
        self.num_slots += len(slots)
        self.window += batches

    @property
    def idle(self) -> bool:
        return len(self._free) == self.num_slots

    def begin(self, run: int) -> list[BatchInProgress]:
        """Runs before this one end, what they hold is taken back; returns jobs that no worker has.

        The caller drops their pins and workspaces; those a worker has are marked cancelled.
        """
        ended = []
        for job in self.jobs.values():
            job.cancelled = True
            if not job.busy:
                self._forget(job)
                ended.append(job)
        self.jobs = {}
        self._order.clear()
        self._outbox.clear()
        self._sequence = self._next_out = 0
        self.run, self.failed = run, False
        return ended

    def may_start(self) -> bool:
        return not self.failed and len(self.jobs) < self.window

    def start(self, run: int, unit: Unit, work: Workspace) -> BatchInProgress:
        job = BatchInProgress(run, unit, work)
        self.jobs[job.run, unit.step] = job
        self._order.append(job)
        return job

    def admit(self, job: BatchInProgress) -> None:
        """A batch that was sampled elsewhere is to be placed after those before it."""
        job.busy = False
        self.jobs[job.run, job.unit.step] = job
        self._order.append(job)

    def head(self) -> BatchInProgress | None:
        """The batch that is to be placed next, if it waits for that and the window is open."""
        job = self._order[0] if self._order else None
        if job is None or job.busy:
            return None
        return job if job.groups or len(self.jobs) - len(self._order) < self.window else None

    def place(self, job: BatchInProgress) -> Placement | None:
        """Slots for the job's next group, or None while it must wait for releases."""
        assert job.structure is not None
        assert job.addressed is not None
        if job.done == 0 and job.groups == 0:
            whole = self._place_whole(job)
            if whole is not None or self.num_slots != len(self._free):
                return whole
        elif self.num_slots != len(self._free):
            return None
        return self._place_part(job)

    def _place_whole(self, job: BatchInProgress) -> Placement | None:
        """All rows in one group, where the free slots allow it."""
        assert job.structure is not None
        assert job.addressed is not None
        structure = -(-job.structure_bytes // self.sizes.slot_bytes)
        addresses = self.sizes.address_slots(job.num_items, with_positions=False)
        area = self.sizes.area_slots(job.addressed.missing_rows)
        if structure + addresses + sum(area) > len(self._free):
            return None
        return self._grant(job, structure, addresses, area, job.addressed.num_missing)

    def _place_part(self, job: BatchInProgress) -> Placement:
        """As many rows as the session's slots hold; all of them are free."""
        assert job.structure is not None
        assert job.addressed is not None
        first = job.groups == 0
        structure = -(-job.structure_bytes // self.sizes.slot_bytes) if first else 0
        present = job.num_items - job.addressed.num_missing if first else 0
        room = len(self._free) - structure
        left, missing = job.addressed.num_missing - job.done, job.addressed.missing_rows

        def need(count: int) -> tuple[int, tuple[int, ...]]:
            rows = tuple(min(count, m) for m in missing)
            return self.sizes.address_slots(present + count, True), self.sizes.area_slots(rows)

        low, high = 0, left  # the largest count that fits
        while low < high:
            middle = (low + high + 1) // 2
            addresses, area = need(middle)
            low, high = (middle, high) if addresses + sum(area) <= room else (low, middle - 1)
        addresses, area = need(low)
        assert addresses + sum(area) <= room, "the session's least holds one group"
        assert low or first, "the session's least holds one row of each array"
        return self._grant(job, structure, addresses, area, low)

    def _grant(
        self,
        job: BatchInProgress,
        structure: int,
        addresses: int,
        area: tuple[int, ...],
        count: int,
    ) -> Placement:
        assert job.addressed is not None

        def take(n: int) -> tuple[int, ...]:
            return tuple(self._free.pop() for _ in range(n))

        low = job.done
        job.done += count
        last = job.done == job.addressed.num_missing
        placement = Placement(
            job.groups, low, job.done, last, take(structure), take(addresses),
            tuple(take(n) for n in area), self._sequence,
        )  # fmt: skip
        self._sequence += 1
        job.leases[job.groups] = placement.slots()
        self._largest = max(self._largest, len(job.leases[job.groups]))
        job.groups += 1
        job.busy = True
        if last:
            self._order.popleft()
        return placement

    def filled(
        self, job: BatchInProgress, placement: Placement, message: BatchReady | RowGroup
    ) -> list[BatchReady | RowGroup]:
        """A group is ready; returns what may be sent now, in order."""
        job.busy = False
        job.finished = placement.last
        self._outbox[placement.sequence] = [message]
        out = []
        while self._next_out in self._outbox:
            out += self._outbox.pop(self._next_out)
            self._next_out += 1
        return out

    def release(self, run: int, step: int, group: int) -> BatchInProgress | None:
        """The client is done with a group; returns the job once it is wholly done."""
        job = self.jobs.get((run, step))
        if job is None or job.busy or group not in job.leases:
            return None
        self._free += job.leases.pop(group)
        if not job.finished or job.leases:
            return None
        del self.jobs[run, step]
        self.batches += 1
        return job

    def abandon(self, job: BatchInProgress) -> None:
        """A worker is done with a cancelled job: its slots are free."""
        job.busy = False
        self._forget(job)

    def fail(self, job: BatchInProgress) -> None:
        """A worker could not build the job: nothing more is built before another run begins."""
        job.cancelled = True
        if self.jobs.get((job.run, job.unit.step)) is job:
            del self.jobs[job.run, job.unit.step]
        if job in self._order:
            self._order.remove(job)
        self.failed = True
        self.abandon(job)

    def _forget(self, job: BatchInProgress) -> None:
        for slots in job.leases.values():
            self._free += slots
        job.leases.clear()
