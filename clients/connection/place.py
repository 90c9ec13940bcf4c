"""What a dataset is given to find its batches: an endpoint, or the path of a store."""

import os
from pathlib import Path
from typing import Any

from blockstore.launch import SharedDaemon, shared_daemon
from clients.connection.backoff import Backoff
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import NoDaemon, Refused
from loaderd.api.tcp import SCHEME, parse_tcp


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
