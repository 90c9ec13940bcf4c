"""ZeroMQ in the daemon: a ROUTER in the event loop, and the request of `loaderd status`."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import zmq
from numpy.typing import NDArray

from loaderd.api.endpoint import Endpoint, connect, parse_endpoint
from loaderd.api.errors import BadMessage, DaemonError, NoDaemon, Refused
from loaderd.api.keys import Authorized, KeyPair
from loaderd.api.protocol import LEASE_S, Message, StatusReply, StatusRequest, decode_daemon, encode
from loaderd.api.tcp import SCHEME, TcpAddress, check_reachable, parse_tcp
from loaderd.server.curve import KeyAuthenticator, TcpConnection, server_options

ANSWER_S = 5.0  # for a daemon to answer
SEND_QUEUE = 100_000  # messages to one peer; a window of batches is far below
RECEIVE_QUEUE = 32  # messages of one peer; then it waits
FRAME_BYTES = 1 << 19  # a peer that sends a larger one is cut off
MESSAGE_BYTES = 1 << 18  # of a message
MAX_FRAMES = 1  # of a message
BURST = 64  # messages taken before the loop may do other things
LINGER_MS = 200  # for what is queued at the end
HANDSHAKE_MS = 10_000  # for a peer over tcp
GIVEN = 1 << 20  # bytes of rows that a peer sends at once
WAITING = 128  # connections over tcp that are not accepted yet
_FIRST = zmq.NOBLOCK | zmq.SNDMORE  # more frames follow

Frame = bytes | memoryview
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Receive = Callable[[bytes, str, list[Frame]], None]  # identity, public key of the peer, frames


class TcpRouter:
    """A ROUTER for other hosts; with keys, it lets in only authorized clients.

    Driven by the running event loop; all methods belong to the loop's thread.  libzmq's descriptor
    is edge-triggered, and a send may consume an edge: after each send, and after an exception, the
    socket is looked at again.
    """

    def __init__(
        self,
        address: TcpAddress,
        receive: Receive,
        pair: KeyPair | None,
        authorized: Authorized | None,
    ) -> None:
        """`receive` is called in the loop for each message; what it raises goes to the loop.

        pair   None: whoever reaches the address is let in

        Raises Refused: the address cannot be had.
        """
        self._receive, self._loop = receive, asyncio.get_running_loop()
        self._context: Context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.copy_threshold = 0  # arrays lie in the arena: do not copy them
        self._poll_scheduled = False  # a look at the socket is scheduled
        self._gate: KeyAuthenticator | None = None
        options: list[tuple[int, int | bytes]] = [
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.RCVHWM, RECEIVE_QUEUE),
            (zmq.MAXMSGSIZE, FRAME_BYTES),
            (zmq.LINGER, LINGER_MS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.IPV6, int(address.is_v6)),
            (zmq.TCP_KEEPALIVE, 1),
            # a stopped client keeps its TCP window shut, but still answers
            (zmq.TCP_MAXRT, int(1000 * LEASE_S)),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.BACKLOG, WAITING),
        ]
        try:
            if pair is not None and authorized is not None:
                self._gate = KeyAuthenticator(self._context, authorized)
                self._gate.start()
                options += server_options(pair)
            for option, value in options:
                self._socket.setsockopt(option, value)
            self._socket.bind(address.place)
        except BaseException as error:
            self._close_sockets()
            if isinstance(error, zmq.ZMQError):
                raise Refused(
                    f"--listen {address}: {error.strerror}; expected a free one of this host"
                ) from error
            raise
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._poll)
        self._poll_soon()

    @property
    def address(self) -> str:
        """The address where it listens, with the port that was chosen."""
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def send(
        self, identity: bytes, message: Message, array: NDArray[np.uint8] | None = None
    ) -> bool:
        """Queue a message without waiting; False if the peer vanished or reads nothing.

        array   bytes that follow it, not copied: the array is held until they have left
        """
        raw = encode(message)  # once the first frame is sent the others must follow
        try:
            self._socket.send(identity, _FIRST)
            self._socket.send(raw, zmq.NOBLOCK if array is None else _FIRST)
            if array is not None:
                self._socket.send(array.data, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # EHOSTUNREACH, EAGAIN; ENOTSOCK once closed
            return False
        finally:
            self._poll_soon()
        return True

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.close()
        if self._gate is not None:
            self._gate.stop()
        self._context.term()

    def _poll_soon(self) -> None:
        if not self._poll_scheduled and not self._socket.closed:
            self._poll_scheduled = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Take what has come, at most a burst of it."""
        self._poll_scheduled = False
        for _ in range(BURST):
            # asked first: an exception from `recv` costs more than the question
            if self._socket.closed or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            identity = self._socket.recv(zmq.NOBLOCK)
            key, frames = self._take()
            try:
                self._receive(identity, key, frames)
            except Exception as error:
                context = {"message": "a message could not be handled", "exception": error}
                self._loop.call_exception_handler(context)
        self._poll_soon()

    def _take(self) -> tuple[str, list[Frame]]:
        """The peer's key and the frames after its identity.

        No frames, if the message has too many, or one that is too large.
        """
        key, frames, odd = "", list[Frame](), False
        while self._socket.getsockopt(zmq.RCVMORE):
            frame: Any = self._socket.recv(zmq.NOBLOCK, copy=False)
            if not frames:
                key = _key_of(frame)
                odd = odd or len(frame.buffer) > MESSAGE_BYTES
            if len(frames) == MAX_FRAMES:
                odd = True
            if not odd:
                frames.append(frame.bytes)
        return key, [] if odd else frames


def _key_of(frame: Any) -> str:
    """The public key of a frame's sender, as the answer to libzmq's ZAP request named it."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:  # there was no ZAP request
        return ""


def ask_status(endpoint: Endpoint | TcpAddress) -> StatusReply:
    """Ask the daemon at an endpoint for its status.  Raises NoDaemon, Refused."""
    with zmq.Context() as context:
        if isinstance(endpoint, TcpAddress):
            frame = _ask_over_tcp(context, endpoint)
        else:
            frame = _ask_here(context, endpoint)
    if frame is None:
        raise NoDaemon(f"{endpoint}: the daemon does not answer within {ANSWER_S:g} s")
    try:
        reply = decode_daemon(frame)
    except BadMessage as error:
        raise DaemonError(f"{endpoint}: {error}") from error
    if not isinstance(reply, StatusReply):
        what = type(reply).__name__
        raise DaemonError(f"{endpoint}: the answer is {what}, expected a status")
    return reply


def _ask_over_tcp(context: Context, address: TcpAddress) -> bytes | None:
    check_reachable(address)
    with closing(TcpConnection(context, address)) as connection:
        connection.send(StatusRequest())
        frames = connection.receive(ANSWER_S)
        return bytes(frames[0]) if frames else None


def _ask_here(context: Context, endpoint: Endpoint) -> bytes | None:
    with connect(endpoint) as door, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(str(endpoint))
        dealer.send(encode(StatusRequest()))
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(door, zmq.POLLERR)  # its hang-up
        ready = dict(poller.poll(int(1000 * ANSWER_S)))
        if ready and dealer not in ready:
            raise NoDaemon(f"{endpoint}: the daemon went away")
        return dealer.recv() if ready else None


class Sockets:
    """Makes connections to peers.  `close` it after the last of them."""

    def __init__(self) -> None:
        self.context: Context = zmq.Context(io_threads=1)

    def connect(self, address: TcpAddress) -> TcpConnection:
        """A connection, for one request at a time.  Raises Refused: no keys for that address."""
        largest = 2 * MESSAGE_BYTES + GIVEN
        options = (zmq.MAXMSGSIZE, largest), (zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        return TcpConnection(self.context, address, options)

    def close(self) -> None:
        self.context.term()


def parse_either(text: str) -> Endpoint | TcpAddress:
    """The local or remote endpoint that `text` names.  Raises Refused."""
    return parse_tcp(text) if text.startswith(SCHEME) else parse_endpoint(text)
