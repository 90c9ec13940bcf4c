"""What macro-batches keep: shares of neighbors and of nodes, expected over random partitions.

Exact, not sampled: of k partitions B are drawn, one of them that of the target; a node that m other
groups hold (its partition, and halos) is there but where none of the m is drawn.
"""

from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import Kept
from blockstore.store import Store
from preprocess.files.ahead import read_ahead
from preprocess.kernels.influence import Loaded, Sums, add_kept, end_column
from preprocess.pipeline.progress import Progress
from preprocess.stages.stored_columns import stored_columns

SHARES = (8, 16)  # one of so many partitions is loaded
REACH_NODE_BYTES = 10


def chances(num_groups: int, drawn: int, most: int) -> NDArray[np.float64]:
    """That of m given groups at least one is among `drawn` of `num_groups`: float64 (most + 1,)."""
    none = np.ones(most + 1)
    for m in range(most):
        left = max(0, num_groups - drawn - m)
        none[m + 1] = none[m] * left / (num_groups - m) if num_groups > m else 0.0
    return 1 - none


def measure_kept(
    store: Store,
    marks: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    halo: NDArray[np.uint64],
    halo_starts: NDArray[np.int64],
    hubs: NDArray[np.int64],
    scan_bytes: int,
    progress: Progress,
) -> tuple[Kept, ...]:
    """One for each of SHARES; reads the graph once.

    marks        uint8 (num_nodes,)            training nodes; none: all nodes count
    offsets      int64 (types, parts + 1)      store ids
    halo         uint64 (slots,)               nodes of all halos, part by part
    halo_starts  int64 (parts + 1,)
    hubs         int64                         store ids

    Raises CorruptBlock.
    """
    if not marks.any():
        marks = np.ones_like(marks)
    num_parts = offsets.shape[1] - 1
    is_hub = np.zeros(marks.size, np.uint8)
    is_hub[hubs] = 1
    times = np.bincount(halo.astype(np.int64), minlength=marks.size).astype(np.uint32)
    times += np.uint32(1)
    most = int(times.max(initial=1))
    drawn = [max(1, num_parts // share) for share in SHARES]
    others = np.stack([chances(num_parts - 1, count - 1, most) for count in drawn])
    state, totals = np.array([-1, -1, 0, 0, 0], np.int64), np.zeros((len(SHARES), 3, 2))
    sums = Sums(state, np.zeros((len(SHARES), 3)), totals)
    num_edges = sum(r.num_edges for r in store.manifest.relations)
    types = {t.name: i for i, t in enumerate(store.manifest.types)}
    with progress.stage("neighbors kept", num_edges, "edges") as stage:
        for relation in store.manifest.relations:
            state[1], stamps = -1, np.zeros(marks.size, np.uint32)
            loaded = Loaded(marks, is_hub, times, stamps, offsets, halo, halo_starts)
            with closing(read_ahead(stored_columns(store, relation, scan_bytes))) as ahead:
                for head, degrees, sources in ahead:
                    add_kept(head[0], degrees, sources, loaded, types[relation.dst], others, sums)
                    stage.advance(sources.size)
            end_column(sums)
    shares = [_loaded(times, is_hub, num_parts, count, most) for count in drawn]
    held = (marks.size + halo.size) / num_parts
    return tuple(
        Kept(
            num_partitions=count,
            nodes=tuple((totals[i, :, 0] / max(1, state[3])).tolist()),
            edges=tuple((totals[i, :, 1] / max(1, state[4])).tolist()),
            loaded=shares[i],
            rows=(count * held + hubs.size) / max(1, marks.size),
        )
        for i, count in enumerate(drawn)
    )


def _loaded(
    times: NDArray[np.uint32], is_hub: NDArray[np.uint8], num_parts: int, drawn: int, most: int
) -> tuple[float, float, float]:
    """Share of nodes that are loaded: by partitions, with hubs, with halos too."""
    chance, size = chances(num_parts, drawn, most), max(1, times.size)
    counts: NDArray[Any] = np.bincount(times[is_hub == 0], minlength=most + 1)
    num_hubs = int(is_hub.sum(dtype=np.int64))
    hubs = (num_hubs + (times.size - num_hubs) * float(chance[1])) / size
    halos = (num_hubs + float(counts @ chance)) / size
    return float(chance[1]), hubs, halos
