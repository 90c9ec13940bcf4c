"""The engine: sessions of one store by their numbers, whatever kind they are."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.closing import Closing
from blockstore.io.elsewhere import Elsewhere
from blockstore.io.reader import BlockReader
from blockstore.store import Store, scan_rows
from loaderd.api.errors import SessionLost, Shortage, ShuttingDown
from loaderd.api.protocol import Attach, Attached, LedgerEntry, Release, Resolved, Start
from loaderd.memory.guarded import Guarded
from loaderd.memory.ledger import (
    MIN_SESSION,
    EngineSettings,
    enough_mem,
    graph_preferred,
    make_budget,
    rows_of,
    size_pools,
)
from loaderd.memory.residency import BlockPool, GraphPool, Residency
from loaderd.memory.slots import SHORT_WAIT_S, WAIT_S, RequestArea, SlotBroker
from loaderd.memory.workspace import StoreTables
from loaderd.monitoring.devicecost import DeviceGauge
from loaderd.monitoring.meter import add_counts
from loaderd.plans.base import Wanted
from loaderd.sampling.macrobatch.files import copied_files
from loaderd.sampling.propagated.files import hop_files
from loaderd.sampling.rows import RowAssembler, ServedFiles
from loaderd.sampling.topology import Topology
from loaderd.sessions.base import (
    Deliver,
    EngineSession,
    Out,
    SessionRequest,
    SharedResources,
    StoreResources,
)
from loaderd.sessions.build import Builder
from loaderd.sessions.classes import ClassCounts
from loaderd.sessions.kinds import find_kind
from loaderd.sessions.owners import map_digest
from loaderd.sessions.packed import open_packed
from loaderd.sessions.sizing import check_numbers

_MAX_SPARE = 64 << 20  # bytes that a session of hyperbatches leaves
# counters that a status has even without sessions
_COUNTERS = (
    "batches", "edges", "rows", "rows_copied", "groups", "sample_ns", "fill_ns",
)  # fmt: skip


class Engine(Closing):
    """Serves one store, with memory and threads that it may share with others."""

    def __init__(
        self,
        store: Store,
        settings: EngineSettings,
        shared: SharedResources | None = None,
        slots: Sequence[int] = (),
        tables: NDArray[np.uint8] | None = None,
    ) -> None:
        """Take memory: `slots` of the shared arena, or all of it at once if there is none yet.

        tables   memory for the tables of the store; None: they are beside the arena

        Raises BudgetTooSmall, StoreError.
        """
        self.store, self.settings = store, settings
        self._stack = ExitStack()
        if shared is None:
            self.budget = make_budget(store.manifest, settings)
            slots = range(self.budget.num_slots)
            cut = self.budget
            shared = SharedResources(settings, cut.num_slots, cut.slot_bytes, cut.unused_bytes)
            self._stack.callback(shared.close)
        else:
            self.budget = size_pools(
                store.manifest, settings, shared.arena.slot_bytes, len(slots), shared.unused_bytes
            )
        self.arena, self._workers, self._numbers = shared.arena, shared.workers, shared.numbers
        self.deliver: Deliver = lambda _session, _message: None  # for sessions opened by `attach`
        self.lock = shared.lock
        self._changed = concurrency.Condition(self.lock)  # a session has ended, or all are to
        self._sessions: Guarded[dict[int, EngineSession]] = Guarded({}, self.lock)
        self._ending: Guarded[list[EngineSession]] = Guarded([], self.lock)  # detached
        self._counters = dict.fromkeys(_COUNTERS, 0)  # of sessions that have ended
        self.classes = ClassCounts(store)
        try:
            self.resources = self._open(shared, slots, StoreTables(tables))
        except BaseException:
            self._stack.close()
            raise

    def _open(
        self, shared: SharedResources, slots: Sequence[int], tables: StoreTables
    ) -> StoreResources:
        store, manifest, budget, arena = self.store, self.store.manifest, self.budget, self.arena
        served = rows_of(manifest, edges=True)
        files = [store.graph(r) for r in manifest.relations]
        first_rows = len(files)
        files += [store.rows(r.array) for r in served]
        first_copied = len(files)
        files += copied_files(store, served)
        first_propagated = len(files)
        files += hop_files(store)
        files = [replace(file, crcs=tables.keep(file.crcs)) for file in files]
        rows_elsewhere = shared.row_source(store)
        self._elsewhere: list[Elsewhere] = [s for s in (rows_elsewhere, store.pages) if s]
        for source in self._elsewhere:
            self._stack.callback(source.close)
        self.reader = self._stack.enter_context(
            BlockReader(files, arena.data, budget.slot_bytes, shared.readers, rows_elsewhere)
        )
        changed = concurrency.Condition()
        num_blocks = [f.geometry.num_blocks for f in files]
        graph = GraphPool(num_blocks[:first_rows], arena.num_slots, self.settings.workers)
        rows = BlockPool(num_blocks[first_rows:first_copied], arena.num_slots)
        self.broker = SlotBroker(
            graph, rows, changed, slots, budget.graph_slots,
            lambda more: enough_mem(self.settings, budget.unused_bytes, more * budget.slot_bytes),
        )  # fmt: skip
        self.graph = Residency(graph, self.reader, 0, changed)
        self.rows = Residency(rows, self.reader, first_rows, changed)
        topology = Topology(store, self.graph, arena.data, budget.slot_bytes)
        topology.helpers = shared.workers
        topology.relations = [index.kept(tables) for index in topology.relations]
        row_files = ServedFiles(
            served, self.reader, first_rows, arena.data, budget.slot_bytes, manifest.block_bytes,
            manifest.id_dtype,
        )  # fmt: skip
        gauge = DeviceGauge(self.reader)
        assembler = RowAssembler(row_files, self.rows, gauge)
        original = tables.array(np.dtype(manifest.id_dtype), manifest.num_nodes)
        for t in manifest.types:
            for row, ids in scan_rows(store, t.original_id):
                original[t.first + row : t.first + row + ids.size] = ids
        return StoreResources(
            store=store, settings=self.settings, budget=budget, broker=self.broker, arena=arena,
            reader=self.reader, gauge=gauge, workers=shared.workers,
            trace=shared.trace, graph=self.graph, topology=topology, assembler=assembler,
            builder=Builder(topology, assembler, arena, original), rows=row_files,
            first_copied=first_copied,
            first_propagated=first_propagated, draining=concurrency.Event(),
            ended=self._ended, lock=self.lock, closer=shared.closer,
        )  # fmt: skip

    @property
    def min_slots(self) -> int:
        """Slots that stay with the store, whatever others need."""
        return self.budget.graph_min + MIN_SESSION

    def close(self) -> None:
        self.drain()
        self._stack.close()

    # -- sessions ---------------------------------------------------------------------------------

    def identify(self, request: Attach, seeds: NDArray[np.int64] | None) -> Resolved:
        """Resolve a request; takes no memory.  Raises Refused."""
        return find_kind(request.plan).resolve(self.store.manifest, request, seeds)

    def owners_digest(self, request: Attach) -> str:
        """Digest of the owner map that a request names; "": it names none.  Raises Refused."""
        return map_digest(self.store, request)

    def open(
        self,
        request: Attach,
        seeds: NDArray[np.int64] | None,
        epoch: int = 0,
        alike: int = 1,
        crowded: bool = False,
    ) -> EngineSession:
        """Open a session for one consumer; reads the seeds' store ids from disk.

        epoch     that it is to serve; some sessions do not serve every epoch
        alike     sessions that keep rows for one another, this one included, and those to come
        crowded   all rows have no room in the row pool beside it and other sessions

        Raises Refused, StoreError, ShuttingDown.
        """
        self.wait_ended(WAIT_S)  # for what ending sessions still hold
        opening = SessionRequest(next(self._numbers), request, seeds, alike, crowded)
        kind = find_kind(request.plan)
        session: EngineSession | None = open_packed(self.resources, opening, epoch)
        if session is None:
            session = kind.open(self.resources, opening)
        with self.lock:
            self._sessions()[session.number] = session
        return session

    def wait_ended(self, wait_s: float) -> None:
        """Wait at most `wait_s` until ending sessions have given back what they hold.

        Raises ShuttingDown: leased memory then stays leased.
        """
        draining = self.resources.draining
        with self._changed:
            self._changed.wait_for(lambda: draining.is_set() or not self._ending(), wait_s)
            if draining.is_set():
                raise ShuttingDown("the daemon is shutting down")

    def borrow(self, request: Attach) -> RequestArea:
        """Take room for the numbers of a request until they are looked up.  Raises Refused."""
        broker, slot = self.broker, self.arena.slot_bytes
        count, settings = -(-8 * request.ids // slot), self.settings
        check_numbers(
            self.store.manifest, request, settings, self.budget, count, broker.available()
        )
        try:
            first = broker.take_run(count, SHORT_WAIT_S, low=True)
        except Shortage:  # free slots that are not adjacent are of no use
            free = broker.free()
            free = free if free < count else 0
            check_numbers(self.store.manifest, request, settings, self.budget, count, free)
            raise
        memory = self.arena.data[first * slot :][: 8 * request.ids]
        return RequestArea(memory.view("<i8"), range(first, first + count), slot, broker)

    def close_session(self, session: EngineSession) -> None:
        """Close a session; its memory is freed when nobody uses it any more."""
        with self.lock:
            if self._sessions().pop(session.number, None) is None:
                return
            self._ending().append(session)
            session.detach()
        self._workers.forget(session.number)

    def _ended(self, session: EngineSession) -> None:
        with self._changed:
            self._ending().remove(session)
            add_counts(self._counters, session.counters())
            self._changed.notify_all()

    # -- sessions that nobody shares, by their numbers --------------------------------------------

    def attach(self, request: Attach, seeds: NDArray[np.int64] | None) -> Attached:
        """Open a session that delivers to `deliver`.  Raises as `open`."""
        return self.open(request, seeds).describe(request.request)

    def start(self, start: Start) -> None:
        """Begin a run; those before it end.  Raises SessionLost."""
        session = self._find(start.session)
        num_steps = session.describe(0).num_steps
        steps = range(start.step, num_steps, start.stride)
        session.start(start.run, _Steps(self, start, steps))

    def release(self, release: Release) -> None:
        """Free a row group that nobody needs any more."""
        with self.lock:
            if (session := self._sessions().get(release.session)) is not None:
                session.release(release)

    def detach(self, number: int) -> None:
        with self.lock:
            session = self._sessions().get(number)
        if session is not None:
            self.close_session(session)

    def _find(self, number: int) -> EngineSession:
        with self.lock:
            if number not in self._sessions():
                raise SessionLost(f"session {number} is not open")
            return self._sessions()[number]

    # -- all of it --------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        with self.lock:
            return bool(self._ending())

    def resize(self, other: "Engine", count: int) -> None:
        """Get up to `count` free slots from another store's engine."""
        slots = other.broker.cede(count)
        budget, num_slots = self.budget, self.broker.num_slots + len(slots)
        preferred = graph_preferred(
            budget.graph_blocks, budget.row_blocks, budget.graph_min, num_slots
        )
        self.broker.accept(slots, max(preferred, self.broker.graph_preferred))

    def drain(self) -> None:
        """Start nothing more; returns when no worker is busy.

        Leased memory stays leased: nobody writes where a client that has not heard yet still reads.
        """
        for source in self._elsewhere:
            source.hurry()
        with self._changed:
            self.resources.draining.set()
            self._changed.notify_all()
            sessions = list(self._sessions().values())
        for session in sessions:
            self.close_session(session)
        with self.lock:
            ending = list(self._ending())
        for session in ending:
            session.join()
        self._workers.settle()

    def status(self) -> tuple[tuple[LedgerEntry, ...], tuple[EngineSession, ...], dict[str, int]]:
        with self.lock:
            sessions, ending = list(self._sessions().values()), list(self._ending())
            counters = dict(self._counters)
        for session in [*sessions, *ending]:
            add_counts(counters, session.counters())
        if (cost := self.resources.gauge.known) is not None:
            counters["device_run_ns"] = int(cost.run_s * 1e9)
            counters["device_page_ns"] = int(cost.page_s * 1e9)
        for folder, cost in self.resources.gauge.disks.items():
            counters[f"disk:run_ns:{folder}"] = int(cost.run_s * 1e9)
            counters[f"disk:page_ns:{folder}"] = int(cost.page_s * 1e9)
        reader = self.reader
        for source in self._elsewhere:
            counters |= source.counters()
        add_counts(counters, reader.counters())  # sessions of packed epochs have readers, too
        counters |= {
            "blocks_read": reader.blocks_read,
            "bytes_written": 0,
            "slots_in_pools": self.broker.available(),
            "slots_pinned": self.broker.pinned(),
        }
        for name, residency in (("graph", self.graph), ("row", self.rows)):
            pool = residency.pool
            counters[f"{name}_blocks_present"] = sum(
                map(pool.num_present, range(len(pool.slot_of_block)))
            )
            counters[f"{name}_blocks_hit"] = residency.hits
            counters[f"{name}_blocks_missed"] = residency.misses
        pools = self.budget.entries(self.broker.graph_preferred, self.broker.num_slots)
        entries = [session.ledger_entry() for session in sessions]
        entries += self.resources.shared_entries()
        return (*pools, *entries), tuple(sessions), counters


@dataclass(slots=True)
class _Steps:
    """Wants the steps of one run, one after the other."""

    engine: Engine
    start: Start
    steps: range

    def next(self) -> Wanted | None:
        if not self.steps:
            return None
        step, self.steps = self.steps[0], self.steps[1:]
        return Wanted(self.start.run, self.start.epoch, step)

    def put_back(self, wanted: Wanted) -> None:
        self.steps = range(wanted.step, self.steps.stop, self.steps.step)

    def deliver(self, message: Out) -> None:
        self.engine.deliver(self.start.session, message)


def default_settings(mem_bytes: int, workers: int = 0, readers: int = 0) -> EngineSettings:
    """Settings for this machine; arguments that are 0 are chosen here."""
    cores = len(os.sched_getaffinity(0))
    chosen = min(cores, max(4, min(8, cores // 2)))  # the trainer gets half of many cores
    # the rest is for requests, sessions of other hosts, and those that need little
    share = max(0.95, 1 - _MAX_SPARE / max(1, mem_bytes))
    return EngineSettings(mem_bytes, workers or chosen, readers or 8, session_share=share)
