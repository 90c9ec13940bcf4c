"""Clients of this machine: they get the arena's descriptor, send messages, and leave."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence

from loaderd.api.endpoint import Endpoint
from loaderd.api.errors import BadMessage, Refused
from loaderd.api.protocol import ClientMessage, ErrorReply, Message, Release, Start, encode
from loaderd.memory.ledger import request_bytes
from loaderd.server.listener import UnixListener
from loaderd.server.owners import admit, peer_credentials, share_file
from loaderd.server.registry import Caller, DaemonCallbacks, Peer
from loaderd.server.transport import Frame
from loaderd.server.zmtp import LocalRouter
from loaderd.sessions.base import Out
from loaderd.streams.service import StreamService

BACKLOG = 64


class LocalClients:
    """Clients of this machine, whose sessions read the arena themselves.

    One socket hands out the arena's descriptor, with a token of its own for each connection.
    Clients say nothing there: the end of a connection, however it comes, is the client's death
    notice.  Messages pass over the other socket.  All methods belong to the event loop's thread,
    and mean what they do in `RemoteClients`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        engine: StreamService,
        gid: int | None,
        daemon: DaemonCallbacks,
    ) -> None:
        """Opens both sockets, the one that hands out the arena last.

        gid   of a group whose members may come in, too
        """
        self._endpoint, self._engine, self._daemon = endpoint, engine, daemon
        self._gid = gid
        self._owners: dict[int, str] = {}
        self._open: dict[int, socket.socket] = {}
        self._loop = asyncio.get_running_loop()
        room = request_bytes(engine.settings.mem_bytes) // 2  # the other half: ids that are kept
        with contextlib.ExitStack() as opened:
            self._router = LocalRouter(endpoint.path, self._receive, room)
            opened.callback(self._router.close)
            share_file(endpoint.path, gid)
            kind = socket.SOCK_SEQPACKET
            self._listener = UnixListener(endpoint.new_door, kind, BACKLOG, self._welcome)
            opened.callback(self._listener.close)
            share_file(endpoint.new_door, gid)
            endpoint.new_door.rename(endpoint.door)
            opened.pop_all()  # both stay open
        self._listener.start()

    def _receive(self, identity: bytes, _: str, frames: Sequence[Frame]) -> None:
        self._daemon.receive(Caller(identity), frames)

    def send(self, caller: Caller, message: Message) -> bool:
        return self._router.send(caller.identity, message)

    def handle(self, caller: Caller, message: ClientMessage) -> None:
        del caller  # whoever it is, none of these is expected here
        raise BadMessage(f"{type(message).__name__}: expected over tcp only")

    def is_open(self, token: int) -> bool:
        return token in self._open

    def owner_of(self, peer: Peer) -> str | None:
        return self._owners.get(peer.token)

    def push(self, session: int, caller: Caller, message: Out) -> bool:
        del session  # its messages go the way of its client's
        return self.send(caller, message)

    def begin(self, start: Start) -> None:
        """Do nothing: nothing is in flight."""

    def release(self, release: Release) -> None:
        self._engine.release(release)

    def close_session(self, session: int) -> None:
        """Do nothing: nothing is held besides what the engine holds."""

    def held_bytes(self, session: int) -> int:
        del session  # none holds anything besides what the engine holds
        return 0

    def hang_up(self, token: int) -> None:
        """End a connection; does nothing if it has ended."""
        connection = self._open.pop(token, None)
        self._owners.pop(token, None)
        if connection is not None:
            self._loop.remove_reader(connection)
            connection.close()

    def close(self) -> None:
        """Remove the sockets and hang up on everybody."""
        self._endpoint.door.unlink(missing_ok=True)
        self._listener.close()
        for token in list(self._open):
            self.hang_up(token)
        self._router.close()
        self._endpoint.path.unlink(missing_ok=True)

    def _welcome(self, connection: socket.socket) -> None:
        """Send a client the greeting and the arena's descriptor, or why it may not come in."""
        token = int.from_bytes(os.urandom(7), "little")
        try:
            owner = admit(peer_credentials(connection), self._gid)
            arena_fd = self._engine.arena.open_to_read()
            try:
                socket.send_fds(connection, [encode(self._daemon.welcome(token))], [arena_fd])
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
        self._daemon.client_left(token)
