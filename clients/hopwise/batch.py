"""From descriptors of hop-wise batches to arrays: views of the arena, or one copy out of it."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.kernels.hoprows import gather_hops
from clients.connection.buffers import Memory
from clients.connection.session import Session
from clients.gather import NUMPY_DTYPE, SPLIT_BYTES
from loaderd.errors import BadMessage, Refused
from loaderd.protocol import Blob, ChunkReady, RowArraySpec

LABEL, NODES = "y", "n_id"  # arrays that are not hops
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class HopArrays:
    """A batch; bfloat16 as uint16."""

    epoch: int
    step: int
    x: tuple[NDArray[Any], ...]  # per array (num_rows, *row_shape), or one with a second axis of it
    y: NDArray[Any] | None  # (num_rows, ...)
    n_id: NDArray[np.int64]  # (num_rows,) original ids
    input_id: NDArray[np.int64]  # (num_rows,) rows in the stored order of the split
    in_place: bool  # x are views of the arena


class HopReader:
    """Reads the hop-wise batches of one session."""

    def __init__(
        self, session: Session, pool: Memory, threads: int, stacked: bool, views: bool
    ) -> None:
        """`stacked`: one array (rows, arrays, ...) for all; `views`: where they lie, if they can.

        Raises Refused: arrays of different shapes cannot be stacked.
        """
        self._session, self._pool, self._threads = session, pool, threads
        self._stacked, self._views = stacked, views
        specs = session.attached.rows
        self._hops = [i for i, s in enumerate(specs) if s.name not in (LABEL, NODES)]
        self._others = {s.name: i for i, s in enumerate(specs) if s.name in (LABEL, NODES)}
        kinds = {(specs[i].dtype, specs[i].row_shape) for i in self._hops}
        if stacked and len(kinds) > 1:
            raise Refused(f"stacked=True: expected arrays of one dtype and shape, found {kinds}")
        self._lent = -1, -1  # run and step of a batch that is used where it lies
        self.form = ""  # of the last batch: `ChunkReady.form`
        self._helpers: ThreadPoolExecutor | None = None

    def read(self, step: int) -> HopArrays:
        """The batch of `step`; the one before, if it was used where it lies, is given back."""
        self._give_back()
        ready = self._session.receive_chunk(step)
        self.form = ready.form
        self._pool.received(self._arena, [])
        if ready.pieces is not None:
            return self._landed(ready, ready.pieces)
        input_id = self._input_id(ready)
        specs = self._session.attached.rows
        one_piece = ready.form == "rows" or (ready.form == "ranges" and len(ready.first) == 1)
        in_place = self._views and one_piece
        if in_place:
            x = tuple(self._view(specs[i], ready.places[i][0], ready.num_rows) for i in self._hops)
        else:
            x = self._copy(ready, input_id, self._hops, self._stacked)
        others = {
            name: self._copy(ready, input_id, [i], stacked=False)[0]
            for name, i in self._others.items()
        }
        if in_place:
            self._lent = self._session.run, step
        else:
            self._session.release(step, 0)
        return HopArrays(
            epoch=ready.epoch,
            step=step,
            x=x,
            y=others.get(LABEL),
            n_id=others[NODES].astype(np.int64, copy=False),
            input_id=input_id,
            in_place=in_place,
        )

    def _landed(self, ready: ChunkReady, blob: Blob) -> HopArrays:
        """A batch that came in pieces, each array copied once."""
        named = {array.name: array for array in blob.arrays}
        input_id = self._pool.empty((ready.num_rows,), np.int64)
        for start, view in self._session.views(blob, named["input_id"]):
            input_id[start : start + view.size] = view
        specs = self._session.attached.rows
        hops = self._rooms([specs[i] for i in self._hops], ready.num_rows, self._stacked)
        others = {
            name: self._rooms([specs[i]], ready.num_rows, stacked=False)[0][0]
            for name, i in self._others.items()
        }
        rooms = dict(zip(self._hops, hops[1], strict=True))
        rooms |= {i: others[name] for name, i in self._others.items()}
        for i, spec in enumerate(specs):
            raw = rooms[i].reshape(ready.num_rows, -1)
            kind, width = raw.dtype, spec.row_bytes
            for start, data in self._session.views(blob, named[f"rows:{spec.name}"]):
                if start % width or data.size % width:
                    raise BadMessage(f"a piece of rows:{spec.name} ends within a row")
                low, high = start // width, (start + data.size) // width
                raw[low:high] = data.view(kind).reshape(high - low, -1)
        self._session.release(ready.step, 0)
        return HopArrays(
            epoch=ready.epoch,
            step=ready.step,
            x=tuple(hops[0]),
            y=others.get(LABEL),
            n_id=others[NODES].astype(np.int64, copy=False),
            input_id=input_id,
            in_place=False,
        )

    def _rooms(
        self, specs: Sequence[RowArraySpec], rows: int, stacked: bool
    ) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """Arrays of a batch, and the part of them that each spec's rows go to."""
        kinds = [np.dtype(NUMPY_DTYPE.get(s.dtype, s.dtype)) for s in specs]
        if not stacked:
            arrays = [
                self._pool.empty((rows, *s.row_shape), k) for s, k in zip(specs, kinds, strict=True)
            ]
            return arrays, arrays
        whole = self._pool.empty((rows, len(specs), *specs[0].row_shape), kinds[0])
        return [whole], [whole[:, a] for a in range(len(specs))]

    def close(self) -> None:
        """End the helper threads, if there are any."""
        if self._helpers is not None:
            self._helpers.shutdown()

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

    def _view(self, spec: RowArraySpec, place: int, rows: int) -> NDArray[Any]:
        raw = self._arena[place : place + rows * spec.row_bytes]
        kind = np.dtype(NUMPY_DTYPE.get(spec.dtype, spec.dtype))
        return raw.view(kind).reshape(rows, *spec.row_shape)

    def _copy(
        self,
        ready: ChunkReady,
        input_id: NDArray[np.int64],
        chosen: Sequence[int],
        stacked: bool,
    ) -> tuple[NDArray[Any], ...]:
        """Rows of some arrays, in one buffer of their own."""
        specs = [self._session.attached.rows[i] for i in chosen]
        places = [ready.places[i] for i in chosen]
        rows = ready.num_rows
        widths = np.array([s.row_bytes for s in specs], np.int64)
        if stacked:
            strides = np.full_like(widths, widths.sum())
            firsts = np.cumsum(widths) - widths
            size = rows * int(widths.sum())
        else:
            strides = widths
            sizes = -(-rows * widths // _ALIGN) * _ALIGN
            firsts = np.cumsum(sizes) - sizes
            size = int(sizes.sum())
        kind = np.dtype(NUMPY_DTYPE.get(specs[0].dtype, specs[0].dtype))
        out = self._pool.empty((-(-size // kind.itemsize),), kind).view(np.uint8)
        if ready.form == "index":
            bases = np.array([p[0] for p in places], np.int64)

            def work(start: int, stop: int) -> None:
                gather_hops(self._arena, bases, widths, input_id, start, stop, firsts, strides, out)
        else:
            counts = ready.counts or (rows,)

            def work(start: int, stop: int) -> None:
                at = 0
                for r, count in enumerate(counts):
                    low, high = max(start, at), min(stop, at + count)
                    for a in range(len(specs)):
                        if low < high:
                            place = places[a][r] + (low - at) * int(widths[a])
                            self._copy_range(
                                place, low, high, int(widths[a]), int(firsts[a]),
                                int(strides[a]), out,
                            )  # fmt: skip
                    at += count

        self._split(work, rows, size)
        if stacked:
            shape = (rows, len(specs), *specs[0].row_shape)
            return (out[:size].view(kind).reshape(shape),)
        return tuple(
            out[first : first + rows * spec.row_bytes]
            .view(NUMPY_DTYPE.get(spec.dtype, spec.dtype))
            .reshape(rows, *spec.row_shape)
            for first, spec in zip(firsts.tolist(), specs, strict=True)
        )

    def _copy_range(
        self, place: int, low: int, high: int, width: int, first: int, stride: int,
        out: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """Rows [low, high) of the batch, consecutive from `place` on."""
        source = self._arena[place : place + (high - low) * width]
        if stride == width:
            out[first + low * width : first + high * width] = source
            return
        rows = out[: out.size // stride * stride].reshape(-1, stride)
        rows[low:high, first : first + width] = source.reshape(-1, width)

    def _split(self, work: Callable[[int, int], None], rows: int, size: int) -> None:
        """On as many threads as the bytes are worth."""
        if self._threads == 1 or size < SPLIT_BYTES:
            work(0, rows)
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self._threads - 1, "gather")
        cuts = [rows * i // self._threads for i in range(self._threads + 1)]
        helped = [self._helpers.submit(work, a, b) for a, b in itertools.pairwise(cuts[1:])]
        work(0, cuts[1])
        for future in helped:
            future.result()
