"""A large batch: some steps of an epoch, out of which each is taken on the device."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from clients.cut import BatchCutter
from clients.large.second import SecondStage
from clients.records import TensorRecord
from clients.torch import Batch


class LargeBatch(TensorRecord):
    """Steps of an epoch that come together."""

    __slots__ = ()

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """The batch of each step, in order, on the device of the large batch."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Distinct nodes, whose rows came along."""


@dataclass(slots=True, repr=False)
class OwnBatches(LargeBatch):
    """Batches with draws of their own; of each row the first that needs it brings it."""

    steps: list[Batch]  # with rows of the nodes that no earlier one of them has
    places: list[Tensor]  # int64, of each: places of its nodes among the distinct ones

    def batches(self) -> Iterator[Batch]:
        x, y = (_joined([getattr(s, name) for s in self.steps]) for name in ("x", "y"))
        names = self.steps[0].features
        features = {name: _joined([s.features[name] for s in self.steps]) for name in names}
        for step, places in zip(self.steps, self.places, strict=True):
            yield replace(
                step,
                x=None if x is None else x[places],
                y=None if y is None else y[places],
                features={name: rows[places] for name, rows in features.items()},
            )

    @property
    def num_rows(self) -> int:
        return 1 + reduce(max, (int(p.max()) for p in self.places if p.numel()), -1)


def _joined(parts: list[Any]) -> Any:
    """Rows one behind the other; None if there are none."""
    return None if parts[0] is None else torch.cat(parts)


@dataclass(slots=True, repr=False)
class SharedDraws(LargeBatch):
    """A batch that was sampled as a whole, and where the steps are whose seeds it has."""

    whole: Batch
    first: int  # step whose seeds these are: the first one; earlier ones are left out
    cuts: list[tuple[int, int]]  # of each step: [start, stop) among the seeds of `whole`
    second_fanout: tuple[int, ...]  # draws that a step keeps, by hop; (): all
    seed: int

    def batches(self) -> Iterator[Batch]:
        cutter, device = BatchCutter(self.whole), self.whole.n_id.device
        for step, (start, stop) in enumerate(self.cuts, self.first):
            keep = None
            if self.second_fanout:
                keep = SecondStage(self.second_fanout, self.seed, self.whole.epoch, step)
            yield replace(cutter.batch(torch.arange(start, stop, device=device), keep), step=step)

    @property
    def num_rows(self) -> int:
        return self.whole.num_nodes
