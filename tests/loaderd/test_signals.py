"""Signals reach their receiver, at once or as soon as there is one."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from loaderd.signals import Interrupted, Signals, interrupt


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Both signals as they were, afterwards."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(n) for n in numbers]
    yield Signals()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_receiver_gets_each_signal(signals, number):
    got = []
    with signals.to(lambda: got.append(1)):
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert len(got) == 2


def test_a_signal_without_a_receiver_waits_for_one(signals):
    signal.raise_signal(signal.SIGTERM)
    got = []
    with signals.to(lambda: got.append(1)):
        assert len(got) == 1
    with signals.to(lambda: got.append(2)):
        assert len(got) == 1


def test_work_is_broken_off_and_later_signals_wait(signals):
    with pytest.raises(Interrupted), signals.to(interrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)


BROKEN_OFF = """
import contextlib, signal
from loaderd.signals import Interrupted, Signals, interrupt
with contextlib.suppress(Interrupted), Signals().to(interrupt):
    exec("signal.raise_signal(signal.SIGTERM)")
"""


def test_work_that_is_broken_off_inside_an_exec_leaves_the_exit_code_alone():
    done = subprocess.run([sys.executable, "-c", BROKEN_OFF], check=False)
    assert done.returncode == 0
