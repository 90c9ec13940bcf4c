"""Readers of hop-wise batches.

Rows come from a daemon's descriptors, as views of the arena or one copy out of it; from a store's
files, read by this process; or from arrays that lie on a device.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockstore.format import RowArray
from blockstore.io.gds import HostReader
from blockstore.kernels.rows import gather_hops
from blockstore.store import BlockedFile, open_store
from clients.batch import ArenaReader, numpy_dtype
from clients.connection.buffers import Memory
from clients.connection.session import Session
from clients.records import TensorRecord, to_tensor
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attached, Blob, ChunkReady
from loaderd.plans.chunks import HopPlan

LABEL, NODES = "y", "n_id"  # arrays that are not hops
_ALIGN = 64


@dataclass(slots=True, repr=False)
class HopBatch(TensorRecord):
    """Rows of some nodes: `x[i]` are those of the i-th of `HopDataset.arrays`."""

    x: list[Tensor]  # each (batch_size, ...)
    y: Tensor | None  # (batch_size, ...) labels; int64 if they are integers
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
    """Make a batch of tensors from `row_tensor`, given by array name, in order."""
    x = [tensor for name, tensor in arrays.items() if name not in (LABEL, NODES)]
    y, n_id = arrays.get(LABEL), arrays[NODES]
    return HopBatch(x, y, n_id, torch.from_numpy(input_id), epoch, step)


def row_tensor(name: str, array: NDArray[Any], dtype: str) -> Tensor:
    """A tensor over rows of an array of the session."""
    return to_tensor(array, dtype, is_label=name in (LABEL, NODES))


def _strides(row_shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of rows one after the other, in items."""
    return *(math.prod(row_shape[i:]) for i in range(len(row_shape))), 1


class HopReader(ArenaReader):
    """Reads the hop-wise batches of one session."""

    def __init__(self, session: Session, pool: Memory, threads: int, views: bool) -> None:
        """`views`: do not copy hop arrays that lie in one piece."""
        super().__init__(session, pool, threads)
        specs = session.attached.rows
        self._hops = [i for i, s in enumerate(specs) if s.name not in (LABEL, NODES)]
        self._others = [i for i, s in enumerate(specs) if s.name in (LABEL, NODES)]
        # the arena in the dtype of each hop array, if batches may be views of it: on this host
        self._typed: list[Tensor] = []
        if views and self._arena.size:
            with warnings.catch_warnings():  # torch says that it is not writable
                warnings.simplefilter("ignore", UserWarning)
                whole = torch.from_numpy(self._arena)
            self._typed = [whole.view(getattr(torch, specs[i].dtype)) for i in self._hops]
        self._strides = [_strides(spec.row_shape) for spec in specs]
        self._lent = -1, -1  # run and step of a batch of views, still to be released
        self.form = ""  # of the last batch: `ChunkReady.form`

    def read(self, step: int) -> HopBatch:
        """Read the batch of `step`; releases the previous one, if that consisted of views."""
        self._give_back()
        ready = self._session.receive(ChunkReady, step)
        self.form = ready.form
        self._pool.received(self._arena, [])
        one_piece = ready.form == "rows" or (ready.form == "ranges" and len(ready.first) == 1)
        arrays: dict[str, Tensor]
        if ready.pieces is not None:
            input_id, arrays = self._landed(ready.num_rows, ready.pieces)
        else:
            input_id = self._input_id(ready)
            if self._typed and one_piece:
                arrays = self._views(ready)
                self._lent = self._session.run, step
            else:
                arrays = self._copied(ready, input_id, self._hops)
            for i in self._others:
                if one_piece:
                    arrays |= self._copied_piece(ready, i)
                else:
                    arrays |= self._copied(ready, input_id, [i])
        if self._lent != (self._session.run, step):
            self._session.release(step, 0)
        return hop_batch(arrays, input_id, ready.epoch, step)

    def _landed(self, num_rows: int, blob: Blob) -> tuple[NDArray[np.int64], dict[str, Tensor]]:
        """Row numbers and arrays of a batch that came in pieces, each copied once."""
        named = {array.name: array for array in blob.arrays}
        input_id = self._wide(blob, named["input_id"])
        arrays = {}
        for spec in self._session.attached.rows:
            array = self._pool.empty((num_rows, *spec.row_shape), numpy_dtype(spec))
            out = array.reshape(-1).view(np.uint8)
            self._land(spec, blob, named[f"rows:{spec.name}"], None, out)
            arrays[spec.name] = row_tensor(spec.name, array, spec.dtype)
        return input_id, arrays

    def _give_back(self) -> None:
        run, step = self._lent
        if run == self._session.run and run >= 0:
            self._session.release_soon(step)
        self._lent = -1, -1

    @property
    def _arena(self) -> NDArray[np.uint8]:
        return self._session.attachment.data

    def _input_id(self, ready: ChunkReady) -> NDArray[np.int64]:
        if ready.index < 0 and len(ready.first) == 1:
            return np.arange(ready.first[0], ready.first[0] + ready.num_rows, dtype=np.int64)
        out: NDArray[np.int64] = self._pool.empty((ready.num_rows,), np.int64)
        if ready.index >= 0:
            out[:] = self._arena[ready.index : ready.index + out.nbytes].view(np.int64)
            return out
        at = 0
        for first, count in zip(ready.first, ready.counts, strict=True):
            out[at : at + count] = np.arange(first, first + count)
            at += count
        return out

    def _views(self, ready: ChunkReady) -> dict[str, Tensor]:
        """Hop arrays as views of the arena, which torch believes to be writable."""
        found = {}
        for i, typed in zip(self._hops, self._typed, strict=True):
            spec, size = self._session.attached.rows[i], typed.element_size()
            shape, first = (ready.num_rows, *spec.row_shape), ready.places[i][0] // size
            # one call for each: nothing is copied, so calls are most of the work of such a batch
            found[spec.name] = typed.as_strided(shape, self._strides[i], first)
        return found

    def _copied_piece(self, ready: ChunkReady, i: int) -> dict[str, Tensor]:
        """As `_copied`, for rows in one piece: this copy is nearly all the work of such a batch."""
        spec, place = self._session.attached.rows[i], ready.places[i][0]
        out = self._pool.empty((ready.num_rows, *spec.row_shape), numpy_dtype(spec))
        out.reshape(-1).view(np.uint8)[:] = self._arena[place : place + out.nbytes]
        return {spec.name: row_tensor(spec.name, out, spec.dtype)}

    def _copied(
        self, ready: ChunkReady, input_id: NDArray[np.int64], chosen: Sequence[int]
    ) -> dict[str, Tensor]:
        """Copy rows of some arrays to one new buffer."""
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
        for first, spec in zip(firsts.tolist(), specs, strict=True):
            array = out[first : first + rows * spec.row_bytes].view(numpy_dtype(spec))
            shaped = array.reshape(rows, *spec.row_shape)
            found[spec.name] = row_tensor(spec.name, shaped, spec.dtype)
        return found


class _File(NamedTuple):
    array: RowArray
    file: BlockedFile
    reader: HostReader


class FileReader:
    """Reads the batches of one session from files; the caller sets `epoch` before each epoch."""

    def __init__(self, folder: Path, plan: HopPlan, attached: Attached, memory: Memory) -> None:
        """Raises Refused: these are not the files that the daemon serves; StoreError."""
        store, resolved = open_store(folder), attached.resolved
        if store.manifest.fingerprint != resolved.fingerprint:
            raise Refused(
                f"{folder}: the store has fingerprint {store.manifest.fingerprint}, expected "
                f"{resolved.fingerprint}, that of the store which the daemon serves"
            )
        found = next(t for t in store.manifest.types if t.name == resolved.seed_type)
        hops = found.hops[resolved.seeds.removeprefix("split:")]
        self.epoch = 0
        self._plan, self._memory = plan, memory
        self._files: dict[str, _File] = {}
        for spec in attached.rows:
            operator, _, hop = spec.name.rpartition(":")
            array = {LABEL: hops.label, NODES: hops.nodes}.get(spec.name)
            array = hops.operators[operator][int(hop)] if array is None else array
            file = store.rows(array)
            self._files[spec.name] = _File(array, file, HostReader(file))

    def read(self, step: int) -> HopBatch:
        """The batch of a step.  Raises CorruptBlock, OSError."""
        unit = self._plan.unit(self.epoch, step)
        rows = self._plan.ranges(unit)
        num = unit.num_seeds
        input_id = self._memory.empty((num,), np.int64)
        self._plan.rows(unit, input_id)
        arrays = {
            name: row_tensor(name, self._read(name, rows, num), file.array.dtype)
            for name, file in self._files.items()
        }
        return hop_batch(arrays, input_id, self.epoch, step)

    def close(self) -> None:
        for file in self._files.values():
            file.reader.close()

    def _read(self, name: str, rows: NDArray[np.int64], num: int) -> NDArray[Any]:
        array, file, reader = self._files[name]
        ranges = [r for a, b in rows.tolist() for r in file.row_ranges(array.row_bytes, a, b)]
        shape, dtype = (num, *array.row_shape), numpy_dtype(array)
        if name not in (LABEL, NODES):
            return self._memory.filed(ranges, reader.read, shape, dtype)
        out = self._memory.empty(shape, dtype)
        reader.read(ranges, out.reshape(-1).view(np.uint8))
        return out


class ResidentRows:
    """All rows of a split on one device, from which the batches of `plan` are drawn.

    Asks the daemon for nothing; the caller sets `epoch` before each epoch.
    """

    def __init__(
        self, batches: Iterable[HopBatch], plan: HopPlan, device: torch.device | str
    ) -> None:
        """Copy all rows, batch by batch, in the stored order."""
        self.plan, self.epoch = plan, 0
        self._device = torch.device(device)
        at = 0
        for batch in batches:
            if at == 0:
                self._rows = batch.map(self._empty)
            stop = at + batch.batch_size
            for own, tensor in zip(self._rows.tensors(), batch.tensors(), strict=True):
                own[at:stop] = tensor
            at = stop
        assert at == plan.resolved.num_seeds

    def _empty(self, like: Tensor) -> Tensor:
        shape = (self.plan.resolved.num_seeds, *like.shape[1:])
        return torch.empty(shape, dtype=like.dtype, device=self._device)

    def read(self, step: int) -> HopBatch:
        """The batch of a step of `epoch`, by one gather per array."""
        unit = self.plan.unit(self.epoch, step)
        rows = np.empty(unit.num_seeds, np.int64)
        self.plan.rows(unit, rows)
        places = torch.from_numpy(rows).to(self._device)
        batch = self._rows.map(lambda tensor: tensor.index_select(0, places))
        return replace(batch, epoch=self.epoch, step=step)

    def close(self) -> None:
        """There is nothing to end."""
