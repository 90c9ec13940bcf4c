"""The daemon's shell: what clients send reaches the engine, and the other way round."""

import errno
import mmap
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import zmq

from blockstore.errors import CorruptBlock
from loaderd.api.errors import Refused
from loaderd.api.protocol import (
    Attach,
    Attached,
    Detach,
    ErrorReply,
    Ids,
    IdsWanted,
    Release,
    Start,
    StatusReply,
    StatusRequest,
    encode,
)
from loaderd.server import intake
from loaderd.server.daemon import REFUSALS_LOGGED, refusal
from loaderd.server.intake import PIECE
from loaderd.server.registry import MAX_SESSIONS
from loaderd.server.transport import MESSAGE_BYTES
from tests.loaderd.harness import WAIT_S, Client, Shell, client_of
from tests.loaderd.samples import SAMPLES


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A daemon that leaves no file and no unexpected error behind."""
    with Shell(tmp_path) as running:
        yield running
    assert list(tmp_path.iterdir()) == []
    assert not running.errors


@pytest.fixture
def client(shell: Shell) -> Iterator[Client]:
    """A client that has passed the door."""
    with client_of(shell) as connected:
        yield connected


def test_the_door_lends_the_arena_for_reading_only(shell, client):
    assert (client.welcome.num_slots, client.welcome.slot_bytes) == (2, 4096)
    shell.engine.arena.data[5000] = 77
    with mmap.mmap(client.fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert mapped[5000] == 77
    with pytest.raises(PermissionError):
        mmap.mmap(client.fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_all_files_are_the_owners_alone(shell):
    for path in (shell.endpoint.path, shell.endpoint.door, shell.endpoint.lock):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert shell.endpoint.lock.read_text() == f"{os.getpid()}\n"


def test_a_session_from_attach_to_detach(shell, client):
    attached = client.attach()
    assert isinstance(attached, Attached)
    assert shell.engine.seen()[0] == "attach"
    number = attached.session
    for message in (
        Start(session=number, run=1, epoch=0, step=0),
        Release(session=number, run=1, step=0, group=0),
    ):
        client.send(message)
        assert shell.engine.seen() == (type(message).__name__.lower(), message)
    client.send(Detach(session=number))
    client.send(Detach(session=number))  # safe to repeat
    assert shell.engine.seen() == ("detach", number)
    assert isinstance(client.ask(StatusRequest()), StatusReply)
    assert shell.engine.events.empty()


def test_what_the_engine_delivers_reaches_its_client_in_order(shell, client):
    number = client.attach().session
    sent = [ErrorReply(error="BatchFailed", message="x", session=number, step=i) for i in range(99)]
    for message in sent:
        shell.engine.deliver(number, message)
    assert [client.receive() for _ in sent] == sent


@pytest.mark.parametrize("count", [3, PIECE, PIECE + 1, 9 * PIECE + 5])
def test_numbers_of_seeds_come_in_pieces_as_they_are_asked_for(shell, client, count):
    ids = np.random.default_rng(count).integers(0, 1 << 60, count)
    assert isinstance(client.attach(ids.tobytes(), split=""), Attached)
    np.testing.assert_array_equal(shell.engine.ids, ids)
    assert shell.engine.borrowed == 0


def test_one_request_has_room_for_its_numbers_at_a_time(shell):
    """The next one's are asked for when the first has been served, or has left."""
    others = [Client(shell.endpoint) for _ in range(2)]
    for other in others:
        request = Attach(token=other.welcome.token, request=1, split="", ids=1)
        other.send(request)
    poller = zmq.Poller()
    for other in others:
        poller.register(other.dealer, zmq.POLLIN)
    ((dealer, _),) = poller.poll(WAIT_S * 1000)
    asked, waiting = sorted(others, key=lambda other: other.dealer is not dealer)
    assert isinstance(asked.receive(), IdsWanted)
    assert shell.engine.borrowed == 1
    asked.close()
    assert isinstance(waiting.receive(), IdsWanted)
    assert shell.engine.borrowed == 1
    waiting.send(Ids(request=1, first=0, numbers=bytes(8)))
    assert isinstance(waiting.receive(), Attached)
    waiting.close()


@pytest.mark.parametrize(
    "odd",
    [
        {"first": 1},
        {"numbers": bytes(8)},
        {"numbers": bytes(24)},
        {"numbers": bytes(15)},
        {"numbers": b""},
    ],
)
def test_numbers_that_nobody_asked_for_end_the_request(shell, client, odd):
    request = Attach(token=client.welcome.token, request=1, split="", ids=2)
    assert client.ask(request) == IdsWanted(request=1, first=0, count=2)
    piece = Ids(request=1, first=0, numbers=bytes(16))
    answer = client.ask(msgspec.structs.replace(piece, **odd))
    assert answer.error == "BadMessage"
    assert "as they were asked for" in answer.message
    while isinstance(client.attach(), ErrorReply):  # the answer to the request itself
        pass
    assert shell.engine.borrowed == 0


def test_a_client_that_sends_no_numbers_is_refused_in_the_end(shell, client, monkeypatch):
    monkeypatch.setattr(intake, "PIECE_S", 0.01)
    request = Attach(token=client.welcome.token, request=1, split="", ids=2)
    assert isinstance(client.ask(request), IdsWanted)
    assert "0 of 2 numbers came in time" in client.receive().message
    assert isinstance(client.attach(), Attached)
    assert shell.engine.borrowed == 0


def test_a_client_that_keeps_its_numbers_back_is_refused_when_others_wait(
    shell, client, monkeypatch
):
    """Whoever sends them is not held up for longer, nor refused."""
    monkeypatch.setattr(intake, "WAITED_S", 0.2)
    monkeypatch.setattr(intake, "PIECE_S", 2.0)  # if nobody waits behind the second one
    others = [Client(shell.endpoint) for _ in range(2)]
    for number, other in enumerate(others):
        other.send(Attach(token=other.welcome.token, request=number, split="", ids=1))
    ids = np.arange(PIECE + 1)
    assert isinstance(client.attach(ids.tobytes(), split=""), Attached)
    np.testing.assert_array_equal(shell.engine.ids, ids)
    for other in others:
        assert isinstance(other.receive(), IdsWanted)
        assert "0 of 1 numbers came in time" in other.receive().message
    assert shell.engine.borrowed == 0
    for other in others:
        other.close()


def test_what_can_never_be_served_does_not_wait_for_those_before_it(shell, client, monkeypatch):
    def check(request: Attach) -> None:
        if request.batch_size > 1000:
            raise Refused("at least --mem 7M")

    monkeypatch.setattr(shell.engine, "check", check)
    other = Client(shell.endpoint)
    request = Attach(token=other.welcome.token, request=1, split="", ids=1)
    assert isinstance(other.ask(request), IdsWanted)  # and nothing more comes of it
    reply = client.ask(
        Attach(token=client.welcome.token, request=1, split="", ids=1, batch_size=1001)
    )
    assert (reply.error, reply.message) == ("Refused", "at least --mem 7M")
    other.close()


def test_a_repeated_attach_opens_one_session(shell, client):
    shell.engine.may_attach.clear()
    request = Attach(token=client.welcome.token, request=1)
    client.send(request)
    client.send(request)
    assert shell.engine.seen()[0] == "attach"
    shell.engine.may_attach.set()
    first = client.receive()
    assert client.ask(request) == first
    assert shell.engine.events.empty()


def test_an_unknown_token_is_refused(shell, client):
    reply = client.attach(token=12345)
    assert (reply.error, reply.request) == ("Refused", 1)
    assert "token 12345" in reply.message


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        (Refused("fanout 0 at hop 1"), "Refused", "fanout 0 at hop 1"),
        (CorruptBlock("x.blk+4096: crc32c"), "Refused", "x.blk+4096: crc32c"),
        (OSError(errno.EIO, "Input/output error", "/x"), "Refused", "Input/output error"),
    ],
)
def test_an_attach_that_fails_is_answered(shell, client, error, name, text):
    shell.engine.failure = error
    reply = client.attach()
    assert (reply.error, reply.request) == (name, 1)
    assert text in reply.message
    shell.engine.failure = None
    assert isinstance(client.attach(), Attached)


def test_a_bug_in_the_engine_is_answered_and_reported(shell, client):
    number = client.attach().session
    shell.engine.failure = RuntimeError("boom")
    reply = client.ask(Start(session=number, run=4, epoch=0, step=0))
    assert (reply.error, reply.session, reply.run) == ("Refused", number, 4)
    assert "RuntimeError: boom" in reply.message
    shell.engine.failure = None
    assert isinstance(client.ask(StatusRequest()), StatusReply)
    assert [str(c["exception"]) for c in shell.errors] == ["boom"]
    shell.errors.clear()


def test_a_session_is_its_own_peers_alone(shell, client):
    number = client.attach().session
    shell.engine.seen()
    own, client.dealer = client.dealer, client.dial(shell.endpoint)
    client.send(Release(session=number, run=1, step=0, group=0))
    client.send(Detach(session=number))
    reply = client.ask(Start(session=number, run=1, epoch=0, step=0))
    assert (reply.error, reply.session) == ("SessionLost", number)
    assert shell.engine.events.empty()
    client.dealer.close()
    client.dealer = own


def test_a_hang_up_ends_all_sessions_of_its_token(shell, client):
    with client_of(shell) as other:
        numbers = [other.attach().session, other.attach().session]
        client.attach()
        for _ in range(3):
            assert shell.engine.seen()[0] == "attach"
        other.door.close()
        assert sorted(shell.engine.seen() for _ in numbers) == [("detach", n) for n in numbers]
    assert isinstance(client.ask(StatusRequest()), StatusReply)
    assert shell.engine.events.empty()


def test_a_client_that_leaves_while_it_is_attached(shell, client):
    shell.engine.may_attach.clear()
    with client_of(shell) as other:
        other.send(Attach(token=other.welcome.token, request=1))
        assert shell.engine.seen()[0] == "attach"
    while shell.call(shell.daemon._local.is_open, other.welcome.token):
        pass
    shell.engine.may_attach.set()
    assert shell.engine.seen() == ("detach", 1)


def test_a_vanished_dealer_costs_its_session_and_nothing_else(shell, client):
    number = client.attach().session
    assert shell.engine.seen()[0] == "attach"
    client.dealer.close(0)
    client.dealer = client.dial(shell.endpoint)
    while shell.engine.events.empty():  # until libzmq has noticed
        shell.engine.deliver(number, ErrorReply(error="BatchFailed", message="x"))
        client.ask(StatusRequest())
    assert shell.engine.seen() == ("detach", number)


def test_there_is_a_bound_on_sessions(shell, client):
    for _ in range(MAX_SESSIONS):
        client.attach()
    assert client.attach().error == "Refused"
    client.send(Detach(session=1))
    assert isinstance(client.attach(), Attached)


def test_odd_messages_are_answered(client):
    client.dealer.send(b"not a message")
    assert client.receive().error == "BadMessage"
    client.dealer.send_multipart([b"", encode(StatusRequest())])  # as a REQ socket frames it
    assert client.receive().error == "BadMessage"
    client.dealer.send(msgspec.msgpack.encode((1, {"kind": "status"})))
    assert "protocol 1, this side 5" in client.receive().message
    client.dealer.send_multipart([encode(StatusRequest()), b"x", b"y"])
    assert "too many" in client.receive().message
    client.send(Ids(request=7, first=0, numbers=bytes(8)))  # nobody asked for them: no answer
    client.dealer.send(encode(StatusRequest()) + bytes(MESSAGE_BYTES))
    assert "too long" in client.receive().message


def test_nothing_that_a_client_sends_ends_the_daemon(shell, client):
    """Messages of which most are spoilt in a few bytes, in one to three frames; seed 1."""
    random = Random(1)
    for _ in range(2000):
        frames = [bytearray(encode(m)) for m in random.choices(SAMPLES, k=random.randint(1, 3))]
        for frame in frames:
            for _ in range(random.randint(0, 3)):
                at = random.randrange(len(frame) + 1)
                frame[at : at + random.randint(0, 2)] = random.randbytes(random.randint(0, 2))
        client.dealer.send_multipart(frames)
    client.send(StatusRequest(request=4711))
    while not (isinstance(reply := client.receive(), StatusReply) and reply.request == 4711):
        pass
    assert shell.engine.events.empty()  # no token, no session: nothing went further


def test_refusals_do_not_fill_the_log(shell, client, caplog):
    for _ in range(500):
        client.dealer.send(b"not a message")
    for _ in range(500):
        assert client.receive().error == "BadMessage"
    lines = [r for r in caplog.records if r.getMessage() == "request refused"]
    seconds = 1 + lines[-1].created - lines[0].created
    assert 0 < len(lines) <= REFUSALS_LOGGED * (1 + seconds)
    assert shell.daemon.status().counters["requests_refused"] == 500


def test_what_a_client_that_left_had_asked_for_is_not_begun(shell, client):
    shell.engine.may_attach.clear()
    with client_of(shell) as other:
        for number in range(5):
            other.send(Attach(token=other.welcome.token, request=number))
        assert shell.engine.seen()[0] == "attach"
    while shell.call(shell.daemon._local.is_open, other.welcome.token):
        pass
    shell.engine.may_attach.set()
    assert shell.engine.seen() == ("detach", 1)
    assert isinstance(client.attach(), Attached)
    assert shell.engine.seen()[0] == "attach"
    assert shell.engine.events.empty()


def test_more_messages_than_a_burst_are_all_handled(shell, client):
    for i in range(500):
        client.send(StatusRequest(request=i))
    assert [client.receive().request for _ in range(500)] == list(range(500))


def test_where_the_door_is_somebody_listens(tmp_path, monkeypatch):
    """It gets its name last: a client between `bind` and `listen` would be turned away."""
    seen, listen = [], socket.socket.listen

    def look(listener, *words):
        if listener.type == socket.SOCK_SEQPACKET:
            seen.append((tmp_path / "d.sock.door").exists())
        listen(listener, *words)

    monkeypatch.setattr(socket.socket, "listen", look)
    with Shell(tmp_path) as shell, client_of(shell):
        assert seen == [False]
        assert not shell.endpoint.new_door.exists()


def test_noise_at_the_door_is_ignored(shell, client):
    client.door.send(b"hello")
    assert isinstance(client.attach(), Attached)


def test_the_door_outlives_a_shortage_of_descriptors(shell, monkeypatch):
    door = shell.daemon._local._listener
    listener = door._socket

    class Exhausted:
        def __getattr__(self, name):
            return getattr(listener, name)

        def accept(self):
            door._socket = listener
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("loaderd.server.listener.RETRY_S", 0.01)
    door._socket = Exhausted()
    with client_of(shell) as client:
        assert isinstance(client.attach(), Attached)
    assert [c["exception"].errno for c in shell.errors] == [errno.EMFILE]
    shell.errors.clear()


def test_a_drain_refuses_newcomers_hangs_up_and_removes_its_files(shell, client):
    number = client.attach().session
    assert shell.engine.seen()[0] == "attach"
    shell.engine.may_idle.clear()
    shell.stop()
    assert shell.engine.seen() == ("drain", None)
    reply = client.attach()
    assert (reply.error, reply.message) == ("ShuttingDown", "the daemon is shutting down")
    assert client.ask(StatusRequest()).draining
    last = ErrorReply(error="BatchFailed", message="late")
    shell.engine.deliver(number, last)  # a worker finishes what it has in hand
    shell.engine.may_idle.set()
    assert client.receive() == last
    assert client.hung_up()
    shell.join()
    assert list(shell.endpoint.path.parent.iterdir()) == []
    shell.engine.deliver(number, last)  # by then nobody listens, and nothing happens


def test_a_drain_waits_for_a_session_that_is_being_opened(shell, client):
    """What it reads by is closed afterwards: it would wait for a read that nobody does."""
    shell.engine.may_attach.clear()
    client.send(Attach(token=client.welcome.token, request=5))
    assert shell.engine.seen()[0] == "attach"
    shell.stop()
    assert shell.engine.seen() == ("drain", None)
    assert client.ask(StatusRequest()).draining
    shell._thread.join(0.3)
    assert shell._thread.is_alive()
    shell.engine.may_attach.set()
    shell.join()


def test_a_second_signal_ends_the_wait_for_workers(shell, client):
    shell.engine.may_idle.clear()
    shell.stop()
    assert shell.engine.seen() == ("drain", None)
    shell.hurry()
    assert client.hung_up()


def test_a_refusal_can_always_be_encoded():
    reply = refusal(Refused("/data/\udcff: not a store"), None)
    assert msgspec.msgpack.decode(encode(reply))[1]["message"] == "/data/\\udcff: not a store"
