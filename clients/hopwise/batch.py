"""From descriptors of hop-wise batches to arrays: views of the arena, or one copy out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.rows import gather_hops
from clients.batch import ArenaReader, numpy_dtype
from clients.connection.buffers import Memory
from clients.connection.session import Session
from loaderd.api.contents import RowArraySpec
from loaderd.api.protocol import Blob, ChunkReady

LABEL, NODES = "y", "n_id"  # arrays that are not hops
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class HopArrays:
    """A batch; bfloat16 as uint16."""

    epoch: int
    step: int
    x: tuple[NDArray[Any], ...]  # per array (num_rows, *row_shape)
    y: NDArray[Any] | None  # (num_rows, ...)
    n_id: NDArray[np.int64]  # (num_rows,) original ids
    input_id: NDArray[np.int64]  # (num_rows,) rows in the stored order of the split
    in_place: bool  # x are views of the arena


class HopReader(ArenaReader):
    """Reads the hop-wise batches of one session."""

    def __init__(self, session: Session, pool: Memory, threads: int, views: bool) -> None:
        """`views`: leave hop arrays where they lie, if they lie in one piece."""
        super().__init__(session, pool, threads)
        self._in_place = views
        specs = session.attached.rows
        self._hops = [i for i, s in enumerate(specs) if s.name not in (LABEL, NODES)]
        self._others = [i for i, s in enumerate(specs) if s.name in (LABEL, NODES)]
        self._lent = -1, -1  # run and step of a batch that is used where it lies
        self.form = ""  # of the last batch: `ChunkReady.form`

    def read(self, step: int) -> HopArrays:
        """The batch of `step`; the one before, if it was used where it lies, is given back."""
        self._give_back()
        ready = self._session.receive(ChunkReady, step)
        self.form = ready.form
        self._pool.received(self._arena, [])
        if ready.pieces is not None:
            return self._result(ready, *self._landed(ready.num_rows, ready.pieces))
        input_id = self._input_id(ready)
        one_piece = ready.form == "rows" or (ready.form == "ranges" and len(ready.first) == 1)
        if self._in_place and one_piece:
            specs = self._session.attached.rows
            arrays = {i: self._view(specs[i], ready.places[i][0], ready) for i in self._hops}
            self._lent = self._session.run, step
        else:
            arrays = self._copied(ready, input_id, self._hops)
        for i in self._others:
            arrays |= self._copied(ready, input_id, [i])
        return self._result(ready, input_id, arrays)

    def _result(
        self, ready: ChunkReady, input_id: NDArray[np.int64], arrays: dict[int, NDArray[Any]]
    ) -> HopArrays:
        """The batch; what was copied is given back.  `arrays` by their place in `attached.rows`."""
        in_place = self._lent == (self._session.run, ready.step)
        if not in_place:
            self._session.release(ready.step, 0)
        others = {self._session.attached.rows[i].name: arrays[i] for i in self._others}
        return HopArrays(
            epoch=ready.epoch,
            step=ready.step,
            x=tuple(arrays[i] for i in self._hops),
            y=others.get(LABEL),
            n_id=others[NODES].astype(np.int64, copy=False),
            input_id=input_id,
            in_place=in_place,
        )

    def _landed(
        self, num_rows: int, blob: Blob
    ) -> tuple[NDArray[np.int64], dict[int, NDArray[Any]]]:
        """Rows and arrays of a batch that came in pieces, each copied once."""
        named = {array.name: array for array in blob.arrays}
        input_id = self._wide(blob, named["input_id"])
        arrays = {}
        for i, spec in enumerate(self._session.attached.rows):
            arrays[i] = self._pool.empty((num_rows, *spec.row_shape), numpy_dtype(spec))
            out = arrays[i].reshape(-1).view(np.uint8)
            self._land(spec, blob, named[f"rows:{spec.name}"], None, out)
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

    def _view(self, spec: RowArraySpec, place: int, ready: ChunkReady) -> NDArray[Any]:
        raw = self._arena[place : place + ready.num_rows * spec.row_bytes]
        return raw.view(numpy_dtype(spec)).reshape(ready.num_rows, *spec.row_shape)

    def _copied(
        self, ready: ChunkReady, input_id: NDArray[np.int64], chosen: Sequence[int]
    ) -> dict[int, NDArray[Any]]:
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
        return {
            i: out[first : first + rows * spec.row_bytes]
            .view(numpy_dtype(spec))
            .reshape(rows, *spec.row_shape)
            for i, first, spec in zip(chosen, firsts.tolist(), specs, strict=True)
        }
