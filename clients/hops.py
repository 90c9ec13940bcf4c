"""Hop-wise batches as torch tensors: rows of features and of what operators made of them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from clients.dataset import (
    RECONNECT_S,
    Connection,
    SteppedDataset,
    gather_threads,
    to_tensor,
)
from clients.hopbatch import LABEL, NODES, HopArrays, HopReader
from clients.patience import Patience
from clients.records import TensorRecord
from clients.session import Session
from loaderd.errors import Refused
from loaderd.protocol import Attach, Attached

PLAN_OF = {"cr": "chunks", "rr": "rows"}  # method -> plan


@dataclass(slots=True)
class HopBatch(TensorRecord):
    """Rows of some nodes: `x[i]` belongs to the i-th of `HopDataset.arrays`."""

    x: list[Tensor] | Tensor  # each (batch_size, ...); stacked: one (batch_size, arrays, ...)
    y: Tensor | None  # (batch_size, ...) labels; int64 where they are integers
    n_id: Tensor  # int64 (batch_size,) original ids
    input_id: Tensor  # int64 (batch_size,) rows in the stored order of the split
    epoch: int
    step: int

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.n_id.numel()


class HopDataset(SteppedDataset[HopBatch]):
    """Batches for models that are trained on propagated features; nothing is sampled.

    The store holds a row a node of the split, in one random order.  Method "cr" (SGD-CR) takes
    chunks of consecutive rows in a new order each epoch, method "rr" (SGD-RR) single rows.  Every
    row comes once an epoch, the last batch may be smaller.  Epochs, workers and state are those of
    `SteppedDataset`.
    """

    def __init__(
        self,
        endpoint: str,
        split: str = "train",
        operators: Sequence[str] | str = (),
        hops: int | None = None,
        batch_size: int = 8000,
        method: Literal["cr", "rr"] = "cr",
        chunk: int = 0,
        seed: int = 0,
        *,
        shuffle: bool = True,
        redeal: int = 0,
        views: bool = False,
        stacked: bool = False,
        labels: bool = True,
        rank: int = 0,
        world_size: int = 1,
        window: int = 0,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        """`operators`: those wanted, in this order; none: all that the split has.  `hops`: hops 0
        to this one; None: all.  `batch_size` counts the rows of all ranks together.  `window`
        (batches under way) changes no batch.

        chunk     rows of a chunk; 0: `batch_size`
        redeal    every so many epochs, sixteenths of chunks change places before chunks are cut
        views     `x` of a batch that is one range of rows (chunk a multiple of `batch_size`) or was
                  gathered from disk lies where the daemon read it: no copy.  Such tensors hold
                  until the next batch is asked for, and a write to one ends the process; `clone`
                  what is to stay.  Not in DataLoader workers, and not with `stacked`
        stacked   `x` is one tensor (batch_size, arrays, ...), not a list
        labels    False: `y` is None; the split need not have any
        reconnect_s   how long it waits for a daemon that went away
        """
        if method not in PLAN_OF:
            raise Refused(f"method {method!r}: expected {' or '.join(map(repr, PLAN_OF))}")
        if views and stacked:
            raise Refused("stacked=True: expected no views=True; leave one of them out")
        names = (operators,) if isinstance(operators, str) else tuple(operators)
        request = Attach(
            token=0,
            request=0,
            plan=PLAN_OF[method],
            split=split,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            window=window,
            operators=names,
            hops=-1 if hops is None else hops,
            chunk=chunk,
            redeal=redeal,
            labels=labels,
        )
        super().__init__(endpoint, request, None, reconnect_s)
        self.views, self.stacked = views, stacked
        self._arena: tuple[int, Tensor] | None = None  # of what session, all of it

    @property
    def arrays(self) -> list[tuple[str, int]]:
        """(operator, hop) of each tensor of `x`; connects.  Hop 0 comes once, before all others."""
        names = [s.name for s in self.attached().rows if s.name not in (LABEL, NODES)]
        pairs = [name.rsplit(":", 1) for name in names]
        return [(operator, int(hop)) for operator, hop in pairs]

    def close(self) -> None:
        """Detach from the daemon: views do not hold any more."""
        self._arena = None
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        """Parameters and position."""
        return super().__getstate__() | {"_arena": None}

    def _connect(self, patience: Patience | None = None) -> Connection:
        if self.views and get_worker_info() is not None:
            raise Refused(
                "views=True in a DataLoader worker: its batches are handed on after the next one "
                "is asked for; iterate the dataset itself, or leave views out"
            )
        return super()._connect(patience)

    def _make_reader(self, session: Session) -> HopReader:
        return HopReader(session, self.memory, gather_threads(), self.stacked, self.views)

    def _to_batch(self, arrays: HopArrays, attached: Attached) -> HopBatch:
        specs = [s for s in attached.rows if s.name not in (LABEL, NODES)]
        dtypes = [s.dtype for s in specs][: len(arrays.x)]
        make = self._view if arrays.in_place else to_tensor
        x = [make(array, dtype, False) for array, dtype in zip(arrays.x, dtypes, strict=True)]
        y = None
        if arrays.y is not None:
            kind = next(s.dtype for s in attached.rows if s.name == LABEL)
            y = to_tensor(arrays.y, kind, True)
        return HopBatch(
            x=x[0] if self.stacked else x,
            y=y,
            n_id=torch.from_numpy(arrays.n_id),
            input_id=torch.from_numpy(arrays.input_id),
            epoch=arrays.epoch,
            step=arrays.step,
        )

    def _view(self, array: NDArray[Any], dtype: str, is_label: bool) -> Tensor:
        """The tensor over a piece of the arena, which torch believes to be writable."""
        del is_label
        data = self._connect().session.attachment.data
        if self._arena is None or self._arena[0] != data.ctypes.data:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it is not writable
                self._arena = data.ctypes.data, torch.from_numpy(data)
        first = array.ctypes.data - data.ctypes.data
        kind = torch.bfloat16 if dtype == "bfloat16" else getattr(torch, np.dtype(dtype).name)
        raw = self._arena[1][first : first + array.nbytes]
        return raw.view(kind).reshape(array.shape)
