"""The HTTP port, with a status that is made up."""

import contextlib
import json
import select
import socket
import threading
import urllib.error
import urllib.request

import pytest

from loaderd.api.errors import DaemonError
from loaderd.monitoring import server as sightserver
from loaderd.monitoring.server import MonitoringServer
from tests.loaderd.statuses import status

WAIT_S = 20


@pytest.fixture
def server():
    with MonitoringServer("127.0.0.1", 0, status) as running:
        yield running


def get(server, path="", host=None):
    request = urllib.request.Request(server.address + path, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return reply.headers, reply.read().decode()


def code(server, path, host=None):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, path, host)
    with caught.value:
        return caught.value.code


def test_the_page_asks_nobody_else(server):
    headers, page = get(server)
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "<svg" not in page or "http" not in page.replace("http://www.w3.org/2000/svg", "")
    for word in ("src=", "@import", "url(", "integrity", "//cdn"):
        assert word not in page


def test_metrics_and_status(server):
    headers, text = get(server, "metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "loaderd_batches_total 100.0" in text
    told = json.loads(get(server, "status.json?after=x")[1])
    assert told["status"]["sessions"][0]["session"] == 3
    assert told["every_s"] == sightserver.SAMPLE_S


def test_rates_come_once(server, monkeypatch):
    server._history.add(sightserver.StatusSample(1e12, status(uptime_s=1e9)))
    newest = json.loads(get(server, "status.json")[1])["rates"][-1]
    assert newest["at_s"] == 1e12
    assert json.loads(get(server, f"status.json?after={newest['at_s']}")[1])["rates"] == []


def test_what_is_refused(server):
    assert code(server, "../etc/passwd") == 404
    assert code(server, "metrics", host="evil.example:80") == 403
    assert get(server, "metrics", host="localhost:1")[1]
    assert get(server, "metrics", host="[::1]:1")[1]
    with pytest.raises(DaemonError, match="choose another one"):
        MonitoringServer("127.0.0.1", int(server.address.split(":")[2].strip("/")), status)


def test_a_daemon_that_does_not_answer():
    def silent():
        raise TimeoutError

    with MonitoringServer("127.0.0.1", 0, silent) as server:
        for path in ("metrics", "healthz", "readyz"):
            assert code(server, path) == 503


def test_a_daemon_that_drains_is_alive_and_not_ready(server):
    assert get(server, "healthz")[1] == "ok\n"
    assert get(server, "readyz")[1] == "ready\n"
    with MonitoringServer("127.0.0.1", 0, lambda: status(draining=True)) as draining:
        assert get(draining, "healthz")[1] == "ok\n"
        assert code(draining, "readyz") == 503


def connections(server, number):
    address = ("127.0.0.1", int(server.address.split(":")[2].strip("/")))
    return [socket.create_connection(address, 10) for _ in range(number)]


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.0\r\nX: y"])
def test_connections_that_never_finish_their_request_keep_nobody_out(server, said):
    held = connections(server, 200)
    try:
        for connection in held:
            with contextlib.suppress(OSError):  # it has been ended
                connection.send(said)
        for connection in held[: -sightserver.MAX_REQUESTS]:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
        for _ in range(20):
            assert "loaderd_batches_total" in get(server, "metrics")[1]
    finally:
        for connection in held:
            connection.close()


def test_requests_that_are_never_answered_keep_nobody_out():
    """Of the status: as when the daemon's loop stands still."""
    still, came = threading.Event(), threading.Semaphore(0)

    def wait():
        came.release()
        still.wait(WAIT_S)
        return status()

    with MonitoringServer("127.0.0.1", 0, wait) as server:
        held = connections(server, sightserver.MAX_REQUESTS)
        try:
            for connection in held:
                connection.send(b"GET /metrics HTTP/1.0\r\n\r\n")
            for _ in range(len(held) + 1):  # the thread that looks once a second asks, too
                assert came.acquire(timeout=WAIT_S)
            assert "<html" in get(server)[1]
            (ended,) = select.select(held, [], [], WAIT_S)[0]  # the first that was heard
            assert ended.recv(1) == b""
        finally:
            still.set()
            for connection in held:
                connection.close()
