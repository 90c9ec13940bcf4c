"""The engine: one for all plans.  Sessions attach to it; its worker threads build their batches."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from types import TracebackType
from typing import Self

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.io.reader import BlockReader
from blockstore.pool import BlockPool
from blockstore.store import Store, scan_rows
from loaderd.batch.rows import RowAssembler
from loaderd.batch.topology import Topology
from loaderd.devicecost import DeviceGauge
from loaderd.engine.attachment import Attachment, Opening
from loaderd.engine.build import Builder
from loaderd.engine.commons import Commons
from loaderd.engine.hyperdesk import HyperDesk
from loaderd.engine.least import check_numbers
from loaderd.engine.lookahead import Prospect
from loaderd.engine.opening import open_attachment, refuse_shortage, resolve_request
from loaderd.engine.production import Deliver, MacroNews, Production
from loaderd.errors import Refused, SessionLost, Shortage
from loaderd.guarded import Guarded
from loaderd.hopwise.desk import HopDesk
from loaderd.hopwise.files import hop_files
from loaderd.macro.files import MacroFiles, copied_files
from loaderd.macro.job import Jobs
from loaderd.memory.ledger import (
    LEAST_SESSION,
    EngineSettings,
    cut_slots,
    enough_mem,
    graph_wish,
    make_budget,
    rows_of,
    served_rows,
)
from loaderd.memory.reservation import Reservation
from loaderd.memory.residency import Residency
from loaderd.memory.slots import LOOK_WAIT_S, WAIT_S, RequestArea, SlotBroker
from loaderd.memory.workspace import Tables
from loaderd.meter import add_counts
from loaderd.plans.chunks import METHOD_OF, resolve_hops
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.protocol import (
    Attach,
    Attached,
    LedgerEntry,
    Release,
    Resolved,
    SessionStatus,
    Start,
)


class Engine:
    """Serves one store, out of memory and with threads that others may use, too.

    A context manager.
    """

    def __init__(
        self,
        store: Store,
        settings: EngineSettings,
        commons: Commons | None = None,
        slots: Sequence[int] = (),
        tables: NDArray[np.uint8] | None = None,
    ) -> None:
        """Take memory: `slots` of the common arena, or all of it at once where there is none yet.

        tables   memory for the tables of the store; None: they are beside the arena

        Raises BudgetTooSmall, StoreError.
        """
        self.store, self.settings = store, settings
        self._own_commons = commons is None
        if commons is None:
            self.budget = make_budget(store.manifest, settings)
            slots = range(self.budget.num_slots)
            cut = self.budget
            commons = Commons(settings, cut.num_slots, cut.slot_bytes, cut.unused_bytes)
        else:
            slot_bytes = commons.arena.slot_bytes
            self.budget = cut_slots(
                store.manifest, settings, slot_bytes, len(slots), commons.unused_bytes
            )
        self.commons, self.arena = commons, commons.arena
        self.deliver: Deliver = lambda _session, _message: None
        self._served = rows_of(store.manifest, edges=True)
        self._stack = ExitStack()
        if self._own_commons:
            self._stack.callback(commons.close)
        try:
            self._open(slots, Tables(tables))
        except BaseException:
            self._stack.close()
            raise
        self._lock = self._production.lock
        self._sessions: Guarded[dict[int, Attachment]] = Guarded({}, self._lock)
        self._own_counters: dict[str, int] = {}  # of sessions that have ended
        self._closers: list[concurrency.Thread] = []

    def _open(self, slots: Sequence[int], tables: Tables) -> None:
        manifest, budget, stack = self.store.manifest, self.budget, self._stack
        commons = self.commons
        relations = manifest.relations
        files = [self.store.graph(r) for r in relations]
        files += [self.store.rows(r.array) for r in self._served]
        first_copied = len(files)
        files += copied_files(self.store, self._served)
        first_hops = len(files)
        files += hop_files(self.store)
        files = [replace(file, crcs=tables.keep(file.crcs)) for file in files]
        data, slot = self.arena.data, budget.slot_bytes
        self.reader = stack.enter_context(BlockReader(files, data, slot, threads=commons.readers))
        self._gauge = DeviceGauge(self.reader)
        changed = concurrency.Condition()
        files = files[:first_copied]
        graph = BlockPool(
            [f.geometry.num_blocks for f in files[: len(relations)]], self.arena.num_slots
        )
        rows = BlockPool(
            [f.geometry.num_blocks for f in files[len(relations) :]], self.arena.num_slots
        )
        reservation = Reservation([r.num_blocks for r in relations], self.settings.workers)
        self.broker = SlotBroker(
            graph, rows, changed, slots, budget.graph_slots, reservation,
            lambda slots: enough_mem(self.settings, budget.unused_bytes, slots * slot),
        )  # fmt: skip
        self._opening = Opening(
            self.store, self.settings, budget, self.broker, self.arena, self.reader,
            len(relations),
            cache(lambda: MacroFiles(self.store, served_rows(manifest), first_copied)),
            Jobs(),
        )  # fmt: skip
        self._hops = HopDesk(
            self.store, self.settings, self.broker, self.arena, self.reader, self._gauge,
            budget.unused_bytes, first_hops,
            lambda session, message: self.deliver(session, message),
        )  # fmt: skip
        self.graph = Residency(graph, self.reader, 0, changed, reservation)
        self.rows = Residency(rows, self.reader, len(relations), changed)
        self.topology = Topology(self.store, self.graph, data, slot)
        self.assembler = RowAssembler(
            self._served, self.rows, self.reader, len(relations), data, slot, manifest.block_bytes
        )
        self.topology.relations = [index.kept(tables) for index in self.topology.relations]
        original = tables.array(np.dtype(manifest.id_dtype), manifest.num_nodes)
        for t in manifest.types:
            for row, ids in scan_rows(self.store, t.original_id):
                original[t.first + row : t.first + row + ids.size] = ids
        self.builder = Builder(self.topology, self.assembler, self.arena, original)
        self._production = Production(
            commons.floor, self.builder, self.assembler, self.broker, commons.trace,
            lambda session, message: self.deliver(session, message),
        )  # fmt: skip
        self._hypers = HyperDesk(
            self._opening, self.builder, self.topology, self.graph, self._gauge,
            self._production, commons.trace,
        )  # fmt: skip

    @property
    def least_slots(self) -> int:
        """Slots that stay with the store, whatever others need."""
        return self.budget.graph_least + LEAST_SESSION

    @property
    def io_mode(self) -> str:
        """How blocks are read: O_DIRECT, or buffered and why."""
        return self.reader.mode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drain()
        self._stack.close()

    # -- sessions ---------------------------------------------------------------------------------

    def attach(self, request: Attach, seeds: NDArray[np.int64] | None) -> Attached:
        """Open a session; reads the seeds' store ids from disk.

        Raises Refused, StoreError, ShuttingDown.
        """
        self._production.wait_ended(WAIT_S)  # for what sessions that end still hold
        session = next(self.commons.numbers)
        if request.plan in METHOD_OF:
            return self._hops.attach(session, request)
        announce = MacroNews(self._production)
        attachment = open_attachment(self._opening, request, seeds, announce)
        announce.belong(session, attachment)
        try:
            whole = self.broker.graph_wish >= self.budget.graph_blocks
            if whole and attachment.macro is None:
                self.topology.load()
            if attachment.plan.name == HyperbatchPlan.name:
                self._hypers.open(session, attachment, request)
        except Shortage:
            attachment.close(self.broker)
            refuse_shortage(self._opening, attachment.need.least)
        except BaseException:
            attachment.close(self.broker)
            raise
        with self._lock:
            self._sessions()[session] = attachment
        return attachment.describe(self.store.manifest, request.request, session)

    def borrow(self, request: Attach) -> RequestArea:
        """Room for the numbers of a request, until they have been looked up.  Raises Refused."""
        broker, slot = self.broker, self.arena.slot_bytes
        count, settings = -(-8 * request.ids // slot), self.settings
        check_numbers(
            self.store.manifest, request, settings, self.budget, count, broker.available()
        )
        try:
            first = broker.take_run(count, LOOK_WAIT_S, low=True)
        except Shortage:  # free slots that are not adjacent are of no use
            free = broker.free()
            free = free if free < count else 0
            check_numbers(self.store.manifest, request, settings, self.budget, count, free)
            raise
        memory = self.arena.data[first * slot :][: 8 * request.ids]
        return RequestArea(memory.view("<i8"), range(first, first + count), slot, broker)

    def prospect(self, request: Attach) -> Prospect:
        """What a session would get and need; nothing is kept.  Raises Refused, StoreError."""
        asked = structs.replace(request, plan=HyperbatchPlan.name)
        attachment = open_attachment(self._opening, asked, None, MacroNews(self._production))
        try:
            if self.broker.graph_wish >= self.budget.graph_blocks:
                self.topology.load()
            return self._hypers.prospect(attachment, request.hyperbatch)
        finally:
            attachment.close(self.broker)

    def detach(self, session: int) -> None:
        """Close a session; its memory is free once no worker has a batch of it."""
        if self._hops.detach(session):
            return
        with self._lock:
            attachment = self._sessions().pop(session, None)
            if attachment is None:
                return
            attachment.closed = True
            background = attachment.background
            if background is not None:
                background.stop()
            attachment.meter.end()
            self._production.ending.append(attachment)
            if not self._production.draining:  # else clients may still read what was lent
                self._production.end(attachment, attachment.state.begin(1 << 62, 0, 1 << 62, 1))
            if background is not None:
                closer = concurrency.Thread(target=self._close_background, args=(attachment,))
                self._closers.append(closer)
                try:
                    closer.start()
                except RuntimeError:  # the system has no more threads: this one waits
                    self._closers.remove(closer)
                else:
                    background = None
            else:
                add_counts(self._own_counters, attachment.own_counters())
            self.commons.floor.forget(session)
        if background is not None:
            self._close_background(attachment)

    def _close_background(self, attachment: Attachment) -> None:
        """Without the lock: what is being sampled or read is waited for."""
        assert attachment.background is not None
        attachment.background.close()
        with self._lock:
            attachment.background_ended = True
            add_counts(self._own_counters, attachment.own_counters())
            self._production.close_if_idle(attachment)
            self._closers = [c for c in self._closers if c is not concurrency.current_thread()]

    def start(self, start: Start) -> None:
        """Begin a run: earlier ones of the session end.  A start that is not newer does nothing.

        Raises SessionLost: it is not open, or not any more; Refused: a position that no epoch has.
        """
        if start.step < 0 or start.stride < 1 or start.epoch < 0:
            raise Refused(
                f"epoch {start.epoch}, step {start.step}, stride {start.stride}: "
                "expected 0 or more, 0 or more, 1 or more"
            )
        if self._hops.start(start):
            return
        with self._lock:
            attachment = self._sessions().get(start.session)
            if attachment is None:
                raise SessionLost(f"session {start.session} is not open")
            state = attachment.state
            if start.run <= state.run:
                return
            macro = attachment.plan.resolved.macro
            if macro is not None and macro.waiting and start.stride > 1:
                raise Refused("reuse while waiting: expected no DataLoader workers beside the one")
            self._production.end(
                attachment, state.begin(start.run, start.epoch, start.step, start.stride)
            )
            attachment.meter.begin(len(range(start.step, state.num_steps, start.stride)))
            if attachment.hyper is not None:
                attachment.hyper.begin(start.run, start.epoch, start.step, start.stride)
            self._begin_macro(start, attachment)
            self._production.pump(start.session, attachment)

    def proceed(self, start: Start) -> None:
        """A new run behind one of which every batch was delivered: what is lent stays lent."""
        if (hops := self._hops.find(start.session)) is not None:
            hops.proceed(start)
            return
        with self._lock:
            attachment = self._sessions().get(start.session)
            if attachment is None:
                raise SessionLost(f"session {start.session} is not open")
            state, where = attachment.state, (start.run, start.epoch, start.step, start.stride)
            state.proceed(*where)
            attachment.meter.begin(len(range(start.step, state.num_steps, start.stride)))
            if attachment.hyper is not None:
                attachment.hyper.proceed(*where)
            self._begin_macro(start, attachment)
            self._production.pump(start.session, attachment)

    def _begin_macro(self, start: Start, attachment: Attachment) -> None:
        macro = attachment.macro
        if macro is not None:
            self._production.attempt(
                start.session, attachment,
                lambda: macro.begin(start.run, start.epoch, start.step, start.stride),
            )  # fmt: skip

    @property
    def ending(self) -> bool:
        """Whether sessions that have ended still hold something."""
        with self._lock:
            return bool(self._production.ending or self._closers) or self._hops.ending

    def resize(self, other: "Engine", count: int) -> None:
        """Get up to `count` free slots from another store's engine."""
        slots = other.broker.cede(count)
        budget, num_slots = self.budget, self.broker.num_slots + len(slots)
        wish = graph_wish(budget.graph_blocks, budget.graph_least, num_slots)
        self.broker.accept(slots, max(wish, self.broker.graph_wish))

    def waits(self, session: int) -> bool:
        """Whether a session's next batch is not built before others of it are released."""
        if (hops := self._hops.find(session)) is not None:
            return hops.waits
        with self._lock:
            attachment = self._sessions().get(session)
            return attachment is not None and attachment.waits

    def depth(self, session: int) -> int:
        """Batches of a session that can be lent at a time, as far as is known."""
        if (hops := self._hops.find(session)) is not None:
            return hops.window
        with self._lock:
            attachment = self._sessions().get(session)
            return 0 if attachment is None else attachment.state.depth

    def holds_all(self, session: int) -> bool:
        """Whether all that a session reads is in memory, whatever share of the arena it has."""
        return self._hops.holds_all(session)

    def widen(self, session: int, batches: int) -> None:
        """More batches in flight of a session that is shared, where there are slots for them."""
        with self._lock:
            attachment = self._sessions().get(session)
            if attachment is not None:
                attachment.widen(self.broker, batches)
                self._production.pump_open(session, attachment)

    def identify(self, request: Attach, seeds: NDArray[np.int64] | None) -> Resolved:
        """What a request is resolved to; nothing is taken.  Raises Refused."""
        if request.plan in METHOD_OF:
            return resolve_hops(self.store.manifest, request)
        return resolve_request(self.store.manifest, request, seeds)

    def release(self, release: Release) -> None:
        """A client is done with a row group."""
        if self._hops.release(release):
            return
        with self._lock:
            attachment = self._sessions().get(release.session)
            if attachment is None:
                return
            done = attachment.state.release(release.run, release.step, release.group)
            if done is not None:
                attachment.meter.released()
            if done is not None and done.addressed is not None:
                self.assembler.drop(done.addressed.pins)
            if done is not None and done.sampled is not None and attachment.hyper is not None:
                attachment.hyper.released(done.run, done.sampled.batch)
            if done is not None and attachment.macro is not None:
                attachment.macro.release(done.unit)
            self._production.pump(release.session, attachment)

    def drain(self) -> None:
        """Start nothing more; returns when no worker is busy.

        What is lent stays so: nobody writes where a client that has not heard of it yet reads.
        """
        with self._lock:
            self._production.drain()
            for session in list(self._sessions()):
                self.detach(session)
            closers = list(self._closers)
        for closer in closers:
            closer.join()
        self.commons.floor.settle()
        self._hops.drain()

    def status(
        self,
    ) -> tuple[tuple[LedgerEntry, ...], tuple[SessionStatus, ...], dict[str, int]]:
        """Ledger, sessions and counters as they are now."""
        with self._lock:
            sessions = tuple(a.status(session) for session, a in self._sessions().items())
            taken = [a.ledger_entry(session) for session, a in self._sessions().items()]
            counters = self._production.counters()
            own = dict(self._own_counters)
            for attachment in self._sessions().values():
                add_counts(own, attachment.own_counters())
            counters |= own
            if (cost := self._gauge.known) is not None:
                counters["device_run_ns"] = int(cost.run_s * 1e9)
                counters["device_page_ns"] = int(cost.page_s * 1e9)
        reader = self.reader
        counters |= {
            "bytes_read": reader.bytes_read,
            "blocks_read": reader.blocks_read,
            "reads": reader.reads,
            "bytes_written": 0,
            "read_errors": reader.errors,
            "read_retries": reader.retries,
            "slots_in_pools": self.broker.available(),
            "slots_pinned": self.broker.pinned(),
            "read_ns": reader.busy_ns,
            "read_wait_ns": reader.wait_ns,
        }
        for name, residency, files in (
            ("graph", self.graph, len(self.store.manifest.relations)),
            ("row", self.rows, len(self._served)),
        ):
            counters[f"{name}_blocks_present"] = sum(
                residency.pool.num_present(f) for f in range(files)
            )
            counters[f"{name}_blocks_hit"] = residency.hits
            counters[f"{name}_blocks_missed"] = residency.misses
        entries, others, counts = self._hops.status()
        add_counts(counters, counts)
        pools = self.budget.entries(self.broker.graph_wish, self.broker.num_slots)
        return (*pools, *taken, *entries), (*sessions, *others), counters


def default_settings(mem_bytes: int, workers: int = 0, readers: int = 0) -> EngineSettings:
    """Settings with what is 0 chosen for this machine."""
    cores = len(os.sched_getaffinity(0))
    return EngineSettings(mem_bytes, workers or min(4, cores), readers or 8)
