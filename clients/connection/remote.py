"""Sessions with a daemon on another host: batches come in pieces, heartbeats detect its end."""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from clients.connection.session import INTACT, Attachment, Session, welcome_of
from loaderd.api.errors import BadMessage, NoDaemon
from loaderd.api.protocol import (
    LEASE_S,
    Attach,
    BatchReady,
    Blob,
    BlobArray,
    ChunkReady,
    DaemonMessage,
    ErrorReply,
    Heartbeat,
    Hello,
    Piece,
    Resolved,
    RowGroup,
    Taken,
    decode_daemon,
    encode,
)
from loaderd.api.tcp import SCHEME, check_reachable, parse_tcp
from loaderd.server.curve import TcpConnection, client_options, watched

WELCOME_TIMEOUT_S = 10.0


class RemoteAttachment(Attachment):
    """A connection over TCP, kept alive by a thread that answers heartbeats.

    `door` is a socket that hangs up when the daemon is gone, as the one of a local daemon does.
    """

    def __init__(self, endpoint: str) -> None:  # its base maps an arena: there is none here
        self.endpoint, self.users = endpoint, 0
        address = parse_tcp(endpoint)
        self.address, self.options = address.place, client_options(address)
        check_reachable(address)
        self.data, self.stamp, self.slot_bytes = np.empty(0, np.uint8), INTACT, 1
        self.context = zmq.Context()
        self._control = TcpConnection(self.context, address, [(zmq.RCVHWM, 0)])
        try:
            self._control.send(Hello())
            frames = self._control.receive(WELCOME_TIMEOUT_S)
            if frames is None:
                raise NoDaemon(f"{self.endpoint}: the daemon does not answer")
            welcome = welcome_of(bytes(frames[0]), self.endpoint)
        except BaseException:
            self._control.close()
            self.context.term()
            raise
        self.token, self.stores = welcome.token, welcome.stores
        self.door, self._far = socket.socketpair()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._keep_up, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up: the daemon ends the sessions of this attachment."""
        self._wake.close()
        self._thread.join()
        self.context.term()
        self.forget()

    def hold(self) -> bool:
        """True: batches are copies, which stay valid."""
        return True

    def forget(self) -> None:
        """Close this process's copies of its sockets, and nothing else."""
        for end in (self.door, self._far, self._wake, self._woken):
            end.close()

    def _keep_up(self) -> None:
        """In the thread: answer heartbeats, until the daemon is gone or this side closes."""
        poller, dealer, monitor = zmq.Poller(), self._control.dealer, self._control.monitor
        for watched_socket in (dealer, monitor, self._woken):
            poller.register(watched_socket, zmq.POLLIN | zmq.POLLERR)
        heard = time.monotonic()
        while time.monotonic() - heard < LEASE_S:
            ready = dict(poller.poll(int(1000 * LEASE_S / 4)))
            if self._woken.fileno() in ready:
                break
            try:
                while True:
                    message = decode_daemon(dealer.recv(zmq.NOBLOCK))
                    if isinstance(message, ErrorReply):  # this side's lease has ended
                        raise BadMessage(message.message)
                    heard = time.monotonic()
                    dealer.send(encode(Heartbeat(token=self.token)), zmq.NOBLOCK)
            except zmq.Again:
                pass
            except BadMessage:
                break
            if monitor in ready:
                break
        self._far.close()
        self._control.close()


class RemoteSession(Session):
    """One dataset's conversation with a daemon on another host."""

    attachment_type = RemoteAttachment
    _monitor: "zmq.Socket[bytes] | None" = None
    _num_taken = 0  # bytes received in this run

    def start(self, epoch: int, step: int, stride: int = 1) -> int:
        """Ask for steps `step`, `step + stride`, ... of `epoch`; ends the previous run."""
        self._landed.clear()
        self._num_taken = 0
        return super().start(epoch, step, stride)

    def release(self, step: int, group: int) -> None:
        """Do nothing: the daemon releases a row group once it is sent."""

    def views(self, blob: Blob, array: BlobArray) -> Iterator[tuple[int, NDArray[Any]]]:
        """An array of the newest message as (first item, view), as its pieces come.

        Arrays of rows can be read once, in order: pieces are dropped after use.
        """
        del blob  # its slots are in an arena that is not mapped here
        kind = np.dtype(array.dtype)
        begin, end = array.offset, array.offset + array.length * kind.itemsize
        passing = array.name.startswith("rows:")
        at = begin
        while at < end:
            first, data = self._piece_at(at)
            stop = min(end, first + data.size)
            raw = data[at - first : stop - first]
            if raw.size % kind.itemsize:
                raise BadMessage(f"a piece of {array.name} ends within an item, at byte {stop}")
            yield (at - begin) // kind.itemsize, raw.view(kind)
            at = stop
            while passing and self._landed and self._landed[0][0] + self._landed[0][1].size <= at:
                self._landed.popleft()

    def _piece_at(self, at: int) -> tuple[int, NDArray[np.uint8]]:
        """The piece that holds a byte; waits for it."""
        while True:
            for first, data in self._landed:
                if first <= at < first + data.size:
                    return first, data
            match self._next():
                case ErrorReply(run=run) as reply if run in (-1, self.run):
                    raise self._failure(reply)
                case BatchReady() | RowGroup() | ChunkReady():
                    raise BadMessage(f"a message came before byte {at} of the one before it")

    def _next(self) -> DaemonMessage:
        """The next message except heartbeats; the bytes of a `Piece` are stored on the way."""
        while True:
            message = super()._next()
            match message:
                case Heartbeat():
                    continue
                case Piece(run=self.run):
                    self._land(message)
                case Piece():
                    self._socket.recv(zmq.NOBLOCK)
                case BatchReady() | RowGroup() | ChunkReady():
                    self._landed.clear()
            return message

    def _land(self, piece: Piece) -> None:
        if not self._socket.getsockopt(zmq.RCVMORE):
            raise BadMessage("a piece without its bytes")
        # a view of the memory that libzmq read into
        frame: Any = self._socket.recv(zmq.NOBLOCK, copy=False)
        data = np.frombuffer(frame.buffer, np.uint8)
        self._landed.append((piece.offset, data))
        self._num_taken += data.size
        session = self.attached.session
        self._send(Taken(session=session, run=self.run, num_bytes=self._num_taken))

    def _open_socket(self) -> None:
        self._landed = deque[tuple[int, NDArray[np.uint8]]]()  # pieces of the newest message
        self._monitor = watched(self._socket)
        super()._open_socket()
        self._poller.register(self._monitor, zmq.POLLIN)

    def _close_socket(self) -> None:
        if self._monitor is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._monitor.close(0)
        super()._close_socket()


def open_session(
    endpoint: str,
    request: Attach,
    ids: NDArray[np.int64] | None = None,
    expected: Resolved | None = None,
) -> Session:
    """Open a session with the daemon at an endpoint, on any host; raises what `Session` raises."""
    make: Callable[..., Session] = RemoteSession if endpoint.startswith(SCHEME) else Session
    return make(endpoint, request, ids, expected)
