"""Opening a session: parameters resolved, memory taken out of the arena, seeds looked up."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Manifest
from blockstore.io.arena import Arena
from blockstore.io.buffers import byte_view
from blockstore.store import Store
from blockstore.units import format_bytes
from loaderd.errors import Refused
from loaderd.ledger import (
    MAX_TRANSIT,
    Budget,
    EngineSettings,
    ServedRows,
    SessionNeed,
    make_sizes,
    served_rows,
    session_need,
)
from loaderd.plans.base import Part, Plan
from loaderd.plans.resolve import make_plan, resolve, seed_type
from loaderd.protocol import Attach, Attached, LedgerEntry, RowArraySpec, SessionStatus
from loaderd.seeds import count_seeds, fill_seeds
from loaderd.session import RowSizes, SessionState
from loaderd.slots import SlotBroker
from loaderd.workspace import Carver, Sizes, Workspace, carve_workspace, clear_workspace


class Attachment:
    """A session's plan, memory and state."""

    def __init__(
        self, plan: Plan, served: list[ServedRows], slot_bytes: int, cut: "SessionCut"
    ) -> None:
        """Memory is filled in by `open_attachment`."""
        self.plan, self.window, self.served = plan, cut.window, served
        self.workspaces: list[Workspace] = []  # those no batch uses
        self.num_workspaces = cut.workers
        self.seeds: NDArray[Any] = np.empty(0, np.uint32)
        self.closed = False
        self._slot_bytes = slot_bytes
        self._taken: list[int] = []  # slots of workspaces, seeds and transit
        self._transit: dict[int, NDArray[np.int64]] = {}
        self._sizes = RowSizes(tuple(slot_bytes // r.array.row_bytes for r in served), slot_bytes)
        self.state = SessionState(cut.window, plan.num_steps, [], self._sizes)
        self._cut = cut

    def take(self, broker: SlotBroker, arena: Arena, need: SessionNeed, sizes: Sizes) -> None:
        """Take the session's memory.  Raises Refused; what was taken is given back by `close`."""
        cut, slot = self._cut, self._slot_bytes
        shape = self.plan.shape()
        for _ in range(cut.workers):
            first = broker.take_run(need.workspace)
            self._taken += range(first, first + need.workspace)
            transit = broker.take(cut.transit)
            self._taken += transit
            memory = arena.data[first * slot : (first + need.workspace) * slot]
            work = carve_workspace(Carver(memory), shape, sizes)
            clear_workspace(work)
            self._transit[id(work)] = np.sort(np.asarray(transit, np.int64))
            self.workspaces.append(work)
        first = broker.take_run(need.seeds)
        self._taken += range(first, first + need.seeds)
        dtype = np.dtype(sizes.id_dtype)
        num_bytes = self.plan.resolved.num_seeds * dtype.itemsize
        self.seeds = arena.data[first * slot : first * slot + num_bytes].view(dtype)
        quota = broker.take(cut.quota)
        self.state = SessionState(cut.window, self.plan.num_steps, quota, self._sizes)

    def transit(self, work: Workspace) -> NDArray[np.int64]:
        """Slots through which blocks pass while this workspace's rows are copied."""
        return self._transit[id(work)]

    def close(self, broker: SlotBroker) -> None:
        """Give everything back; no worker has a batch of the session."""
        broker.give(self._taken + self.state.take_all())
        self._taken = []

    def describe(self, request: int, session: int) -> Attached:
        """The reply to the client."""
        return Attached(
            request=request,
            session=session,
            resolved=self.plan.resolved,
            plan=self.plan.name,
            num_steps=self.plan.num_steps,
            window=self.window,
            rows=tuple(
                RowArraySpec(r.name, r.array.dtype, r.array.row_shape, r.array.row_bytes)
                for r in self.served
            ),
            num_relations=len(self.plan.resolved.fanouts[0]),
        )

    def status(self, session: int) -> SessionStatus:
        """As `loaderd status` shows it."""
        state = self.state
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
        )

    def ledger_entry(self, session: int) -> LedgerEntry:
        """What the session has taken out of the row pool."""
        cut = self._cut
        slots = len(self._taken) + cut.quota
        return LedgerEntry(
            f"session {session}, out of the pools",
            slots * self._slot_bytes,
            f"{cut.workers} workspaces, {cut.workers} x {cut.transit} transit slots, seeds, "
            f"{cut.quota} slots for {cut.window} batches",
        )


class SessionCut:
    """How much of each a session gets: physical, so it may follow the budget."""

    def __init__(self, workers: int, transit: int, quota: int, window: int) -> None:
        """Workspaces; transit slots of each; slots for batches; batches in flight."""
        self.workers, self.transit, self.quota, self.window = workers, transit, quota, window


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


def _seeds_name(split: str, ids: NDArray[np.int64] | None) -> str:
    if ids is None:
        return "all" if split == "all" else f"split:{split}"
    return f"ids:{hashlib.blake2b(byte_view(ids), digest_size=16).hexdigest()}"


def _refuse(least: int, available: int, budget: Budget, settings: EngineSettings) -> None:
    short = (least - available) * budget.slot_bytes
    enough = format_bytes(-(-(settings.mem_bytes + short) // (1 << 20)) << 20)
    raise Refused(
        f"the session needs {format_bytes(least * budget.slot_bytes)} of the arena, "
        f"{format_bytes(max(0, available) * budget.slot_bytes)} can be had: serve with at least "
        f"--mem {enough}, or ask for a smaller batch_size or smaller fanouts"
    )


def open_attachment(
    store: Store,
    settings: EngineSettings,
    budget: Budget,
    broker: SlotBroker,
    arena: Arena,
    request: Attach,
    ids: NDArray[np.int64] | None,
) -> Attachment:
    """Resolve a request and take its memory.  Raises Refused with the least that would do."""
    manifest: Manifest = store.manifest
    served = served_rows(manifest)
    node_type = seed_type(manifest, request)
    ids = None if request.split else ids
    num_seeds = count_seeds(node_type, request.split, ids)
    resolved = resolve(manifest, request, _seeds_name(request.split, ids), num_seeds)
    plan = make_plan(manifest, resolved, Part(request.rank, request.world_size))
    available = broker.available()
    needs = {
        stamp: session_need(
            plan.shape(), make_sizes(manifest, resolved.edge_ids, stamp), served, num_seeds,
            budget.slot_bytes,
        )
        for stamp in (True, False)
    }  # fmt: skip
    least = min(need.least for need in needs.values())
    if least > available:
        _refuse(least, available, budget, settings)
    # a table of all nodes is the faster one, where it takes little of what there is
    workers = settings.workers
    stamp = (
        needs[True].workspace <= needs[False].workspace
        or needs[True].least + (workers - 1) * needs[True].workspace <= available // 4
    )
    need = needs[stamp]
    cut = cut_session(need, available, budget.row_blocks, settings, request.window)
    attachment = Attachment(plan, served, budget.slot_bytes, cut)
    try:
        attachment.take(broker, arena, need, make_sizes(manifest, resolved.edge_ids, stamp))
        scratch_slots = 0 if request.split == "all" else -(-8 * num_seeds // budget.slot_bytes)
        first = broker.take_run(scratch_slots)
        start = first * budget.slot_bytes
        scratch = arena.data[start : start + 8 * num_seeds * bool(scratch_slots)].view(np.int64)
        try:
            fill_seeds(store, node_type, request.split, ids, scratch, attachment.seeds)
        finally:
            broker.give(list(range(first, first + scratch_slots)))
    except BaseException:
        attachment.close(broker)
        raise
    return attachment
