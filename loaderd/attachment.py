"""Opening a session: parameters resolved, memory taken out of the arena, seeds looked up."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, Manifest, NodeType
from blockstore.io.arena import Arena
from blockstore.io.buffers import byte_view
from blockstore.io.reader import BlockReader
from blockstore.store import Store
from blockstore.units import format_bytes
from loaderd.advice import fits_in_memory
from loaderd.devicecost import DeviceCost
from loaderd.errors import Refused
from loaderd.hyper import Hyper, StructureArea
from loaderd.hypercut import HyperCut
from loaderd.ledger import (
    MAX_TRANSIT,
    Budget,
    EngineSettings,
    ServedRows,
    SessionNeed,
    make_sizes,
    served_rows,
    session_entry_name,
    session_need,
)
from loaderd.macro import Announce, Macro
from loaderd.macrocut import MacroCut, cut_macro
from loaderd.macrofiles import MacroFiles
from loaderd.macrograph import MacroGraph, MacroShared, carve_macro
from loaderd.meter import Meter
from loaderd.plans.base import Part, Plan, Shape
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.macrobatch import MacrobatchPlan, SeedGroups
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.plans.resolve import make_plan, resolve, seed_relation, seed_type
from loaderd.protocol import Attach, Attached, LedgerEntry, Resolved, RowArraySpec, SessionStatus
from loaderd.requests import split_frame
from loaderd.roots import EndTable
from loaderd.rowcache import RowCache
from loaderd.rows import Addressed, Pins
from loaderd.sampling import Workspaces, usual_shape
from loaderd.seeds import count_edges, count_seeds, fill_edges, fill_seeds, table_items
from loaderd.session import RowSizes, SessionState
from loaderd.slots import LOOK_WAIT_S, WAIT_S, SlotBroker
from loaderd.topology import Structure
from loaderd.workspace import (
    Carver,
    Sizes,
    Workspace,
    carve_workspace,
    clear_workspace,
    workspace_bytes,
)

_WIDEST = 64  # batches in flight of sessions that share
_SPARE = 8  # slots of the pools that are left to them
_ROOMY = 512  # slots: sessions of hyperbatches have a cache then


class Attachment:
    """A session's plan, memory and state."""

    def __init__(
        self,
        plan: Plan,
        served: list[ServedRows],
        slot_bytes: int,
        need: SessionNeed,
        cut: "SessionCut",
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
        self.hyper: Hyper | None = None  # where the plan is `hyperbatch`
        self.background_ended = False  # its threads have
        self.fits = False  # whether graph and rows stay in memory beside it
        self.plain_blocks = 0  # of rows that would stay, were its batches built one by one
        self.hyper_cut: HyperCut | None = None
        self.areas: list[StructureArea] = []
        self.macro: Macro | None = None  # where the plan is `macrobatch`
        self.macro_cut: MacroCut | None = None
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

    def take(
        self, broker: SlotBroker, arena: Arena, sizes: Sizes, num_ids: int, num_times: int
    ) -> None:
        """Take workspaces, and room for a table of seeds of so many ids, times before them.

        Raises Refused; what was taken is given back by `close`.
        """
        need, self._row_sizes = self.need, sizes
        self.edge_id_bytes = np.dtype(sizes.edge_id_dtype or "uint8").itemsize
        self.take_workspaces(broker, arena, self._cut.workers, self.plan.shape(), small=False)
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
        opening: "Opening",
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
        opening: "Opening",
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

    def take_macro(
        self, opening: "Opening", node_type: NodeType, cut: MacroCut, announce: Announce
    ) -> None:
        """Take what macro-batches need, and start reading.  The seeds are there.

        Raises Refused; what was taken is given back by `close`.
        """
        store, broker, arena = opening.store, opening.broker, opening.arena
        files = opening.macro_files()
        plan = self.plan
        assert isinstance(plan, MacrobatchPlan)
        places = self._take_run(broker, arena, cut.places).view(np.int64)[: self.seeds.size]
        offsets = files.offsets[files.type_of[node_type.name]]
        groups = SeedGroups(self.seeds, offsets, places)
        self.plan = plan = plan.placed(groups.counts)
        runs = [self._take_run(broker, arena, cut.macro) for _ in range(cut.memories)]
        transit = [self._take_run(broker, arena, cut.run) for _ in range(cut.transit)]
        shared = MacroShared(
            store, files, self.served, opening.reader, arena.data, transit,
            self._take_run(broker, arena, cut.ids), self._take_run(broker, arena, cut.hubs),
            cut.choice,
        )  # fmt: skip
        graphs = [
            MacroGraph(
                shared,
                carve_macro(Carver(run), store.manifest, self.served, cut.bounds, cut.choice),
            )
            for run in runs
        ]
        self.macro_cut = cut
        self.macro = Macro(plan, groups, graphs, announce)

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
        """Serve the same batches by plan `minibatch`."""
        resolved, part = self.plan.resolved, self.plan.part
        self.plan = make_plan(manifest, resolved, part, MinibatchPlan.name)
        cut = cut_session(
            self.need, broker.available() + self.need.workspace + 2, blocks, settings, self.window
        )
        self._cut = SessionCut(cut.workers, cut.transit, cut.quota, self.window)
        self.take_workspaces(broker, arena, cut.workers - 1, self.plan.shape(), small=False)
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
        """Give everything back; no worker has a batch of the session."""
        broker.give(self._taken + self.state.take_all())
        self._taken = []

    def describe(self, manifest: Manifest, request: int, session: int) -> Attached:
        """The reply to the client."""
        return Attached(
            request=request,
            session=session,
            resolved=self.plan.resolved,
            plan=self.plan.name,
            num_steps=self.plan.num_steps,
            window=self.window,
            rows=tuple(
                RowArraySpec(
                    r.name, r.array.dtype, r.array.row_shape, r.array.row_bytes, r.node_type.name
                )
                for r in self.served
            ),
            types=tuple(t.name for t in manifest.types),
            relations=tuple((r.src, r.name, r.dst) for r in manifest.relations),
        )

    def status(self, session: int) -> SessionStatus:
        """As `loaderd status` shows it."""
        state = self.state
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
            held_bytes=(len(self._taken) + self._cut.quota) * self._slot_bytes,
            ready_ns=times["ready_ns"],
            starved_ns=times["starved_ns"],
        )

    def ledger_entry(self, session: int) -> LedgerEntry:
        """What the session has taken out of the row pool."""
        cut = self._cut
        slots = len(self._taken) + cut.quota
        return LedgerEntry(
            session_entry_name([session]),
            slots * self._slot_bytes,
            f"{self.workspaces.total} workspaces, each with {cut.transit} transit slots, seeds, "
            f"{cut.quota} slots for {cut.window} batches{self._own_basis()}",
        )

    def _own_basis(self) -> str:
        if self.macro_cut is not None:
            return self.macro_cut.basis()
        cut = self.hyper_cut
        if cut is None:
            return ""
        return (
            f"; hyperbatches of {cut.size}: {cut.areas} x {cut.area} slots of structure, "
            f"{cut.scratch} of "
            f"scratch, {cut.rows} "
            f"slots of rows ({sum(cut.entries):,}), {cut.tables} of tables"
        )


class SessionCut:
    """How much of each a session gets: physical, so it may follow the budget."""

    def __init__(self, workers: int, transit: int, quota: int, window: int) -> None:
        """Workspaces; transit slots of each; slots for batches; batches in flight."""
        self.workers, self.transit, self.quota, self.window = workers, transit, quota, window

    def slots(self, need: SessionNeed) -> int:
        """All of a session's."""
        return self.workers * (need.workspace + self.transit) + need.seeds + self.quota


def cut_session(
    need: SessionNeed, available: int, row_blocks: int, settings: EngineSettings, window: int
) -> SessionCut:
    """Share `available` slots between a session and the row pool.  `need.least` fits."""
    window = window or 2 * settings.workers
    batch = need.structure + need.addresses
    room = available - need.seeds - need.least_quota
    workers = max(1, min(settings.workers, room // 2 // (need.workspace + 2)))
    room -= workers * (need.workspace + 2)
    if room >= row_blocks + (window - 1) * batch:  # all rows stay: nothing passes through
        return SessionCut(workers, 2, need.least_quota + (window - 1) * batch, window)
    transit = 2 + max(0, min(MAX_TRANSIT - 2, room // 4 // workers))
    room -= workers * (transit - 2)
    wanted = window * (batch + need.area) - need.least_quota
    quota = need.least_quota + max(0, min(wanted, room // 2))
    return SessionCut(workers, transit, quota, window)


def cut_workspaces(
    need: SessionNeed, available: int, settings: EngineSettings, window: int
) -> SessionCut:
    """The same for hyperbatches, which begin with one workspace.  `need.least` fits."""
    # blocks pass through where there is no room for a cache
    spare = available - need.workspace - need.seeds - need.least_quota
    transit = 2 if available > _ROOMY else max(2, min(MAX_TRANSIT // 2, spare // 8))
    return SessionCut(1, transit, need.least_quota, window or 2 * settings.workers)


def _seeds_name(split: str, frame: NDArray[np.int64] | None) -> str:
    named = split if split == "all" else f"split:{split}"
    if frame is None:
        return named
    digest = hashlib.blake2b(byte_view(frame), digest_size=16).hexdigest()
    return f"{named}+times:{digest}" if split else f"ids:{digest}"


def _refuse(
    least: int, available: int, budget: Budget, settings: EngineSettings, less: str
) -> None:
    short = (least - available) * budget.slot_bytes
    enough = format_bytes(-(-(settings.mem_bytes + short) // (1 << 20)) << 20)
    raise Refused(
        f"the session needs {format_bytes(least * budget.slot_bytes)} of the arena, "
        f"{format_bytes(max(0, available) * budget.slot_bytes)} can be had: serve with at least "
        f"--mem {enough}, or ask for {less}"
    )


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


def resolve_request(
    manifest: Manifest, request: Attach, frame: NDArray[np.int64] | None
) -> Resolved:
    """What fixes a session's batches; `frame`: ids and times of seeds.  Raises Refused."""
    ids, times = split_frame(request, frame)
    name, relation = _seeds_name(request.split, frame), seed_relation(manifest, request)
    if relation is not None:
        name, num_seeds = f"edges:{name}", count_edges(manifest, relation, request.split, ids)
    else:
        num_seeds = count_seeds(seed_type(manifest, request), request.split, ids)
    if times.size not in (0, num_seeds):
        raise Refused(f"times: {times.size} for {num_seeds} seeds, expected one for each")
    return resolve(manifest, request, name, num_seeds)


def open_attachment(
    opening: Opening, request: Attach, frame: NDArray[np.int64] | None, announce: Announce
) -> Attachment:
    """Resolve a request and take its memory.  Raises Refused with the least that would do.

    frame   ids and times of seeds, as `check_attach` gives them
    """
    store, settings, budget, broker = opening[:4]
    manifest: Manifest = store.manifest
    resolved = resolve_request(manifest, request, frame)
    ids, times = split_frame(request, frame)
    num_ids = table_items(manifest, seed_relation(manifest, request), request.split, resolved)
    part = Part(request.rank, request.world_size)
    plan = make_plan(manifest, resolved, part, request.plan)
    macro, need, stamp, available = _measure_need(opening, plan, num_ids, times.size)
    row_blocks = 0 if macro else budget.row_blocks  # its rows are in the macro-batch
    plain = cut_session(need, available, row_blocks, settings, request.window)
    spare = broker.graph_slots() - budget.graph_least
    plain_blocks = max(0, broker.pooled() - spare - plain.slots(need))
    fits = fits_in_memory(budget._replace(graph_slots=broker.graph_wish), plain_blocks)
    if request.plan == "auto" and not fits:
        plan = make_plan(manifest, resolved, part, HyperbatchPlan.name)
    hyper = plan.name == HyperbatchPlan.name
    cut = cut_workspaces(need, available, settings, request.window) if hyper else plain
    attachment = Attachment(plan, served_rows(manifest), budget.slot_bytes, need, cut)
    attachment.fits, attachment.plain_blocks = fits, plain_blocks
    try:
        sizes = make_sizes(manifest, resolved.edge_ids, stamp, resolved.temporal is not None)
        attachment.take(broker, opening.arena, sizes, num_ids, times.size)
        attachment.times[:] = times
        _fill_seeds(opening, request, ids, attachment)
        if macro is not None:
            attachment.take_macro(opening, seed_type(manifest, request), macro, announce)
        if not hyper:
            attachment.take_quota(broker, cut.quota)
    except BaseException:
        if attachment.macro is not None:
            attachment.macro.close()
        attachment.close(broker)
        raise
    return attachment


def _measure_need(
    opening: Opening, plan: Plan, num_ids: int, num_times: int
) -> tuple[MacroCut | None, SessionNeed, bool, int]:
    """What macro-batches take, what the rest does, whether with stamps, and slots left for it.

    num_ids, num_times   of the table of seeds

    Raises Refused with the least that would do.
    """
    store, settings, budget, broker = opening[:4]
    manifest, resolved, served = store.manifest, plan.resolved, served_rows(store.manifest)
    available, trees = broker.available(), resolved.temporal is not None
    needs = {
        stamp: session_need(
            plan.shape(), make_sizes(manifest, resolved.edge_ids, stamp, trees), served,
            num_ids + 8 * num_times // ITEM_BYTES[manifest.id_dtype], budget.slot_bytes,
        )
        for stamp in (True, False)
    }  # fmt: skip
    least = min(need.least for need in needs.values())
    macro = None
    if isinstance(plan, MacrobatchPlan):
        macro = cut_macro(
            manifest, opening.macro_files(), served, resolved, settings, budget.slot_bytes,
            available - least,
        )  # fmt: skip
        least += macro.least
    if least > available:
        less = "a smaller batch_size or smaller fanouts"
        if resolved.macro is not None:
            few = resolved.macro.partitions == 1
            less = "a store of more partitions" if few else "fewer macro_partitions"
        _refuse(least, available, budget, settings, less)
    available -= macro.slots if macro else 0
    # a table of all nodes is the faster one, where it takes little of what there is
    stamp = (
        needs[True].workspace <= needs[False].workspace
        or needs[True].least + (settings.workers - 1) * needs[True].workspace <= available // 4
    )
    return macro, needs[stamp], stamp, available


def _fill_seeds(
    opening: Opening,
    request: Attach,
    ids: NDArray[np.int64] | None,
    attachment: Attachment,
) -> None:
    """The table of seeds, through slots that are free again afterwards."""
    store, broker, slot_bytes = opening.store, opening.broker, opening.budget.slot_bytes
    relation, resolved = seed_relation(store.manifest, request), attachment.plan.resolved
    num_seeds = resolved.num_seeds
    slots = 0 if request.split == "all" else -(-8 * num_seeds // slot_bytes)
    first = broker.take_run(slots)
    start = first * slot_bytes
    scratch = opening.arena.data[start : start + 8 * num_seeds * bool(slots)].view(np.int64)
    try:
        if relation is not None:
            attachment.ends = fill_edges(
                store, relation, resolved, request.split, ids, scratch, attachment.seeds
            )
        else:
            node_type = seed_type(store.manifest, request)
            fill_seeds(store, node_type, request.split, ids, scratch, attachment.seeds)
    finally:
        broker.give(list(range(first, first + slots)))
