"""A ROUTER for clients on this machine: ZMTP 3.0 over a Unix socket, with bounded memory.

libzmq keeps a message of several frames until its last one has come, however many there are: one
client could make the daemon hold any number of bytes.  Here a connection holds one message of at
most `MESSAGE_BYTES`, all connections together hold a given number of bytes, and what is longer is
skipped.  Specification: https://rfc.zeromq.org/spec/23/ (NULL mechanism).
"""

import asyncio
import select
import socket
import struct
import time
from collections import deque
from pathlib import Path

from loaderd.api.protocol import Message, encode
from loaderd.server.listener import UnixListener
from loaderd.server.transport import BURST, FRAME_BYTES, LINGER_MS, MESSAGE_BYTES, Frame, Receive

MAX_CONNECTIONS = 1024
MIN_ROOM = MESSAGE_BYTES + 9  # bytes of long messages that are received at a time, at least
SMALL_BYTES = 1 << 12  # a message up to this needs no room of its own
UNSENT_BYTES = 1 << 23  # of one client that reads nothing; then it is cut off
PAUSE_BYTES = 1 << 14  # of one client that reads nothing; then nothing is read from it either
_READ_BYTES = 1 << 16
_STALLED_S = 10.0  # for a long message, and for the greeting
_POLL_S = 1.0
_HEAD_BYTES = 9  # of a long frame; those of a short one are 2
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def _framed(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body


_READY = _framed(_COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER")


class _Odd(Exception):
    """The peer does not speak the protocol: it is cut off."""


class _Connection:
    """One client: what it has sent of a message, and what it has not read yet."""

    def __init__(self, peer: socket.socket, identity: bytes) -> None:
        self.peer, self.identity = peer, identity
        self.buffer = bytearray()  # what has come of a frame, or of several short ones
        self.greeted = self.ready = False
        self.skip = 0  # bytes left of a frame that is skipped
        self.odd = False  # the message has too many frames, or one that is too long
        self.wanted = 0  # bytes of room that it waits for
        self.room = 0  # bytes of the long frame that it has room for
        self.since = time.monotonic()  # when the greeting, or the long message, began
        self.busy = False  # what has come is about to be taken, before more is read
        self.watched = False  # the loop tells when it can be read
        self.out = bytearray()  # what it has not read
        self.write_ended = False  # it reads nothing more; what it has sent is still received

    @property
    def may_be_read(self) -> bool:
        return not (self.wanted or self.busy or len(self.out) > PAUSE_BYTES)

    @property
    def read_bytes(self) -> int:
        """How much to read: what is held outside of a room is never more than a short frame."""
        if self.skip:
            return min(self.skip, _READ_BYTES)
        maximum = max(self.room, SMALL_BYTES + _HEAD_BYTES)
        return min(maximum - len(self.buffer), _READ_BYTES)


class LocalRouter:
    """All methods belong to the event loop's thread, as those of `transport.TcpRouter`."""

    def __init__(self, path: Path, receive: Receive, room: int) -> None:
        """`receive` is called in the loop for each message; what it raises goes to the loop.

        room   bytes of long messages that are received at a time, of all clients
        """
        self._receive, self._loop = receive, asyncio.get_running_loop()
        self._room = max(room, MIN_ROOM)
        self._connections: dict[bytes, _Connection] = {}
        self._waiting: deque[_Connection] = deque()  # for room: first come, first served
        self._next = 0
        path.unlink(missing_ok=True)  # of a daemon that has died: the endpoint is claimed
        # libzmq gives up if there is no place in the queue of connections
        self._listener = UnixListener(path, socket.SOCK_STREAM, MAX_CONNECTIONS, self._accept)
        self._listener.start()
        self._timer = self._loop.call_later(_POLL_S, self._poll)

    def send(self, identity: bytes, message: Message) -> bool:
        """Queue a message without waiting; False: the peer vanished, or reads nothing."""
        connection = self._connections.get(identity)
        if connection is None or not connection.ready:
            return False
        return self._write(connection, _framed(0, encode(message)))

    def close(self) -> None:
        """Close after what is queued has gone, or `LINGER_MS` have passed."""
        self._timer.cancel()
        self._listener.close()
        self._flush(time.monotonic() + LINGER_MS / 1000)
        for connection in list(self._connections.values()):
            self._cut(connection)

    # -- connections ------------------------------------------------------------------------------

    def _accept(self, peer: socket.socket) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            peer.close()
            return
        self._next += 1
        connection = _Connection(peer, b"\0" + struct.pack(">Q", self._next))
        self._connections[connection.identity] = connection
        self._write(connection, _GREETING)
        self._watch(connection)

    def _cut(self, connection: _Connection) -> None:
        if self._connections.pop(connection.identity, None) is None:
            return
        self._loop.remove_reader(connection.peer)
        self._loop.remove_writer(connection.peer)
        connection.peer.close()
        connection.buffer.clear()
        connection.out.clear()
        if connection.wanted:
            self._waiting.remove(connection)
            connection.wanted = 0
        self._give_room(connection)

    def _poll(self) -> None:
        """Every second, cut off clients that stall a greeting or a long message."""
        self._timer = self._loop.call_later(_POLL_S, self._poll)
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if (connection.room or not connection.ready) and now - connection.since > _STALLED_S:
                self._cut(connection)

    # -- what comes -------------------------------------------------------------------------------

    def _watch(self, connection: _Connection) -> None:
        """Have the loop watch whether it can be read, or not, as its state demands."""
        watches = connection.may_be_read and connection.identity in self._connections
        if watches and not connection.watched:
            self._loop.add_reader(connection.peer, self._readable, connection)
        elif connection.watched and not watches:
            self._loop.remove_reader(connection.peer)
        connection.watched = watches

    def _readable(self, connection: _Connection) -> None:
        try:
            data = connection.peer.recv(connection.read_bytes)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._cut(connection)
        elif connection.skip:
            connection.skip -= len(data)
        else:
            connection.buffer += data
            self._parse(connection)

    def _parse(self, connection: _Connection) -> None:
        """Take what has come, at most a burst of it, as long as the client may be read from."""
        if connection.identity not in self._connections:
            return
        connection.busy = False
        try:
            for _ in range(BURST):
                if not (connection.may_be_read and self._parse_one(connection)):
                    break
            else:
                self._parse_soon(connection)
        except _Odd:
            self._cut(connection)
            return
        self._watch(connection)

    def _parse_soon(self, connection: _Connection) -> None:
        connection.busy = True
        self._loop.call_soon(self._parse, connection)

    def _parse_one(self, connection: _Connection) -> bool:
        """Take one frame from what has come; False: it is incomplete.  Raises _Odd."""
        buffer = connection.buffer
        if not connection.greeted:
            if len(buffer) < len(_GREETING):
                return False
            if buffer[0] != 0xFF or not buffer[9] & 1 or buffer[10] < 3:
                raise _Odd
            if buffer[12:32] != _GREETING[12:32]:
                raise _Odd  # another mechanism than NULL
            del buffer[: len(_GREETING)]
            connection.greeted = True
            return True
        head = _HEAD_BYTES if buffer and buffer[0] & _LONG else 2
        if len(buffer) < head:
            return False
        flags = buffer[0]
        size = struct.unpack_from(">Q", buffer, 1)[0] if flags & _LONG else buffer[1]
        if size > FRAME_BYTES or flags > _MORE | _LONG | _COMMAND:
            raise _Odd
        if flags & _COMMAND:
            if size > SMALL_BYTES or flags & _MORE:
                raise _Odd
            if len(buffer) >= head + size:
                self._command(connection, _taken(buffer, head, size))
                return True
            return False
        if not connection.ready:
            raise _Odd
        if connection.odd or size > MESSAGE_BYTES or flags & _MORE:
            self._read_past(connection, head + size, bool(flags & _MORE))
            return True
        if len(buffer) < head + size:
            if size > SMALL_BYTES and not connection.room:
                self._want_room(connection, head + size)
            return False
        message = _taken(buffer, head, size)
        self._give_room(connection)
        self._hand_over(connection, [message])
        return True

    def _command(self, connection: _Connection, body: bytes) -> None:
        """Handle a peer's command; once the connection is ready, all but PING are ignored.

        Raises _Odd.
        """
        if not connection.ready:
            if not body.startswith(b"\x05READY"):
                raise _Odd
            connection.ready = True
            self._write(connection, _READY)
        elif body.startswith(b"\x04PING"):
            self._write(connection, _framed(_COMMAND, b"\x04PONG" + body[7:23]))

    def _read_past(self, connection: _Connection, num_bytes: int, more: bool) -> None:
        """Skip a frame that is too long, or of a message that has several: nothing is kept."""
        connection.skip = max(0, num_bytes - len(connection.buffer))
        del connection.buffer[:num_bytes]
        connection.odd = more
        if not more:
            self._hand_over(connection, [])

    def _hand_over(self, connection: _Connection, frames: list[Frame]) -> None:
        try:
            self._receive(connection.identity, "", frames)
        except Exception as error:
            context = {"message": "a message could not be handled", "exception": error}
            self._loop.call_exception_handler(context)

    def _want_room(self, connection: _Connection, num_bytes: int) -> None:
        """Take room for a long frame; the client is not read from until there is some."""
        connection.wanted = num_bytes
        self._waiting.append(connection)
        self._give_room(connection)

    def _give_room(self, connection: _Connection) -> None:
        """Take back a client's room, and give it to those that wait, in order."""
        self._room += connection.room
        connection.room = 0
        while self._waiting and self._waiting[0].wanted <= self._room:
            first = self._waiting.popleft()
            first.room, first.wanted = first.wanted, 0
            first.since = time.monotonic()
            self._room -= first.room
            self._parse_soon(first)

    # -- what goes --------------------------------------------------------------------------------

    def _write(self, connection: _Connection, data: bytes) -> bool:
        if connection.write_ended:
            return False
        if len(connection.out) + len(data) > UNSENT_BYTES:
            self._cut(connection)
            return False
        waits = bool(connection.out)
        connection.out += data
        if waits:
            self._watch(connection)
        else:
            self._writable(connection)
        return not connection.write_ended

    def _writable(self, connection: _Connection) -> None:
        paused = len(connection.out) > PAUSE_BYTES
        _send_some(connection)
        if connection.out:
            self._loop.add_writer(connection.peer, self._writable, connection)
        else:
            self._loop.remove_writer(connection.peer)
        if paused and connection.may_be_read:
            self._parse_soon(connection)
        self._watch(connection)

    def _flush(self, deadline: float) -> None:
        """Wait until the clients have read what there is for them."""
        poller = select.poll()
        unsent = {c.peer.fileno(): c for c in self._connections.values() if c.out}
        for peer in unsent:
            poller.register(peer, select.POLLOUT)
        while unsent and (left := deadline - time.monotonic()) > 0:
            for peer, _ in poller.poll(1000 * left):
                _send_some(unsent[peer])
                if not unsent[peer].out:
                    poller.unregister(peer)
                    del unsent[peer]


def _taken(buffer: bytearray, head: int, size: int) -> bytes:
    """Take a frame; returns its body."""
    with memoryview(buffer) as view:
        body = bytes(view[head : head + size])
    del buffer[: head + size]
    return body


def _send_some(connection: _Connection) -> None:
    try:
        while connection.out:
            del connection.out[: connection.peer.send(connection.out)]
    except BlockingIOError:
        return
    except OSError:  # it has gone, or reads no more: the end of what it sent will tell
        connection.write_ended = True
        connection.out.clear()
