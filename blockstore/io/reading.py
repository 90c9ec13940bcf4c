"""Reads in flight, and how to wait for them."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self

from blockstore import concurrency


class Request:
    """The tasks that one `read` waits for."""

    def __init__(self, left: int) -> None:
        self._left, self._lock = left, concurrency.Lock()
        self.done = concurrency.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if self._left == 0:
                self.done.set()


class Reading:
    """Runs of pages that are being read."""

    def __init__(self, request: Request | None, waited: Callable[[int], None]) -> None:
        self._request, self._waited = request, waited

    def wait(self) -> None:
        """Wait until all are read and consumed.  Raises the first error met."""
        if self._request is not None:
            begun = concurrency.perf_counter_ns()
            self._request.done.wait()
            self._waited(concurrency.perf_counter_ns() - begun)
            if self._request.error is not None:
                raise self._request.error


def wait_all(readings: Iterable[Reading]) -> None:
    """Wait until nothing is in flight any more, whatever failed.  Raises the first error met."""
    error: BaseException | None = None
    for reading in readings:
        try:
            reading.wait()
        except Exception as found:
            error = error or found
    if error is not None:
        raise error


class ReadingQueue:
    """Readings in the order in which they were begun, at most so many in flight.

    A context manager: when it ends, with or without an error, nothing is in flight.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._coming = deque[tuple[list[Reading], Callable[[], None] | None]]()

    def make_room(self, room: int = 1) -> None:
        """Wait until so many may be added.  Raises the first error met."""
        while len(self._coming) > self._maximum - room:
            readings, then = self._coming.popleft()
            wait_all(readings)
            if then is not None:
                then()

    def add(self, readings: list[Reading], then: Callable[[], None] | None = None) -> None:
        """`then` is called after all of them are done."""
        self._coming.append((readings, then))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.make_room(self._maximum)
        finally:
            with contextlib.suppress(Exception):  # the first error is being raised already
                wait_all(reading for readings, _ in self._coming for reading in readings)
