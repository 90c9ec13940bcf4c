"""`loaderd presample`: how often nodes are expanded in the epochs to come, for owner maps.

Batches are sampled as sessions of the same request would; their structure is counted and dropped.
After each epoch the counts go to a file beside the target, from which a stopped run resumes.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore.errors import CorruptBlock
from blockstore.expansions import Expansions, read_expansions, write_expansions
from blockstore.io.files import check_free, take_name
from blockstore.kernels.order import count_nodes
from blockstore.store import Store
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach
from loaderd.api.requests import check_attach
from loaderd.memory.ledger import EngineSettings
from loaderd.sampling.hyperbatch.areas import Sampled
from loaderd.sessions.offline import OfflineSampler
from loaderd.sessions.sizing import resolve_sampled

_MAX = (1 << 32) - 1  # of a count


def presample(
    store: Store,
    request: Attach,
    epochs: int,
    settings: EngineSettings,
    out: Path,
    tell: Callable[[str], None],
) -> Expansions:
    """Count the first `epochs` epochs of a request into the file `out`.

    settings   its memory holds the counts, too
    tell       is called with a line after each epoch

    Raises Refused, StoreExists, BudgetTooSmall, BatchFailed, StoreError.
    """
    check_free(out)
    found = _expected(store, request)
    counts = np.zeros((len(found.fanouts) + 1, found.num_nodes), np.uint32)
    partial = out.with_name(f".{out.name}.partial")
    found = _resume(partial, found, counts, epochs)
    settings = replace(settings, reserve_bytes=counts.nbytes)
    with OfflineSampler(store, request, settings) as sampler:
        steps = range(sampler.plan.num_steps)
        for epoch in range(found.epochs, epochs):
            count_batches(sampler.batches(epoch, steps), counts)
            found = structs.replace(found, epochs=epoch + 1, steps=found.steps + len(steps))
            write_expansions(partial, found, counts)
            tell(f"epoch {epoch + 1} of {epochs}: {len(steps):,} batches")
    take_name(partial, out)
    return found


def count_batches(batches: Iterable[Sampled], counts: NDArray[np.uint32]) -> None:
    """Add what each batch expands, and which nodes it has.

    counts   uint32 (hops + 1, nodes)   in and out, as in `Expansions`
    """
    for sampled in batches:
        structure = sampled.structure
        nodes = np.concatenate(sampled.arrays.nodes)
        stop = 0
        for hop, size in enumerate(structure.frontiers):
            stop += structure.nodes_per_hop[hop]
            count_nodes(nodes[stop - size : stop], _MAX, counts[hop])
        count_nodes(nodes, _MAX, counts[-1])


def _expected(store: Store, request: Attach) -> Expansions:
    """The description of the counts, with no epoch yet.  Raises Refused."""
    manifest = store.manifest
    refused = {
        "weighted sampling": request.weighted,
        "sampling up to a time": request.temporal,
        "LABOR sampling": request.labor,
        "draws with replacement": request.replace,
        "seed edges": request.edges,
        "several node types or relations": len(manifest.types) + len(manifest.relations) > 2,
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise Refused(
                f"presample: found {what}, expected uniform neighbor sampling from nodes of one "
                "type over one relation; make a map without presampling"
            )
    check_attach(request)
    resolved = resolve_sampled(manifest, request, None)
    return Expansions(
        fingerprint=manifest.fingerprint, num_nodes=manifest.num_nodes,
        fanouts=tuple(hop[0] for hop in resolved.fanouts), batch_size=resolved.batch_size,
        frontier=resolved.frontier, seeds=resolved.seeds, seed=resolved.seed, epochs=0, steps=0,
    )  # fmt: skip


def _resume(path: Path, found: Expansions, counts: NDArray[np.uint32], epochs: int) -> Expansions:
    """Read what an earlier run of the same request has counted into `counts`, zeros so far."""
    try:
        earlier, counted = read_expansions(path)
    except (FileNotFoundError, CorruptBlock):
        return found
    if earlier.epochs > epochs or structs.replace(earlier, epochs=0, steps=0, digest="") != found:
        return found
    counts[:] = counted
    return earlier
