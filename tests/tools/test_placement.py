"""Counts of placements against the batches that ranks are really sent, and a plain count."""

from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockstore.owners import write_owners  # noqa: E402
from blockstore.store import open_store  # noqa: E402
from clients.micrograph.dataset import HomeDataset  # noqa: E402
from clients.micrograph.training import visit_batches  # noqa: E402
from clients.torch import NeighborDataset  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.stores import write_store  # noqa: E402
from tools.placement import Counts, PlacementOptions, measure  # noqa: E402

NODES, RANKS = 300, 3


def most_wanted(batches, owner, share: float) -> list[set[int]]:
    """What the cache of each rank holds, after these batches."""
    times = Counter(node for _, batch in batches for node in batch.n_id.tolist())
    found = []
    for rank in range(RANKS):
        others = [node for node in range(NODES) if owner[node] != rank]
        others.sort(key=lambda node: (-times[node], node))
        found.append(set(others[: int(share * len(others))]))
    return found


def counted(batches, owner, held) -> Counts:
    """Of (rank, batch) of one iteration, node by node."""
    wanted = remote = edges = 0
    rows: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    for rank, batch in batches:
        own = set(batch.n_id.tolist())
        wanted += len(own)
        remote += sum(owner[node] != rank for node in own)
        edges += batch.edge_index.size(1)
        rows[rank] |= own
    fetched = sum(owner[node] != rank for rank, own in rows.items() for node in own)
    missed = sum(
        owner[node] != rank and node not in held[rank] for rank, own in rows.items() for node in own
    )
    return Counts(wanted, sum(map(len, rows.values())), remote, fetched, missed, edges)


def test_counts_are_those_of_the_batches(tmp_path):
    path = tmp_path / "store"
    write_store(path, make_csc(np.random.default_rng(1).integers(0, 9, NODES), 2), range(120))
    owner = np.random.default_rng(2).integers(0, RANKS, NODES)
    write_owners(open_store(path), "three", owner, RANKS, {})
    given = PlacementOptions(path, ("three",), batch_size=20, fanouts=(3, 2), steps=1, cache=0.3)
    options = {
        "num_neighbors": (3, 2), "batch_size": 60, "frontier": "layer", "world_size": RANKS
    }  # fmt: skip
    with daemon(path, "32M", 2) as endpoint:
        found = measure(given, "three", endpoint)
        parallel, home, merged, earlier = [], [], [], []
        for rank in range(RANKS):
            for data, batches in (
                (NeighborDataset(endpoint, rank=rank, **options), parallel),
                (NeighborDataset(endpoint, rank=rank, seed=1, **options), earlier),
                (HomeDataset(endpoint, owners="three", rank=rank, **options), home),
                (HomeDataset(endpoint, owners="three", time_steps=2, rank=rank, **options), merged),
            ):
                batches.append((rank, next(iter(data))))
                data.close()

    held = most_wanted(earlier, owner, 0.3)

    def visits(batches, kept: int) -> list:
        return [
            (rank, part)
            for rank, batch in batches
            for _, part in visit_batches(batch, rank, RANKS, kept)
        ]

    assert found == {
        "data parallel": counted(parallel, owner, held),
        "micrographs": counted(visits(home, RANKS), owner, held),
        "merged by server to 2": counted(visits(home, 2), owner, held),
        "home": counted(home, owner, held),
        "merged by model to 2": counted(visits(merged, RANKS), owner, held),
        "merged by model to 1": found["merged by model to 1"],
    }
    assert 0 < found["home"].missed < found["home"].fetched
    assert found["home"].distinct == found["micrographs"].distinct
    assert found["merged by model to 1"].edges == found["data parallel"].edges
