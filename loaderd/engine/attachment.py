"""A session of the engine: its plan, its memory out of the arena, and its state."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Manifest
from blockstore.io.arena import Arena
from blockstore.io.reader import BlockReader
from blockstore.store import Store
from loaderd.batch.rows import Addressed, Pins
from loaderd.batch.structure import Structure
from loaderd.devicecost import DeviceCost
from loaderd.engine.resolve import make_plan
from loaderd.engine.session import RowSizes, SessionState
from loaderd.engine.sessioncut import SessionCut, cut_session
from loaderd.hyper.cut import HyperCut
from loaderd.hyper.rowcache import RowCache
from loaderd.hyper.session import Hyper, StructureArea
from loaderd.hyper.single import Workspaces, usual_shape
from loaderd.macro.files import MacroFiles
from loaderd.macro.job import Jobs
from loaderd.macro.session import Macro
from loaderd.memory.ledger import (
    Budget,
    EdgeItems,
    EngineSettings,
    ServedRows,
    SessionNeed,
    session_entry_name,
)
from loaderd.memory.slots import LOOK_WAIT_S, WAIT_S, SlotBroker
from loaderd.memory.workspace import (
    Carver,
    Sizes,
    Workspace,
    carve_workspace,
    clear_workspace,
    workspace_bytes,
)
from loaderd.meter import Meter
from loaderd.plans.base import Plan, Shape
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.plans.roots import EndTable
from loaderd.protocol import Attached, LedgerEntry, RowArraySpec, SessionStatus

_WIDEST = 64  # batches in flight of sessions that share
_SPARE = 8  # slots of the pools that are left to them


class Opening(NamedTuple):
    """What of the engine a session is opened with."""

    store: Store
    settings: EngineSettings
    budget: Budget
    broker: SlotBroker
    arena: Arena
    reader: BlockReader
    first_rows: int  # number, in the reader, of the first of the served rows
    macro_files: Callable[[], MacroFiles]  # of a partitioned store
    macro_jobs: Jobs


class Attachment:
    """A session's plan, memory and state."""

    def __init__(
        self,
        plan: Plan,
        served: list[ServedRows],
        slot_bytes: int,
        need: SessionNeed,
        cut: SessionCut,
    ) -> None:
        """Memory is filled in by `open_attachment`."""
        self.plan, self.window, self.served, self.need = plan, cut.window, served, need
        self.workspaces = Workspaces()
        self.seeds: NDArray[Any] = np.empty(0, np.uint32)
        self.ends: EndTable | None = None  # where seeds are edges
        self.times: NDArray[np.int64] = np.empty(0, np.int64)  # of the seeds, where given
        self.meter = Meter()
        self.closed = False
        self.edge_id_bytes = 0
        self.edge_rows = plan.resolved.edge_features  # edges have rows, as nodes do
        self.hyper: Hyper | None = None  # where the plan is `hyperbatch`
        self.background_ended = False  # its threads have
        self.fits = False  # whether graph and rows stay in memory beside it
        self.plain_blocks = 0  # of rows that would stay, were its batches built one by one
        self.hyper_cut: HyperCut | None = None
        self.areas: list[StructureArea] = []
        self.macro: Macro | None = None  # where the plan is `macrobatch`
        self._row_sizes: Sizes
        self.scratch: StructureArea | None = None  # where batches are sampled together
        self._rows: RowCache | None = None
        self._slot_bytes = slot_bytes
        self._taken: list[int] = []  # slots of workspaces, seeds, transit, areas and cache
        self._transit: dict[int, NDArray[np.int64]] = {}
        self._sizes = RowSizes(tuple(slot_bytes // r.array.row_bytes for r in served), slot_bytes)
        self.state = SessionState(cut.window, plan.num_steps, [], self._sizes)
        self._cut = cut

    @property
    def cached_rows(self) -> RowCache:
        """The row cache of a session that has one."""
        assert self._rows is not None
        return self._rows

    @property
    def row_cache(self) -> RowCache | None:
        """The same, or None."""
        return self._rows

    def take_seeds(
        self, broker: SlotBroker, arena: Arena, sizes: Sizes, num_ids: int, num_times: int
    ) -> None:
        """Take room for a table of seeds of so many ids, times before them.

        It comes before everything else, at the top of the free slots: what lies below it can be
        given back as one run.  Raises Refused; what was taken is given back by `close`.
        """
        need, self._row_sizes = self.need, sizes
        self.edge_id_bytes = np.dtype(sizes.edge_id_dtype or "uint8").itemsize
        dtype = np.dtype(sizes.id_dtype)
        memory = self._take_run(broker, arena, need.seeds)
        self.times = memory[: 8 * num_times].view(np.int64)
        self.seeds = memory[8 * num_times :][: num_ids * dtype.itemsize].view(dtype)

    def take_workspaces(
        self,
        broker: SlotBroker,
        arena: Arena,
        count: int,
        shape: Shape,
        small: bool,
        wait_s: float = WAIT_S,
    ) -> None:
        """Take workspaces for batches of this shape.  Raises Refused."""
        sizes = self._row_sizes
        slots = -(-workspace_bytes(shape, sizes) // self._slot_bytes)
        for _ in range(count):
            work = carve_workspace(
                Carver(self._take_run(broker, arena, slots, wait_s)), shape, sizes
            )
            clear_workspace(work)
            work.small = small
            transit = broker.take(self._cut.transit)
            self._taken += transit
            self._transit[id(work)] = np.sort(np.asarray(transit, np.int64))
            self.workspaces.add(work)

    def take_small_workspaces(
        self, broker: SlotBroker, arena: Arena, seen: Sequence[Structure], workers: int
    ) -> None:
        """Beside the large one there is, as many more as there are workers.  Raises Refused."""
        worst = self.plan.shape()
        shape = usual_shape(seen, worst, self.plan.resolved.fanouts)
        large, small = (workspace_bytes(s, self._row_sizes) for s in (worst, shape))
        is_small = small < large * 3 // 4
        room = broker.row_slots() // 4 * self._slot_bytes  # a quarter is for these
        each = small if is_small else large
        count = max(1, min(workers - 1, room // each))
        self.take_workspaces(
            broker, arena, count, shape if is_small else worst, is_small, LOOK_WAIT_S
        )

    def take_quota(self, broker: SlotBroker, quota: int) -> None:
        """Take the slots in which batches are handed over.  Raises Refused."""
        slots = broker.take(quota)
        self.state = SessionState(self.window, self.plan.num_steps, slots, self._sizes)
        self._cut = SessionCut(self._cut.workers, self._cut.transit, quota, self.window)

    def widen(self, broker: SlotBroker, batches: int) -> None:
        """As many more batches in flight, each with its slots; less where these are not free."""
        each = -(-self._cut.quota // self.window)
        for _ in range(batches if self.window < _WIDEST else 0):
            slots = broker.take_now(each, _SPARE)
            if not slots:
                return
            self.state.widen(slots, 1)
            self.window += 1
            self._cut.quota += each

    def take_hyper(
        self,
        opening: Opening,
        cut: HyperCut,
        cost: Callable[[Sequence[NDArray[np.uint8]]], DeviceCost],
    ) -> None:
        """Take what hyperbatches need: areas for structure, and the row cache.

        cost   measures the device, through the buffers that pages will pass through

        Raises Refused; what was taken is given back then.
        """
        before = len(self._taken)
        try:
            self._take_hyper(opening, cut, cost)
        except BaseException:
            opening.broker.give(self._taken[before:])
            del self._taken[before:]
            self.areas, self.scratch, self.hyper_cut = [], None, None
            raise

    def _take_hyper(
        self,
        opening: Opening,
        cut: HyperCut,
        cost: Callable[[Sequence[NDArray[np.uint8]]], DeviceCost],
    ) -> None:
        broker, arena, manifest = opening.broker, opening.arena, opening.store.manifest
        self.hyper_cut = cut
        self.areas = [
            StructureArea(self._take_run(broker, arena, cut.area, LOOK_WAIT_S))
            for _ in range(cut.areas)
        ]
        if cut.scratch:
            self.scratch = StructureArea(self._take_run(broker, arena, cut.scratch, LOOK_WAIT_S))
        if not cut.entries:
            return
        tables = self._take_run(broker, arena, cut.tables, LOOK_WAIT_S)
        transit = [
            self._take_run(broker, arena, cut.run, LOOK_WAIT_S)
            for _ in range(opening.settings.readers)
        ]
        area = broker.take(cut.rows)
        self._taken += area
        self._rows = RowCache(
            self.served, opening.reader, opening.first_rows, arena.data, self._slot_bytes,
            manifest.block_bytes, manifest.id_dtype, cut.entries, tables, area, transit,
            cost(transit).gap_pages, opening.settings.policy,
        )  # fmt: skip

    @property
    def background(self) -> Hyper | Macro | None:
        """Threads of its own."""
        return self.hyper or self.macro

    def fall_back(
        self,
        manifest: Manifest,
        broker: SlotBroker,
        arena: Arena,
        blocks: int,
        settings: EngineSettings,
    ) -> None:
        """Serve the same batches by plan `minibatch`.

        All but the seeds is given back and taken again, so that nothing of what was tried for
        hyperbatches lies between: a budget that holds minibatches holds them here, too.
        """
        resolved, part = self.plan.resolved, self.plan.part
        self.plan = make_plan(manifest, resolved, part, MinibatchPlan.name)
        assert self.workspaces.all_home
        broker.give(self._taken[self.need.seeds :])
        del self._taken[self.need.seeds :]
        self.workspaces, self._transit = Workspaces(), {}
        cut = cut_session(self.need, broker.free() + self.need.seeds, blocks, settings, self.window)
        self._cut = SessionCut(cut.workers, cut.transit, cut.quota, self.window)
        self.take_workspaces(broker, arena, cut.workers, self.plan.shape(), small=False)
        self.take_quota(broker, cut.quota)

    def own_counters(self) -> dict[str, int]:
        """Of its hand-over, its hyperbatches or macro-batches so far."""
        times = self.meter.times()
        if self.macro is not None:
            return times | self.macro.counters
        if self.hyper is None:
            return times
        rows = self._rows
        if rows is None:
            return times | self.hyper.counters
        return (
            times
            | self.hyper.counters
            | {
                "hyper_rows_wanted": rows.rows_wanted,  # by batches, each counted
                "hyper_rows_read": rows.rows_read,  # into entries
                "hyper_pages_read": rows.pages_read,  # of all arrays, 4 KiB each
                "hyper_runs_read": rows.runs_read,  # of pages, in one call each
            }
        )

    def nothing_missing(self) -> Addressed:
        """Of a batch whose rows are in the cache."""
        return Addressed(Pins((), ()), 0, (0,) * len(self.served))

    def _take_run(
        self, broker: SlotBroker, arena: Arena, count: int, wait_s: float = WAIT_S
    ) -> NDArray[np.uint8]:
        """Memory of `count` adjacent slots."""
        first = broker.take_run(count, wait_s)
        self._taken += range(first, first + count)
        return arena.data[first * self._slot_bytes : (first + count) * self._slot_bytes]

    def transit(self, work: Workspace) -> NDArray[np.int64]:
        """Slots through which blocks pass while this workspace's rows are copied."""
        return self._transit[id(work)]

    @property
    def waits(self) -> bool:
        """Whether nothing more is built before batches are released."""
        own = self.hyper or self.macro
        return self.state.waits or (own is not None and own.waits)

    @property
    def idle(self) -> bool:
        """Whether no worker and no client has anything of the session."""
        unused = self.macro is None or self.macro.idle
        return self.workspaces.all_home and self.state.idle and unused

    def close(self, broker: SlotBroker) -> None:
        """Give everything back; no worker has a batch of the session, its threads have ended."""
        broker.give(self._taken + self.state.take_all())
        self._taken = []
        if self.macro is not None:
            self.macro.leave()
        self.hyper = self.macro = None  # they lead back here: nothing waits for the collector

    def describe(self, manifest: Manifest, request: int, session: int) -> Attached:
        """The reply to the client."""
        return Attached(
            request=request,
            session=session,
            resolved=self.plan.resolved,
            plan=self.plan.name,
            num_steps=self.plan.num_steps,
            window=self.window,
            rows=tuple(_spec(r) for r in self.served),
            types=tuple(t.name for t in manifest.types),
            relations=tuple((r.src, r.name, r.dst) for r in manifest.relations),
        )

    def status(self, session: int) -> SessionStatus:
        """As `loaderd status` shows it."""
        state, macro = self.state, self.macro
        common = 0 if macro is None else macro.held_slots
        times = self.meter.times()
        return SessionStatus(
            session=session,
            plan=self.plan.name,
            seeds=self.plan.resolved.seeds,
            epoch=state.epoch,
            step=min(state.next_step, state.num_steps),
            num_steps=state.num_steps,
            in_flight=len(state.jobs),
            window=self.window,
            batches=state.batches,
            rows=self.meter.rows,
            edges=self.meter.edges,
            owner="",  # the shell knows
            held_bytes=(len(self._taken) + self._cut.quota + common) * self._slot_bytes,
            ready_ns=times["ready_ns"],
            starved_ns=times["starved_ns"],
        )

    def ledger_entry(self, session: int) -> LedgerEntry:
        """What the session has taken out of the row pool."""
        cut = self._cut
        slots = len(self._taken) + cut.quota
        slots += 0 if self.macro is None else self.macro.counted_slots
        return LedgerEntry(
            session_entry_name([session]),
            slots * self._slot_bytes,
            f"{self.workspaces.total} workspaces, each with {cut.transit} transit slots, seeds, "
            f"{cut.quota} slots for {cut.window} batches{self._own_basis()}",
        )

    def _own_basis(self) -> str:
        if self.macro is not None:
            return self.macro.basis()
        cut = self.hyper_cut
        if cut is None:
            return ""
        return (
            f"; hyperbatches of {cut.size}: {cut.areas} x {cut.area} slots of structure, "
            f"{cut.scratch} of "
            f"scratch, {cut.rows} "
            f"slots of rows ({sum(cut.entries):,}), {cut.tables} of tables"
        )


def _spec(rows: ServedRows) -> RowArraySpec:
    """As the client is told of it."""
    array, of_edges = rows.array, isinstance(rows.node_type, EdgeItems)
    owner = ("", rows.node_type.name) if of_edges else (rows.node_type.name, "")
    return RowArraySpec(rows.name, array.dtype, array.row_shape, array.row_bytes, *owner)
