"""What a session of the engine is, and the resources that every kind of session uses."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.format import Manifest
from blockstore.io.arena import Arena
from blockstore.io.reader import BlockReader, ReadThreads
from blockstore.store import Store
from loaderd.batch.rows import RowAssembler
from loaderd.batch.topology import Topology
from loaderd.devicecost import DeviceGauge
from loaderd.engine.build import Builder
from loaderd.engine.workers import WorkerPool
from loaderd.guarded import Guarded
from loaderd.memory.ledger import Budget, EngineSettings
from loaderd.memory.residency import Residency
from loaderd.memory.slots import WAIT_S, SlotBroker
from loaderd.protocol import (
    Attach,
    Attached,
    BatchReady,
    ChunkReady,
    ErrorReply,
    LedgerEntry,
    Release,
    Resolved,
    RowArraySpec,
    RowGroup,
    SessionStatus,
    Skipped,
    Start,
)
from loaderd.trace import Trace

Out = BatchReady | RowGroup | ChunkReady | Skipped | ErrorReply
Deliver = Callable[[int, Out], None]


class EngineSession(Protocol):
    """Batches in order for whoever knows its number.  Any thread may call, with no lock held.

    What opens a session returns a finished one.  After `detach` it serves nobody; when all of its
    memory is back where it came from, it says so by `StoreResources.ended`, once.
    """

    number: int

    def describe(self, request: int) -> Attached:
        """The reply to the client."""

    def start(self, start: Start, ranks: tuple[int, ...] = ()) -> None:
        """Begin a run: earlier ones of the session end.  A start that is not newer does nothing.

        ranks   of a session that serves every rank of a job: whose batches are built; (): all

        Raises SessionLost: it is detached; Refused: a position that no epoch has.
        """

    def proceed(self, start: Start, ranks: tuple[int, ...] = ()) -> None:
        """Begin a run behind one of which every batch was delivered: what is leased stays so.

        Raises SessionLost.
        """

    def narrow(self, run: int, ranks: tuple[int, ...]) -> None:
        """Go on with the batches of fewer ranks, if the session is at this run."""

    def release(self, release: Release) -> None:
        """The client is done with a row group."""

    def waits(self) -> bool:
        """Whether nothing more is built before batches are released."""

    def detach(self) -> None:
        """End; returns at once."""

    def join(self) -> None:
        """After `detach`: wait until the session's own threads have ended."""

    def status(self) -> SessionStatus:
        """As `loaderd status` shows it."""

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


class Kind(NamedTuple):
    """Sessions of one plan: how a request becomes parameters, and these a session."""

    # what fixes the batches; nothing is taken.  Raises Refused
    resolve: Callable[[Manifest, Attach, NDArray[np.int64] | None], Resolved]
    # slots without which none is opened, at least; 0: that depends on what is in memory already
    least_slots: Callable[[Manifest, Attach, Resolved, int], int]
    # raises Refused, StoreError; nothing is kept then
    open: Callable[["StoreResources", int, Attach, NDArray[np.int64] | None], EngineSession]
    # raises Refused: with so many slots it is never served.  Reads nothing, and takes nothing
    check: Callable[[Manifest, Attach, EngineSettings, Budget, int], None] = lambda *_: None
    # `widen` gives it more batches in flight, and with less memory it does not read all anew
    resizable: bool = True
    # one session can serve every rank of a job: of rank `EVERY_RANK`, its steps are positions
    every_rank: bool = False


class Shared(Protocol):
    """What the sessions of one kind share, at one store."""

    def ledger_entries(self) -> list[LedgerEntry]:
        """What it has taken, that no session's entry counts."""


SharedT = TypeVar("SharedT", bound=Shared)


class SharedResources:
    """What the stores of one daemon share: arena, workers, readers.  Ends with `close`."""

    def __init__(
        self, settings: EngineSettings, num_slots: int, slot_bytes: int, unused_bytes: int
    ) -> None:
        """`unused_bytes`: of --mem.  Raises BudgetTooSmall: the system does not give so much."""
        self._stack = ExitStack()
        self.unused_bytes = unused_bytes
        self.numbers = itertools.count(1)  # of sessions, through all stores
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
    graph: Residency
    topology: Topology
    assembler: RowAssembler
    builder: Builder
    first_copied: int  # number, in the reader, of the first file of copies of hubs and halos
    first_propagated: int  # and of the first array of propagated features
    draining: concurrency.Event  # set: no batch is begun, and what is leased stays so for good
    deliver: Deliver
    ended: Callable[[EngineSession], None]  # told when a session has given all back
    _shared: Guarded[dict[object, Any]] = field(default_factory=lambda: Guarded({}))

    @property
    def first_rows(self) -> int:
        """Number, in the reader, of the first of the served row arrays."""
        return len(self.store.manifest.relations)

    def shared(self, make: Callable[["StoreResources"], SharedT]) -> SharedT:
        """What `make` makes of the resources when it is first asked for: one for all sessions."""
        with self._shared.lock:
            found = self._shared()
            if make not in found:
                found[make] = make(self)
            made: SharedT = found[make]
            return made

    def shared_entries(self) -> list[LedgerEntry]:
        """What all that is shared has taken."""
        with self._shared.lock:
            made: list[Shared] = list(self._shared().values())
        return [entry for one in made for entry in one.ledger_entries()]

    def allocation(self) -> "Allocation":
        """Nothing yet: what a session takes of the arena is counted there."""
        return Allocation(self.broker, self.arena)

    def load_graph(self) -> None:
        """Read the graph, if the pool is to hold all of it.  Raises CorruptBlock, OSError."""
        if self.broker.graph_wish >= self.budget.graph_blocks:
            self.topology.load()


class Allocation:
    """Slots of the arena that one session has taken.  A `with` that an error leaves frees them."""

    def __init__(self, broker: SlotBroker, arena: Arena) -> None:
        self._broker, self._arena = broker, arena
        self._slots: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
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


class Closing:
    """Waits for the threads of a session that ends, in a thread of its own."""

    def __init__(self, close: Callable[[], None]) -> None:
        """`close` waits for them; it is called once."""
        self._close, self._done = close, concurrency.Event()
        self._thread: concurrency.Thread | None = None

    def begin(self, in_thread: bool) -> None:
        """Close; the caller holds no lock.

        in_thread   return at once, unless the system has no more threads
        """
        if in_thread:
            self._thread = concurrency.Thread(target=self._run)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
            else:
                return
        self._run()

    def join(self) -> None:
        """Until it is closed; another thread may be about to begin."""
        self._done.wait()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._close()
        finally:
            del self._close  # it leads back to the session: nothing waits for the collector
            self._done.set()


def describe(
    manifest: Manifest,
    request: int,
    session: int,
    resolved: Resolved,
    plan: str,
    num_steps: int,
    window: int,
    rows: tuple[RowArraySpec, ...],
) -> Attached:
    """The reply to a client."""
    return Attached(
        request=request,
        session=session,
        resolved=resolved,
        plan=plan,
        num_steps=num_steps,
        window=window,
        rows=rows,
        types=tuple(t.name for t in manifest.types),
        relations=tuple((r.src, r.name, r.dst) for r in manifest.relations),
    )
