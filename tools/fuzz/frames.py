"""Messages to spoil, the answers that a daemon must give, and a client that sends them."""

import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import zmq

from blockstore.format import Manifest
from blockstore.part import StorePart
from blockstore.store import Store
from loaderd.api.endpoint import Endpoint
from loaderd.api.errors import BadMessage, Refused
from loaderd.api.protocol import (
    Attach,
    Attached,
    ClientMessage,
    DaemonMessage,
    Detach,
    ErrorReply,
    Heartbeat,
    Hello,
    Ids,
    Message,
    Release,
    RowsWanted,
    Start,
    StatusRequest,
    Taken,
    Welcome,
    decode_client,
    decode_daemon,
    encode,
)
from loaderd.api.requests import check_attach, check_rows, check_start
from loaderd.api.tcp import TcpAddress
from loaderd.server.transport import parse_either
from loaderd.sessions.resolve import resolve
from tools.fuzz.values import change_shape, change_value, number

# Placeholders for numbers that only a connection knows; each is nine bytes on the wire.
TOKEN, SESSION, VICTIM = NAMED = 0x7E57_0000_0001, 0x7E57_0000_0002, 0x7E57_0000_0003
FINGERPRINT, DIGEST = "F" * 32, "D" * 32  # placeholders for a part's, known to its peers alone
_CUT = b"\xc1\xc1CUT"  # MessagePack never uses 0xc1
MAX_FRAMES = 4
_IDS = b"".join(n.to_bytes(8, "little", signed=True) for n in (5, 3, 5, -1, 1 << 40))
_ROWS = b"".join(n.to_bytes(8, "little") for n in (1, 2, 700, 701))
# Values of message fields that have no default.
_FIELDS: dict[str, Any] = {
    "token": TOKEN, "request": 1, "session": SESSION, "run": 1, "epoch": 0, "step": 0, "group": 0,
    "num_bytes": 1 << 40, "first": 0, "numbers": _IDS, "fingerprint": FINGERPRINT, "server": 1,
    "digest": DIGEST, "array": "nodes/node/features/x", "ids": _ROWS,
}  # fmt: skip
_ATTACHES: tuple[dict[str, Any], ...] = (
    {}, {"plan": "hyperbatch", "hyperbatch": 2, "window": 2}, {"owners": "all"},
    {"plan": "macrobatch", "macro_partitions": 2, "reuse": 2}, {"num_neighbors": (3, -1)},
    {"plan": "chunks", "num_neighbors": (), "operators": ("sym",), "hops": 1, "chunk": 64},
    {"plan": "rows", "num_neighbors": (), "labels": False}, {"split": "", "ids": len(_IDS) // 8},
    {"rank": 1, "world_size": 2, "shuffle": False, "frontier": "layer", "replace": True},
    {"owners": "all", "frontier": "layer", "home": {}}, {"split": "all", "edges": {}},
    {"split": "all", "edges": {"amount": 1.0, "negatives": "binary"}, "temporal": {}},
    {"labor": {}, "split": "valid", "return_e_id": True}, {"rows": {}, "fanouts": {"": (2,)}},
)  # fmt: skip


@cache
def base_messages() -> list[list[bytes]]:
    """Valid messages as lists of frames, from which spoiling begins."""
    found: list[Message] = []
    for kind in get_args(ClientMessage):
        usual = {f.name: _FIELDS[f.name] for f in msgspec.structs.fields(kind) if f.required}
        variants: list[dict[str, Any]] = [{}]
        if kind is Attach:
            variants = [{"num_neighbors": (2, 2), "batch_size": 50, **more} for more in _ATTACHES]
        if "session" in usual:
            variants += [{"session": VICTIM, "run": 1 << 40}]
        found += [msgspec.convert({**usual, **more}, kind) for more in variants]
    return [[encode(message)] for message in found]


def join(frames: Sequence[bytes]) -> bytes:
    """Join frames to one fuzzer input."""
    return _CUT.join(frames)


def split(data: bytes) -> list[bytes]:
    return data.split(_CUT, MAX_FRAMES - 1)


def bind(
    frames: Sequence[bytes], numbers: Sequence[int], part: StorePart | None = None
) -> list[bytes]:
    """Replace placeholders by what a connection knows.

    numbers   its token, a session of its own, a session of another client
    part      the part whose peer it is
    """
    known = {
        msgspec.msgpack.encode(name): b"\xcf" + number.to_bytes(8, "big")
        for name, number in zip(NAMED, numbers, strict=True)
    }
    if part is not None:
        known |= {FINGERPRINT.encode(): part.fingerprint.encode()}
        known |= {DIGEST.encode(): part.digest.encode()}
    found = list(frames)
    for name, meant in known.items():
        found = [frame.replace(name, meant) for frame in found]
    return found


def spoil(data: bytes, random: Random) -> bytes:
    """Change an input somewhere: in the fields of its message, or any bytes."""
    choice, frames = random.random(), split(data)
    if choice < 0.2:
        return _overwrite(data, random)
    if choice < 0.25:
        frames.insert(random.randrange(len(frames) + 1), random.randbytes(random.randrange(40)))
    elif choice < 0.35:
        frames = frames[:1]
    return join([_spoil_message(frames[0], random), *frames[1:]])


def _overwrite(data: bytes, random: Random) -> bytes:
    """Replace, insert and delete random bytes."""
    found = bytearray(data)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(found) + 1)
        found[at : at + random.randint(0, 2)] = random.randbytes(random.randint(0, 2))
    return bytes(found)


def _spoil_message(frame: bytes, random: Random) -> bytes:
    """Change a few values of a message; an unreadable one is replaced by a valid one first."""
    try:
        decode_client(frame)
        version, body = msgspec.msgpack.decode(frame)
    # the name of an unknown field may be invalid UTF-8, which msgspec 0.23 calls a DecodeError
    except (BadMessage, UnicodeDecodeError, msgspec.DecodeError):
        frame = random.choice(base_messages())[0]
        version, body = msgspec.msgpack.decode(frame)
    for _ in range(random.randint(1, 3)):
        body["extra"] = 0
        if random.random() < 0.85:
            change_value(body, random, NAMED)
        else:
            change_shape(body, random)
    if random.random() < 0.02:
        version = number(random, version)
    try:
        return msgspec.msgpack.encode((version, body))
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return frame


def verdict(frames: Sequence[bytes], manifest: Manifest) -> str:
    """The answer that a daemon must give, as far as the message alone determines it.

    "BadMessage", "status-reply"; "": no answer; "unexpected": perhaps a BadMessage, as it has too
    many frames, a meaning over TCP only, or numbers that were not asked for; "?": depends on more
    than the message.
    Runs all checks of a message that come before memory is allocated for it.
    """
    try:
        message = decode_client(frames[0])
    except BadMessage:
        return BadMessage.__name__
    if len(frames) > 1:
        return "unexpected"
    try:
        match message:
            case StatusRequest():
                return "status-reply"
            case Release() | Detach():
                return ""
            case Hello() | Heartbeat() | Taken() | Ids():
                return "unexpected"
            case Start():
                check_start(message)
            case RowsWanted():  # an array of any number of rows
                check_rows(message, 0, 1 << 32, 1)
                return "unexpected"
            case Attach():
                check_attach(message)
                resolve(manifest, message, "all", max(1, message.ids))
    except BadMessage:
        return "unexpected"
    except Refused:
        return "?"
    return "?"


ANSWER_S = 120.0
EVERY = 256  # messages between two checks of what came back
LIFE = 1024  # messages of a connection
_NONCE = 1 << 61
_GREETING = bytes.fromhex("ff00000000000000017f0300") + b"NULL".ljust(20, b"\0") + bytes(32)
# an error with the class of an unforeseen exception in it is a defect
UNFORESEEN = re.compile(r"the daemon failed|\b[A-Z]\w*(Error|Exception): ")


class Defect(Exception):
    """The daemon did something that it must not do."""


class Attacker:
    """Opens one connection after another, each with its own token and session."""

    def __init__(self, endpoint: str, store: Store, victim: int, random: Random) -> None:
        """`victim`: the session of another client at the daemon, which serves `store`."""
        self._endpoint, self._victim, self._random = parse_either(endpoint), victim, random
        self._manifest, self._part = store.manifest, store.part
        self._context = zmq.Context()
        self._nonce = _NONCE
        self.sent = 0
        self.noise = 0  # connections that did not speak the protocol at all
        self.replies: Counter[str] = Counter()
        self.longest_s = 0.0  # between a check and its answer
        self._connect()

    def send(self, data: bytes) -> None:
        """Send an input as one message.  Raises Defect."""
        frames = bind(split(data), (self._token, self._session, self._victim), self._part)
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
        """Wait for the answers to all messages so far, and check them.  Raises Defect."""
        begun = time.monotonic()
        self._nonce += 1
        self._dealer.send(encode(StatusRequest(request=self._nonce)))
        while getattr(self._receive(), "request", None) != self._nonce:
            pass
        self.longest_s = max(self.longest_s, time.monotonic() - begun)
        for kind, more in (
            # times 2: unexpected numbers also end the request that they belong to
            (BadMessage.__name__, 2 * self._expected["unexpected"]),
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
        """Close the connection: the daemon ends its session."""
        self._dealer.close(0)
        if self._listener is not None:
            self._listener.close()

    def _connect(self) -> None:
        self._expected: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._listener: socket.socket | None = None
        if isinstance(self._endpoint, Endpoint):
            self._listener = _open_socket(self._endpoint.door, socket.SOCK_SEQPACKET)
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        milliseconds = int(ANSWER_S * 1000)
        options = {zmq.LINGER: 0, zmq.RCVHWM: 0, zmq.RCVTIMEO: milliseconds}
        for option, value in (options | {zmq.SNDTIMEO: milliseconds}).items():
            self._dealer.setsockopt(option, value)
        self._dealer.connect(str(self._endpoint))
        if self._listener is None:
            self._dealer.send(encode(Hello(request=98)))
            welcome = self._receive()
        else:
            welcome = decode_daemon(self._listener.recv(1 << 16))  # drops the descriptor
        if not isinstance(welcome, Welcome):
            raise Defect(f"the daemon greets with {welcome}")
        self._token = welcome.token
        self._session = self._attach()

    def _attach(self) -> int:
        """Start a real session; 0 if other sessions use all memory."""
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
            message: DaemonMessage = decode_daemon(self._dealer.recv_multipart()[0])
        except zmq.Again:
            raise Defect(f"no answer within {ANSWER_S:g} s") from None
        except BadMessage as error:
            raise Defect(f"an answer cannot be read: {error}") from error
        self._found[_kind(message)] += 1
        if isinstance(message, ErrorReply) and UNFORESEEN.search(message.message):
            raise Defect(f"{message.error}: {message.message}")
        return message

    def _make_noise(self, data: bytes) -> None:
        """Send garbage to the ZeroMQ socket, and packets to the listener's socket."""
        if self._listener is not None:
            self._listener.send(data[:4096] or b"\0")
        for place, kind in _ports(self._endpoint):
            noise = self._random.choice((b"", _GREETING, _GREETING[: self._random.randrange(64)]))
            with _open_socket(place, kind) as connection, suppress(OSError):  # or closed already
                connection.sendall(noise + data[:4096] + self._random.randbytes(16))
            self.noise += 1


def _ports(endpoint: Endpoint | TcpAddress) -> list[tuple[Path | TcpAddress, int]]:
    """The sockets that anybody may connect to, with their types."""
    if isinstance(endpoint, TcpAddress):
        return [(endpoint, socket.SOCK_STREAM)]
    stream = endpoint.path, socket.SOCK_STREAM
    return [stream, stream, (endpoint.door, socket.SOCK_SEQPACKET)]


def _open_socket(place: Path | TcpAddress, kind: int) -> socket.socket:
    """Connect a plain socket."""
    if isinstance(place, TcpAddress):
        return socket.create_connection((place.host, place.port), ANSWER_S)
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(ANSWER_S)
    connection.connect(str(place))
    return connection


def _kind(message: Message) -> str:
    if isinstance(message, ErrorReply):
        return message.error
    tag: Any = type(message).__struct_config__.tag
    return str(tag)
