"""Out of the arena into arrays of a trainer's own: copies, and rows gathered by address."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.format import RowArray
from blockstore.kernels.rows import gather_rows, scatter_rows
from clients.connection.buffers import Memory
from clients.connection.session import Session
from loaderd.errors import BadMessage
from loaderd.protocol import BatchReady, Blob, BlobArray, RowArraySpec, RowGroup

SPLIT_BYTES = 4 << 20  # rows of fewer bytes are gathered on the calling thread alone


def numpy_dtype(array: RowArraySpec | RowArray) -> str:
    """The dtype in which NumPy, which does not know bfloat16, holds an array's rows."""
    return "uint16" if array.dtype == "bfloat16" else array.dtype


class ArenaReader:
    """What readers of a session's batches have in common, whatever batches they make."""

    def __init__(self, session: Session, pool: Memory, threads: int = 1) -> None:
        self._session = session
        self._pool = pool
        self._threads = threads
        self._helpers: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the helper threads, if there are any."""
        if self._helpers is not None:
            self._helpers.shutdown()

    def _views(self, blob: Blob, array: BlobArray) -> Iterator[tuple[int, NDArray[Any]]]:
        return self._session.views(blob, array)

    def _copy(self, blob: Blob, array: BlobArray, out: NDArray[Any]) -> NDArray[Any]:
        for start, view in self._views(blob, array):
            out[start : start + view.size] = view
        return out

    def _wide(self, blob: Blob, array: BlobArray) -> NDArray[np.int64]:
        return self._copy(blob, array, self._pool.empty((array.length,), np.int64))

    def _narrow(self, blob: Blob, array: BlobArray) -> NDArray[Any]:
        """In its own dtype; in place where it lies in one piece."""
        pieces = list(self._views(blob, array))
        if len(pieces) == 1:
            return pieces[0][1]
        return self._copy(blob, array, np.empty(array.length, array.dtype))

    def _announce(self, ready: BatchReady, num_rows: Sequence[int]) -> None:
        """Say what comes, before room is asked for; `num_rows` of each row array."""
        specs, arena = self._session.attached.rows, self._session.attachment.data
        in_place = ready.rows.last and arena.size > 0
        self._pool.received(arena, list(zip(specs, num_rows, strict=True)) if in_place else [])

    def _room(self, spec: RowArraySpec, num_rows: int) -> NDArray[Any]:
        shape = (num_rows, *spec.row_shape)
        return self._pool.rows(spec, shape, numpy_dtype(spec))

    def _release(self, group: RowGroup) -> None:
        """Give a row group back once it is copied, unless its run has ended by then."""
        session, run = self._session, self._session.run

        def release() -> None:
            if session.run == run and not session.lost:
                session.release(group.step, group.group)

        self._pool.after(release)

    def _land(
        self,
        spec: RowArraySpec,
        blob: Blob,
        array: BlobArray,
        positions: NDArray[np.uint32] | None,
        out: NDArray[np.uint8],
    ) -> None:
        """Rows that came along, to their places."""
        width = spec.row_bytes
        for start, data in self._views(blob, array):
            if positions is None:
                out[start : start + data.size] = data
                continue
            if start % width or data.size % width:
                raise BadMessage(f"a piece of {array.name} ends within a row")
            num, places = data.size // width, positions[start // width :]
            here = np.arange(0, data.size, width, dtype=np.uint64)
            scatter_rows(data, here, places, 0, num, width, out)

    def _gather_piece(
        self,
        spec: RowArraySpec,
        addresses: NDArray[np.uint64],
        first: int,
        positions: NDArray[np.uint32] | None,
        out: NDArray[np.uint8],
    ) -> None:
        """Rows `first`, `first + 1`, ... of a group, on as many threads as they are worth."""
        arena = self._session.attachment.data
        if self._pool.gathers(out, first, addresses):
            self._session.hold()  # it will be read when this batch has been handed out
            return

        def gather(start: int, stop: int) -> None:
            if positions is None:
                whole = out[first * spec.row_bytes :]
                gather_rows(arena, addresses, start, stop, spec.row_bytes, whole)
            else:
                places = positions[first:]
                scatter_rows(arena, addresses, places, start, stop, spec.row_bytes, out)

        self._split(gather, addresses.size, addresses.size * spec.row_bytes)

    def _split(self, work: Callable[[int, int], None], rows: int, num_bytes: int) -> None:
        """Do `work` for rows [start, stop) of `rows`, on as many threads as they are worth."""
        if self._threads == 1 or num_bytes < SPLIT_BYTES:
            work(0, rows)
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self._threads - 1, "gather")
        cuts = [rows * i // self._threads for i in range(self._threads + 1)]
        helped = [self._helpers.submit(work, a, b) for a, b in itertools.pairwise(cuts[1:])]
        work(0, cuts[1])
        for future in helped:
            future.result()
