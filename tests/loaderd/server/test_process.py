"""Signals reach their receiver, at once or as soon as there is one; systemd is told of states."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from loaderd.server.process import Signals, notify

WAIT_S = 20.0


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


def test_a_signal_that_another_thread_catches_wakes_the_loop(signals):
    """As does one that comes just before the loop goes to sleep: it interrupts nothing either."""
    received, woken = threading.Event(), []

    def catch(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        time.sleep(0.2)  # the loop sleeps by then
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        woken.append(received.wait(WAIT_S))
        loop.call_soon_threadsafe(stop.set)

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        thread = threading.Thread(target=catch, args=(loop, stop))
        with signals.waking(loop), signals.to(received.set):
            thread.start()
            await stop.wait()
        thread.join()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        asyncio.run(serve())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert woken == [True]


@pytest.mark.parametrize("abstract", [False, True])
def test_states_are_one_datagram(tmp_path, monkeypatch, abstract):
    name = f"@{tmp_path.name}-notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        assert notify("READY=1", "STATUS=serving")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"


def test_without_a_manager_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "tcp:nonsense")
    assert not notify("READY=1")
