"""The door: a Unix socket that hands out the arena's descriptor and sees clients leave."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from loaderd.errors import Refused
from loaderd.protocol import ErrorReply, Welcome, encode
from loaderd.shell.owners import Admission, peer_credentials, share_file
from loaderd.wire.endpoint import Endpoint

BACKLOG = 64
RETRY_S = 1.0  # to accept again after descriptors ran out


class Door:
    """Listens; greets each connection with a token of its own and the arena.

    Clients say nothing here.  The end of a connection, however it comes, is the client's death
    notice.  All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        welcome: Callable[[int], Welcome],
        open_arena: Callable[[], int],
        gone: Callable[[int], None],
        admission: Admission,
    ) -> None:
        """`open_arena()` is a new descriptor of the arena, which the door closes; `gone(token)` is
        called in the event loop when a connection has ended."""
        self._path, self._welcome, self._admission = endpoint.door, welcome, admission
        self._owners: dict[int, str] = {}
        self._open_arena, self._gone = open_arena, gone
        self._open: dict[int, socket.socket] = {}
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            old = os.umask(0o177)
            try:
                self._listener.bind(str(endpoint.new_door))
            finally:
                os.umask(old)
            share_file(endpoint.new_door, admission.gid)
            self._listener.listen(BACKLOG)
            endpoint.new_door.rename(self._path)
        except BaseException:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._listen()

    def is_open(self, token: int) -> bool:
        """Whether the connection that was given this token still stands."""
        return token in self._open

    def owner_of(self, token: int) -> str | None:
        """The user who was given this token; None: nobody has it."""
        return self._owners.get(token)

    def hang_up(self, token: int) -> None:
        """End a connection; does nothing where it has ended."""
        connection = self._open.pop(token, None)
        self._owners.pop(token, None)
        if connection is not None:
            self._loop.remove_reader(connection)
            connection.close()

    def close(self) -> None:
        """Remove the socket and hang up on everybody."""
        self._path.unlink(missing_ok=True)
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for token in list(self._open):
            self.hang_up(token)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it left before we came
            return
        except OSError as error:  # out of descriptors: the listener would stay readable
            self._loop.remove_reader(self._listener)
            self._loop.call_later(RETRY_S, self._listen)
            context = {"message": f"{self._path}: a client must wait", "exception": error}
            self._loop.call_exception_handler(context)
            return
        connection.setblocking(False)
        token = int.from_bytes(os.urandom(7), "little")
        try:
            owner = self._admission.owner(peer_credentials(connection))
            arena_fd = self._open_arena()
            try:
                socket.send_fds(connection, [encode(self._welcome(token))], [arena_fd])
            finally:
                os.close(arena_fd)
        except Refused as error:
            with contextlib.suppress(OSError):
                connection.send(encode(ErrorReply(error="Refused", message=str(error))))
            connection.close()
            return
        except OSError:
            connection.close()
            return
        self._open[token], self._owners[token] = connection, owner
        self._loop.add_reader(connection, self._readable, token)

    def _readable(self, token: int) -> None:
        try:
            if self._open[token].recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:  # a reset is an end, too
            pass
        self.hang_up(token)
        self._gone(token)
