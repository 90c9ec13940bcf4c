"""What a session of the engine is, and the resources that every kind of session uses."""

import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import Manifest, NodeType, Relation
from blockstore.io.arena import Arena
from blockstore.io.elsewhere import RemoteRows
from blockstore.io.reader import BlockReader
from blockstore.io.threads import ReadThreads
from blockstore.store import Store
from loaderd.api.contents import RelationInfo, RowArraySpec, TypeInfo
from loaderd.api.protocol import (
    Attach,
    Attached,
    BatchReady,
    ChunkReady,
    ErrorReply,
    LedgerEntry,
    Release,
    Resolved,
    RowGroup,
    Skipped,
)
from loaderd.memory.guarded import Guarded, Lock
from loaderd.memory.ledger import Budget, EngineSettings, arrays_of
from loaderd.memory.residency import GraphPool, Residency
from loaderd.memory.slots import WAIT_S, SlotBroker
from loaderd.monitoring.devicecost import DeviceGauge
from loaderd.monitoring.logs import tell
from loaderd.monitoring.trace import Trace
from loaderd.plans.base import Plan, Wanted
from loaderd.plans.chunks import HopPlan
from loaderd.sampling.propagated.source import ArrayCache
from loaderd.sampling.rows import RowAssembler, ServedFiles
from loaderd.sampling.topology import Topology
from loaderd.sessions.build import Builder
from loaderd.sessions.workers import SerialExecutor, WorkerPool

log = logging.getLogger(__name__)

Out = BatchReady | RowGroup | ChunkReady | Skipped | ErrorReply
Deliver = Callable[[int, Out], None]


class Consumer(Protocol):
    """For whom a session builds.  It is called under the lock of the daemon's sessions."""

    def next(self) -> Wanted | None:
        """The batch that is wanted next; None: none is, until `EngineSession.wake`.

        It is not asked for again, unless it is put back.
        """

    def put_back(self, wanted: Wanted) -> None:
        """What `next` has just returned cannot begin yet: `next` is asked again, later."""

    def deliver(self, message: Out) -> None:
        """A row group is ready; or steps are left out, or nothing more comes."""


class EngineSession(Protocol):
    """Builds the batches that its consumer asks for.  Any thread may call.

    What opens a session returns a finished one.  After `detach` it serves nobody; when all of its
    memory is back where it came from, it says so by `StoreResources.ended`, once.
    """

    number: int
    plan: str  # that serves: of `auto` the one that was chosen

    def describe(self, request: int) -> Attached:
        """The reply to the client."""

    def serves(self, epoch: int) -> bool:
        """Whether it can build the batches of an epoch; another session has to, otherwise."""

    def start(self, run: int, consumer: Consumer) -> None:
        """Build what a consumer wants of this run and later ones.

        Runs before it end: what is leased of them is taken back, what is on its way is dropped.
        Raises SessionLost: it is detached.
        """

    def wake(self) -> None:
        """The consumer may want more."""

    def release(self, release: Release) -> None:
        """Nobody needs a row group any more."""

    def waits(self) -> bool:
        """Whether nothing more is built before batches are released."""

    def detach(self) -> None:
        """End; returns at once."""

    def join(self) -> None:
        """After `detach`: wait until the session's own threads have ended."""

    def held_bytes(self) -> int:
        """Bytes of the arena that the session has taken."""

    def ledger_entry(self) -> LedgerEntry:
        """What the session has taken out of the row pool."""

    def counters(self) -> dict[str, int]:
        """What it has done so far."""

    @property
    def depth(self) -> int:
        """Batches that can be leased at a time, as far as is known."""

    @property
    def holds_all(self) -> bool:
        """Whether all that it reads is in memory, whatever share of the arena it has."""

    def widen(self, batches: int) -> None:
        """More batches in flight, for a session that is shared, if there are slots for them."""


class Opening(NamedTuple):
    """A session that is to be opened."""

    number: int
    request: Attach
    frame: NDArray[np.int64] | None  # ids and times of seeds, if the request names no split
    alike: int = 1  # sessions of its plan, itself too, that are to be open together


class Kind(NamedTuple):
    """Sessions of one plan: how a request becomes parameters, and these a session."""

    # what fixes the batches; nothing is taken.  Raises Refused
    resolve: Callable[[Manifest, Attach, NDArray[np.int64] | None], Resolved]
    # slots without which none is opened, at least; 0: that depends on what is in memory already
    least_slots: Callable[[Manifest, Attach, Resolved, int], int]
    # raises Refused, StoreError; nothing is kept then
    open: Callable[["StoreResources", Opening], EngineSession]
    # raises Refused: with so many slots it is never served.  Reads nothing, and takes nothing
    check: Callable[[Manifest, Attach, EngineSettings, Budget, int], None] = lambda *_: None
    # `widen` gives it more batches in flight, and with less memory it does not read all of it again
    resizable: bool = True
    # one session can serve every rank of a job: of rank `EVERY_RANK`, its steps are positions
    every_rank: bool = False


SharedT = TypeVar("SharedT")


class SharedResources:
    """What the stores of one daemon share: arena, workers, readers.  Ends with `close`."""

    def __init__(
        self,
        settings: EngineSettings,
        num_slots: int,
        slot_bytes: int,
        unused_bytes: int,
        row_source: Callable[[Store], RemoteRows | None] = lambda _store: None,
    ) -> None:
        """Take it all.

        unused_bytes   of --mem
        row_source     where the reader of a store gets rows that are not in its part

        Raises BudgetTooSmall: the system does not give so much.
        """
        self.row_source = row_source
        self._stack = ExitStack()
        self.unused_bytes = unused_bytes
        self.numbers = itertools.count(1)  # of sessions, through all stores
        # of all sessions and of the streams: what they do under it is bookkeeping alone
        self.lock = concurrency.RLock()
        self.trace = Trace(settings.trace) if settings.trace else None
        if self.trace is not None:
            self._stack.callback(self.trace.close)
        try:
            self.arena = self._stack.enter_context(Arena(num_slots, slot_bytes))
        except BaseException:
            self._stack.close()
            raise
        self.readers = ReadThreads(settings.readers)
        self._stack.callback(self.readers.close)
        self.workers = WorkerPool(settings.workers)
        self._stack.callback(self.workers.close)
        self.closer = SerialExecutor("sessions-close")  # waits for the threads of those that end
        self._stack.callback(self.closer.close)

    def close(self) -> None:
        """End the threads, and give the memory back; nobody uses any of it."""
        self._stack.close()


@dataclass(frozen=True, eq=False)
class StoreResources:
    """What the sessions of one store use."""

    store: Store
    settings: EngineSettings
    budget: Budget
    broker: SlotBroker
    arena: Arena
    reader: BlockReader
    gauge: DeviceGauge
    workers: WorkerPool
    trace: Trace | None
    graph: Residency[GraphPool]
    topology: Topology
    assembler: RowAssembler
    builder: Builder
    rows: ServedFiles  # of nodes, then of edges
    first_copied: int  # number, in the reader, of the first file of copies of hubs and halos
    first_propagated: int  # and of the first array of propagated features
    lock: Lock  # of all sessions
    closer: SerialExecutor
    draining: concurrency.Event  # set: no batch is begun, and what is leased stays so for good
    ended: Callable[[EngineSession], None]  # told when a session has given all back
    _shared: Guarded[dict[object, Any]] = field(default_factory=lambda: Guarded({}))

    def shared(self, make: Callable[["StoreResources"], SharedT]) -> SharedT:
        """What `make` makes of the resources when it is first asked for: one for all sessions."""
        with self._shared.lock:
            found = self._shared()
            if make not in found:
                found[make] = make(self)
            made: SharedT = found[make]
            return made

    def shared_entries(self) -> list[LedgerEntry]:
        with self._shared.lock:
            caches = [one for one in self._shared().values() if isinstance(one, ArrayCache)]
        return [entry for cache in caches for entry in cache.ledger_entries()]

    def allocation(self) -> "Allocation":
        """Nothing yet: what a session takes of the arena is counted there."""
        return Allocation(self.broker, self.arena)

    def load_graph(self) -> None:
        """Read the graph, if the pool is to hold all of it.  Raises CorruptBlock, OSError."""
        if self.broker.graph_preferred >= self.budget.graph_blocks:
            before, begun = self.reader.bytes_read, concurrency.monotonic()
            self.topology.load()
            if num_bytes := self.reader.bytes_read - before:
                seconds = round(concurrency.monotonic() - begun, 2)
                tell(log, logging.INFO, "graph read", bytes=num_bytes, seconds=seconds)


class Allocation:
    """Slots of the arena that one session has taken.  A `with` that an error leaves frees them."""

    def __init__(self, broker: SlotBroker, arena: Arena) -> None:
        self._broker, self._arena = broker, arena
        self._slots: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is not None:
            self.free()

    def run(self, count: int, wait_s: float = WAIT_S) -> NDArray[np.uint8]:
        """Memory of `count` adjacent slots.  Raises Refused."""
        first, size = self._broker.take_run(count, wait_s), self._arena.slot_bytes
        self._slots += range(first, first + count)
        return self._arena.data[first * size : (first + count) * size]

    def slots(self, count: int) -> list[int]:
        """Any slots.  Raises Refused."""
        slots = self._broker.take(count)
        self._slots += slots
        return slots

    def free_slots(self, count: int, spare: int) -> list[int]:
        """Slots that are free right now; none if fewer than `spare` would stay so."""
        slots = self._broker.take_now(count, spare)
        self._slots += slots
        return slots

    def free(self, keep: int = 0) -> None:
        """Give back all but the first `keep` that were taken; nobody uses them."""
        self._broker.give(self._slots[keep:])
        del self._slots[keep:]


def describe(
    session: EngineSession,
    manifest: Manifest,
    request: int,
    plan: Plan | HopPlan,
    window: int,
    rows: tuple[RowArraySpec, ...],
) -> Attached:
    return Attached(
        request=request,
        session=session.number,
        resolved=plan.resolved,
        plan=session.plan,
        num_steps=plan.num_steps,
        window=window,
        rows=rows,
        types=tuple(t.name for t in manifest.types),
        relations=tuple((r.src, r.name, r.dst) for r in manifest.relations),
        type_info=tuple(_type_info(t) for t in manifest.types),
        relation_info=tuple(_relation_info(r) for r in manifest.relations),
    )


def _type_info(t: NodeType) -> TypeInfo:
    arrays = {name: array.row_shape for name, array in arrays_of(t).items()}
    return TypeInfo(t.num_nodes, arrays, {name: s.num_rows for name, s in t.splits.items()})


def _relation_info(r: Relation) -> RelationInfo:
    return RelationInfo(
        r.num_edges,
        {name: array.row_shape for name, array in r.features.items()},
        {name: s.num_rows for name, s in r.splits.items()},
        r.edge_id_dtype is not None, r.has_weights, r.has_times,
    )  # fmt: skip
