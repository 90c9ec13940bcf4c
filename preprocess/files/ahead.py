"""Read pieces ahead in another thread, in order; or distribute them among worker threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from threading import Event, Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_AHEAD = 2  # pieces
COPIES = _AHEAD + 1  # copies of a piece that `read_ahead` holds beside the one being read

Piece = TypeVar("Piece")
Dealt = TypeVar("Dealt", bound=tuple[Any, ...])
Arrays = tuple[NDArray[Any], ...]


def read_ahead(pieces: Iterator[Piece]) -> Generator[Piece]:
    """Yield the arrays, or tuples of arrays, that another thread reads; valid until the next step.

    `pieces` may reuse its arrays: each piece is copied.  Memory: COPIES of the largest piece.
    """
    slots: list[list[NDArray[Any]]] = [[] for _ in range(COPIES)]

    def step(slot: list[NDArray[Any]]) -> Any:
        piece: Any = next(pieces, None)
        if piece is None:
            return None
        parts = piece if isinstance(piece, tuple) else (piece,)
        copies = tuple(_copy(slot, i, part) for i, part in enumerate(parts))
        return copies if isinstance(piece, tuple) else copies[0]

    pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
    waiting: deque[Future[Any]] = deque()
    try:
        for slot in slots[:_AHEAD]:
            waiting.append(pool.submit(step, slot))
        number = _AHEAD
        while (piece := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(step, slots[number % COPIES]))
            number += 1
            yield piece
    finally:
        pool.shutdown(cancel_futures=True)
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


def deal(pieces: Iterator[Dealt], workers: Sequence[Callable[[Arrays, Dealt], None]]) -> None:
    """Pass each piece to the next free worker (one thread each), in no particular order.

    The first item of a piece are its arrays.  `pieces` may reuse them: a worker gets copies, which
    it owns until it returns.  An error of a worker or of `pieces` is raised here after all have
    stopped.  Memory: a piece for each worker.
    """
    taking, over = Lock(), Event()

    def run(worker: Callable[[Arrays, Dealt], None]) -> None:
        slot: list[NDArray[Any]] = []
        while not over.is_set():
            with taking:
                piece = next(pieces, None)
                if piece is None:
                    return
                arrays = tuple(_copy(slot, i, part) for i, part in enumerate(piece[0]))
            worker(arrays, piece)

    try:
        with ThreadPoolExecutor(len(workers), thread_name_prefix="deal") as pool:
            running = [pool.submit(run, worker) for worker in workers]
            try:
                for each in as_completed(running):
                    each.result()
            finally:
                over.set()
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


def _copy(slot: list[NDArray[Any]], number: int, part: NDArray[Any]) -> NDArray[Any]:
    """Copy into the slot's memory, which is reused for the next piece."""
    if number == len(slot):
        slot.append(np.empty(0, part.dtype))
    held = slot[number]
    if held.size < part.size or held.dtype != part.dtype:
        held = slot[number] = np.empty(part.size, part.dtype)
    out = held[: part.size].reshape(part.shape)
    out[...] = part
    return out
