"""Clients on other hosts: tokens, and leases by a clock that the test moves."""

import pytest

from loaderd.errors import Refused
from loaderd.protocol import LEASE_S
from loaderd.shell.registry import Caller
from loaderd.shell.visitors import MAX_VISITORS, Visitors

ANN, BOB = Caller(b"ann", remote=True), Caller(b"bob", remote=True)


def test_a_greeting_repeated_gets_the_same_token():
    visitors = Visitors()
    token = visitors.greet(ANN, "key", "ann", 0.0)
    assert visitors.greet(ANN, "key", "ann", 5.0) == token
    assert visitors.greet(BOB, "", "loopback", 0.0) != token
    found = visitors.get(token)
    assert found is not None
    assert (found.owner, found.heard) == ("ann", 5.0)


def test_a_lease_ends_without_a_sign_of_life():
    visitors = Visitors()
    token = visitors.greet(ANN, "key", "ann", 100.0)
    assert not visitors.is_silent(token, 100.0 + LEASE_S)
    assert visitors.is_silent(token, 100.1 + LEASE_S)
    assert visitors.heard(token, ANN, 110.0)
    assert not visitors.is_silent(token, 110.0 + LEASE_S)


def test_signs_of_life_of_others_and_late_ones_do_not_count():
    visitors = Visitors()
    token = visitors.greet(ANN, "key", "ann", 0.0)
    assert not visitors.heard(token, BOB, 9.0)
    assert not visitors.heard(token + 1, ANN, 9.0)
    visitors.forget(token)
    visitors.forget(token)
    assert not visitors.heard(token, ANN, 9.0)
    assert visitors.get(token) is None
    assert len(visitors) == 0


def test_there_are_so_many_at_most():
    visitors = Visitors()
    for i in range(MAX_VISITORS):
        visitors.greet(Caller(b"%d" % i, remote=True), "", "loopback", 0.0)
    with pytest.raises(Refused, match="the most that may be"):
        visitors.greet(ANN, "", "loopback", 0.0)
