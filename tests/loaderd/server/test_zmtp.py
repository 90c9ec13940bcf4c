"""The ROUTER of local clients: what libzmq's DEALERs say, and what others do to it."""

import asyncio
import contextlib
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from loaderd.api.protocol import ErrorReply, encode
from loaderd.server import zmtp
from loaderd.server.transport import FRAME_BYTES, MESSAGE_BYTES
from loaderd.server.zmtp import (
    MAX_CONNECTIONS,
    MIN_ROOM,
    PAUSE_BYTES,
    SMALL_BYTES,
    UNSENT_BYTES,
    LocalRouter,
)

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
END_S = 30.0
MORE, LONG, COMMAND = 1, 2, 4
HEAD = 9  # bytes of a long frame's


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame as libzmq writes it: long where it must be."""
    return long_frame(body, flags) if len(body) > 255 else bytes([flags, len(body)]) + body


def long_frame(body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BQ", flags | LONG, len(body)) + body


READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0", COMMAND)
HELLO = GREETING + READY
ANSWER_BYTES = 64 + 2 + 28  # greeting and READY of the router


class Shell:
    """A router in a thread of its own, with what it has received."""

    def __init__(self, path: Path, room: int = MIN_ROOM) -> None:
        self.path, self._room = path, room
        self.messages: list[tuple[bytes, list[Any]]] = []
        self.errors: list[dict[str, Any]] = []
        self.answer = ErrorReply(error="Refused", message="", request=0)
        self.answers = False
        self._came = threading.Condition()
        self._began = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self.loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.router = LocalRouter(self.path, self._receive, self._room)
        self._began.set()
        await self._end.wait()
        self.router.close()

    def _receive(self, identity: bytes, key: str, frames: list[Any]) -> None:
        assert key == ""
        with self._came:
            self.messages.append((identity, [bytes(f) for f in frames]))
            self._came.notify_all()
        if self.answers:
            self.router.send(identity, self.answer)

    def __enter__(self) -> "Shell":
        self._thread.start()
        assert self._began.wait(END_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.end()
        assert self.errors == []

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(END_S)
        assert not self._thread.is_alive()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call in the loop's thread."""

        async def run() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(END_S)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Until it holds in the loop's thread; each look lets the loop go round."""
        deadline = time.monotonic() + END_S
        while not self.call(holds):
            assert time.monotonic() < deadline

    def received(self, count: int) -> list[list[Any]]:
        """The frames of the first `count` messages, when they have come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.messages) >= count, END_S), self.messages
            return [frames for _, frames in self.messages[:count]]

    def connections(self) -> list[Any]:
        return list(self.router._connections.values())

    def in_bytes(self) -> int:
        """What is held of messages that are being received."""
        return sum(len(c.buffer) for c in self.connections())

    def out_bytes(self) -> int:
        return sum(len(c.out) for c in self.connections())

    def all_room(self) -> bool:
        return bool(self.router._room == max(self._room, MIN_ROOM)) and not self.router._waiting

    def is_alone(self) -> None:
        """Everybody has been cut off, and nothing is held of them."""
        self.wait_until(lambda: not self.connections())
        assert self.call(self.all_room)

    @contextlib.contextmanager
    def raw(self, hello: bytes = HELLO) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(self.path))
            peer.settimeout(END_S)
            if hello:  # of nothing, too, the system says that the other end has gone
                peer.sendall(hello)
            yield peer

    @contextlib.contextmanager
    def dealer(self) -> Iterator["zmq.Socket[bytes]"]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            for option, value in (
                (zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0),
                (zmq.RCVTIMEO, int(1000 * END_S)),
            ):  # fmt: skip
                dealer.setsockopt(option, value)
            dealer.connect(f"ipc://{self.path}")
            yield dealer


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path may be too long for a socket
        yield Path(folder) / "s"


@pytest.fixture
def shell(path: Path) -> Iterator[Shell]:
    with Shell(path) as shell:
        yield shell


def is_cut(peer: socket.socket) -> bool:
    """Read to the end; True: there was one."""
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(1 << 16):
            pass
    return True


def take(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = peer.recv(count - len(data))
        assert piece, f"{len(data)} of {count} bytes"
        data += piece
    return data


# -- what libzmq says ------------------------------------------------------------------------------

SIZES = [0, 1, 2, 254, 255, 256, 257, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, 1 << 16,
         MESSAGE_BYTES - 1, MESSAGE_BYTES]  # fmt: skip


def test_messages_of_every_size_come_whole_and_in_order(shell):
    random = Random(1)
    sent = [random.randbytes(size) for size in SIZES + random.sample(range(70_000), 50)]
    with shell.dealer() as dealer:
        for message in sent:
            dealer.send(message)
        assert shell.received(len(sent)) == [[m] for m in sent]
    shell.is_alone()


def test_many_dealers_at_once_with_less_room_than_they_need(shell):
    random, sent = Random(2), {}
    with contextlib.ExitStack() as stack:
        for number in range(40):
            dealer = stack.enter_context(shell.dealer())
            sent[number] = [
                struct.pack("<I", number) + random.randbytes(random.choice((9, 5000, 90_000)))
                for _ in range(5)
            ]
            for message in sent[number]:
                dealer.send(message)
        shell.received(200)
        found: dict[int, list[bytes]] = {}
        identities = set()
        for identity, (message,) in shell.messages:
            number = struct.unpack_from("<I", message)[0]
            found.setdefault(number, []).append(message)
            identities.add((identity, number))
        assert found == sent
        assert len(identities) == 40
    shell.is_alone()


def test_answers_of_every_size_come_back(shell):
    with shell.dealer() as dealer:
        dealer.send(b"")
        shell.received(1)
        for size in (0, 200, 256, 70_000, 1 << 20):
            reply = ErrorReply(error="Refused", message="x" * size, request=size)
            assert shell.call(shell.router.send, shell.messages[0][0], reply)
            assert dealer.recv() == encode(reply)


def test_a_dealer_that_comes_again_is_another_peer(path):
    with Shell(path) as first, first.dealer() as dealer:
        dealer.send(b"1")
        assert first.received(1) == [[b"1"]]
        first.end()
        with Shell(path) as second:
            dealer.send(b"2")  # libzmq connects again
            assert second.received(1) == [[b"2"]]


def test_messages_of_several_frames_or_too_long_are_none_at_all(shell):
    with shell.dealer() as dealer:
        dealer.send_multipart([b"", b"request"])  # as a REQ frames it
        dealer.send_multipart([bytes(10)] * 300)
        dealer.send_multipart([bytes(300_000), b"", bytes(5)])
        dealer.send(bytes(MESSAGE_BYTES + 1))
        dealer.send(bytes(FRAME_BYTES))
        dealer.send(b"last")
        assert shell.received(6) == [[], [], [], [], [], [b"last"]]


def test_a_ping_is_answered_and_other_commands_are_not(shell):
    with shell.raw() as peer:
        take(peer, ANSWER_BYTES)
        peer.sendall(frame(b"\x05ERROR\x03odd", COMMAND) + frame(READY, COMMAND))
        peer.sendall(frame(b"\x04PING\0\x01" + b"context", COMMAND) + frame(b"m"))
        assert take(peer, 14) == frame(b"\x04PONGcontext", COMMAND)
        assert shell.received(1) == [[b"m"]]


def test_libzmqs_heartbeats_hold_a_connection(path):
    with (
        Shell(path) as shell,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
        dealer.get_monitor_socket() as monitor,
    ):
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 10)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        dealer.connect(f"ipc://{path}")
        dealer.send(b"m")
        shell.received(1)
        assert not monitor.poll(0) or zmq.EVENT_DISCONNECTED not in events(monitor)
        dealer.disable_monitor()


def events(monitor: Any) -> set[int]:
    found = set()
    while monitor.poll(0):
        found.add(int(struct.unpack("=hi", monitor.recv_multipart()[0])[0]))
    return found


# -- however the bytes come ------------------------------------------------------------------------

bodies = st.one_of(
    st.binary(max_size=20),
    st.builds(lambda n, b: bytes([b]) * n, st.sampled_from(SIZES), st.integers(0, 255)),
)
# a stream of bytes, and what is received of it
parts = st.one_of(
    st.builds(lambda b: (frame(b), [[b]]), bodies),
    st.builds(lambda b: (long_frame(b), [[b]]), st.binary(max_size=20)),
    st.builds(
        lambda bs, b: (b"".join(frame(x, MORE) for x in bs) + frame(b), [[]]),
        st.lists(bodies, min_size=1, max_size=4), bodies,
    ),
    st.builds(lambda n: (frame(bytes(n)), [[]]), st.integers(MESSAGE_BYTES + 1, FRAME_BYTES)),
    st.just((frame(b"\x04PING\0\0", COMMAND), list[Any]())),
)  # fmt: skip


@given(st.lists(parts, max_size=8), st.lists(st.integers(1, 70_000), max_size=12), st.data())
def test_any_cut_of_a_stream_gives_the_same_messages(streams, sizes, data):
    stream = HELLO + b"".join(s for s, _ in streams) + frame(b"end")
    expected = [m for _, found in streams for m in found] + [[b"end"]]
    single = data.draw(st.integers(0, 400))  # bytes that come one by one at first
    with tempfile.TemporaryDirectory() as folder, Shell(Path(folder) / "s") as shell:
        with shell.raw(b"") as peer:
            at = 0
            for size in [1] * single + sizes:
                peer.sendall(stream[at : at + size])
                at += size
                shell.call(lambda: None)  # the loop goes round: it has read that
            peer.sendall(stream[at:])
            assert shell.received(len(expected)) == expected
        shell.is_alone()


def test_bytes_that_come_one_by_one(shell):
    sent = [b"", b"x", bytes(255), bytes(256), bytes(SMALL_BYTES + 1)]
    stream = HELLO + frame(sent[0]) + b"".join(map(frame, sent[1:])) + frame(b"", MORE) + frame(b"")
    with shell.raw(b"") as peer:
        for byte in stream:
            peer.sendall(bytes([byte]))
            shell.call(lambda: None)
        assert shell.received(6) == [*([m] for m in sent), []]
    shell.is_alone()


# -- who does not speak the protocol ---------------------------------------------------------------

ODD = {
    "another signature": b"GET / HTTP/1.1\r\n".ljust(64, b" "),
    "an older revision": GREETING[:10] + b"\x01" + GREETING[11:],
    "another mechanism": GREETING[:12] + b"NULLX".ljust(20, b"\0") + bytes(32),
    "no READY": GREETING + frame(b"m"),
    "another command first": GREETING + frame(b"\x05ERROR\0", COMMAND),
    "unknown flags": HELLO + b"\x08\0",
    "a command of two frames": HELLO + b"\x05\0",
    "a long command": HELLO + long_frame(b"", COMMAND)[:1] + struct.pack(">Q", SMALL_BYTES + 1),
    "a long frame": HELLO + struct.pack(">BQ", LONG, FRAME_BYTES + 1),
    "a frame without end": HELLO + struct.pack(">BQ", LONG | MORE, (1 << 64) - 1),
}


@pytest.mark.parametrize("stream", ODD.values(), ids=ODD)
def test_who_does_not_speak_the_protocol_is_cut_off(shell, stream):
    with shell.raw(stream) as peer:
        assert is_cut(peer)
        shell.is_alone()
    assert shell.messages == []


def test_garbage_harms_nobody_else(shell):
    random = Random(3)
    with shell.dealer() as dealer:
        dealer.send(b"before")
        shell.received(1)
        for _ in range(300):
            stream = bytearray(HELLO + frame(b"") * 3 + frame(bytes(5000)))
            for _ in range(random.randint(1, 4)):
                at = random.randrange(len(stream))
                stream[at : at + random.randint(0, 2)] = random.randbytes(random.randint(0, 3))
            with shell.raw(b"") as peer, contextlib.suppress(ConnectionError):
                peer.sendall(stream)
        shell.wait_until(lambda: len(shell.connections()) == 1)
        assert shell.call(shell.all_room)
        dealer.send(b"after")
        shell.wait_until(lambda: shell.messages[-1][1] == [b"after"])


def test_who_stalls_a_greeting_or_a_long_message_is_cut_off(shell, monkeypatch):
    with shell.raw(b"") as silent, shell.raw() as half, shell.raw(HELLO + b"\0\x05x") as short:
        half.sendall(frame(bytes(MESSAGE_BYTES))[:5000])
        shell.wait_until(lambda: not shell.all_room())
        monkeypatch.setattr(zmtp, "_STALLED_S", -1.0)
        shell.call(shell.router._poll)
        assert is_cut(silent)
        assert is_cut(half)
        short.sendall(b"1234")  # a short one may take its time
        assert shell.received(1) == [[b"x1234"]]
        assert shell.call(shell.all_room)


def test_who_reads_nothing_cannot_keep_room(shell, monkeypatch):
    shell.answers, shell.answer = True, ErrorReply(error="Refused", message="x" * PAUSE_BYTES)
    with shell.raw() as peer:
        peer.sendall(frame(bytes(MESSAGE_BYTES))[:5000])
        shell.wait_until(lambda: not shell.all_room())
        (connection,) = shell.call(shell.connections)
        while not shell.call(lambda: len(connection.out) > 16 * PAUSE_BYTES):
            assert shell.call(shell.router.send, connection.identity, shell.answer)
        monkeypatch.setattr(zmtp, "_STALLED_S", -1.0)
        shell.call(shell.router._poll)
        shell.is_alone()


def test_a_client_too_many_is_turned_away(shell, monkeypatch):
    assert MAX_CONNECTIONS == 1024
    monkeypatch.setattr(zmtp, "MAX_CONNECTIONS", 3)
    with shell.raw() as one, shell.raw(), shell.raw(), shell.raw(b"") as fourth:
        assert is_cut(fourth)
        one.sendall(frame(b"m"))
        assert shell.received(1) == [[b"m"]]
        one.close()
        shell.wait_until(lambda: len(shell.connections()) == 2)
        with shell.raw(HELLO + frame(b"n")):
            assert shell.received(2) == [[b"m"], [b"n"]]


def test_those_who_connect_while_the_loop_is_held_have_a_place(shell):
    """libzmq, told not to connect again, would give up."""
    held = threading.Event()
    shell.loop.call_soon_threadsafe(held.wait, END_S)
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(300):
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stack.enter_context(peer).setblocking(False)
                peer.connect(str(shell.path))
        finally:
            held.set()
        shell.wait_until(lambda: len(shell.connections()) == 300)


# -- what it may hold ------------------------------------------------------------------------------


class Most:
    """The most that a router held after anything that it read."""

    def __init__(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_bytes = self.out_bytes = 0
        readable = LocalRouter._readable

        def watched(router: LocalRouter, connection: Any) -> None:
            readable(router, connection)
            self.in_bytes = max(self.in_bytes, shell.in_bytes())
            self.out_bytes = max(self.out_bytes, shell.out_bytes())

        monkeypatch.setattr(LocalRouter, "_readable", watched)


def test_an_endless_message_is_read_past(shell, monkeypatch):
    maximum = Most(shell, monkeypatch)
    with shell.raw() as peer, shell.dealer() as dealer:
        for _ in range(50):
            peer.sendall(frame(bytes(FRAME_BYTES), MORE) + frame(b"", MORE) * 2000)
        dealer.send(bytes(5000))
        assert shell.received(1) == [[bytes(5000)]]
        peer.sendall(frame(b""))
        assert shell.received(2)[1] == []
    assert maximum.in_bytes <= 2 * (SMALL_BYTES + HEAD) + 5000
    shell.is_alone()


def test_many_who_stall_hold_no_more_than_the_room(path, monkeypatch):
    room, count = 1 << 20, 100
    with Shell(path, room) as shell, contextlib.ExitStack() as stack:
        maximum = Most(shell, monkeypatch)
        stream = frame(bytes(MESSAGE_BYTES))
        peers = [stack.enter_context(shell.raw()) for _ in range(count)]
        for peer in peers:
            peer.sendall(stream[:100_000])
        shell.wait_until(lambda: sum(c.wanted > 0 for c in shell.connections()) == count - 3)
        assert maximum.in_bytes <= room + count * (SMALL_BYTES + HEAD)
        with shell.dealer() as dealer:
            dealer.send(b"short")  # needs no room
            assert shell.received(1) == [[b"short"]]
        peers[50].close()  # one of those who wait
        for number, peer in enumerate(peers):
            if number != 50:  # in the order they came
                peer.sendall(stream[100_000:])
        assert shell.received(count) == [[b"short"], *([bytes(MESSAGE_BYTES)] for _ in peers[1:])]


def test_room_goes_to_who_came_first(shell):
    """A shorter one that comes later does not pass by a longer one, and all that fit go at once."""
    whole, sizes = frame(bytes(MESSAGE_BYTES)), (5000, 6000, 7000)
    with shell.raw() as holder, shell.raw() as long, contextlib.ExitStack() as stack:
        for number, peer in enumerate((holder, long)):
            peer.sendall(whole[:5000])
            shell.wait_until(
                lambda n=number: len(shell.router._waiting) == n and not shell.all_room()
            )
        for number, size in enumerate(sizes):
            stack.enter_context(shell.raw(HELLO + frame(bytes(size))[:4200]))
            shell.wait_until(lambda n=2 + number: len(shell.router._waiting) == n)
        holder.close()
        shell.wait_until(lambda: len(shell.router._waiting) == len(sizes))
        assert shell.call(lambda: [c.room for c in shell.connections()]) == [len(whole), 0, 0, 0]
        long.sendall(whole[5000:])
        assert shell.received(1) == [[bytes(MESSAGE_BYTES)]]
        shell.wait_until(lambda: not shell.router._waiting)
        rooms = shell.call(lambda: [c.room for c in shell.connections()])
        assert rooms == [0, *(HEAD + size for size in sizes)]
    shell.is_alone()


LEFT = {
    "nothing": b"",
    "half a greeting": GREETING[:30],
    "a greeting": GREETING,
    "no message": HELLO,
    "half a short frame": HELLO + b"\0\x05x",
    "the begin of a long frame": HELLO + frame(bytes(5000))[:4200],
    "half a long frame": HELLO + frame(bytes(MESSAGE_BYTES))[:90_000],
    "half of one that is too long": HELLO + frame(bytes(FRAME_BYTES))[:90_000],
    "half a message of two": HELLO + frame(bytes(300), MORE) + frame(bytes(300))[:100],
}


@pytest.mark.parametrize("stream", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("has_room", [True, False])
def test_who_leaves_gives_back_all(shell, stream, has_room):
    whole = frame(bytes(MESSAGE_BYTES))
    with shell.raw() as holder:
        if not has_room:
            holder.sendall(whole[:5000])
            shell.wait_until(lambda: not shell.all_room())
        with shell.raw(stream):
            shell.wait_until(lambda: len(shell.connections()) == 2)
        if not has_room:
            holder.sendall(whole[5000:])
            shell.wait_until(lambda: [bytes(MESSAGE_BYTES)] in [m for _, m in shell.messages])
        shell.wait_until(lambda: len(shell.connections()) == 1)
        assert shell.call(shell.all_room)
    shell.is_alone()


def test_who_reads_nothing_is_not_heard_until_it_reads(shell, monkeypatch):
    """And of what it said nothing is lost: as many answers come as there were messages."""
    maximum = Most(shell, monkeypatch)
    shell.answers, shell.answer = True, ErrorReply(error="Refused", message="x" * 1000)
    count, size = 3000, len(frame(encode(shell.answer)))
    with shell.raw() as peer, shell.dealer() as other:
        writer = threading.Thread(target=peer.sendall, args=(frame(b"") * count,))
        writer.start()
        shell.wait_until(lambda: shell.out_bytes() > PAUSE_BYTES)
        other.send(b"other")
        other.recv()
        assert shell.call(shell.out_bytes) <= PAUSE_BYTES + size
        take(peer, ANSWER_BYTES)
        assert take(peer, count * size) == frame(encode(shell.answer)) * count
        writer.join(END_S)
    assert maximum.out_bytes <= PAUSE_BYTES + size
    assert len(shell.messages) == count + 1


def test_who_takes_none_of_what_is_pushed_is_cut_off(shell):
    reply = ErrorReply(error="Refused", message="x" * 100_000)
    with shell.raw(HELLO + frame(b"m")) as peer:
        shell.received(1)
        identity, sent = shell.messages[0][0], 0
        while shell.call(shell.router.send, identity, reply):
            sent += 1
        assert sent * 100_000 > UNSENT_BYTES - 200_000
        assert not shell.call(shell.router.send, identity, reply)
        assert is_cut(peer)
    shell.is_alone()


def test_the_last_words_of_who_has_gone_are_heard(shell):
    """An answer cannot be sent any more: what came before the end is taken all the same."""
    shell.answers = True
    with shell.raw() as peer:
        take(peer, ANSWER_BYTES)
        held = threading.Event()
        shell.loop.call_soon_threadsafe(held.wait, END_S)
        peer.sendall(frame(bytes(300)) * 500)
        peer.close()
        held.set()
        assert shell.received(500) == [[bytes(300)]] * 500
    shell.is_alone()


def test_what_was_sent_last_still_goes_when_it_closes(shell):
    """Also what the socket did not take; a client that reads nothing does not stop that."""
    reply = ErrorReply(error="ShuttingDown", message="x" * 1_000_000)
    with shell.raw(HELLO + frame(b"1")) as peer, shell.raw(HELLO + frame(b"2")) as stalled:
        shell.received(2)
        found: list[bytes] = []

        def read() -> None:
            take(peer, ANSWER_BYTES)
            ended.wait(END_S)
            found.append(take(peer, len(frame(encode(reply)))))

        ended, reader = threading.Event(), threading.Thread(target=read)
        reader.start()
        for identity, _ in shell.messages:
            assert shell.call(shell.router.send, identity, reply)
        assert shell.call(shell.out_bytes) > 1_000_000
        shell.loop.call_soon_threadsafe(ended.set)
        shell.end()
        reader.join(END_S)
        assert found == [frame(encode(reply))]
        assert is_cut(stalled)


def test_an_error_while_a_message_is_handled_goes_to_the_loop(shell, monkeypatch):
    def boom(*_: object) -> None:
        raise ValueError("boom")

    with shell.dealer() as dealer:
        with monkeypatch.context() as patch:
            patch.setattr(shell.router, "_receive", boom)
            dealer.send(b"1")
            shell.wait_until(lambda: bool(shell.errors))
        dealer.send(b"2")
        assert shell.received(1) == [[b"2"]]
    assert [str(c["exception"]) for c in shell.errors] == ["boom"]
    shell.errors.clear()


def test_a_router_that_is_closed_listens_no_more(shell):
    shell.end()
    with pytest.raises(ConnectionRefusedError), shell.raw():
        pass
