"""The interface of engine sessions, and the resources that every kind of session uses."""

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
from loaderd.memory.tables import RenumberingTables
from loaderd.monitoring.devicecost import DeviceGauge
from loaderd.monitoring.logs import log_event
from loaderd.monitoring.trace import Trace
from loaderd.plans.base import Plan, Wanted
from loaderd.plans.chunks import HopPlan
from loaderd.sampling.propagated.source import ArrayCache
from loaderd.sampling.rows import RowAssembler, ServedFiles
from loaderd.sampling.topology import Topology
from loaderd.sessions.build import Builder
from loaderd.sessions.tables import SharedTables
from loaderd.sessions.workers import SerialExecutor, WorkerPool

log = logging.getLogger(__name__)

Out = BatchReady | RowGroup | ChunkReady | Skipped | ErrorReply
Deliver = Callable[[int, Out], None]


class Consumer(Protocol):
    """Receives the batches of a session.  Called under the lock of the daemon's sessions."""

    def next(self) -> Wanted | None:
        """The batch that is wanted next; None: none is, until `EngineSession.wake`.

        It is not asked for again, unless it is put back.
        """

    def put_back(self, wanted: Wanted) -> None:
        """Take back what `next` has just returned: it cannot begin yet.  `next` is called again."""

    def deliver(self, message: Out) -> None:
        """Take a row group, a note that steps are left out, or an error that ends the run."""


class EngineSession(Protocol):
    """Builds the batches that its consumer asks for.  Any thread may call.

    A session is complete when its opener returns it.  After `detach` it serves nobody; once it has
    given back all of its memory, it calls `StoreResources.ended`, once.
    """

    number: int
    plan: str  # the plan that serves; for `auto`, the one that was chosen

    def describe(self, request: int) -> Attached:
        """The reply to the client."""

    def serves(self, epoch: int) -> bool:
        """Whether it can build the batches of an epoch; otherwise another session has to."""

    def start(self, run: int, consumer: Consumer) -> None:
        """Build what a consumer wants of this run and later ones.

        Earlier runs end: their leased batches are taken back, those in progress are dropped.
        Raises SessionLost: it is detached.
        """

    def wake(self) -> None:
        """The consumer may want more."""

    def release(self, release: Release) -> None:
        """Free a row group that nobody needs any more."""

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

    def crowded(self, more: int) -> bool:
        """Whether it was opened with all rows in the row pool, and these have no room any more.

        more   slots that are to be taken from the pool
        """

    def widen(self, batches: int) -> None:
        """Allow more batches in flight, for a shared session, if there are slots for them."""


class SessionRequest(NamedTuple):
    """A session that is to be opened."""

    number: int
    request: Attach
    frame: NDArray[np.int64] | None  # ids and times of seeds, if the request names no split
    alike: int = 1  # sessions that keep rows for one another: this one, others, and those to come
    crowded: bool = False  # all rows have no room in the row pool beside it and other sessions


class Kind(NamedTuple):
    """One kind of session: how a request becomes parameters, and these a session."""

    # what fixes the batches; takes no memory.  Raises Refused
    resolve: Callable[[Manifest, Attach, NDArray[np.int64] | None], Resolved]
    # minimum of slots to open one; 0: that depends on what is in memory already
    min_slots: Callable[[Manifest, Attach, Resolved, int], int]
    # raises Refused, StoreError; nothing is kept then
    open: Callable[["StoreResources", SessionRequest], EngineSession]
    # raises Refused: so many slots can never serve it.  Reads nothing, and takes nothing
    check: Callable[[Manifest, Attach, EngineSettings, Budget, int], None] = lambda *_: None
    # `widen` gives it more batches in flight, and less memory does not make it read all again
    resizable: bool = True
    # its sessions may read rows out of the row pool, or be opened so that they do not
    pool_optional: bool = False
    # one session can serve every rank of a job: its rank is `EVERY_RANK`, its steps are positions
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
        """Take the memory and start the threads.

        unused_bytes   of --mem
        row_source     opens the source of a store's rows that are not in its part

        Raises BudgetTooSmall: the system does not give so much.
        """
        self.row_source = row_source
        self._stack = ExitStack()
        self.unused_bytes = unused_bytes
        self.numbers = itertools.count(1)  # of sessions, across all stores
        # of all sessions and streams, which only do bookkeeping under it
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
        self.closer = SerialExecutor("sessions-close")  # waits for threads of ending sessions
        self._stack.callback(self.closer.close)

    def close(self) -> None:
        """End the threads, and give the memory back, which nobody may use any more."""
        self._stack.close()


@dataclass(frozen=True, eq=False)
class StoreResources:
    """The resources that the sessions of one store use."""

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
    first_propagated: int  # likewise, of the first array of propagated features
    lock: Lock  # of all sessions
    closer: SerialExecutor
    draining: concurrency.Event  # set: no batch is begun, and leased memory stays leased
    ended: Callable[[EngineSession], None]  # called when a session has given all back
    _shared: Guarded[dict[object, Any]] = field(default_factory=lambda: Guarded({}))

    def shared(self, make: Callable[["StoreResources"], SharedT]) -> SharedT:
        """What `make` builds from the resources at its first use: one object for all sessions."""
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
        """A new, empty allocation, for what a session takes of the arena."""
        return Allocation(self.broker, self.arena)

    def shared_tables(self) -> SharedTables:
        return self.shared(_shared_tables)

    def load_graph(self) -> None:
        """Read the graph, if the pool is to hold all of it.  Raises CorruptBlock, OSError."""
        if self.broker.graph_preferred >= self.budget.graph_blocks:
            before, begun = self.reader.bytes_read, concurrency.monotonic()
            self.topology.load()
            if num_bytes := self.reader.bytes_read - before:
                seconds = round(concurrency.monotonic() - begun, 2)
                log_event(log, logging.INFO, "graph read", bytes=num_bytes, seconds=seconds)


def _shared_tables(resources: StoreResources) -> SharedTables:
    num_nodes, workers = resources.store.manifest.num_nodes, resources.settings.workers
    return SharedTables(resources.broker, resources.arena, num_nodes, workers)


class Allocation:
    """Slots of the arena that one session has taken.  An error inside its `with` frees them."""

    def __init__(self, broker: SlotBroker, arena: Arena) -> None:
        self._broker, self._arena = broker, arena
        self._slots: list[int] = []
        self._tables: SharedTables | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is not None:
            self.free()

    def run(self, count: int, wait_s: float = WAIT_S) -> NDArray[np.uint8]:
        """Memory of `count` adjacent slots.  Raises Refused."""
        return self.memory(self.adjacent(count, wait_s))

    def adjacent(self, count: int, wait_s: float = WAIT_S, low: bool = False) -> range:
        """Adjacent slots; `low`: as of `SlotBroker.take_run`.  Raises Refused."""
        first = self._broker.take_run(count, wait_s, low)
        self._slots += range(first, first + count)
        return range(first, first + count)

    def extend(self, slots: range, count: int) -> range:
        """These slots and those that follow, `count` in all; as they are if others are in use."""
        longer = range(slots.start, slots.start + count)
        if not self._broker.take_range(longer[len(slots) :]):
            return slots
        self._slots += longer[len(slots) :]
        return longer

    def give(self, slots: range) -> None:
        """Give some of its slots back."""
        self._broker.give(list(slots))
        self._slots = [slot for slot in self._slots if slot not in slots]

    def memory(self, slots: range) -> NDArray[np.uint8]:
        """The memory of adjacent slots."""
        size = self._arena.slot_bytes
        return self._arena.data[slots.start * size : slots.stop * size]

    def slots(self, count: int) -> list[int]:
        """Any slots.  Raises Refused."""
        slots = self._broker.take(count)
        self._slots += slots
        return slots

    def free_slots(self, count: int, spare: int) -> list[int]:
        """Slots that are free right now; none if fewer than `spare` would stay free."""
        slots = self._broker.take_now(count, spare)
        self._slots += slots
        return slots

    def join_tables(self, tables: SharedTables, workspaces: int) -> RenumberingTables:
        """Share tables, in so many more workspaces, until all is given back.  Raises Refused."""
        self._tables = tables
        return tables.join(self, workspaces)

    @property
    def charged(self) -> int:
        """Slots that are charged to the session: its own, and its part of tables that it shares."""
        return len(self._slots) + self._tables_part

    @property
    def tables_text(self) -> str:
        """Its part of tables that it shares, as text for the ledger."""
        slots = self._tables_part
        return f", {slots} slots of tables that sessions share" if slots else ""

    @property
    def _tables_part(self) -> int:
        return 0 if self._tables is None else self._tables.num_slots(self)

    def free(self, keep: int = 0) -> None:
        """Give back all but the first `keep` that were taken; nobody may use them any more."""
        self._broker.give(self._slots[keep:])
        del self._slots[keep:]
        if self._tables is not None and not keep:
            self._tables.leave(self)


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
