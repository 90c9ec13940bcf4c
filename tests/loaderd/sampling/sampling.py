"""A small store whose blocks pass through few slots, and plans over it, without an engine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from blockstore.io.arena import Arena
from blockstore.io.reader import BlockReader
from blockstore.store import Store, open_store
from loaderd.api.protocol import Resolved, Temporal
from loaderd.memory.ledger import make_sizes
from loaderd.memory.residency import GraphPool, Residency
from loaderd.memory.workspace import (
    Carver,
    TableKind,
    Workspace,
    carve_workspace,
    clear_workspace,
)
from loaderd.plans.base import Part, Unit
from loaderd.plans.minibatch import GraphBounds, MinibatchPlan
from loaderd.plans.roots import Roots, node_roots, seed_places, timed_roots
from loaderd.sampling.structure import Structure
from loaderd.sampling.topology import Topology
from tests.differences import At, flat
from tests.graphs import Csc, make_csc
from tests.loaderd.samples import RESOLVED
from tests.reference import (
    make_epoch_key,
    permute,
    sample_batch,
    sample_trees,
    tree_number,
)
from tests.stores import write_store

NODES, TRAIN, BATCH, SEED, SLOT = 300, 24, 8, 11, 4096

CASES: dict[str, dict[str, Any]] = {
    "new": {"fanouts": (4, 3, 2)},
    "layer": {"fanouts": (4, 3), "frontier": "layer"},
    "all": {"fanouts": (-1, 2)},
    "none at a hop": {"fanouts": (3, 0)},
    "replace": {"fanouts": (5, 4), "replace": True},
    "weighted": {"fanouts": (4, 30), "weighted": True},
    "weighted, layer": {"fanouts": (7, 3), "weighted": True, "frontier": "layer"},
    "weighted, replace": {"fanouts": (6, 4), "weighted": True, "replace": True},
    "weighted, then all": {"fanouts": (4, -1), "weighted": True},
    "all, then weighted": {"fanouts": (-1, 4), "weighted": True},
    "in order": {"fanouts": (4, 3), "shuffle": False},
    "up to a time": {"fanouts": (4, 3), "temporal": Temporal(strategy="uniform")},
    "the last up to a time": {
        "fanouts": (4, 9),
        "temporal": Temporal(strategy="last", strict=True),
    },
}


class Made(NamedTuple):
    """A graph and its store."""

    graph: Csc
    weights: Any
    times: Any
    store: Store
    seeds: Any  # uint32 (TRAIN,)
    seed_times: Any  # int64 (TRAIN,)
    known: dict[Any, Any]  # batches of the reference, by resolved parameters and unit


def make(folder: Path) -> Made:
    """Columns from none to four blocks, weights and times with many equal ones."""
    rng = np.random.default_rng(4)
    degrees = rng.integers(0, 30, NODES)
    degrees[[5, 17]] = (700, 300)
    graph = make_csc(degrees, 2)
    weights = rng.exponential(1.0, graph.indices.size).astype(np.float32)
    weights[rng.random(weights.size) < 0.4] = 0
    times = rng.integers(0, 9, graph.indices.size)
    seeds = rng.permutation(NODES)[:TRAIN].astype(np.uint32)
    seeds[:2] = (5, 17)
    write_store(folder / "store", graph, seeds, weights=weights, times=times)
    store = open_store(folder / "store")
    return Made(graph, weights, times, store, seeds, rng.integers(0, 9, TRAIN), {})


class Parts(NamedTuple):
    """What samples: blocks pass through `slots` slots."""

    made: Made
    plan: MinibatchPlan
    topology: Topology
    residency: Residency

    def roots(self, unit: Unit) -> Roots:
        index = np.empty(unit.num_seeds, np.int64)
        seed_places(self.plan, unit, index)
        if self.plan.resolved.temporal is None:
            return node_roots(self.made.seeds, index)
        return timed_roots(self.plan, unit, self.made.seeds, self.made.seed_times, index)

    def workspace(self) -> Workspace:
        sizes = make_sizes(self.made.store.manifest, self.plan.resolved, TableKind.OF_ALL)
        counted = Carver(None)
        carve_workspace(counted, self.plan.shape(), sizes)
        work = carve_workspace(Carver(np.zeros(counted.used, np.uint8)), self.plan.shape(), sizes)
        clear_workspace(work)
        return work


@contextmanager
def parts_of(made: Made, case: str, slots: int, worker_blocks: int) -> Iterator[Parts]:
    """What samples with one worker, which pins so many blocks; afterwards no block is pinned."""
    options = CASES[case]
    resolved = structs.replace(
        RESOLVED, num_seeds=TRAIN, batch_size=BATCH, seed=SEED, edge_ids=True,
        **(options | {"fanouts": tuple((fanout,) for fanout in options["fanouts"])}),
    )  # fmt: skip
    (relation,) = made.store.manifest.relations
    file = made.store.graph(relation)
    plan = MinibatchPlan(resolved, Part(), GraphBounds(NODES, (relation.num_edges,)))
    pool = GraphPool([relation.num_blocks], slots, 1, worker_blocks)
    assert slots >= pool.minimum
    with Arena(slots, SLOT) as arena, BlockReader([file], arena.data, SLOT, 2) as reader:
        pool.add_slots(range(slots))
        residency = Residency(pool, reader, 0, threading.Condition())
        topology = Topology(made.store, residency, arena.data, SLOT)
        yield Parts(made, plan, topology, residency)
        assert not pool.pinned().any(), "a block is still pinned"
        assert not any(pool.on_account.values()), "a block still counts as pinned"


class Found(NamedTuple):
    """A batch as it was sampled."""

    structure: Structure
    n_id: Any
    counts: Any
    local: Any
    edge_ids: Any
    trees: Any


def expected_of(parts: Parts, unit: Unit) -> Any:
    """The batch of the reference, which is made once for all memories, threads and orders."""
    key = parts.plan.resolved, unit
    if key not in parts.made.known:
        parts.made.known[key] = _reference(parts.made, parts.plan.resolved, unit)
    return parts.made.known[key]


def _reference(made: Made, resolved: Resolved, unit: Unit) -> Any:
    options, own = tuple(fanouts[0] for fanouts in resolved.fanouts), range(unit.start, unit.stop)
    key = make_epoch_key(SEED, unit.epoch)
    places = [permute(i, TRAIN, key) if resolved.shuffle else i for i in own]
    seeds = made.seeds[places].tolist()
    graph = made.graph.indptr, made.graph.indices
    position = SEED, unit.epoch, unit.step
    if (temporal := resolved.temporal) is None:
        return sample_batch(
            *graph, seeds, options, *position, resolved.frontier, resolved.replace,
            made.weights if resolved.weighted else None,
        )  # fmt: skip
    limits = [int(made.seed_times[p]) - temporal.strict for p in places]
    return sample_trees(
        *graph, made.times, seeds, limits, [tree_number(i) for i in own], options, *position,
        temporal.strategy == "last", resolved.frontier,
    )  # fmt: skip


def same(parts: Parts, unit: Unit, found: Found) -> None:
    """A batch is the reference's."""
    resolved, expected = parts.plan.resolved, expected_of(parts, unit)
    at = At(unit.epoch, unit.step)
    if resolved.temporal is not None:
        at.same("trees", found.trees, expected.trees, expected.n_id)
    n_id, structure = expected.n_id, found.structure
    at.same("n_id", found.n_id, n_id, n_id)
    at.same("nodes_per_hop", list(structure.nodes_per_hop), expected.nodes_per_hop)
    targets = [n_id[place] for place in flat(expected.dst_local)]
    at.same("local", found.local, flat(expected.src_local), targets)
    at.same("edge_ids", found.edge_ids, flat(expected.edges), targets)
    ends = np.cumsum(structure.nodes_per_hop)
    used, dst = 0, []
    for hop, size in enumerate(structure.frontiers):
        first = 0 if resolved.frontier == "layer" else int(ends[hop]) - size
        dst += np.repeat(np.arange(first, first + size), found.counts[used : used + size]).tolist()
        used += size
    at.same("targets", dst, flat(expected.dst_local), targets)
    sizes = [sum(edges) for edges in structure.edges_per_hop]
    at.same("edges_per_hop", sizes, [len(hop) for hop in expected.edges])
