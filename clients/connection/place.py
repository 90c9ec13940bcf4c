"""Where a dataset finds its batches, an endpoint or the path of a store, and how it waits there."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockstore.launch import SharedDaemon, shared_daemon
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import NoDaemon, Refused
from loaderd.api.tcp import SCHEME, parse_tcp

FIRST_S, MOST_S = 0.02, 1.0  # between two attempts: doubled from one to the next, up to


class Backoff:
    """Waits between attempts until so many seconds have passed since the first of them failed."""

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """0: not at all."""
        self.seconds = seconds
        self._now, self._sleep = now, sleep
        self._end: float | None = None
        self._pause = FIRST_S

    def wait(self) -> bool:
        """Before another attempt; False where the time is over."""
        now = self._now()
        if self._end is None:
            self._end = now + self.seconds
        left = self._end - now
        if left <= 0:
            return False
        self._sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, MOST_S)
        return True


def find_endpoint(given: Any, wait_s: float = 0.0) -> tuple[str, SharedDaemon | None]:
    """The endpoint, and the daemon of this user that serves there if the path of a store is given.

    That daemon is shared with other processes, and ends with the last of them.  Raises Refused: the
    text names no daemon; NoDaemon: none is on this host there, nor came within `wait_s` seconds;
    NotAStore, NotServed.
    """
    backoff = Backoff(wait_s)
    if isinstance(given, str) and "://" in given:
        if given.startswith(SCHEME):
            parse_tcp(given)
            return given, None
        ipc = parse_endpoint(given)
        while not ipc.door.exists():
            if not backoff.wait():
                raise NoDaemon(
                    f"{ipc}: no daemon listens there; start one with: loaderd serve STORE "
                    f"--endpoint {ipc}"
                )
        return given, None
    if isinstance(given, str | os.PathLike) and Path(given).is_dir():
        daemon = shared_daemon(Path(given))
        return daemon.endpoint, daemon
    raise Refused(
        f"endpoint: found {given!r}, expected ipc:///path/of/the/socket, "
        "tcp://HOST:PORT?keys=FILE or the path of a store"
    )
