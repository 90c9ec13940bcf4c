"""What trainers would gather, compute and exchange if batches were split by an owner map.

Some batches are sampled and counted, whole and as the shares of ordinary ranks; nobody trains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore.kernels.order import distinct
from blockstore.owners import OwnerMap, read_owners
from blockstore.store import Store
from blockstore.units import format_bytes
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import EngineSettings, served_rows
from loaderd.monitoring.report import table
from loaderd.plans.base import EVERY_RANK
from loaderd.sampling.hyperbatch.areas import Sampled
from loaderd.sessions.offline import OfflineSampler
from loaderd.sessions.owners import map_digest

_STEPS = 4  # to sample
_FLOAT_BYTES = 4
_HEADER = ("a step", "rows", "bytes", "largest", "edges", "largest", "exchanged")


class OwnersQuestion(NamedTuple):
    """An owner map, and the model that is to be trained by it."""

    name: str
    hidden: int  # width of the layers, float32


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Means over some steps; of all trainers together, and of the one with most."""

    rows: float  # gathered
    most_rows: float
    edges: float  # computed
    most_edges: float
    exchanged_bytes: float = 0.0  # between trainers, gradients of rows included


@dataclass(frozen=True, slots=True)
class SplitAdvice:
    """Both ways to share the same batches among as many trainers as a map has owners."""

    name: str
    owners: int
    steps: int  # that were sampled
    batch_size: int  # of all trainers
    row_bytes: int  # of a node
    hidden: int
    data_parallel: StepTraffic
    split: StepTraffic

    @property
    def text(self) -> str:
        lines = [
            f"owner map {self.name}: {self.steps} steps of {self.batch_size:,} seeds for "
            f"{self.owners} trainers, {self.row_bytes} bytes a row, hidden layers of {self.hidden}"
        ]
        rows = [_HEADER]
        for name, found in (("data parallel", self.data_parallel), ("split", self.split)):
            rows.append(
                (
                    name, f"{found.rows:,.0f}", format_bytes(round(found.rows * self.row_bytes)),
                    f"{found.most_rows:,.0f}", f"{found.edges:,.0f}", f"{found.most_edges:,.0f}",
                    format_bytes(round(found.exchanged_bytes)),
                )
            )  # fmt: skip
        lines += table(rows, frozenset(range(1, len(_HEADER))))
        return "\n".join([*lines, f"advice for split batches: {self._verdict()}"])

    def _verdict(self) -> str:
        saved = (self.data_parallel.rows - self.split.rows) * self.row_bytes
        fewer = self.data_parallel.edges / max(1.0, self.split.edges)
        more = format_bytes(round(self.split.exchanged_bytes))
        edges = f"{fewer:.2f} times fewer edges are computed"
        if saved <= 0:
            return f"no: no byte less is gathered, {more} a step are exchanged; {edges}"
        times = self.split.exchanged_bytes / saved
        return (
            f"{format_bytes(round(saved))} a step less are gathered, {more} are exchanged: it pays "
            f"where trainers exchange a byte {times:.2g} times as fast as they gather one; {edges}"
        )


def advise_split(
    store: Store, settings: EngineSettings, request: Attach, asked: OwnersQuestion
) -> SplitAdvice:
    """Sample some steps, and compare both ways to share them.

    Raises Refused, StoreError: there is no such map, or its batches cannot be split; BatchFailed.
    """
    map_digest(store, structs.replace(request, owners=asked.name))
    owners = read_owners(store, asked.name)
    settings = replace(settings, reserve_bytes=settings.reserve_bytes + owners.owner.nbytes)
    world, row_bytes = owners.owners, sum(r.array.row_bytes for r in served_rows(store.manifest))

    def of_ranks(sampled: Sampled) -> tuple[NDArray[Any], NDArray[Any], int]:
        found = sampled.structure
        return np.array([found.num_nodes]), np.array([found.num_edges]), 0

    def of_owners(sampled: Sampled) -> tuple[NDArray[Any], NDArray[Any], int]:
        return count_split(sampled, owners, request.frontier == "layer", row_bytes, asked.hidden)

    rank = EVERY_RANK if world > 1 else 0
    ranks = structs.replace(request, rank=rank, world_size=world)
    steps, apart = _sample(store, settings, ranks, of_ranks, world)
    return SplitAdvice(
        asked.name, world, steps, request.batch_size, row_bytes, asked.hidden, apart,
        _sample(store, settings, request, of_owners, 1)[1],
    )  # fmt: skip


def _sample(
    store: Store,
    settings: EngineSettings,
    request: Attach,
    count: Callable[[Sampled], tuple[NDArray[Any], NDArray[Any], int]],
    world: int,
) -> tuple[int, StepTraffic]:
    """How many steps were sampled, in `world` batches each, and what was counted."""
    with OfflineSampler(store, request, settings) as sampler:
        positions = range(min(sampler.plan.num_steps, _STEPS * world))
        counted = [count(sampled) for sampled in sampler.batches(0, positions)]
    steps = len(positions) // world
    rows, edges = (
        np.concatenate([batch[i] for batch in counted]).reshape(steps, -1) for i in (0, 1)
    )
    return steps, StepTraffic(
        rows.sum() / steps, rows.max(1).mean(), edges.sum() / steps, edges.max(1).mean(),
        sum(batch[2] for batch in counted) / steps,
    )  # fmt: skip


def count_split(
    sampled: Sampled, owners: OwnerMap, layers: bool, row_bytes: int, hidden: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Count, for a whole batch, each owner's nodes, the edges into them, and bytes exchanged.

    layers   whether the frontier is "layer"
    """
    structure, arrays = sampled.structure, sampled.arrays
    owner = owners.owner[np.concatenate(arrays.nodes)].astype(np.int64)
    counts = np.empty(structure.num_counts, np.uint32)
    arrays.counts.write(0, counts)
    src = np.empty(structure.num_edges, np.uint32)
    arrays.local.write(0, src)
    edges = np.zeros(owners.owners, np.int64)
    pairs, needed, used, edge, stop = np.empty(0, np.int64), list[int](), 0, 0, 0
    for hop, size in enumerate(structure.frontiers):
        stop += structure.nodes_per_hop[hop]
        to = np.repeat(owner[stop - size : stop], counts[used : used + size])
        of = src[edge : edge + to.size].astype(np.int64)
        used, edge = used + size, edge + to.size
        edges += np.bincount(to, minlength=owners.owners)
        crosses = owner[of] != to
        own = distinct(of[crosses] * owners.owners + to[crosses])
        # "new": rows that came for an earlier hop are there
        pairs = own if layers else distinct(np.concatenate([pairs, own]))
        needed.append(pairs.size)
    rows = np.bincount(owner, minlength=owners.owners)
    return rows, edges, exchanged_bytes(needed, row_bytes, hidden)


def exchanged_bytes(needed: Sequence[int], row_bytes: int, hidden: int) -> int:
    """Bytes sent between owners in a step of a model with as many layers as hops.

    needed   by hop: rows of other owners that the layer beginning there needs

    Before the first layer, that of the last hop, rows of features are exchanged, and no gradients
    return; before the others hidden rows, float32, and their gradients.
    """
    *others, first = needed
    return first * row_bytes + sum(others) * 2 * _FLOAT_BYTES * hidden
