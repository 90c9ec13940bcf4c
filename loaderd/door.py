"""The door: a Unix socket that hands out the arena's descriptor and sees clients leave."""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

from loaderd.errors import EndpointInUse, NoDaemon, Refused
from loaderd.protocol import DOOR_SUFFIX, Welcome, encode

BACKLOG = 64


def ipc_path(endpoint: str) -> Path:
    """The file system path of an ipc endpoint.  Raises Refused: another kind of endpoint."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or not path:
        raise Refused(f"endpoint {endpoint!r}: expected ipc:///path/of/the/socket")
    return Path(path)


def door_path(endpoint: str) -> Path:
    """Where the door of an endpoint is."""
    path = ipc_path(endpoint)
    return path.with_name(path.name + DOOR_SUFFIX)


def knock(endpoint: str) -> socket.socket:
    """A connection to the door.  Raises NoDaemon at once where nobody listens."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        door.connect(str(door_path(endpoint)))
    except OSError as error:
        door.close()
        raise NoDaemon(
            f"{endpoint}: no daemon listens there ({error.strerror}); start one with: "
            f"loaderd serve STORE --endpoint {endpoint}"
        ) from error
    return door


def claim(endpoint: str) -> None:
    """Make sure that no daemon serves the endpoint; remove what a dead one left.

    Raises EndpointInUse, Refused: the folder is missing.
    """
    path = ipc_path(endpoint)
    if not path.parent.is_dir():
        raise Refused(f"{path.parent}: no such folder; make it, or choose another endpoint")
    try:
        knock(endpoint).close()
    except NoDaemon:
        for stale in (path, door_path(endpoint)):
            if stale.is_socket():
                stale.unlink()
            elif stale.exists():
                raise EndpointInUse(f"{stale}: is a file, expected a free path") from None
        return
    raise EndpointInUse(f"{endpoint}: another daemon serves it; stop it, or choose another one")


class Door:
    """Listens; greets each connection with a token of its own and the arena."""

    def __init__(
        self,
        endpoint: str,
        welcome: Callable[[int], Welcome],
        arena_fd: int,
        gone: Callable[[int], None],
    ) -> None:
        """`gone(token)` is called in the event loop when a connection hangs up."""
        self._path, self._welcome, self._arena_fd, self._gone = (
            door_path(endpoint), welcome, arena_fd, gone,
        )  # fmt: skip
        self._tokens = itertools.count(int.from_bytes(os.urandom(4), "little") << 16)
        self._open: dict[int, socket.socket] = {}
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        old = os.umask(0o177)
        try:
            self._listener.bind(str(self._path))
        finally:
            os.umask(old)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def is_open(self, token: int) -> bool:
        """Whether the connection that was given this token still stands."""
        return token in self._open

    def close(self) -> None:
        """Hang up on everybody and remove the socket."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for token in list(self._open):
            self._hang_up(token)
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            token = next(self._tokens)
            try:
                socket.send_fds(connection, [encode(self._welcome(token))], [self._arena_fd])
            except OSError:
                connection.close()
                return
            self._open[token] = connection
            self._loop.add_reader(connection, self._readable, token)

    def _readable(self, token: int) -> None:
        try:
            frame = self._open[token].recv(4096)
        except BlockingIOError:
            return
        except OSError:
            frame = b""
        if not frame:  # clients say nothing here: this is the hang-up
            self._hang_up(token)
            self._gone(token)

    def _hang_up(self, token: int) -> None:
        connection = self._open.pop(token)
        self._loop.remove_reader(connection)
        connection.close()
