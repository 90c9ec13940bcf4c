"""Owner maps of sessions: a batch that is built once names the owner of each of its nodes.

Trainers of one job cut their own pieces out of the batch (`clients.split`).  A map is stored after
the seeds of the session that builds for all of them, so it lives as long as that session, and its
memory is known before it is read.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreError
from blockstore.owners import OwnerMap, owner_dtype, read_facts, read_owners
from blockstore.store import Store
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach
from loaderd.plans.chunks import METHOD_OF
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.minibatch import MinibatchPlan


def min_owner_bytes(request: Attach) -> int:
    """Minimum bytes of a node's owner: only the map itself says how many owners there are."""
    return np.dtype(np.uint8).itemsize if request.owners else 0


def owner_bytes(store: Store, request: Attach) -> int:
    """Bytes of a node's owner.  Raises Refused: there is no such map."""
    if not request.owners:
        return 0
    try:
        return np.dtype(owner_dtype(read_facts(store, request.owners).owners)).itemsize
    except StoreError as error:
        raise Refused(f"owners {request.owners!r}: {error}") from error


def map_digest(store: Store, request: Attach) -> str:
    """Digest of the map that a request names; "": it names none.

    Raises Refused: its batches cannot be split, or not by this map.
    """
    if not (name := request.owners):
        if request.home is not None:
            raise Refused(
                "home placement: found no owner map, expected the name of one with as many owners "
                "as ranks; give owners"
            )
        return ""
    manifest, where = store.manifest, f"owners {request.owners!r}"
    several = max(len(manifest.types), len(manifest.relations)) > 1
    for found, is_so in (
        (f"plan {request.plan!r}", request.plan in METHOD_OF),
        ("a store of several node types or relations", several),
        ("seeds that are edges", request.edges is not None),
        ("times of the seeds", request.temporal is not None),
        ("edge_features", request.edge_features),
        ("edge_weights", request.edge_weights),
        ("edge_times", request.edge_times),
        ("return_e_id", request.return_e_id),
    ):
        if is_so:
            raise Refused(
                f"{where}: found {found}, expected batches around seed nodes of a store of one "
                "node type and relation, without rows, ids or times of edges; leave owners out"
            )
    try:
        facts = read_facts(store, name)
    except StoreError as error:
        raise Refused(f"{where}: {error}") from error
    if facts.fingerprint != manifest.fingerprint:
        raise Refused(
            f"{where}: the map is of a store of fingerprint {facts.fingerprint}, expected "
            f"{manifest.fingerprint}; make the map again"
        )
    if request.home is not None:
        _check_home(request, facts.owners)
    return facts.digest


def _check_home(request: Attach, owners: int) -> None:
    """Raises Refused: seeds cannot be placed at home, or not by a map of so many owners."""
    where = f"home placement by owners {request.owners!r}"
    if request.plan not in ("auto", MinibatchPlan.name, HyperbatchPlan.name):
        raise Refused(f"{where}: found plan {request.plan!r}, expected 'minibatch' or 'hyperbatch'")
    if request.frontier != "layer":
        raise Refused(
            f"{where}: found frontier {request.frontier!r}, expected 'layer': otherwise what is "
            "sampled around a seed depends on the other seeds of its batch"
        )
    if owners != request.world_size:
        raise Refused(
            f"{where}: the map has {owners} owners, expected {request.world_size}, one for each "
            "rank; make another map by `blockstore owners`"
        )


def read_map(store: Store, request: Attach, memory: NDArray[np.uint8]) -> OwnerMap | None:
    """The map of a session, in memory that holds it.  Raises StoreError."""
    if not request.owners:
        return None
    found = read_owners(store, request.owners)
    if found.owner.nbytes > memory.size:
        raise StoreError(
            f"owners {request.owners!r}: found {found.owners:,} owners, expected at most 256: "
            "another map has taken the place of the one that was asked for; begin a new session"
        )
    owner = memory[: found.owner.nbytes].view(found.owner.dtype)
    owner[:] = found.owner
    return replace(found, owner=owner)
