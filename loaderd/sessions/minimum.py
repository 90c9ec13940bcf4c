"""The least of the arena that a session can do with."""

from blockstore.format import ITEM_BYTES, Manifest
from blockstore.units import format_bytes
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, Resolved
from loaderd.api.requests import num_parts
from loaderd.memory.ledger import (
    Budget,
    EngineSettings,
    SessionNeed,
    chosen_rows,
    enough_mem,
    make_sizes,
    session_need,
)
from loaderd.plans.base import Plan
from loaderd.plans.chunks import METHOD_OF
from loaderd.sessions.owners import least_owner_bytes
from loaderd.sessions.resolve import asked_part, make_plan, resolve, seed_relation
from loaderd.sessions.seeds import lookup_items, table_items


def least_slots(
    manifest: Manifest,
    request: Attach,
    resolved: Resolved,
    slot_bytes: int,
) -> int:
    """Slots without which no session of this request is served: at least so many, maybe more.

    Macro-batches need their own memory beside it.
    """
    num_ids = table_items(manifest, seed_relation(manifest, request), request.split, resolved)
    plan = make_plan(manifest, resolved, asked_part(request), request.plan)
    timed = request.temporal is not None and request.temporal.times == "given"
    times, lookup = resolved.num_seeds * timed, lookup_items(request.split, resolved)
    owners = least_owner_bytes(request)
    needs = session_needs(manifest, plan, num_ids, times, lookup, slot_bytes, owners)
    return min(need.least for need in needs.values())


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

    It is asked before the numbers are sent.  The memory that it names is enough for the session,
    too.
    """
    if request.plan in METHOD_OF:
        raise Refused(f"plan {request.plan!r}: its seeds are a split; leave the ids out")
    if slots <= available:
        return
    resolved = resolve(manifest, request, "ids", request.ids // num_parts(request))
    least = slots + least_slots(manifest, request, resolved, budget.slot_bytes)
    enough = enough_mem(settings, budget.unused_bytes, (least - available) * budget.slot_bytes)
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
) -> dict[bool, SessionNeed]:
    """What a session needs with a table of all nodes, and without.

    num_ids, num_times   of the table of seeds
    num_lookup           original ids that are looked up for it, as `lookup_items` says
    owners               bytes of a node's owner
    """
    resolved = plan.resolved
    served = chosen_rows(manifest, resolved)
    seeds = num_ids + 8 * num_times // ITEM_BYTES[manifest.id_dtype]
    return {
        stamp: session_need(
            plan.shape(),
            make_sizes(manifest, resolved, stamp, owners),
            served,
            seeds,
            8 * num_lookup,
            slot_bytes,
        )
        for stamp in (True, False)
    }
