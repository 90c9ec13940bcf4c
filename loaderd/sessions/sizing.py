"""Size the memory of a session of sampled batches, and take it: seeds, workspaces, slots."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, Manifest
from blockstore.io.buffers import byte_view
from blockstore.units import format_bytes
from loaderd.api.errors import Refused, Shortage
from loaderd.api.protocol import Attach, Resolved
from loaderd.api.requests import num_parts, split_frame
from loaderd.memory.ledger import (
    MAX_TRANSIT,
    Budget,
    EngineSettings,
    ServedRows,
    SessionNeed,
    chosen_rows,
    enough_mem,
    make_sizes,
    session_need,
)
from loaderd.memory.slots import WAIT_S
from loaderd.memory.workspace import (
    Carver,
    Sizes,
    TableKind,
    carve_workspace,
    clear_workspace,
    workspace_bytes,
)
from loaderd.plans.base import Plan, Shape
from loaderd.plans.chunks import METHOD_OF
from loaderd.plans.minibatch import MinibatchPlan
from loaderd.sampling.hyperbatch.single import Workspaces
from loaderd.sessions.base import Allocation, SessionRequest, StoreResources
from loaderd.sessions.build import BatchSpec
from loaderd.sessions.owners import min_owner_bytes, owner_bytes, read_map
from loaderd.sessions.resolve import asked_part, make_plan, resolve, seed_relation, seed_type
from loaderd.sessions.seeds import (
    check_mask,
    count_edges,
    count_seeds,
    fill_edges,
    fill_seeds,
    lookup_items,
    table_items,
)

SMALLER = "a smaller batch_size or smaller fanouts"
FEWER_EDGES = "smaller subgraphs, or subgraph={'max_edges': fewer}, if they have fewer"
_ROOMY = 512  # slots, with more of which sessions of hyperbatches have a cache
_TABLES = 6  # tables that sessions share may take this part of the available slots: a sixth


class ResolvedRequest(NamedTuple):
    """A request for sampled batches, resolved."""

    request: Attach
    plan: MinibatchPlan
    ids: NDArray[np.int64] | None  # original ids of the seeds, if the request has them
    times: NDArray[np.int64]  # of the seeds; (0,) if the request has none
    served: list[ServedRows]
    num_ids: int  # in the table of seeds
    lookup: int  # original ids that are looked up for it
    owner_bytes: int  # of a node's owner, if batches name owners

    def window(self, settings: EngineSettings) -> int:
        """Batches in flight; two of each rank and two more, if all ranks of a job are served."""
        together = self.plan.together
        ranks = 0 if together == 1 else 2 * together + 2
        return self.request.window * together or max(2 * settings.workers, ranks)


class SessionSizing(NamedTuple):
    """How much a session gets of each: physical, so it may depend on the budget."""

    workers: int  # workspaces
    transit: int  # slots of each workspace, for pages that pass through
    quota: int  # slots for batches
    window: int  # batches in flight

    def slots(self, need: SessionNeed) -> int:
        return self.workers * (need.workspace + self.transit) + need.seeds + self.quota


class Room(NamedTuple):
    """What a session needs, and the slots that it may take."""

    need: SessionNeed
    sizes: Sizes
    available: int  # to the session
    pooled: int  # of the row pool, which all sessions share


class BatchMemory(NamedTuple):
    """Memory that batches of a session are built in."""

    allocation: Allocation  # with everything else that the session has taken
    workspaces: Workspaces
    quota: list[int]  # slots for batches
    window: int
    transit: int


# -- from a request to its plan -------------------------------------------------------------------


def _seeds_name(split: str, frame: NDArray[np.int64] | None) -> str:
    named = split if split == "all" else f"split:{split}"
    if frame is None:
        return named
    digest = hashlib.blake2b(byte_view(frame), digest_size=16).hexdigest()
    return f"{named}+times:{digest}" if split else f"ids:{digest}"


def resolve_sampled(
    manifest: Manifest, request: Attach, frame: NDArray[np.int64] | None
) -> Resolved:
    """Resolve what fixes a session's batches; `frame`: ids and times of seeds.  Raises Refused."""
    ids, times = split_frame(request, frame)
    name, relation = _seeds_name(request.split, frame), seed_relation(manifest, request)
    if relation is not None:
        name, num_seeds = f"edges:{name}", count_edges(manifest, relation, request.split, ids)
    else:
        found = seed_type(manifest, request)
        num_seeds = count_seeds(found, request.split, ids, request.mask_size)
    _check_times(times.size, num_seeds)
    return resolve(manifest, request, name, num_seeds)


def _check_times(num_times: int, num_seeds: int) -> None:
    if num_times not in (0, num_seeds):
        raise Refused(f"times: {num_times} for {num_seeds} seeds, expected one for each")


def check_possible(
    manifest: Manifest, request: Attach, settings: EngineSettings, budget: Budget, maximum: int
) -> None:
    """Raises Refused: the request cannot be served with `maximum` slots, or not at all.

    Reads nothing and takes nothing; called before the numbers of a request are sent.
    """
    slots = -(-8 * request.ids // budget.slot_bytes)
    check_numbers(manifest, request, settings, budget, slots, maximum)
    if request.split:
        resolved = resolve_sampled(manifest, request, None)
        _check_times(request.ids, resolved.num_seeds)
    else:
        resolved = resolve(manifest, request, "ids", request.ids // num_parts(request))
        if request.edges is None:
            check_mask(seed_type(manifest, request), request.mask_size)
    minimum = slots + min_slots(manifest, request, resolved, budget.slot_bytes)
    if minimum > maximum:
        _refuse(settings, budget, minimum, maximum, FEWER_EDGES if resolved.subgraph else SMALLER)


def ask(resources: StoreResources, opening: SessionRequest, plan: str) -> ResolvedRequest:
    """Resolve a request for a plan.  Raises Refused."""
    manifest = resources.store.manifest
    request, frame = opening.request, opening.frame
    resolved = resolve_sampled(manifest, request, frame)
    return ResolvedRequest(
        request,
        make_plan(manifest, resolved, asked_part(request), plan),
        *split_frame(request, frame),
        chosen_rows(manifest, resolved),
        table_items(manifest, seed_relation(manifest, request), request.split, resolved),
        lookup_items(request.split, resolved),
        owner_bytes(resources.store, request),
    )


# -- the least that a session can do with --------------------------------------------------------


def min_slots(manifest: Manifest, request: Attach, resolved: Resolved, slot_bytes: int) -> int:
    """A lower bound of the slots that a session of this request needs.

    Macro-batches need their own memory beside it.
    """
    num_ids = table_items(manifest, seed_relation(manifest, request), request.split, resolved)
    plan = make_plan(manifest, resolved, asked_part(request), request.plan)
    timed = request.temporal is not None and request.temporal.times == "given"
    times, lookup = resolved.num_seeds * timed, lookup_items(request.split, resolved)
    owners = min_owner_bytes(request)
    needs = session_needs(manifest, plan, num_ids, times, lookup, slot_bytes, owners)
    return minimum_of(needs)


def check_numbers(
    manifest: Manifest,
    request: Attach,
    settings: EngineSettings,
    budget: Budget,
    slots: int,
    available: int,
) -> None:
    """Raises Refused: there is no room for the numbers of a request, or it cannot be served.

    slots       that the numbers take
    available   slots that can be had

    Called before the numbers are sent.  The memory that it names is enough for the session, too.
    """
    if request.plan in METHOD_OF:
        raise Refused(f"plan {request.plan!r}: its seeds are a split; leave the ids out")
    if slots <= available:
        return
    resolved = resolve(manifest, request, "ids", request.ids // num_parts(request))
    minimum = slots + min_slots(manifest, request, resolved, budget.slot_bytes)
    enough = enough_mem(settings, budget.unused_bytes, (minimum - available) * budget.slot_bytes)
    raise Refused(
        f"the {request.ids} numbers of the seeds need {format_bytes(slots * budget.slot_bytes)} of "
        f"the arena, {format_bytes(max(0, available) * budget.slot_bytes)} can be had: serve with "
        f"at least --mem {enough}, or name a split of the store"
    )


def session_needs(
    manifest: Manifest,
    plan: Plan,
    num_ids: int,
    num_times: int,
    num_lookup: int,
    slot_bytes: int,
    owners: int,
) -> dict[TableKind, SessionNeed]:
    """What a session needs, by the table in which it numbers nodes; without those that are shared.

    num_ids, num_times   of the table of seeds
    num_lookup           original ids that are looked up for it, as `lookup_items` says
    owners               bytes of a node's owner
    """
    resolved = plan.resolved
    served = chosen_rows(manifest, resolved)
    seeds = num_ids + 8 * num_times // ITEM_BYTES[manifest.id_dtype]
    return {
        table: session_need(
            plan.shape(),
            make_sizes(manifest, resolved, table, owners),
            served,
            seeds,
            8 * num_lookup,
            slot_bytes,
        )
        for table in TableKind
    }


# -- how much -------------------------------------------------------------------------------------


def needs_of(resources: StoreResources, asked: ResolvedRequest) -> dict[TableKind, SessionNeed]:
    """What a session needs, as of `session_needs`."""
    return session_needs(
        resources.store.manifest, asked.plan, asked.num_ids, asked.times.size, asked.lookup,
        resources.budget.slot_bytes, asked.owner_bytes,
    )  # fmt: skip


def minimum_of(needs: dict[TableKind, SessionNeed]) -> int:
    """The minimum of slots to serve the session."""
    return min(needs[TableKind.HASHED].minimum, needs[TableKind.OF_ALL].minimum)


def choose_need(
    resources: StoreResources,
    asked: ResolvedRequest,
    needs: dict[TableKind, SessionNeed],
    available: int,
) -> tuple[SessionNeed, Sizes, int]:
    """Choose the table; the number is of the available slots, without those of shared tables."""
    shared = resources.shared_tables().slots_to_come()
    table = choose_table(needs, shared, available)
    manifest, resolved = resources.store.manifest, asked.plan.resolved
    sizes = make_sizes(manifest, resolved, table, asked.owner_bytes)
    return needs[table], sizes, available - shared * (table is TableKind.SHARED)


def choose_table(needs: dict[TableKind, SessionNeed], shared: int, available: int) -> TableKind:
    """Choose the table in which a session numbers nodes.

    One with an entry for every node, if it is smaller than a hash table, or if the `shared` slots
    of those that sessions share are few: with hash tables sampling takes a third longer.
    """
    if needs[TableKind.OF_ALL].workspace <= needs[TableKind.HASHED].workspace:
        return TableKind.OF_ALL
    left = available - needs[TableKind.SHARED].minimum
    return TableKind.SHARED if shared <= min(left, available // _TABLES) else TableKind.HASHED


def fit(
    resources: StoreResources,
    asked: ResolvedRequest,
    beside: int = 0,
    less: str = SMALLER,
    staying: int = 0,
) -> Room:
    """What a session takes, and the room for it.

    beside    slots that it takes for more than batches and seeds
    less      what would need fewer, if there are too few
    staying   slots of rows that stay for it: it is as if it had taken them for itself

    Raises Refused: too few.
    """
    needs, available = needs_of(resources, asked), resources.broker.available()
    check_room(resources, minimum_of(needs) + beside, available, less)
    need, sizes, left = choose_need(resources, asked, needs, available - beside + staying)
    taken = available + staying - left
    return Room(need, sizes, left - staying, resources.broker.pooled_rows() - taken)


def size_minibatches(
    need: SessionNeed,
    available: int,
    pooled: int,
    row_blocks: int,
    settings: EngineSettings,
    window: int,
) -> SessionSizing:
    """Share `available` slots between a session and the row pool.  `need.minimum` fits.

    pooled       slots of the row pool: sessions share it, so it may have room for all rows where
                 one session's share has not
    row_blocks   of all rows
    """
    batch = need.structure + need.addresses
    room = available - need.seeds - need.min_quota
    workers = max(1, min(settings.workers, room // 2 // (need.workspace + 2)))
    whole = SessionSizing(workers, 2, need.min_quota + (window - 1) * batch, window)
    if whole.slots(need) <= min(available, pooled - row_blocks):
        return whole  # all rows stay: nothing passes through
    room -= workers * (need.workspace + 2)
    transit = 2 + max(0, min(MAX_TRANSIT - 2, room // 4 // workers))
    room -= workers * (transit - 2)
    wanted = window * (batch + need.area) - need.min_quota
    quota = need.min_quota + max(0, min(wanted, room // 2))
    return SessionSizing(workers, transit, quota, window)


def size_workspaces(need: SessionNeed, available: int, window: int) -> SessionSizing:
    """`size_minibatches` for hyperbatches, which begin with one workspace.  `need.minimum` fits."""
    # blocks pass through if there is no room for a cache
    spare = available - need.workspace - need.seeds - need.min_quota
    transit = 2 if available > _ROOMY else max(2, min(MAX_TRANSIT // 2, spare // 8))
    return SessionSizing(1, transit, need.min_quota, window)


# -- too little -----------------------------------------------------------------------------------


def check_room(
    resources: StoreResources, minimum: int, available: int, less: str = SMALLER
) -> None:
    """Raises Refused: fewer slots are available; `less` says what would need fewer."""
    if minimum > available:
        _refuse(resources.settings, resources.budget, minimum, available, less)


@contextmanager
def explained_shortage(resources: StoreResources, minimum: int) -> Iterator[None]:
    """Explain a shortage of slots that batches in flight hold.  Raises Refused.

    Free slots that are not adjacent are of no use: the memory that is named has as many more.
    """
    try:
        yield
    except Shortage:
        free = resources.broker.free()
        min_free = free if free < minimum else 0
        _refuse(resources.settings, resources.budget, minimum, min_free, SMALLER)


def _refuse(
    settings: EngineSettings, budget: Budget, minimum: int, available: int, less: str
) -> NoReturn:
    more_bytes = (minimum - available) * budget.slot_bytes
    enough = enough_mem(settings, budget.unused_bytes, more_bytes)
    raise Refused(
        f"the session needs {format_bytes(minimum * budget.slot_bytes)} of the arena, "
        f"{format_bytes(max(0, available) * budget.slot_bytes)} can be had: serve with at least "
        f"--mem {enough}, or ask for {less}"
    )


# -- taking it ------------------------------------------------------------------------------------


def take_seeds(
    resources: StoreResources,
    allocation: Allocation,
    asked: ResolvedRequest,
    need: SessionNeed,
    sizes: Sizes,
) -> BatchSpec:
    """Take room for the table of seeds and the owner map; fill it.  Raises Refused, StoreError.

    Called before anything else is taken, it takes the top of the free slots: what lies below can be
    given back as one run.  Original ids pass through slots that are free again afterwards.
    """
    store, broker, plan, size = resources.store, resources.broker, asked.plan, asked.times.size
    memory, dtype = allocation.run(need.seeds), np.dtype(sizes.id_dtype)
    times = memory[: 8 * size].view(np.int64)
    times[:] = asked.times
    stop = 8 * size + asked.num_ids * dtype.itemsize
    seeds = memory[8 * size : stop].view(dtype)
    owners = read_map(store, asked.request, memory[stop:])
    request, ends = asked.request, None
    relation = seed_relation(store.manifest, request)
    first = broker.take_run(need.lookup, low=True)
    start = first * resources.budget.slot_bytes
    scratch = resources.arena.data[start : start + 8 * asked.lookup].view(np.int64)
    try:
        if relation is not None:
            ends = fill_edges(
                store, relation, plan.resolved, request.split, asked.ids, scratch, seeds
            )
        else:
            node_type = seed_type(store.manifest, request)
            fill_seeds(store, node_type, request.split, asked.ids, scratch, seeds)
    finally:
        broker.give(list(range(first, first + need.lookup)))
    return BatchSpec(plan, seeds, times, ends, sizes.record, owners)


class WorkspaceNeed(NamedTuple):
    """Workspaces of one size."""

    shape: Shape  # of a batch
    number: int
    transit: int  # slots of each, for pages that pass through
    small: bool = False  # sized for usual batches, not for the largest possible


def add_workspaces(
    resources: StoreResources,
    allocation: Allocation,
    workspaces: Workspaces,
    sizes: Sizes,
    need: WorkspaceNeed,
    wait_s: float = WAIT_S,
) -> None:
    """Take workspaces.  Raises Refused."""
    slots, tables = -(-workspace_bytes(need.shape, sizes) // resources.budget.slot_bytes), None
    if sizes.table is TableKind.SHARED and need.number > 0:
        tables = allocation.join_tables(resources.shared_tables(), need.number)
    for _ in range(need.number):
        work = carve_workspace(Carver(allocation.run(slots, wait_s)), need.shape, sizes, tables)
        clear_workspace(work)
        work.small = need.small
        work.transit_slots = np.sort(np.asarray(allocation.slots(need.transit), np.int64))
        workspaces.add(work)


def take_memory(
    resources: StoreResources, allocation: Allocation, plan: MinibatchPlan, sizes: Sizes,
    sizing: SessionSizing,
) -> BatchMemory:  # fmt: skip
    """Take workspaces and slots for batches.  Raises Refused."""
    workspaces = Workspaces()
    need = WorkspaceNeed(plan.shape(), sizing.workers, sizing.transit)
    add_workspaces(resources, allocation, workspaces, sizes, need)
    return BatchMemory(
        allocation, workspaces, allocation.slots(sizing.quota), sizing.window, sizing.transit
    )
