"""Resolve a dataset's endpoint (a daemon's address or a store path) and wait for the daemon."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockstore.launch import SharedDaemon, shared_daemon
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import NoDaemon, Refused
from loaderd.api.tcp import SCHEME, parse_tcp

FIRST_S, MAX_S = 0.02, 1.0  # first and longest pause between attempts; each doubles


class Backoff:
    """Waits between attempts, until `seconds` have passed since the first one failed."""

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`seconds`: 0 for no wait at all."""
        self.seconds = seconds
        self._now, self._sleep = now, sleep
        self._end: float | None = None
        self._pause = FIRST_S

    def wait(self) -> bool:
        """Wait before another attempt; False if the time is over."""
        now = self._now()
        if self._end is None:
            self._end = now + self.seconds
        left = self._end - now
        if left <= 0:
            return False
        self._sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, MAX_S)
        return True


def find_endpoint(given: Any, wait_s: float = 0.0) -> tuple[str, SharedDaemon | None]:
    """The endpoint, and, if the path of a store is given, this user's daemon that serves it.

    That daemon is shared with other processes, and ends with the last of them.  Raises Refused: the
    text names no daemon; NoDaemon: none listened there on this host within `wait_s` seconds;
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
