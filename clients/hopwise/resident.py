"""All rows of a split in the memory of a device: batches are drawn there, in the plan's order."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from loaderd.plans.chunks import HopPlan


class Rows(Protocol):
    """Rows of a split, in the order in which they are stored."""

    x: list[Tensor]
    y: Tensor | None
    n_id: Tensor


class Drawn(NamedTuple):
    """A batch on the device."""

    x: list[Tensor]
    y: Tensor | None
    n_id: Tensor
    input_id: Tensor
    epoch: int
    step: int


class ResidentRows:
    """The arrays of a split, whole, on one device."""

    def __init__(self, batches: Iterable[Rows], num_rows: int, device: torch.device | str) -> None:
        """Take all rows, batch by batch, in the stored order."""
        self.device = torch.device(device)
        self.x: list[Tensor] = []
        self.y: Tensor | None = None
        self.n_id = torch.empty(num_rows, dtype=torch.int64, device=self.device)
        at = 0
        for batch in batches:
            if at == 0:
                self.x = [self._empty(num_rows, tensor) for tensor in batch.x]
                self.y = None if batch.y is None else self._empty(num_rows, batch.y)
            stop = at + batch.n_id.numel()
            for own, tensor in zip(self.x, batch.x, strict=True):
                own[at:stop] = tensor
            if self.y is not None and batch.y is not None:
                self.y[at:stop] = batch.y
            self.n_id[at:stop] = batch.n_id
            at = stop
        assert at == num_rows

    def _empty(self, num_rows: int, like: Tensor) -> Tensor:
        return torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, device=self.device)

    def draw(self, plan: HopPlan, epoch: int, step: int) -> Drawn:
        """The plan's batch of a step: one gather an array."""
        unit = plan.unit(epoch, step)
        rows = np.empty(unit.num_seeds, np.int64)
        plan.rows(unit, rows)
        input_id = torch.from_numpy(rows).to(self.device)
        x = [tensor.index_select(0, input_id) for tensor in self.x]
        y = None if self.y is None else self.y.index_select(0, input_id)
        n_id = self.n_id.index_select(0, input_id)
        return Drawn(x, y, n_id, input_id, epoch, step)


class ResidentReader:
    """Draws the batches of one session; nothing is asked of the daemon."""

    def __init__(self, rows: ResidentRows, plan: HopPlan) -> None:
        self._rows, self._plan, self.epoch = rows, plan, 0

    def read(self, step: int) -> Drawn:
        """The batch of a step of `epoch`."""
        return self._rows.draw(self._plan, self.epoch, step)

    def close(self) -> None:
        """There is nothing to end."""
