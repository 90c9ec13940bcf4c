"""ZeroMQ in the daemon: a ROUTER in the event loop, and the one question that `status` asks."""

import asyncio
import contextlib
import os
from collections.abc import Callable

import zmq

from loaderd.door import ipc_path, knock
from loaderd.errors import NoDaemon
from loaderd.protocol import Message, StatusReply, StatusRequest, decode_daemon, encode

ANSWER_MS = 5000
QUEUE = 100_000  # messages to one peer; a window of batches is far below
Receive = Callable[[bytes, list[bytes]], None]  # identity, frames


class Router:
    """A ROUTER socket driven by the running event loop.

    Sends never wait: what a peer cannot take (it vanished, or its queue is full) is dropped, and
    its hang-up at the door ends its sessions.
    """

    def __init__(self, endpoint: str, receive: Receive) -> None:
        """`receive` is called in the loop for each message."""
        self._receive = receive
        self._path = ipc_path(endpoint)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.SNDHWM, QUEUE),
            (zmq.RCVHWM, QUEUE),
            (zmq.LINGER, 200),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self._socket.setsockopt(option, value)
        old = os.umask(0o177)
        try:
            self._socket.bind(endpoint)
        finally:
            os.umask(old)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, identity: bytes, message: Message) -> None:
        """Send from the loop's thread."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        # the descriptor signals edges, and sending may have eaten one
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Close after what is queued has gone, and remove the socket's file."""
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(identity, frames)


def ask_status(endpoint: str) -> StatusReply:
    """What the daemon at the endpoint says of itself.  Raises NoDaemon."""
    knock(endpoint).close()
    context = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send(encode(StatusRequest()))
        if not dealer.poll(ANSWER_MS):
            raise NoDaemon(f"{endpoint}: the daemon does not answer within {ANSWER_MS} ms")
        reply = decode_daemon(dealer.recv())
        if not isinstance(reply, StatusReply):
            raise NoDaemon(f"{endpoint}: the answer is {type(reply).__name__}, expected a status")
        return reply
    finally:
        dealer.close()
        context.term()
