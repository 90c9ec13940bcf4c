"""Reads on their way, and those who wait for them."""

from collections.abc import Callable, Iterable

from blockstore import concurrency


class Request:
    """What one `read` waits for."""

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
    """Runs of pages on their way."""

    def __init__(self, request: Request | None, waited: Callable[[int], None]) -> None:
        self._request, self._waited = request, waited

    def wait(self) -> None:
        """Until all are read and consumed.  Raises the first error met."""
        if self._request is not None:
            begun = concurrency.perf_counter_ns()
            self._request.done.wait()
            self._waited(concurrency.perf_counter_ns() - begun)
            if self._request.error is not None:
                raise self._request.error


def wait_all(readings: Iterable[Reading]) -> None:
    """Until nothing is on its way any more, whatever failed.  Raises the first error met."""
    error: BaseException | None = None
    for reading in readings:
        try:
            reading.wait()
        except Exception as found:
            error = error or found
    if error is not None:
        raise error
