"""A client that sends anything, and counts what comes back."""

import re
import socket
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import zmq

from blockstore.format import Manifest
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import BadMessage
from loaderd.api.protocol import (
    Attach,
    Attached,
    DaemonMessage,
    ErrorReply,
    Message,
    Release,
    Start,
    StatusRequest,
    Welcome,
    decode_daemon,
    encode,
)
from tools.fuzz.frames import bind, split, verdict

ANSWER_S = 120.0
EVERY = 256  # messages between two checks of what came back
LIFE = 1024  # messages of a connection
_NONCE = 1 << 61
_GREETING = bytes.fromhex("ff00000000000000017f0300") + b"NULL".ljust(20, b"\0") + bytes(32)
# what only a defect makes of an error: the class of an exception that nobody foresaw
UNFORESEEN = re.compile(r"the daemon failed|\b[A-Z]\w*(Error|Exception): ")


class Defect(Exception):
    """The daemon did what it must not."""


class Attacker:
    """Connections one after the other, each with a token and a session of its own."""

    def __init__(self, endpoint: str, manifest: Manifest, victim: int, random: Random) -> None:
        """`victim`: a session of somebody else's."""
        self._endpoint, self._manifest, self._victim = parse_endpoint(endpoint), manifest, victim
        self._random = random
        self._context = zmq.Context()
        self._nonce = _NONCE
        self.sent = 0
        self.noise = 0  # connections that do not speak the protocol at all
        self.replies: Counter[str] = Counter()
        self.longest_s = 0.0  # between a check and its answer
        self._connect()

    def send(self, data: bytes) -> None:
        """One message, of an input's frames.  Raises Defect."""
        frames = bind(split(data), self._token, self._session, self._victim)
        self._expected[verdict(frames, self._manifest)] += 1
        self._dealer.send_multipart(frames)
        self.sent += 1
        if self.sent % EVERY == 0:
            self.check()
        if self.sent % LIFE == 0:
            self._make_noise(data)
            self.close_connection()
            self._connect()

    def check(self) -> None:
        """Everything sent was taken, and answered as it must be.  Raises Defect."""
        begun = time.monotonic()
        self._nonce += 1
        self._dealer.send(encode(StatusRequest(request=self._nonce)))
        while getattr(self._receive(), "request", None) != self._nonce:
            pass
        self.longest_s = max(self.longest_s, time.monotonic() - begun)
        for kind, more in (
            (BadMessage.__name__, self._expected["unexpected"]),
            ("status-reply", 0),
        ):
            due = self._expected[kind] + (kind == "status-reply")
            if not due <= self._found[kind] <= due + more:
                raise Defect(f"{due} answers {kind!r} were due, {self._found[kind]} came")
        self.replies += self._found
        self._found.clear()
        self._expected.clear()

    def close(self) -> None:
        self.close_connection()
        self._context.destroy(0)

    def close_connection(self) -> None:
        """The daemon ends what was attached."""
        self._dealer.close(0)
        self._listener.close()

    def _connect(self) -> None:
        self._expected: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(ANSWER_S)
        self._listener.connect(str(self._endpoint.door))
        welcome = decode_daemon(self._listener.recv(1 << 16))  # its descriptor is let go
        if not isinstance(welcome, Welcome):
            raise Defect(f"the listener greets with {welcome}")
        self._token = welcome.token
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        milliseconds = int(ANSWER_S * 1000)
        options = {zmq.LINGER: 0, zmq.RCVHWM: 0, zmq.RCVTIMEO: milliseconds}
        for option, value in (options | {zmq.SNDTIMEO: milliseconds}).items():
            self._dealer.setsockopt(option, value)
        self._dealer.connect(str(self._endpoint))
        self._session = self._attach()

    def _attach(self) -> int:
        """A session that really runs; 0 where others have all memory."""
        request = Attach(
            token=self._token, request=99, num_neighbors=(2, 2), batch_size=50, window=2
        )
        self._dealer.send(encode(request))
        while True:
            match self._receive():
                case Attached(request=99, session=session):
                    break
                case ErrorReply(request=99):
                    return 0
        self._dealer.send(encode(Start(session=session, run=0, epoch=0, step=0)))
        self._dealer.send(encode(Release(session=session, run=0, step=0, group=0)))
        return session

    def _receive(self) -> DaemonMessage:
        try:
            message: DaemonMessage = decode_daemon(self._dealer.recv())
        except zmq.Again:
            raise Defect(f"no answer within {ANSWER_S:g} s") from None
        except BadMessage as error:
            raise Defect(f"an answer cannot be read: {error}") from error
        self._found[_kind(message)] += 1
        if isinstance(message, ErrorReply) and UNFORESEEN.search(message.message):
            raise Defect(f"{message.error}: {message.message}")
        return message

    def _make_noise(self, data: bytes) -> None:
        """Bytes for the sockets' own protocols, and packets at the listener's socket."""
        self._listener.send(data[:4096] or b"\0")
        for path, kind in (
            (self._endpoint.path, socket.SOCK_STREAM),
            (self._endpoint.path, socket.SOCK_STREAM),
            (self._endpoint.door, socket.SOCK_SEQPACKET),
        ):
            noise = self._random.choice((b"", _GREETING, _GREETING[: self._random.randrange(64)]))
            _connect(path, kind, noise + data[:4096] + self._random.randbytes(16))
            self.noise += 1


def _connect(path: Path, kind: int, noise: bytes) -> None:
    with socket.socket(socket.AF_UNIX, kind) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(path))
        try:
            connection.sendall(noise)
        except OSError:  # the connection was closed already
            return


def _kind(message: Message) -> str:
    if isinstance(message, ErrorReply):
        return message.error
    tag: Any = type(message).__struct_config__.tag
    return str(tag)
