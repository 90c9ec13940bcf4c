"""The shell towards other hosts: what it hears, what it refuses, whom it forgets."""

import threading

import numpy as np
import pytest
import zmq

from loaderd.api.errors import Refused
from loaderd.api.keys import AUTHORIZED
from loaderd.api.protocol import (
    Attach,
    Attached,
    Detach,
    ErrorReply,
    Heartbeat,
    Hello,
    Release,
    Start,
    StatusReply,
    StatusRequest,
    Taken,
    Welcome,
    decode_daemon,
    encode,
)
from loaderd.api.tcp import parse_tcp
from loaderd.memory.residency import BlockPool, GraphPool
from loaderd.memory.slots import SlotBroker
from loaderd.server.daemon import Access
from loaderd.server.remote import Listening
from tests.loaderd.harness import WAIT_S, Shell, client_of
from tests.remotes import free_address, introduce, make_keys


class Far:
    """A raw client on tcp: one DEALER after the other."""

    def __init__(self, address):
        self.address, self.context, self.dealers = address, zmq.Context(), []
        self.dealer = self.dial()

    def dial(self):
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        dealer.connect(self.address)
        self.dealers.append(dealer)
        return dealer

    def ask(self, message, dealer=None):
        """The answer; heartbeats between are not one."""
        dealer = dealer or self.dealer
        dealer.send(encode(message))
        while isinstance(answer := decode_daemon(dealer.recv()), Heartbeat):
            pass
        return answer

    def close(self):
        for dealer in self.dealers:
            dealer.close(0)
        self.context.term()


def give_slots(engine):
    """What senders take their buffers from."""
    pools = GraphPool([1], 2, 1), BlockPool([1], 2)
    engine.broker = SlotBroker(*pools, threading.Condition(), range(2), 0, str)


@pytest.fixture
def shell(tmp_path):
    listening = Listening(parse_tcp(free_address()))
    with Shell(tmp_path, Access(listening=listening)) as shell:
        give_slots(shell.engine)
        yield shell


@pytest.fixture
def far(shell):
    client = Far(shell.daemon.remote_address)
    yield client
    client.close()


def attach(far, token, dealer=None):
    return far.ask(Attach(token=token, request=1), dealer)


def test_a_greeting_lends_no_memory_and_may_be_repeated(far):
    welcome = far.ask(Hello())
    assert isinstance(welcome, Welcome)
    assert (welcome.num_slots, welcome.slot_bytes, welcome.stores) == (0, 0, {"x": "f00d"})
    assert far.ask(Hello()) == welcome
    assert far.ask(Hello(), far.dial()).token != welcome.token


def test_a_session_from_greeting_to_detach(shell, far):
    token, data = far.ask(Hello()).token, far.dial()
    attached = attach(far, token, data)
    assert isinstance(attached, Attached)
    assert shell.engine.seen()[0] == "attach"
    start = Start(session=attached.session, run=1, epoch=0, step=0)
    data.send(encode(start))
    assert shell.engine.seen() == ("start", start)
    data.send(encode(Release(session=attached.session, run=1, step=0, group=0)))
    data.send(encode(Taken(session=attached.session, run=1, num_bytes=1 << 60)))
    status = far.ask(StatusRequest(), data)
    assert isinstance(status, StatusReply)
    assert any("pieces" in entry.name for entry in status.ledger)
    data.send(encode(Detach(session=attached.session)))
    assert shell.engine.seen() == ("detach", attached.session)  # and no release before it


def test_tokens_of_others_and_of_nobody_are_refused(shell, far):
    for token in (0, far.ask(Hello()).token ^ 1, 2**63):
        assert "not one that was given" in attach(far, token, far.dial()).message
    with client_of(shell) as local:
        assert "not one that was given" in attach(far, local.welcome.token).message
        answer = local.attach(token=far.ask(Hello()).token)
        assert isinstance(answer, ErrorReply)


def test_what_is_said_over_tcp_alone_is_a_bad_message_elsewhere(shell):
    with client_of(shell) as local:
        for message in (Hello(), Heartbeat(token=1), Taken(session=1, run=1, num_bytes=1)):
            assert "expected over tcp only" in local.ask(message).message


def test_sessions_of_others_are_out_of_reach(shell, far):
    data = far.dial()
    session = attach(far, far.ask(Hello()).token, data).session
    assert far.ask(Start(session=session, run=1, epoch=0, step=0)).error == "SessionLost"
    far.dealer.send(encode(Detach(session=session)))
    far.dealer.send(encode(Taken(session=session, run=1, num_bytes=5)))
    assert isinstance(far.ask(StatusRequest()), StatusReply)
    assert shell.engine.seen()[0] == "attach"
    assert shell.engine.events.empty()


def test_a_lease_that_has_ended_is_told(far):
    assert far.ask(Heartbeat(token=5)).error == "SessionLost"
    token = far.ask(Hello()).token
    assert far.ask(Heartbeat(token=token), far.dial()).error == "SessionLost"  # another client's


def test_there_are_so_many_clients_at_most(far, monkeypatch):
    monkeypatch.setattr("loaderd.server.remote.MAX_CLIENTS", 1)
    token = far.ask(Hello()).token
    assert "the most that may be" in far.ask(Hello(), far.dial()).message
    assert far.ask(Hello()).token == token


def test_who_leaves_is_forgotten(shell):
    far = Far(shell.daemon.remote_address)
    session = attach(far, far.ask(Hello()).token, far.dial()).session
    far.close()
    assert shell.engine.seen()[0] == "attach"
    assert shell.engine.seen() == ("detach", session)


def test_who_is_silent_is_forgotten(shell, far, monkeypatch):
    """The lease ends by the clock; the connection stands."""
    monkeypatch.setattr("loaderd.server.remote.LEASE_S", 1.5)
    session = attach(far, far.ask(Hello()).token, far.dial()).session
    assert shell.engine.seen()[0] == "attach"
    assert shell.engine.seen() == ("detach", session)


def test_without_keys_only_loopback_is_listened_at(tmp_path):
    for text in ("tcp://0.0.0.0:7000", "tcp://*:7000", "tcp://[::]:7000", "tcp://10.0.0.5:7000"):
        with pytest.raises(Refused, match=r"only loopback is served.*loaderd keygen"):
            Listening(parse_tcp(text)).pair()
    keys = make_keys(tmp_path, "daemon", "client")
    listening = Listening(parse_tcp("tcp://0.0.0.0:7000"), keys["daemon"])
    with pytest.raises(Refused, match="authorized_keys: No such file"):
        listening.pair()
    introduce(keys["daemon"], keys["client"])
    assert None not in listening.pair()


def test_a_thread_takes_no_more_slots_than_it_may():
    pools = GraphPool([4], 16, 0), BlockPool([4], 16)
    broker = SlotBroker(*pools, threading.Condition(), range(16), 4, str)
    assert broker.available() == 14
    with broker.at_most(5):
        assert broker.available() == 5
        first = broker.take_run(3)
        assert broker.available() == 2
        for take in (broker.take_run, broker.take):
            with pytest.raises(
                Refused, match=r"3 arena slots are needed, 2 are left.*--user-share"
            ):
                take(3)
        broker.give([first])
        assert len(broker.take(3)) == 3
    assert broker.available() == 9
    assert len(set(np.ravel(broker.take(9)))) == 9


def test_messages_of_a_key_that_was_taken_out_are_not_heard(tmp_path, monkeypatch):
    """On a connection that stands: only a new one asks for its key."""
    keys = make_keys(tmp_path, "daemon", "known")
    introduce(keys["daemon"], keys["known"])
    authorized = keys["daemon"] / AUTHORIZED
    before = authorized.read_text()
    listening = Listening(parse_tcp(free_address()), keys["daemon"])
    with Shell(tmp_path, Access(listening=listening)) as shell:
        heard = []
        monkeypatch.setattr(shell.daemon, "receive", lambda caller, frames: heard.append(frames))

        def say(number):
            """As the router hands over what came, with the key of who sent it."""
            frames = [encode(StatusRequest(request=number))]
            shell.call(shell.daemon._remote._receive, b"peer", before.split()[0], frames)

        say(1)
        authorized.write_text("")
        say(2)
        authorized.unlink()
        say(3)
        authorized.write_text(before)
        say(4)
        assert heard == [[encode(StatusRequest(request=number))] for number in (1, 4)]
