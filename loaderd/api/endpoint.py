"""ipc endpoints of daemons: their files, and the right to serve them."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from loaderd.api.errors import EndpointInUse, NoDaemon, Refused
from loaderd.api.protocol import DOOR_SUFFIX

_NEW_SUFFIX = ".new"  # shorter than DOOR_SUFFIX, for which the length of a path is checked
LOCK_SUFFIX = ".lock"  # held by the daemon as long as it lives
MAX_PATH_BYTES = 107 - len(DOOR_SUFFIX)  # of the address of a Unix socket


class Endpoint(NamedTuple):
    """An ipc endpoint: the path of its ZeroMQ socket; other files stand beside it."""

    path: Path

    def __str__(self) -> str:
        return f"ipc://{self.path}"

    @property
    def door(self) -> Path:
        """The Unix socket that passes the arena."""
        return Path(f"{self.path}{DOOR_SUFFIX}")

    @property
    def new_door(self) -> Path:
        """That socket until it listens, so that the one at `door` never refuses a client."""
        return Path(f"{self.path}{_NEW_SUFFIX}")

    @property
    def lock(self) -> Path:
        """The file that names the process that serves."""
        return Path(f"{self.path}{LOCK_SUFFIX}")


def parse_endpoint(text: str) -> Endpoint:
    """The endpoint that `text` names.  Raises Refused: not `ipc://` and an absolute path."""
    scheme, _, name = text.partition("://")
    path = Path(name)
    if scheme != "ipc" or not path.is_absolute() or not path.name or "\0" in name:
        instead = f"; give ipc://{Path(text).absolute()}" if text and "://" not in text else ""
        raise Refused(f"endpoint {text!r}: expected ipc:///path/of/the/socket{instead}")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise Refused(
            f"endpoint {text!r}: its path has {len(os.fsencode(path))} bytes, a socket's can "
            f"have {MAX_PATH_BYTES}: choose a shorter one"
        )
    return Endpoint(path)


def connect(endpoint: Endpoint, waits: bool = False) -> socket.socket:
    """A connection to the door.  Raises NoDaemon at once if nobody listens.

    waits   whether to wait if many connect at once; otherwise that is a NoDaemon too
    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.setblocking(waits)
        door.connect(str(endpoint.door))
    except OSError as error:
        door.close()
        raise NoDaemon(
            f"{endpoint}: no daemon listens there ({error.strerror or error}); start one with: "
            f"loaderd serve STORE --endpoint {endpoint}"
        ) from error
    return door


@contextmanager
def claim(endpoint: Endpoint) -> Iterator[None]:
    """The right to serve the endpoint: held inside the `with`; no file is left after it.

    Removes what a killed daemon left behind.  Raises EndpointInUse: somebody listens, or a file
    there is not ours to remove; Refused: the folder is missing.
    """
    if not endpoint.path.parent.is_dir():
        raise Refused(f"{endpoint.path.parent}: no such folder; make it, or choose another one")
    lock = _take_lock(endpoint)
    sockets = (endpoint.path, endpoint.new_door, endpoint.door)
    try:
        for path in sockets:
            _remove_stale(endpoint, path)
        try:
            yield
        finally:
            for path in sockets:
                path.unlink(missing_ok=True)
    finally:
        endpoint.lock.unlink(missing_ok=True)
        os.close(lock)


def _take_lock(endpoint: Endpoint) -> int:
    """The descriptor of the lock file, locked; its text is the process that serves."""
    path = endpoint.lock
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            holder = os.pread(lock, 64, 0)
            if holder.strip() and not holder.strip().isdigit():
                raise EndpointInUse(
                    f"{path}: something else stands there, expected a free path; choose another one"
                )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = f"process {holder.decode().strip()}" if holder.strip() else "just starting"
                raise EndpointInUse(
                    f"{endpoint}: another daemon serves it ({who}); stop it, or choose another one"
                ) from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, b"%d\n" % os.getpid(), 0)
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its last holder removed it between our opening and locking it


def _remove_stale(endpoint: Endpoint, path: Path) -> None:
    if not path.is_socket():
        if path.exists() or path.is_symlink():
            raise EndpointInUse(
                f"{path}: something else stands there, expected a free path; choose another one"
            )
        return
    if _is_alive(path):
        raise EndpointInUse(f"{endpoint}: another process listens at {path}; choose another one")
    path.unlink()


def _is_alive(path: Path) -> bool:
    """Whether some process listens at a Unix socket, of whatever type."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True
