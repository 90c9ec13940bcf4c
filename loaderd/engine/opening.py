"""Opening a session: parameters resolved, memory taken out of the arena, seeds looked up."""

import hashlib
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Manifest
from blockstore.io.buffers import byte_view
from blockstore.units import format_bytes
from loaderd.engine.advice import fits_in_memory
from loaderd.engine.attachment import Attachment, Opening
from loaderd.engine.least import check_numbers, least_slots, session_needs, sizes_of
from loaderd.engine.macrosupply import open_job
from loaderd.engine.resolve import make_plan, resolve, seed_relation, seed_type
from loaderd.engine.seeds import (
    check_mask,
    count_edges,
    count_seeds,
    fill_edges,
    fill_seeds,
    lookup_items,
    table_items,
)
from loaderd.engine.sessioncut import cut_session, cut_workspaces
from loaderd.errors import Refused, Shortage
from loaderd.macro.cut import MacroCut, cut_macro
from loaderd.macro.job import Job
from loaderd.macro.session import Macro
from loaderd.macro.shelf import Announce, Reader
from loaderd.memory.ledger import (
    Budget,
    EngineSettings,
    SessionNeed,
    enough_mem,
    rows_of,
)
from loaderd.memory.slots import LOOK_WAIT_S
from loaderd.plans.base import Part, Plan
from loaderd.plans.chunks import METHOD_OF
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.macrobatch import MacrobatchPlan
from loaderd.protocol import Attach, Resolved
from loaderd.requests import num_parts, split_frame

_SMALLER = "a smaller batch_size or smaller fanouts"
_RANKS_HERE = 8  # of a job, that room is left for: of the others it is thought elsewhere


def _seeds_name(split: str, frame: NDArray[np.int64] | None) -> str:
    named = split if split == "all" else f"split:{split}"
    if frame is None:
        return named
    digest = hashlib.blake2b(byte_view(frame), digest_size=16).hexdigest()
    return f"{named}+times:{digest}" if split else f"ids:{digest}"


def _refuse(
    least: int, available: int, budget: Budget, settings: EngineSettings, less: str
) -> NoReturn:
    enough = enough_mem(settings, budget.unused_bytes, (least - available) * budget.slot_bytes)
    raise Refused(
        f"the session needs {format_bytes(least * budget.slot_bytes)} of the arena, "
        f"{format_bytes(max(0, available) * budget.slot_bytes)} can be had: serve with at least "
        f"--mem {enough}, or ask for {less}"
    )


def refuse_shortage(opening: Opening, least: int) -> NoReturn:
    """Raises Refused: slots are there for a session, but batches in flight hold some of them.

    Free slots that are not adjacent are of no use: the memory that is named has as many more.
    """
    free = opening.broker.free()
    available = free if free < least else 0
    _refuse(least, available, opening.budget, opening.settings, _SMALLER)


def resolve_request(
    manifest: Manifest, request: Attach, frame: NDArray[np.int64] | None
) -> Resolved:
    """What fixes a session's batches; `frame`: ids and times of seeds.  Raises Refused."""
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
    manifest: Manifest, request: Attach, settings: EngineSettings, budget: Budget, most: int
) -> None:
    """Raises Refused: the request cannot be served with `most` slots, or not at all.

    It reads nothing and takes nothing, and is asked before the numbers of a request are sent.
    Macro-batches and propagated features need more than what is counted here.
    """
    if request.plan in (MacrobatchPlan.name, *METHOD_OF):
        return
    slots = -(-8 * request.ids // budget.slot_bytes)
    check_numbers(manifest, request, settings, budget, slots, most)
    if request.split:
        resolved = resolve_request(manifest, request, None)
        _check_times(request.ids, resolved.num_seeds)
    else:
        resolved = resolve(manifest, request, "ids", request.ids // num_parts(request))
        if request.edges is None:
            check_mask(seed_type(manifest, request), request.mask_size)
    least = slots + least_slots(manifest, request, resolved, budget.slot_bytes)
    if least > most:
        _refuse(least, most, budget, settings, _SMALLER)


@dataclass(slots=True)
class Place:
    """A session of macro-batches, and the job that it belongs to, once there is one."""

    reader: Reader
    job: Job | None


def open_attachment(
    opening: Opening, request: Attach, frame: NDArray[np.int64] | None, announce: Announce
) -> Attachment:
    """Resolve a request and take its memory.  Raises Refused with the least that would do.

    frame   ids and times of seeds, as `check_attach` gives them
    """
    manifest: Manifest = opening.store.manifest
    resolved = resolve_request(manifest, request, frame)
    plan = make_plan(manifest, resolved, Part(request.rank, request.world_size), request.plan)
    if not isinstance(plan, MacrobatchPlan):
        return _open_with(opening, request, frame, plan, None)
    reader, kind = Reader(announce), (resolved, request.world_size)
    alone = resolved.macro is not None and resolved.macro.waiting
    job = None if alone else opening.macro_jobs.join(kind, reader)
    place = Place(reader, job)
    try:
        attachment = _open_with(opening, request, frame, plan, place)
    except BaseException:
        if place.job is not None:
            place.job.close(reader)
            place.job.leave()
        raise
    if job is None and place.job is not None and not alone:
        opening.macro_jobs.add(kind, place.job)
    return attachment


def _open_with(
    opening: Opening,
    request: Attach,
    frame: NDArray[np.int64] | None,
    plan: Plan,
    place: Place | None,
) -> Attachment:
    store, settings, budget, broker = opening[:4]
    manifest: Manifest = store.manifest
    resolved, part = plan.resolved, plan.part
    ids, times = split_frame(request, frame)
    num_ids = table_items(manifest, seed_relation(manifest, request), request.split, resolved)
    lookup = lookup_items(request.split, resolved)
    macro, need, stamp, available = _measure_need(
        opening, plan, (num_ids, times.size, lookup), place
    )
    row_blocks = 0 if place else budget.row_blocks  # its rows are in the macro-batch
    plain = cut_session(need, available, row_blocks, settings, request.window)
    spare = broker.graph_slots() - budget.graph_least
    plain_blocks = max(0, broker.pooled() - spare - plain.slots(need))
    fits = fits_in_memory(budget._replace(graph_slots=broker.graph_wish), plain_blocks)
    if request.plan == "auto" and not fits:
        plan = make_plan(manifest, resolved, part, HyperbatchPlan.name)
    hyper = plan.name == HyperbatchPlan.name
    cut = cut_workspaces(need, available, settings, request.window) if hyper else plain
    served = rows_of(manifest, resolved.edge_features)
    attachment = Attachment(plan, served, budget.slot_bytes, need, cut)
    attachment.fits, attachment.plain_blocks = fits, plain_blocks
    try:
        sizes = sizes_of(manifest, resolved, stamp)
        attachment.take_seeds(broker, opening.arena, sizes, num_ids, times.size)
        attachment.times[:] = times
        _fill_seeds(opening, request, ids, attachment, lookup)
        attachment.take_workspaces(broker, opening.arena, cut.workers, plan.shape(), small=False)
        if isinstance(plan, MacrobatchPlan) and place is not None:
            if macro is not None:
                node_type = seed_type(manifest, request)
                place.job = open_job(opening, attachment, node_type, macro, place.reader)
            assert place.job is not None
            attachment.plan = plan = plan.placed(place.job.groups.counts)
        if not hyper:
            attachment.take_quota(broker, cut.quota)
    except Shortage:
        attachment.close(broker)
        refuse_shortage(opening, need.least + (macro.least if macro else 0))
    except BaseException:
        attachment.close(broker)
        raise
    if isinstance(plan, MacrobatchPlan) and place is not None and place.job is not None:
        attachment.macro = Macro(plan, place.job, place.reader)
    return attachment


def _measure_need(
    opening: Opening, plan: Plan, numbers: tuple[int, int, int], place: Place | None
) -> tuple[MacroCut | None, SessionNeed, bool, int]:
    """What macro-batches take, what the rest does, whether with stamps, and slots left for it.

    numbers   ids and times of the table of seeds, and original ids that are looked up for it
    place     of macro-batches; those of a job that is there take nothing more

    Raises Refused with the least that would do.
    """
    store, settings, budget, broker = opening[:4]
    manifest, resolved = store.manifest, plan.resolved
    served, available = rows_of(manifest, resolved.edge_features), broker.available()
    needs = session_needs(manifest, plan, *numbers, budget.slot_bytes)
    least = min(need.least for need in needs.values())
    macro, ranks = None, 1  # of this one's kind, that are yet to find room
    if place is not None:
        ranks = min(plan.part.world_size, _RANKS_HERE)
        if place.job is None:
            macro = cut_macro(
                manifest, opening.macro_files(), served, resolved, settings, budget.slot_bytes,
                available - ranks * least,
            )  # fmt: skip
        else:
            share = available if available < broker.pooled() else broker.num_slots  # of all ranks
            if least > available or place.job.num_slots + least * place.job.num_sessions > share:
                place.job.narrow(LOOK_WAIT_S)
                available = broker.available()
            ranks = max(1, ranks + 1 - place.job.num_sessions)
    one = least
    least += macro.least if macro else 0
    if least > available:
        less = _SMALLER
        if resolved.macro is not None:
            few = resolved.macro.partitions == 1
            less = "a store of more partitions" if few else "fewer macro_partitions"
        _refuse(least, available, budget, settings, less)
    available = max(one, (available - (macro.slots if macro else 0)) // ranks)
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
    lookup: int,
) -> None:
    """The table of seeds, through slots that are free again afterwards.

    lookup   original ids that pass through these slots
    """
    store, broker, slots = opening.store, opening.broker, attachment.need.lookup
    relation, resolved = seed_relation(store.manifest, request), attachment.plan.resolved
    first = broker.take_run(slots, low=True)
    start = first * opening.budget.slot_bytes
    scratch = opening.arena.data[start : start + 8 * lookup].view(np.int64)
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
