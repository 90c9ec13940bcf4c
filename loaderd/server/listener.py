"""Unix sockets of the daemon that accept connections in its event loop."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

RETRY_S = 1.0  # to accept again after descriptors ran out


class UnixListener:
    """A socket at a path, which only this user can reach.  Its thread is the event loop's."""

    def __init__(
        self,
        path: Path,
        kind: socket.SocketKind,
        backlog: int,
        accepted: Callable[[socket.socket], None],
    ) -> None:
        """Listens; `accepted` gets each connection, non-blocking, once `start` was called."""
        self._path, self._accepted, self._loop = path, accepted, asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, kind)
        try:
            old = os.umask(0o177)
            try:
                self._socket.bind(str(path))
            finally:
                os.umask(old)
            self._socket.listen(backlog)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def start(self) -> None:
        """Accept connections from now on."""
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # it left before we came
            return
        except OSError as error:  # out of descriptors: the listener would stay readable
            self._loop.remove_reader(self._socket)
            self._loop.call_later(RETRY_S, self.start)
            context = {"message": f"{self._path}: a client must wait", "exception": error}
            self._loop.call_exception_handler(context)
            return
        connection.setblocking(False)
        self._accepted(connection)
