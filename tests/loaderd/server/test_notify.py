"""systemd's notification socket."""

import socket

import pytest

from loaderd.server.notify import notify


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
