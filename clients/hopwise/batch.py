"""From descriptors of hop-wise batches to tensors: views of the arena, or one copy out of it."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockstore.kernels.rows import gather_hops
from clients.batch import ArenaReader, numpy_dtype, to_tensor
from clients.connection.buffers import Memory
from clients.connection.session import Session
from clients.records import TensorRecord
from loaderd.api.protocol import Blob, ChunkReady

LABEL, NODES = "y", "n_id"  # arrays that are not hops
_ALIGN = 64


@dataclass(slots=True, repr=False)
class HopBatch(TensorRecord):
    """Rows of some nodes: `x[i]` belongs to the i-th of `HopDataset.arrays`."""

    x: list[Tensor]  # each (batch_size, ...)
    y: Tensor | None  # (batch_size, ...) labels; int64 where they are integers
    n_id: Tensor  # int64 (batch_size,) original ids
    input_id: Tensor  # int64 (batch_size,) rows in the stored order of the split
    epoch: int
    step: int

    @property
    def batch_size(self) -> int:
        return self.n_id.numel()


def hop_batch(
    arrays: Mapping[str, Tensor], input_id: NDArray[np.int64], epoch: int, step: int
) -> HopBatch:
    """The batch of what `row_tensor` gave, by the names of the arrays, in their order."""
    x = [tensor for name, tensor in arrays.items() if name not in (LABEL, NODES)]
    y, n_id = arrays.get(LABEL), arrays[NODES]
    return HopBatch(x, y, n_id, torch.from_numpy(input_id), epoch, step)


def row_tensor(name: str, array: NDArray[Any], dtype: str) -> Tensor:
    """The tensor over rows of an array of the session."""
    return to_tensor(array, dtype, is_label=name in (LABEL, NODES))


class HopReader(ArenaReader):
    """Reads the hop-wise batches of one session."""

    def __init__(self, session: Session, pool: Memory, threads: int, views: bool) -> None:
        """`views`: leave hop arrays where they lie, if they lie in one piece."""
        super().__init__(session, pool, threads)
        specs = session.attached.rows
        self._hops = [i for i, s in enumerate(specs) if s.name not in (LABEL, NODES)]
        self._others = [i for i, s in enumerate(specs) if s.name in (LABEL, NODES)]
        self._whole: Tensor | None = None  # the arena, if batches may be views of it
        if views:
            with warnings.catch_warnings():  # torch says that it is not writable
                warnings.simplefilter("ignore", UserWarning)
                self._whole = torch.from_numpy(self._arena)
        self._lent = -1, -1  # run and step of a batch that is used where it lies
        self.form = ""  # of the last batch: `ChunkReady.form`

    def read(self, step: int) -> HopBatch:
        """The batch of `step`; the one before, if it was used where it lies, is given back."""
        self._give_back()
        ready = self._session.receive(ChunkReady, step)
        self.form = ready.form
        self._pool.received(self._arena, [])
        one_piece = ready.form == "rows" or (ready.form == "ranges" and len(ready.first) == 1)
        arrays: dict[int, Tensor]  # by their place in `attached.rows`
        if ready.pieces is not None:
            input_id, arrays = self._landed(ready.num_rows, ready.pieces)
        else:
            input_id = self._input_id(ready)
            if self._whole is not None and one_piece:
                arrays = {i: self._view(self._whole, i, ready) for i in self._hops}
                self._lent = self._session.run, step
            else:
                arrays = self._copied(ready, input_id, self._hops)
            for i in self._others:
                arrays |= self._copied(ready, input_id, [i])
        if self._lent != (self._session.run, step):
            self._session.release(step, 0)
        named = {s.name: arrays[i] for i, s in enumerate(self._session.attached.rows)}
        return hop_batch(named, input_id, ready.epoch, step)

    def _landed(self, num_rows: int, blob: Blob) -> tuple[NDArray[np.int64], dict[int, Tensor]]:
        """Rows and arrays of a batch that came in pieces, each copied once."""
        named = {array.name: array for array in blob.arrays}
        input_id = self._wide(blob, named["input_id"])
        arrays = {}
        for i, spec in enumerate(self._session.attached.rows):
            array = self._pool.empty((num_rows, *spec.row_shape), numpy_dtype(spec))
            out = array.reshape(-1).view(np.uint8)
            self._land(spec, blob, named[f"rows:{spec.name}"], None, out)
            arrays[i] = row_tensor(spec.name, array, spec.dtype)
        return input_id, arrays

    def _give_back(self) -> None:
        run, step = self._lent
        if run == self._session.run and run >= 0:
            self._session.release(step, 0)
        self._lent = -1, -1

    @property
    def _arena(self) -> NDArray[np.uint8]:
        return self._session.attachment.data

    def _input_id(self, ready: ChunkReady) -> NDArray[np.int64]:
        out: NDArray[np.int64] = self._pool.empty((ready.num_rows,), np.int64)
        if ready.index >= 0:
            out[:] = self._arena[ready.index : ready.index + out.nbytes].view(np.int64)
            return out
        at = 0
        for first, count in zip(ready.first, ready.counts, strict=True):
            out[at : at + count] = np.arange(first, first + count)
            at += count
        return out

    def _view(self, whole: Tensor, number: int, ready: ChunkReady) -> Tensor:
        """A piece of the arena, which torch believes to be writable."""
        spec, place = self._session.attached.rows[number], ready.places[number][0]
        raw = whole[place : place + ready.num_rows * spec.row_bytes]
        kind: torch.dtype = getattr(torch, spec.dtype)
        return raw.view(kind).view(ready.num_rows, *spec.row_shape)

    def _copied(
        self, ready: ChunkReady, input_id: NDArray[np.int64], chosen: Sequence[int]
    ) -> dict[int, Tensor]:
        """Rows of some arrays, in one buffer of their own."""
        specs = [self._session.attached.rows[i] for i in chosen]
        places = [ready.places[i] for i in chosen]
        rows = ready.num_rows
        widths = np.array([s.row_bytes for s in specs], np.int64)
        sizes = -(-rows * widths // _ALIGN) * _ALIGN
        firsts = np.cumsum(sizes) - sizes
        kind = np.dtype(numpy_dtype(specs[0]))
        out = self._pool.empty((-(-int(sizes.sum()) // kind.itemsize),), kind).view(np.uint8)

        if ready.form == "index":
            bases = np.array([p[0] for p in places], np.int64)

            def work(start: int, stop: int) -> None:
                gather_hops(self._arena, bases, widths, input_id, start, stop, firsts, out)
        else:
            counts = ready.counts or (rows,)

            def work(start: int, stop: int) -> None:
                at = 0
                for r, count in enumerate(counts):
                    low, high = max(start, at), min(stop, at + count)
                    for a in range(len(specs)) if low < high else ():
                        width, to = int(widths[a]), int(firsts[a])
                        place = places[a][r] + (low - at) * width
                        source = self._arena[place : place + (high - low) * width]
                        out[to + low * width : to + high * width] = source
                    at += count

        self._split(work, rows, out.size)
        found = {}
        for i, first, spec in zip(chosen, firsts.tolist(), specs, strict=True):
            array = out[first : first + rows * spec.row_bytes].view(numpy_dtype(spec))
            shaped = array.reshape(rows, *spec.row_shape)
            found[i] = row_tensor(spec.name, shaped, spec.dtype)
        return found
