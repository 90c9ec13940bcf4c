"""ZeroMQ in the daemon: a ROUTER in the event loop, and the one question that `status` asks."""

import asyncio
import os
from collections.abc import Callable

import zmq

from loaderd.endpoint import Endpoint, knock
from loaderd.errors import BadMessage, DaemonError, NoDaemon
from loaderd.protocol import Message, StatusReply, StatusRequest, decode_daemon, encode

ANSWER_MS = 5000
SEND_QUEUE = 100_000  # messages to one peer; a window of batches is far below
RECEIVE_QUEUE = 1000  # messages of one peer; then it waits
FRAME_BYTES = 1 << 30  # a peer that sends a larger one is cut off
BURST = 64  # messages taken before the loop may do other things
LINGER_MS = 200  # for what is queued at the end

Frame = bytes | memoryview
Receive = Callable[[bytes, list[Frame]], None]  # identity, frames


class Router:
    """A ROUTER socket driven by the running event loop; all methods belong to the loop's thread.

    libzmq's descriptor tells of edges only, and a send may eat one: after each send, and after an
    exception, the socket is looked at again.
    """

    def __init__(self, endpoint: Endpoint, receive: Receive) -> None:
        """`receive` is called in the loop for each message; what it raises goes to the loop."""
        self._receive = receive
        self._path = endpoint.path
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._looks = False  # a look at the socket is scheduled
        try:
            for option, value in (
                (zmq.SNDHWM, SEND_QUEUE),
                (zmq.RCVHWM, RECEIVE_QUEUE),
                (zmq.MAXMSGSIZE, FRAME_BYTES),
                (zmq.LINGER, LINGER_MS),
                (zmq.ROUTER_MANDATORY, 1),
            ):
                self._socket.setsockopt(option, value)
            old = os.umask(0o177)
            try:
                self._socket.bind(str(endpoint))
            finally:
                os.umask(old)
        except BaseException:
            self._socket.close()
            self._context.term()
            raise
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)
        self._look_soon()

    def send(self, identity: bytes, message: Message) -> bool:
        """Queue a message without waiting; False where the peer vanished or reads nothing."""
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH, EAGAIN; ENOTSOCK once closed
            return False
        finally:
            self._look_soon()
        return True

    def close(self) -> None:
        """Close after what is queued has gone, and remove the socket's file."""
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)

    def _look_soon(self) -> None:
        if not self._looks and not self._socket.closed:
            self._looks = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Take what has come, at most a burst of it."""
        self._looks = False
        for _ in range(BURST):
            if self._socket.closed:
                return
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frames: list[Frame] = []
            while self._socket.getsockopt(zmq.RCVMORE):
                frames.append(self._take(whole=not frames))
            try:
                self._receive(identity, frames)
            except Exception as error:
                context = {"message": "a message could not be handled", "exception": error}
                self._loop.call_exception_handler(context)
        self._look_soon()

    def _take(self, whole: bool) -> Frame:
        """The next frame of a message; arrays, which follow the message itself, are not copied."""
        if whole:
            return self._socket.recv(zmq.NOBLOCK)
        return self._socket.recv(zmq.NOBLOCK, copy=False).buffer


def ask_status(endpoint: Endpoint) -> StatusReply:
    """What the daemon at the endpoint says of itself.  Raises NoDaemon."""
    door = knock(endpoint)
    context = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(str(endpoint))
        dealer.send(encode(StatusRequest()))
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(door, zmq.POLLERR)  # its hang-up
        ready = dict(poller.poll(ANSWER_MS))
        if dealer not in ready:
            how = "went away" if ready else f"does not answer within {ANSWER_MS / 1000:g} s"
            raise NoDaemon(f"{endpoint}: the daemon {how}")
        return _status_of(decode_daemon(dealer.recv()), endpoint)
    except BadMessage as error:
        raise DaemonError(f"{endpoint}: {error}") from error
    finally:
        dealer.close()
        context.term()
        door.close()


def _status_of(reply: Message, endpoint: Endpoint) -> StatusReply:
    if not isinstance(reply, StatusReply):
        raise DaemonError(f"{endpoint}: the answer is {type(reply).__name__}, expected a status")
    return reply
