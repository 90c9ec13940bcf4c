"""Sessions of hop-wise batches in the engine: opened, found by number, closed, counted."""

from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.io.arena import Arena
from blockstore.io.reader import BlockReader
from blockstore.store import Store
from loaderd.devicecost import DeviceGauge
from loaderd.errors import Refused, Shortage
from loaderd.guarded import Guarded
from loaderd.hopwise.cut import HopCut, cut_hops, shortage_text
from loaderd.hopwise.files import HopArray, chosen_arrays
from loaderd.hopwise.session import Deliver, HopSession
from loaderd.hopwise.shelf import Held, Shelf
from loaderd.hopwise.source import HeldRanges, HeldRows, PassingRanges, PassingRows, Source
from loaderd.memory.ledger import EngineSettings, enough_mem, session_entry_name
from loaderd.memory.slots import LOOK_WAIT_S, SlotBroker
from loaderd.meter import add_counts
from loaderd.plans.base import Part
from loaderd.plans.chunks import HopPlan, hop_set, resolve_hops
from loaderd.protocol import (
    Attach,
    Attached,
    LedgerEntry,
    Release,
    RowArraySpec,
    SessionStatus,
    Start,
)


class _Open(NamedTuple):
    """A session and what it holds."""

    session: HopSession
    arrays: list[HopArray]
    held: list[Held]
    taken: list[int]  # slots
    cut: HopCut


class HopDesk:
    """All sessions of plans `chunks` and `rows`."""

    def __init__(
        self,
        store: Store,
        settings: EngineSettings,
        broker: SlotBroker,
        arena: Arena,
        reader: BlockReader,
        gauge: DeviceGauge,
        unused_bytes: int,
        first_file: int,
        deliver: Deliver,
    ) -> None:
        """`unused_bytes`: of --mem; `first_file`: the reader's number of the first `hop_files`."""
        self._unused_bytes = unused_bytes
        self._store, self._settings, self._broker = store, settings, broker
        self._arena, self._reader, self._first_file = arena, reader, first_file
        self._gauge = gauge
        self._slot_bytes, self._deliver = arena.slot_bytes, deliver
        self._shelf = Shelf(broker, arena, reader, arena.slot_bytes)
        self._lock = concurrency.RLock()
        self._open: Guarded[dict[int, _Open]] = Guarded({}, self._lock)
        self._closers: list[concurrency.Thread] = []
        self._ended = {"batches": 0, "rows": 0, "ready_ns": 0, "starved_ns": 0}

    def attach(self, number: int, request: Attach) -> Attached:
        """Open a session.  Raises Refused, StoreError."""
        manifest = self._store.manifest
        resolved = resolve_hops(manifest, request)
        hops = resolved.hops
        assert hops is not None
        plan = HopPlan(resolved, Part(request.rank, request.world_size))
        arrays = chosen_arrays(
            manifest, hop_set(manifest, request)[1], hops.operators, hops.hops, hops.labels,
            self._first_file,
        )  # fmt: skip
        with self._lock:
            closers = list(self._closers)
        for closer in closers:  # what sessions that end still hold
            closer.join()
        opened = self._take(number, plan, arrays, request.window)
        with self._lock:
            self._open()[number] = opened
        return Attached(
            request=request.request,
            session=number,
            resolved=resolved,
            plan=plan.name,
            num_steps=plan.num_steps,
            window=opened.cut.window,
            rows=tuple(
                RowArraySpec(a.name, a.array.dtype, a.array.row_shape, a.row_bytes) for a in arrays
            ),
            types=tuple(t.name for t in manifest.types),
            relations=tuple((r.src, r.name, r.dst) for r in manifest.relations),
        )

    def _take(self, number: int, plan: HopPlan, arrays: list[HopArray], window: int) -> _Open:
        """Take memory and begin to serve: arrays are held where that can be."""

        def cut(held: bool) -> HopCut:
            return cut_hops(
                plan, arrays, self._settings, self._slot_bytes, self._broker.available(),
                self._unused_bytes, self._shelf.missing_slots(arrays), window, held,
            )  # fmt: skip

        best = cut(held=True)
        if best.held:
            try:
                return self._serve(number, plan, arrays, best)
            except Refused:  # free slots lie too far apart
                best = cut(held=False)
        try:
            return self._serve(number, plan, arrays, best)
        except Shortage:  # free slots that are not adjacent are of no use
            slot, least, free = self._slot_bytes, best.least, self._broker.free()
            free = free if free < least else 0
            enough = enough_mem(self._settings, self._unused_bytes, (least - free) * slot)
            raise Refused(shortage_text(least * slot, free * slot, enough)) from None

    def _serve(self, number: int, plan: HopPlan, arrays: list[HopArray], cut: HopCut) -> _Open:
        held = self._shelf.take(arrays) if cut.held else []
        taken: list[int] = []
        try:
            transit = [self._run(cut.run, taken) for _ in range(cut.transit)]
            buffers = self._buffers(cut, taken)
            cut = cut._replace(window=len(buffers), depth=min(cut.depth, len(buffers)))
            session = HopSession(number, plan, cut.window, cut.depth, self._deliver)
            session.open(self._source(plan, arrays, held, buffers, transit, cut, session))
        except BaseException:
            self._broker.give(taken)
            self._shelf.give(held)
            raise
        return _Open(session, arrays, held, taken, cut)

    def _buffers(self, cut: HopCut, taken: list[int]) -> list[NDArray[np.uint8]]:
        """As many as the window has, or as there are; one at least.  Raises Refused."""
        buffers = [self._run(cut.buffer, taken)]
        try:
            while len(buffers) < cut.window:
                buffers.append(self._run(cut.buffer, taken))
        except Refused:  # free slots lie too far apart: a smaller window
            pass
        return buffers

    def _run(self, count: int, taken: list[int]) -> NDArray[np.uint8]:
        """Memory of `count` adjacent slots."""
        first = self._broker.take_run(count, LOOK_WAIT_S)
        taken += range(first, first + count)
        return self._arena.data[first * self._slot_bytes : (first + count) * self._slot_bytes]

    def _source(
        self,
        plan: HopPlan,
        arrays: list[HopArray],
        held: list[Held],
        buffers: list[NDArray[np.uint8]],
        transit: list[NDArray[np.uint8]],
        cut: HopCut,
        session: HopSession,
    ) -> Source:
        if cut.held and cut.ranges:
            return HeldRanges(plan, held)
        if cut.held:
            return HeldRows(plan, held, buffers, self._place_of, session.stopped)
        if cut.ranges:
            return PassingRanges(plan, arrays, self._reader, [self._place_of(b) for b in buffers])
        gap = self._gauge.cost([a.file for a in arrays], transit).gap_pages
        return PassingRows(plan, arrays, self._reader, buffers, self._place_of, transit, gap)

    def _place_of(self, memory: NDArray[Any]) -> int:
        return memory.ctypes.data - self._arena.data.ctypes.data

    # -- by number --------------------------------------------------------------------------------

    def start(self, start: Start) -> bool:
        """Begin a run; False where the session is not one of these."""
        with self._lock:
            opened = self._open().get(start.session)
        if opened is not None:
            opened.session.start(start)
        return opened is not None

    @property
    def ending(self) -> bool:
        """Whether sessions that have ended still hold something."""
        with self._lock:
            return bool(self._closers)

    def find(self, number: int) -> HopSession | None:
        """An open session."""
        with self._lock:
            opened = self._open().get(number)
        return None if opened is None else opened.session

    def holds_all(self, number: int) -> bool:
        """Whether the arrays of a session are in memory whole."""
        with self._lock:
            opened = self._open().get(number)
        return opened is not None and opened.cut.held

    def release(self, release: Release) -> bool:
        """A client is done with a batch; False where the session is not one of these."""
        with self._lock:
            opened = self._open().get(release.session)
        if opened is not None:
            opened.session.release(release)
        return opened is not None

    def detach(self, number: int) -> bool:
        """Close a session; its memory is free once nothing is on its way."""
        with self._lock:
            opened = self._open().pop(number, None)
            if opened is None:
                return False
            opened.session.stop()
            closer = concurrency.Thread(target=self._close, args=(opened,))
            try:
                closer.start()
            except RuntimeError:  # the system has no more threads: this one waits
                pass
            else:
                self._closers.append(closer)  # under the lock: who finds it there waits for it
                return True
        self._close(opened)
        return True

    def _close(self, opened: _Open) -> None:
        opened.session.close()
        self._broker.give(opened.taken)
        self._shelf.give(opened.held)
        with self._lock:
            add_counts(self._ended, opened.session.counts())
            self._closers = [c for c in self._closers if c is not concurrency.current_thread()]

    def drain(self) -> None:
        """Close all; returns when nothing is on its way."""
        with self._lock:
            numbers = list(self._open())
        for number in numbers:
            self.detach(number)
        with self._lock:
            closers = list(self._closers)
        for closer in closers:
            closer.join()

    def status(self) -> tuple[list[LedgerEntry], list[SessionStatus], dict[str, int]]:
        """Entries of the ledger, sessions, counters."""
        with self._lock:
            opened = list(self._open().values())
            counters = dict(self._ended)
        entries = [self._entry(o) for o in opened]
        if held := self._shelf.num_slots:
            entries.append(
                LedgerEntry(
                    "session memory, hop-wise arrays",
                    held * self._slot_bytes,
                    f"{self._shelf.num_arrays} arrays held, for all sessions that use them",
                )
            )
        for o in opened:
            add_counts(counters, o.session.counts())
        sessions = [
            structs.replace(o.session.status(), held_bytes=len(o.taken) * self._slot_bytes)
            for o in opened
        ]
        return entries, sessions, counters

    def _entry(self, opened: _Open) -> LedgerEntry:
        return LedgerEntry(
            session_entry_name([opened.session.number]),
            len(opened.taken) * self._slot_bytes,
            opened.cut.basis(len(opened.arrays)),
        )
