"""Who holds which session."""

import msgspec
import pytest

from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach
from loaderd.server.registry import MAX_SESSIONS, Caller, Peer, Registry
from tests.loaderd.samples import SAMPLES

A, B = Peer(Caller(b"a"), 1), Peer(Caller(b"b"), 1)


def request(number: int) -> Attach:
    return Attach(token=1, request=number)


def opened(registry: Registry, peer: Peer, number: int, session: int):
    """Open a session in a registry."""
    assert registry.begin(peer, request(number)) is None
    attached = msgspec.structs.replace(SAMPLES[1], request=number, session=session)
    registry.opened(peer, attached, "ann")
    return attached


def test_a_session_answers_to_its_own_identity():
    registry = Registry()
    opened(registry, A, 1, 10)
    assert registry.peer(10) == A
    assert registry.holds(A.caller, 10)
    assert not registry.holds(B.caller, 10)
    assert not registry.holds(A.caller, 11)
    assert not registry.holds(Caller(b"a", remote=True), 10)


def test_a_repetition_gets_the_first_answer_while_the_session_is_open():
    registry = Registry()
    attached = opened(registry, A, 1, 10)
    assert registry.begin(A, request(1)) == attached
    assert registry.begin(B, request(1)) is None  # another peer's request of the same number
    registry.close(10)
    assert registry.begin(A, request(1)) is None


def test_a_request_is_opening_until_it_is_answered():
    registry = Registry()
    assert not registry.is_opening(A, request(1))
    registry.begin(A, request(1))
    assert registry.is_opening(A, request(1))
    assert not registry.is_opening(A, request(2))
    registry.failed(A, request(1))
    assert not registry.is_opening(A, request(1))
    opened(registry, A, 1, 10)
    assert not registry.is_opening(A, request(1))


def test_a_token_has_the_sessions_of_all_its_identities():
    registry = Registry()
    opened(registry, A, 1, 10)
    opened(registry, B, 1, 11)
    opened(registry, Peer(Caller(b"c"), 2), 1, 12)
    assert registry.sessions_of(1) == [10, 11]
    registry.close(10)
    assert registry.sessions_of(1) == [11]
    assert registry.peer(10) is None


def test_sessions_being_opened_count_too():
    registry = Registry()
    for number in range(MAX_SESSIONS):
        registry.begin(A, request(number))
    with pytest.raises(Refused, match=f"{MAX_SESSIONS} sessions"):
        registry.begin(A, request(-1))
    registry.failed(A, request(0))
    assert registry.begin(A, request(-1)) is None
