"""Large batches: some steps of an epoch, each of which is cut out on the device.

Most of a batch's memory is feature rows of the nodes found by its last hop, which only the first
layer reads.  In a `FusedBatch` these are not gathered, and their edges are not renumbered: the
layer aggregates the large batch's rows by the places of the sources.
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

_KEPT = 6 << 60  # in keys, in place of a relation: no other draw uses it


class SecondStage:
    """Keeps the draws with the smallest hashes in each column that a step expands.

    The hash of a draw is `draw_hash` under the key (seed, epoch, step, hop), of its target's
    original id and its slot (its place in the column): independent of the first draws.
    """

    def __init__(self, fanouts: Sequence[int], seed: int, epoch: int, step: int) -> None:
        """`fanouts`: most draws to keep per column, by hop; -1: all."""
        self._fanouts = fanouts
        self._keys = [make_key(seed, epoch, step, hop, _KEPT) for hop in range(len(fanouts))]

    def __call__(self, hop: int, targets: Tensor, columns: Tensor, slots: Tensor) -> Tensor | None:
        """Draws of a hop to keep, int64, ascending; None: all.

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
        # sorting keeps columns in place, so order[i] is the draw of rank slots[i] in its column
        return torch.sort(order[slots < fanout]).values


class LargeBatch(TensorRecord):
    """Steps of an epoch that are transferred together."""

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
        """Number of distinct nodes, whose rows were transferred."""


@dataclass(slots=True, repr=False)
class OwnBatches(LargeBatch):
    """Batches with draws of their own; each row comes with the first batch that needs it."""

    steps: list[Batch]  # with rows of the nodes that no earlier batch has
    places: list[Tensor]  # int64, by batch: places of its nodes among the distinct ones

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
    """Concatenated rows; None if there are none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


@dataclass(slots=True, repr=False)
class SharedDraws(LargeBatch):
    """A batch that was sampled as a whole, with the ranges of its steps among its seeds."""

    whole: Batch
    first: int  # first step in `cut_seeds`; earlier ones of the large batch are left out
    cut_seeds: list[tuple[int, int]]  # by step: [start, stop) among the seeds of `whole`
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
    """A batch around all seeds of some partitions, in which only nodes of these are expanded.

    `features` of each step have `PLACE`, int64 (num_nodes,): 1 + a node's place in `whole`, for a
    seed that was given several times the first one.
    """

    store_id: Tensor  # int64 (num_nodes,) of the nodes of `whole`
    inner: Tensor  # bool (num_nodes,) whether these lie in the partitions
    # int64, for each layer l but the last: places of the boundary (not inner) nodes whose output of
    # layer l is read by layer l + 1; distinct, ascending
    pull: list[Tensor]

    def cuts(self) -> Iterator[tuple[Batch, Tensor]]:
        own = 1 + torch.arange(self.inner.numel(), device=self.inner.device)
        seeds = self.whole.batch_size
        own[:seeds] = 1 + first_places(self.whole.n_id[:seeds])
        for step, places in SharedDraws.cuts(self):
            yield replace(step, features=step.features | {PLACE: own[places]}), places

    @property
    def written(self) -> Tensor:
        """bool (num_nodes,): the inner nodes; of duplicate seeds only the first."""
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
    """A batch whose `x` has only rows of the first layer's targets: of all hops but the last.

    Give the model `exchange=FirstLayerRows(batch)`.
    """

    rows: Tensor  # (distinct nodes, width) of the large batch
    places: Tensor  # int64 (num_nodes,) of the batch's nodes among these


class FirstLayerRows:
    """The `RowExchange` of a fused batch: the first layer's sources are the large batch's rows."""

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
