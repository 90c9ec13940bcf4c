"""What a dataset is given to find its batches: an endpoint, or the path of a store."""

import os
from pathlib import Path
from typing import Any

from blockstore.launch import SharedDaemon, shared_daemon
from loaderd.api.errors import Refused


def endpoint_of(given: Any) -> tuple[str, SharedDaemon | None]:
    """The endpoint, and the daemon of this user that serves there if the path of a store is given.

    That daemon is shared with other processes, and ends with the last of them.  Raises Refused,
    NotAStore, NotServed.
    """
    if isinstance(given, str) and "://" in given:
        return given, None
    if isinstance(given, os.PathLike) or (isinstance(given, str) and Path(given).is_dir()):
        daemon = shared_daemon(Path(given))
        return daemon.endpoint, daemon
    raise Refused(
        f"endpoint: found {given!r}, expected a text, ipc:///path/of/the/socket, or the path of a "
        "store"
    )
