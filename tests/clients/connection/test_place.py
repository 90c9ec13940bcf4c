"""Waiting for a daemon, on a clock of our own."""

import pytest

from clients.connection.place import FIRST_S, MAX_S, Backoff


class Clock:
    """Time passes by sleeping only."""

    def __init__(self):
        self.time, self.sleeps = 100.0, []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.time += seconds


@pytest.mark.parametrize("seconds", [0.01, 5.0, 60.0])
def test_it_waits_so_long_and_ever_less_often(seconds):
    clock = Clock()
    backoff = Backoff(seconds, clock.now, clock.sleep)
    attempts = 0
    while backoff.wait():
        attempts += 1
        assert attempts < 1000
    assert sum(clock.sleeps) == pytest.approx(seconds)
    assert clock.sleeps[0] == pytest.approx(min(FIRST_S, seconds))
    assert max(clock.sleeps) <= MAX_S
    assert clock.sleeps[:-1] == sorted(clock.sleeps[:-1])


def test_time_counts_from_the_first_failure_whatever_takes_it():
    clock = Clock()
    backoff = Backoff(5, clock.now, clock.sleep)
    clock.time += 1000  # a run without a failure
    assert backoff.wait()
    clock.time += 5  # an attempt that hung
    assert not backoff.wait()


def test_without_seconds_it_does_not_wait():
    clock = Clock()
    assert not Backoff(0, clock.now, clock.sleep).wait()
    assert clock.sleeps == []
