"""The least of the arena that a session can do with."""

import numpy as np
from numpy.typing import NDArray

from blockstore.format import ITEM_BYTES, Manifest
from loaderd.engine.resolve import make_plan, seed_relation
from loaderd.engine.seeds import lookup_items, table_items
from loaderd.memory.ledger import SessionNeed, make_sizes, rows_of, session_need
from loaderd.memory.workspace import Sizes
from loaderd.plans.base import Part, Plan
from loaderd.plans.chunks import METHOD_OF
from loaderd.protocol import Attach, Resolved
from loaderd.requests import split_frame


def least_slots(
    manifest: Manifest,
    request: Attach,
    resolved: Resolved,
    frame: NDArray[np.int64] | None,
    slot_bytes: int,
) -> int:
    """Slots without which no session of this request is served: at least so many, maybe more.

    frame   ids and times of seeds, as `check_attach` gives them

    Macro-batches need their own memory beside it.  0 for hop-wise batches: what they need depends
    on what is held already.
    """
    if request.plan in METHOD_OF:
        return 0
    _, times = split_frame(request, frame)
    num_ids = table_items(manifest, seed_relation(manifest, request), request.split, resolved)
    plan = make_plan(manifest, resolved, Part(request.rank, request.world_size), request.plan)
    lookup = lookup_items(request.split, frame, resolved)
    needs = session_needs(manifest, plan, num_ids, times.size, lookup, slot_bytes)
    return min(need.least for need in needs.values())


def session_needs(
    manifest: Manifest, plan: Plan, num_ids: int, num_times: int, num_lookup: int, slot_bytes: int
) -> dict[bool, SessionNeed]:
    """What a session needs with a table of all nodes, and without.

    num_ids, num_times   of the table of seeds
    num_lookup           original ids that are looked up for it, as `lookup_items` says
    """
    resolved = plan.resolved
    served = rows_of(manifest, resolved.edge_features)
    seeds = num_ids + 8 * num_times // ITEM_BYTES[manifest.id_dtype]
    return {
        stamp: session_need(
            plan.shape(), sizes_of(manifest, resolved, stamp), served, seeds, 8 * num_lookup,
            slot_bytes,
        )  # fmt: skip
        for stamp in (True, False)
    }


def sizes_of(manifest: Manifest, resolved: Resolved, stamp: bool) -> Sizes:
    """What the store, and what is asked of it, add to a plan's shape."""
    return make_sizes(
        manifest, resolved.edge_ids, stamp, resolved.temporal is not None, resolved.edge_features
    )
