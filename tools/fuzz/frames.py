"""Messages to spoil, what a daemon must make of them, and a client that sends them."""

import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq

from blockstore.format import Manifest
from blockstore.part import StorePart
from loaderd.api.endpoint import Endpoint
from loaderd.api.errors import BadMessage, Refused
from loaderd.api.protocol import (
    Attach,
    Attached,
    DaemonMessage,
    Detach,
    ErrorReply,
    Heartbeat,
    Hello,
    HomePlacement,
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

# stand for numbers that only a connection knows; each is nine bytes on the wire
TOKEN, SESSION, VICTIM = 0x7E57_0000_0001, 0x7E57_0000_0002, 0x7E57_0000_0003
_PLACES = tuple(msgspec.msgpack.encode(n) for n in (TOKEN, SESSION, VICTIM))
FINGERPRINT, DIGEST = "F" * 32, "D" * 32  # of a part, which only its peers know
_CUT = b"\xc1\xc1CUT"  # 0xc1 is in no MessagePack
MOST_FRAMES = 4
_IDS = b"".join(n.to_bytes(8, "little", signed=True) for n in (5, 3, 5, -1, 1 << 40))
_ROWS = b"".join(n.to_bytes(8, "little") for n in (1, 2, 700, 701))

_NUMBERS = (
    0, 1, 2, -1, 3, 7, 50, 255, 256, 1000, 1 << 16, (1 << 16) + 1, 1 << 24, (1 << 24) + 1,
    (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    -(1 << 31), -(1 << 63), TOKEN, SESSION, VICTIM,
)  # fmt: skip
_WORDS = (
    "", "train", "all", "valid", "test", "auto", "minibatch", "hyperbatch", "macrobatch", "chunks",
    "rows", "new", "layer", "sym", "ppr", "node", "../../../etc/passwd", "/", "a" * 300, "\0",
    "\ud7ff\U0010ffff", "${HOME}", "%s%n",
)  # fmt: skip


def base_messages() -> list[list[bytes]]:
    """Messages, each as its frames, that a daemon takes: what spoiling begins with."""

    def attach(**fields: Any) -> Attach:
        filled: dict[str, Any] = {"num_neighbors": (2, 2), "batch_size": 50, "request": 1}
        return Attach(token=TOKEN, **filled | fields)

    messages: list[Message] = [
        attach(),
        attach(request=2, plan="hyperbatch", hyperbatch=2, window=2),
        attach(request=3, plan="macrobatch", macro_partitions=2, reuse=2),
        attach(request=4, plan="chunks", num_neighbors=(), operators=("sym",), hops=1, chunk=64),
        attach(request=5, plan="rows", num_neighbors=(), labels=False),
        attach(request=6, rank=1, world_size=2, shuffle=False, frontier="layer", replace=True),
        attach(request=7, num_neighbors=(3, -1), split="valid", return_e_id=True),
        attach(request=9, owners="all"),
        attach(request=9, owners="all", frontier="layer", home=HomePlacement()),
        attach(request=8, split="", ids=len(_IDS) // 8),
        Ids(request=8, first=0, numbers=_IDS),
        Start(session=SESSION, run=1, epoch=0, step=0),
        Start(session=SESSION, run=2, epoch=1, step=3, stride=2),
        Start(session=VICTIM, run=1 << 40, epoch=0, step=0),
        Release(session=SESSION, run=1, step=0, group=0),
        Release(session=SESSION, run=2, step=3, group=0),
        Release(session=VICTIM, run=1, step=0, group=0),
        Detach(session=SESSION),
        Detach(session=VICTIM),
        StatusRequest(request=9),
        Hello(request=10),  # these are for tcp
        Heartbeat(token=TOKEN),
        RowsWanted(
            request=11,
            fingerprint=FINGERPRINT,
            digest=DIGEST,
            server=1,
            array="nodes/node/features/x",
            ids=_ROWS,
        ),
        Taken(session=SESSION, run=1, num_bytes=1 << 40),
        Taken(session=VICTIM, run=1, num_bytes=1 << 62),
    ]
    return [[encode(message)] for message in messages]


def join(frames: Sequence[bytes]) -> bytes:
    """Frames as one input of a fuzzer."""
    return _CUT.join(frames)


def split(data: bytes) -> list[bytes]:
    return data.split(_CUT, MOST_FRAMES - 1)


def bind(frames: Sequence[bytes], token: int, session: int, victim: int) -> list[bytes]:
    """With the numbers of a connection: its token, a session of its own, one of another's."""
    found = list(frames)
    for place, number in zip(_PLACES, (token, session, victim), strict=True):
        wide = b"\xcf" + number.to_bytes(8, "big")
        found = [frame.replace(place, wide) for frame in found]
    return found


def spoil(data: bytes, random: Random) -> bytes:
    """An input changed somewhere: in the fields of its message, or any bytes."""
    frames = split(data)
    choice = random.random()
    if choice < 0.2:
        return _overwrite(data, random)
    if choice < 0.3 or (choice < 0.8 and not _readable(frames[0])):
        frames = list(random.choice(base_messages()))
    elif choice < 0.35:
        frames.insert(random.randrange(len(frames) + 1), random.randbytes(random.randrange(40)))
    elif choice < 0.4 and len(frames) > 1:
        del frames[random.randrange(len(frames))]
    return join([_spoil_message(frames[0], random), *frames[1:]])


def _overwrite(data: bytes, random: Random) -> bytes:
    """Bytes here and there are others, more or fewer."""
    found = bytearray(data)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(found) + 1)
        found[at : at + random.randint(0, 2)] = random.randbytes(random.randint(0, 2))
    return bytes(found)


def _readable(frame: bytes) -> bool:
    try:
        decode_client(frame)
    except BadMessage:
        return False
    return True


def _spoil_message(frame: bytes, random: Random) -> bytes:
    """One to three fields of a message are others; what cannot be read becomes a message."""
    try:
        version, body = msgspec.msgpack.decode(frame, type=tuple[int, dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        frame = random.choice(base_messages())[0]
        version, body = msgspec.msgpack.decode(frame, type=tuple[int, dict[str, Any]])
    for _ in range(random.randint(1, 3)):
        name = random.choice([*body, "extra"])
        if name == "kind" and random.random() < 0.8:
            continue
        match random.randrange(16):
            case 0:
                body.pop(name, None)
            case 1:
                body[name] = _value(random, 3)
            case _:
                body[name] = _like(body.get(name), random)
    if random.random() < 0.02:
        version = random.choice((0, 2, -1, 1 << 63))
    try:
        return msgspec.msgpack.encode((version, body))
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return frame


def _like(value: Any, random: Random) -> Any:
    """A value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            near = value + random.choice((-1, 1, 2, 100, -value))
            return near if random.random() < 0.6 else random.choice(_NUMBERS)
        case str():
            return random.choice(_WORDS)
        case list():
            return [_like(v, random) for v in value] * random.choice((1, 1, 2, 9, 0))
        case bytes() if random.random() < 0.7:  # numbers in another order, others, more or fewer
            numbers = [value[at : at + 8] for at in range(0, len(value), 8)]
            spoilt = random.choices([*numbers, random.randbytes(8)], k=random.randrange(6))
            return b"".join(spoilt if random.random() < 0.5 else sorted(set(spoilt)))
        case _:
            return _value(random, 2)


def _value(random: Random, depth: int) -> Any:
    match random.randrange(8 if depth else 6):
        case 0:
            return random.choice(_NUMBERS)
        case 1:
            return random.choice(_WORDS)
        case 2:
            return random.choice((None, True, False))
        case 3:
            return random.choice((0.0, -1.5, float("inf"), float("nan"), 1e308))
        case 4:
            return random.randbytes(random.randrange(20))
        case 5:
            return [random.choice((-1, 1, 2, 1 << 16))] * random.choice((0, 1, 3, 17, 1000))
        case 6:
            return [_value(random, depth - 1) for _ in range(random.randrange(4))]
        case _:
            return {random.choice(_WORDS): _value(random, depth - 1)}


def verdict(frames: Sequence[bytes], manifest: Manifest) -> str:
    """What a daemon must answer, as far as the message alone says so.

    "BadMessage", "status-reply"; "" for what is never answered; "unexpected" for what may be a
    BadMessage: it has too many frames, a meaning over tcp alone, or numbers that were not asked
    for; "?" for what depends on the rest.
    Walks through all that looks at a message before memory is taken for it.
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
            case RowsWanted():  # of as many rows as may be
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


def take_part(frames: Sequence[bytes], part: StorePart) -> list[bytes]:
    """With what only the peers of a part know."""
    known = ((FINGERPRINT, part.fingerprint), (DIGEST, part.digest))
    found = list(frames)
    for place, text in known:
        found = [frame.replace(place.encode(), text.encode()) for frame in found]
    return found


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

    def __init__(
        self,
        endpoint: str,
        manifest: Manifest,
        victim: int,
        random: Random,
        part: StorePart | None = None,
    ) -> None:
        """`victim`: a session of somebody else's; `part`: what the daemon serves to its peers."""
        self._endpoint, self._manifest, self._victim = parse_either(endpoint), manifest, victim
        self._random, self._part = random, part
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
        if self._part is not None:
            frames = take_part(frames, self._part)
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
            # twice: numbers that were not asked for also end the request that they belong to
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
        """The daemon ends what was attached."""
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
            welcome = decode_daemon(self._listener.recv(1 << 16))  # its descriptor is let go
        if not isinstance(welcome, Welcome):
            raise Defect(f"the daemon greets with {welcome}")
        self._token = welcome.token
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
        """Bytes for the sockets' own protocols, and packets at the listener's socket."""
        if self._listener is not None:
            self._listener.send(data[:4096] or b"\0")
        for place, kind in _ports(self._endpoint):
            noise = self._random.choice((b"", _GREETING, _GREETING[: self._random.randrange(64)]))
            with _open_socket(place, kind) as connection, suppress(OSError):  # or closed already
                connection.sendall(noise + data[:4096] + self._random.randbytes(16))
            self.noise += 1


def _ports(endpoint: Endpoint | TcpAddress) -> list[tuple[Path | TcpAddress, int]]:
    """Sockets that anybody may connect to, and of what kind they are."""
    if isinstance(endpoint, TcpAddress):
        return [(endpoint, socket.SOCK_STREAM)]
    stream = endpoint.path, socket.SOCK_STREAM
    return [stream, stream, (endpoint.door, socket.SOCK_SEQPACKET)]


def _open_socket(place: Path | TcpAddress, kind: int) -> socket.socket:
    """A connection to it."""
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
