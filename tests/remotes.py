"""A daemon for tests that also listens on tcp, and folders of keys."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loaderd.api.keys import AUTHORIZED, KNOWN, PUBLIC, write_pair
from loaderd.server.curve import new_pair
from tests.daemons import spawn, stop

_ports = itertools.count(20_000)


def free_address() -> str:
    """A tcp address of this host at which nobody listens.

    The host is one of this process alone, and the port is none that connections are given: a peer
    that looks for another one, which is not there yet, would in the end connect to itself there.
    """
    pid = os.getpid()
    host = f"127.{1 + pid // 62500}.{pid // 250 % 250}.{1 + pid % 250}"
    return f"tcp://{host}:{next(_ports)}"


@contextmanager
def remote_daemon(store: Path, mem: str = "64M", *options: str) -> Iterator[tuple[str, str]]:
    """Both endpoints of a daemon; it must drain to exit code 0."""
    with tempfile.TemporaryDirectory(prefix="loaderd-") as folder:
        local, remote = f"ipc://{folder}/daemon.sock", free_address()
        words = ("--mem", mem, "--workers", "2", "--listen", remote, *options)
        process = spawn(store, local, *words)
        try:
            yield local, remote
        finally:
            code = stop(process)
        assert code == 0
        assert list(Path(folder).iterdir()) == []


def make_keys(folder: Path, *names: str) -> dict[str, Path]:
    """A folder of keys for each name."""
    for name in names:
        write_pair(folder / name, new_pair(), name)
    return {name: folder / name for name in names}


def introduce(daemon: Path, client: Path, address: str = "*") -> None:
    """Each other's public keys."""
    with (daemon / AUTHORIZED).open("a") as stream:
        stream.write((client / PUBLIC).read_text())
    key = (daemon / PUBLIC).read_text().split()[0]
    with (client / KNOWN).open("a") as stream:
        stream.write(f"{key} {address.removeprefix('tcp://')}\n")
