"""A large batch: some steps of an epoch, out of which each is taken on the device."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from clients.cut import BatchCutter, first_places
from clients.large.second import SecondStage
from clients.records import TensorRecord
from clients.torch import Batch


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
