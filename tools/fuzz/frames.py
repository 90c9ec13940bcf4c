"""Messages to spoil, ways to spoil them, and what a daemon must make of the result."""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from blockstore.format import Manifest
from loaderd.api.errors import BadMessage, Refused
from loaderd.api.protocol import (
    Attach,
    Detach,
    Heartbeat,
    Hello,
    Ids,
    Message,
    Release,
    Start,
    StatusRequest,
    Taken,
    decode_client,
    encode,
)
from loaderd.api.requests import check_attach, check_start
from loaderd.sessions.resolve import resolve

# stand for numbers that only a connection knows; each is nine bytes on the wire
TOKEN, SESSION, VICTIM = 0x7E57_0000_0001, 0x7E57_0000_0002, 0x7E57_0000_0003
_PLACES = tuple(msgspec.msgpack.encode(n) for n in (TOKEN, SESSION, VICTIM))
_CUT = b"\xc1\xc1CUT"  # 0xc1 is in no MessagePack
MOST_FRAMES = 4
_IDS = b"".join(n.to_bytes(8, "little", signed=True) for n in (5, 3, 5, -1, 1 << 40))

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

    "BadMessage", "status-reply"; "" for what is never answered; "unexpected" for what has too
    many frames or a meaning over tcp alone; "?" for what depends on the rest.
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
            case Release() | Detach() | Ids():
                return ""
            case Hello() | Heartbeat() | Taken():
                return "unexpected"
            case Start():
                check_start(message)
            case Attach():
                check_attach(message)
                resolve(manifest, message, "all", max(1, message.ids))
    except Refused:
        return "?"
    return "?"
