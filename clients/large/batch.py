"""A large batch: some steps of an epoch, out of which each is taken on the device.

A batch's own rows of features are most of what it needs: those of the nodes that its last hop
found, which only the first layer reads.  In a `FusedBatch` they are not gathered, nor are edges
into them renumbered: the layer aggregates the large batch's rows by the places of the sources.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from blockstore.kernels.random import make_key
from clients.cut import BatchCutter, first_places
from clients.hashing import SIGN, draw_hash, node_key
from clients.records import TensorRecord
from clients.torch import Batch
from loaderd.api.errors import Refused

_KEPT = 6 << 60  # of keys, in place of a relation: no other draw has it


class SecondStage:
    """Keeps of each column that a step expands the draws with the smallest hashes.

    The hash of a draw is `draw_hash` under the key (seed, epoch, step, hop) of its target's
    original id and its slot, its place among the column's draws: independent of the first draws.
    """

    def __init__(self, fanouts: Sequence[int], seed: int, epoch: int, step: int) -> None:
        """`fanouts`: draws that are kept by each hop, at most; -1 is all."""
        self._fanouts = fanouts
        self._keys = [make_key(seed, epoch, step, hop, _KEPT) for hop in range(len(fanouts))]

    def __call__(self, hop: int, targets: Tensor, columns: Tensor, slots: Tensor) -> Tensor | None:
        """int64, which draws of a hop are kept, ascending; None: all.

        targets   int64 (draws,) original id of each draw's target
        columns   int64 (draws,) place of its column among those that the hop expands, ascending
        slots     int64 (draws,)
        """
        fanout = self._fanouts[hop]
        if fanout < 0:
            return None
        hashes = draw_hash(node_key(self._keys[hop], targets), slots)
        by_hash = torch.argsort(hashes ^ SIGN, stable=True)
        order = by_hash[torch.argsort(columns[by_hash], stable=True)]
        # columns stay where they are, so the ranks of a column's draws are its slots, permuted
        return torch.sort(order[slots < fanout]).values


class LargeBatch(TensorRecord):
    """Steps of an epoch that come together."""

    __slots__ = ()

    def batches(self) -> Iterator[Batch]:
        """The batch of each step, in order, on the device of the large batch."""
        rows = self.rows()
        for step, places in self.cuts():
            yield replace(step, x=None if rows is None else rows[places])

    @abstractmethod
    def rows(self) -> Tensor | None:
        """`x` of the distinct nodes."""

    @abstractmethod
    def cuts(self) -> Iterator[tuple[Batch, Tensor]]:
        """Each step's batch without `x`, and the places of its nodes among the distinct ones."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Distinct nodes, whose rows came along."""


@dataclass(slots=True, repr=False)
class OwnBatches(LargeBatch):
    """Batches with draws of their own; of each row the first that needs it brings it."""

    steps: list[Batch]  # with rows of the nodes that no earlier one of them has
    places: list[Tensor]  # int64, of each: places of its nodes among the distinct ones

    def rows(self) -> Tensor | None:
        return _joined([step.x for step in self.steps])

    def cuts(self) -> Iterator[tuple[Batch, Tensor]]:
        y = _joined([step.y for step in self.steps])
        names = self.steps[0].features
        features = {name: torch.cat([s.features[name] for s in self.steps]) for name in names}
        for step, places in zip(self.steps, self.places, strict=True):
            found = {name: rows[places] for name, rows in features.items()}
            batch = replace(step, x=None, y=None if y is None else y[places], features=found)
            yield batch, places

    @property
    def num_rows(self) -> int:
        return 1 + reduce(max, (int(p.max()) for p in self.places if p.numel()), -1)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Rows one behind the other; None if there are none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


@dataclass(slots=True, repr=False)
class SharedDraws(LargeBatch):
    """A batch that was sampled as a whole, and where the steps are whose seeds it has."""

    whole: Batch
    first: int  # step whose seeds these are: the first one; earlier ones are left out
    cut_seeds: list[tuple[int, int]]  # of each step: [start, stop) among the seeds of `whole`
    second_fanout: tuple[int, ...]  # draws that a step keeps, by hop; (): all
    seed: int

    def rows(self) -> Tensor | None:
        return self.whole.x

    def cuts(self) -> Iterator[tuple[Batch, Tensor]]:
        cutter, device = BatchCutter(replace(self.whole, x=None)), self.whole.n_id.device
        for step, (start, stop) in enumerate(self.cut_seeds, self.first):
            keep = None
            if self.second_fanout:
                keep = SecondStage(self.second_fanout, self.seed, self.whole.epoch, step)
            seeds = torch.arange(start, stop, device=device)
            cut = cutter.structure(seeds, keep)
            yield replace(cutter.with_rows(cut, seeds), step=step), cut.nodes

    @property
    def num_rows(self) -> int:
        return self.whole.num_nodes


PLACE = "large_place"  # name among `features` of the steps of `PartitionDraws`


@dataclass(slots=True, repr=False)
class PartitionDraws(SharedDraws):
    """A batch around all seeds of some partitions, of which nodes of these alone are expanded.

    `features` of each step have `PLACE`, int64 (num_nodes,): 1 + a node's place in `whole`, of a
    seed that was given several times its first one.
    """

    store_id: Tensor  # int64 (num_nodes,) of the nodes of `whole`
    inner: Tensor  # bool (num_nodes,) whether these lie in the partitions
    # int64, for each layer l but the last: places of the boundary nodes, those that are not inner,
    # of which layer l + 1 reads what layer l gives; distinct, ascending
    pull: list[Tensor]

    def cuts(self) -> Iterator[tuple[Batch, Tensor]]:
        own = 1 + torch.arange(self.inner.numel(), device=self.inner.device)
        seeds = self.whole.batch_size
        own[:seeds] = 1 + first_places(self.whole.n_id[:seeds])
        for step, places in SharedDraws.cuts(self):
            yield replace(step, features=step.features | {PLACE: own[places]}), places

    @property
    def written(self) -> Tensor:
        """bool (num_nodes,): the inner nodes, those given several times once."""
        found, seeds = self.inner.clone(), self.whole.batch_size
        first = first_places(self.whole.n_id[:seeds])
        found[:seeds] &= first == torch.arange(seeds, device=first.device)
        return found

    @property
    def last(self) -> int:
        return self.first + len(self.cut_seeds) - 1


def boundary_reads(whole: Batch, inner: Tensor) -> list[Tensor]:
    """`PartitionDraws.pull`; layer l + 1 reads the sources of hop L - l - 1 of L hops."""
    counts = whole.num_sampled_edges
    ends = [0, *accumulate(counts)]
    found = []
    for hop in range(len(counts) - 2, -1, -1):
        read = torch.zeros_like(inner)
        read[whole.edge_index[0, ends[hop] : ends[hop + 1]]] = True
        found.append(torch.nonzero(read & ~inner)[:, 0])
    return found


@dataclass(slots=True, repr=False, kw_only=True)
class FusedBatch(Batch):
    """A batch whose `x` has the rows of the first layer's targets alone: of all hops but the last.

    Give the model `exchange=FirstLayerRows(batch)`.
    """

    rows: Tensor  # (distinct nodes, width) of the large batch
    places: Tensor  # int64 (num_nodes,) of the batch's nodes among these


class FirstLayerRows:
    """The `RowExchange` of a fused batch: its first layer has the large batch's rows as sources."""

    def __init__(self, batch: FusedBatch) -> None:
        self._batch, self._last = batch, len(batch.num_sampled_edges) - 1

    def __call__(self, h: Tensor, edge_index: Tensor, hop: int) -> tuple[Tensor, Tensor]:
        if hop != self._last:
            return h, edge_index
        batch = self._batch
        return batch.rows, torch.stack([batch.places[edge_index[0]], edge_index[1]])


def fused_batches(large: LargeBatch) -> Iterator[FusedBatch]:
    """The batch of each step, in order.  Raises Refused: there are no features."""
    rows = large.rows()
    if rows is None:
        raise Refused("fused batches: found a store without features, expected a vector a node")
    rows = rows.float()
    for batch, places in large.cuts():
        own = {f.name: getattr(batch, f.name) for f in fields(Batch)}
        own["x"] = rows[places[: sum(batch.num_sampled_nodes[:-1])]]
        yield FusedBatch(**own, rows=rows, places=places)
