"""A ROUTER for clients on this machine: ZMTP 3.0 over a Unix socket, with bounded memory.

libzmq keeps a message of several frames until its last one has come, however many there are: one
client could make the daemon hold any number of bytes.  Here a connection holds one message of at
most `MESSAGE_BYTES`, all connections together hold a given number of bytes, and what is longer is
read past.  Specification: https://rfc.zeromq.org/spec/23/ (NULL mechanism).
"""

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import deque
from pathlib import Path

from loaderd.protocol import Message, encode
from loaderd.wire.transport import FRAME_BYTES, MESSAGE_BYTES, Frame, Receive

MAX_CONNECTIONS = 1024
LEAST_ROOM = MESSAGE_BYTES  # bytes of long messages that are received at a time, at least
_BACKLOG = 128
_READ_BYTES = 1 << 16
_SMALL_BYTES = 1 << 12  # a message up to this needs no room of its own
_UNSENT_BYTES = 1 << 23  # of one client that reads nothing; then it is cut off
_PAUSE_BYTES = 1 << 18  # of one client that reads nothing; then it is not heard either
_STALLED_S = 10.0  # for a long message, and for the greeting
_LOOK_S = 1.0
_ACCEPT_AGAIN_S = 1.0  # after descriptors ran out
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _framed(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body


_READY = _framed(_COMMAND, b"\x05READY" + _property(b"Socket-Type", b"ROUTER"))


class _Odd(Exception):
    """The peer does not speak the protocol: it is cut off."""


class _Connection:
    """One client: what it has sent of a message, and what it has not read yet."""

    def __init__(self, peer: socket.socket, identity: bytes) -> None:
        self.peer, self.identity = peer, identity
        self.buffer = bytearray()
        self.greeted = self.ready = False
        self.skip = 0  # bytes of a frame that is read past
        self.frames: list[Frame] = []  # of the message that is being received
        self.odd = False  # it has too many frames, or one that is too long
        self.room = 0  # bytes that a long message was given
        self.since = time.monotonic()  # when the greeting, or the long message, began
        self.out: deque[memoryview] = deque()
        self.unsent = 0
        self.paused = False


class LocalRouter:
    """All methods belong to the event loop's thread, as those of `transport.Router`."""

    def __init__(self, path: Path, receive: Receive, room: int) -> None:
        """`receive` is called in the loop for each message; what it raises goes to the loop.

        room   bytes of long messages that are received at a time, of all clients
        """
        self._receive, self._loop = receive, asyncio.get_running_loop()
        self._room = max(room, LEAST_ROOM)
        self._connections: dict[bytes, _Connection] = {}
        self._waiting: deque[_Connection] = deque()  # for room
        self._next = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)  # of a daemon that has died: the endpoint is claimed
            old = os.umask(0o177)
            try:
                self._listener.bind(str(path))
            finally:
                os.umask(old)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._listen()
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def send(self, identity: bytes, message: Message) -> bool:
        """Queue a message without waiting; False where the peer vanished or reads nothing."""
        connection = self._connections.get(identity)
        if connection is None or not connection.ready:
            return False
        return self._write(connection, _framed(0, encode(message)))

    def close(self) -> None:
        """Close; what the sockets took still goes."""
        self._timer.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections.values()):
            self._cut(connection)

    # -- connections ------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors: the listener would stay readable
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            context = {"message": "a client must wait", "exception": error}
            self._loop.call_exception_handler(context)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            peer.close()
            return
        peer.setblocking(False)
        self._next += 1
        connection = _Connection(peer, b"\0" + struct.pack(">Q", self._next))
        self._connections[connection.identity] = connection
        self._loop.add_reader(peer, self._readable, connection)
        self._write(connection, _GREETING)

    def _cut(self, connection: _Connection) -> None:
        if self._connections.pop(connection.identity, None) is None:
            return
        self._loop.remove_reader(connection.peer)
        self._loop.remove_writer(connection.peer)
        connection.peer.close()
        connection.buffer.clear()
        self._give_room(connection)

    def _look(self) -> None:
        """Every second: who stalls a greeting, or a long message that others wait for?"""
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        now = time.monotonic()
        for connection in list(self._connections.values()):
            stalls = not connection.ready or (connection.room and not connection.paused)
            if stalls and now - connection.since > _STALLED_S:
                self._cut(connection)

    # -- what comes -------------------------------------------------------------------------------

    def _readable(self, connection: _Connection) -> None:
        try:
            data = connection.peer.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._cut(connection)
            return
        skipped = min(connection.skip, len(data))
        connection.skip -= skipped
        connection.buffer += data[skipped:]
        self._parse(connection)

    def _parse(self, connection: _Connection) -> None:
        try:
            while connection.identity in self._connections and self._parse_one(connection):
                pass
        except _Odd:
            self._cut(connection)

    def _parse_one(self, connection: _Connection) -> bool:
        """Take one frame from what has come; False where it is not there whole.  Raises _Odd."""
        buffer = connection.buffer
        if connection.skip or connection in self._waiting:
            return False
        if not connection.greeted:
            if len(buffer) < len(_GREETING):
                return False
            if buffer[0] != 0xFF or buffer[10] < 3 or bytes(buffer[12:17]) != b"NULL\0":
                raise _Odd
            del buffer[: len(_GREETING)]
            connection.greeted = True
            return True
        head = 9 if buffer and buffer[0] & _LONG else 2
        if len(buffer) < head:
            return False
        flags = buffer[0]
        size = struct.unpack_from(">Q", buffer, 1)[0] if head == 9 else buffer[1]
        if size > FRAME_BYTES or flags > _MORE | _LONG | _COMMAND:
            raise _Odd
        if flags & _COMMAND:
            if size > _SMALL_BYTES:
                raise _Odd
            return self._parse_command(connection, head, size)
        if not connection.ready:
            raise _Odd
        if connection.frames or connection.odd or size > MESSAGE_BYTES or flags & _MORE:
            self._read_past(connection, head, size, flags)
            return True
        if len(buffer) < head + size:
            if size > _SMALL_BYTES and not connection.room:
                self._take_room(connection, size)
            return False
        message = bytes(buffer[head : head + size])
        del buffer[: head + size]
        self._give_room(connection)
        self._hand_over(connection, [message])
        return True

    def _parse_command(self, connection: _Connection, head: int, size: int) -> bool:
        buffer = connection.buffer
        if len(buffer) < head + size:
            return False
        body = bytes(buffer[head : head + size])
        del buffer[: head + size]
        if not connection.ready:
            if not body.startswith(b"\x05READY"):
                raise _Odd
            connection.ready = True
            self._write(connection, _READY)
        elif body.startswith(b"\x04PING"):
            self._write(connection, _framed(_COMMAND, b"\x04PONG" + body[7:23]))
        return True

    def _read_past(self, connection: _Connection, head: int, size: int, flags: int) -> None:
        """A frame of a message that has several, or that is too long: nothing of it is kept."""
        connection.odd = True
        rest = len(connection.buffer) - head - size
        connection.skip = max(0, -rest)
        del connection.buffer[: head + size]
        if not flags & _MORE:
            connection.odd = False
            self._hand_over(connection, [])

    def _hand_over(self, connection: _Connection, frames: list[Frame]) -> None:
        try:
            self._receive(connection.identity, "", frames)
        except Exception as error:
            context = {"message": "a message could not be handled", "exception": error}
            self._loop.call_exception_handler(context)

    def _take_room(self, connection: _Connection, size: int) -> None:
        """Room for a long message; without it the client is not read from until there is some."""
        if self._room < size:
            self._waiting.append(connection)
            self._loop.remove_reader(connection.peer)
            return
        self._room -= size
        connection.room, connection.since = size, time.monotonic()

    def _give_room(self, connection: _Connection) -> None:
        """Its long message has come, or it has gone: the next one may."""
        self._room += connection.room
        connection.room = 0
        with contextlib.suppress(ValueError):
            self._waiting.remove(connection)
        if self._waiting:
            waiting = self._waiting.popleft()
            self._resume(waiting)
            self._loop.call_soon(self._parse, waiting)

    # -- what goes --------------------------------------------------------------------------------

    def _resume(self, connection: _Connection) -> None:
        if connection.identity in self._connections and not connection.paused:
            self._loop.add_reader(connection.peer, self._readable, connection)

    def _write(self, connection: _Connection, data: bytes) -> bool:
        if connection.unsent + len(data) > _UNSENT_BYTES:
            return False
        connection.out.append(memoryview(data))
        connection.unsent += len(data)
        if len(connection.out) == 1:
            self._writable(connection)
        return connection.identity in self._connections

    def _writable(self, connection: _Connection) -> None:
        """Send what there is, as far as the socket takes it."""
        try:
            while connection.out:
                sent = connection.peer.send(connection.out[0])
                connection.unsent -= sent
                if sent < len(connection.out[0]):
                    connection.out[0] = connection.out[0][sent:]
                else:
                    connection.out.popleft()
        except BlockingIOError:
            self._loop.add_writer(connection.peer, self._writable, connection)
        except OSError:
            self._loop.call_soon(self._cut, connection)
            connection.out.clear()
            return
        else:
            self._loop.remove_writer(connection.peer)
        paused = connection.unsent > _PAUSE_BYTES
        if paused and not connection.paused:
            self._loop.remove_reader(connection.peer)
        resumes = connection.paused and not paused and connection not in self._waiting
        connection.paused = paused
        if resumes:
            self._resume(connection)
