"""Endpoints: what may be served, who may serve it, what is left behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loaderd.api.endpoint import Endpoint, claim, connect, parse_endpoint
from loaderd.api.errors import EndpointInUse, NoDaemon, Refused

HOLD = """
import sys
from loaderd.api.endpoint import claim, parse_endpoint
with claim(parse_endpoint(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(tmp_path / "d.sock")


def listen(path: Path, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    """A socket that listens at a path; its file stays when it is closed."""
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def test_an_endpoint_and_its_files():
    endpoint = parse_endpoint("ipc:///run/x.y")
    assert str(endpoint) == "ipc:///run/x.y"
    files = (endpoint.path, endpoint.door, endpoint.lock)
    assert [str(p) for p in files] == ["/run/x.y", "/run/x.y.door", "/run/x.y.lock"]


@pytest.mark.parametrize(
    "text",
    ["", "ipc://", "ipc://*", "ipc://@name", "ipc://here", "tcp://127.0.0.1:5555", "/run/x",
     "inproc://x", "ipc:///", "ipc:///x\0y", "ipc:/run/x"],
)  # fmt: skip
def test_other_endpoints_are_refused(text):
    with pytest.raises(Refused, match="expected ipc:///path"):
        parse_endpoint(text)


def test_a_path_too_long_for_a_socket_is_refused():
    assert parse_endpoint("ipc:///" + "x" * 101)
    with pytest.raises(Refused, match="its path has 103 bytes, a socket's can have 102"):
        parse_endpoint("ipc:///" + "x" * 102)


def test_nothing_is_left_after_a_claim(endpoint):
    with claim(endpoint):
        assert [p.name for p in endpoint.path.parent.iterdir()] == ["d.sock.lock"]
        listen(endpoint.door).close()
    assert list(endpoint.path.parent.iterdir()) == []


def test_a_second_claim_names_the_first_ones_process(endpoint):
    taken = pytest.raises(EndpointInUse, match=f"process {os.getpid()}")
    with claim(endpoint), taken, claim(endpoint):
        pass
    with claim(endpoint):
        pass


def test_a_killed_process_leaves_what_the_next_one_removes(endpoint):
    words = [sys.executable, "-c", HOLD, str(endpoint)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(EndpointInUse, match=f"process {process.pid}"), claim(endpoint):
            pass
        process.send_signal(signal.SIGKILL)
    assert endpoint.lock.exists()
    listen(endpoint.path, socket.SOCK_STREAM).close()
    listen(endpoint.door).close()
    with claim(endpoint):
        assert not endpoint.door.exists()
        assert not endpoint.path.exists()
    assert list(endpoint.path.parent.iterdir()) == []


def test_of_many_that_claim_at_once_one_gets_it(endpoint):
    """Every round somebody holds it alone, and what the last holder left does not confuse."""
    inside, maximum, refused = 0, 0, 0
    guard, barrier = threading.Lock(), threading.Barrier(8)

    def contend() -> None:
        nonlocal inside, maximum, refused
        for _ in range(50):
            barrier.wait(10)
            try:
                with claim(endpoint):
                    with guard:
                        inside += 1
                        maximum = max(maximum, inside)
                    with guard:
                        inside -= 1
            except EndpointInUse:
                with guard:
                    refused += 1

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert maximum == 1
    assert refused <= 50 * 7
    assert list(endpoint.path.parent.iterdir()) == []


@pytest.mark.parametrize("which", ["path", "door"])
def test_somebody_else_who_listens_is_left_alone(endpoint, which):
    path = getattr(endpoint, which)
    with listen(path, socket.SOCK_STREAM):
        with pytest.raises(EndpointInUse, match=str(path)), claim(endpoint):
            pass
        assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("which", ["path", "door", "lock"])
def test_a_file_of_somebody_elses_is_left_alone(endpoint, which):
    path = getattr(endpoint, which)
    path.write_text("important")
    with pytest.raises(EndpointInUse, match=f"{path}: something else"), claim(endpoint):
        pass
    assert path.read_text() == "important"


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(Refused, match="no such folder"), claim(Endpoint(tmp_path / "no" / "d")):
        pass


def test_connecting_to_nobody(endpoint):
    with pytest.raises(NoDaemon, match=r"No such file.*loaderd serve STORE --endpoint ipc://"):
        connect(endpoint)
    listen(endpoint.door).close()
    with pytest.raises(NoDaemon, match="Connection refused"):
        connect(endpoint)


def test_connecting_to_a_full_queue_does_not_wait(endpoint):
    with listen(endpoint.door):
        waiting = [connect(endpoint), connect(endpoint)]  # a queue of 1 holds two
        with pytest.raises(NoDaemon, match="temporarily unavailable"):
            connect(endpoint)
        for door in waiting:
            door.close()
