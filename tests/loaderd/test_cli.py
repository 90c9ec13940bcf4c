"""The `loaderd` command, with the real engine, in processes of their own."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import NoDaemon
from loaderd.api.protocol import (
    Attach,
    Attached,
    BatchReady,
    Detach,
    Release,
    Start,
    StatusReply,
    StatusRequest,
)  # fmt: skip
from loaderd.cli.commands import app
from loaderd.server import transport
from loaderd.server.transport import ask_status
from tests import processes
from tests.daemons import ROOT, spawn, stop, until
from tests.loaderd.harness import WAIT_S, Client, Shell

fresh = pytest.mark.usefixtures("fresh_processes")

CLIENT = """
import sys
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.protocol import Start
from tests.loaderd.harness import Client
client = Client(parse_endpoint(sys.argv[1]))
session = client.attach(num_neighbors=(5, 5), batch_size=100).session
client.send(Start(session=session, run=1, epoch=0, step=0))
print(client.receive().step, flush=True)
sys.stdin.read()
"""


def run(*words: object) -> "subprocess.CompletedProcess[str]":
    """A command of ours, to its end."""
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def store(small_graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the small graph, in blocks that make some hundred."""
    path = tmp_path_factory.mktemp("stores") / "small"
    made = run("preprocess", "ingest", small_graph, path, "--block-size", "16K")
    assert made.returncode == 0, made.stderr
    return path


@pytest.fixture(scope="module")
def shared(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a daemon that several tests use."""
    folder = tmp_path_factory.mktemp("run")
    endpoint = f"ipc://{folder}/d.sock"
    with processes.fresh():
        process = spawn(store, endpoint, "--mem", "64M", "--workers", "2")
    yield endpoint
    assert stop(process) == 0
    assert list(folder.iterdir()) == []


@pytest.fixture
def client(shared: str) -> Iterator[Client]:
    connected = Client(parse_endpoint(shared))
    yield connected
    connected.close()


def open_sessions(endpoint: str) -> int:
    return len(ask_status(parse_endpoint(endpoint)).sessions)


def test_a_dry_run_prints_the_ledger_and_takes_nothing(store, tmp_path):
    endpoint = f"ipc://{tmp_path}/d.sock"
    result = run("loaderd", "serve", store, "--mem", "1T", "--endpoint", endpoint, "--dry-run")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert re.match(r"name +size  basis$", lines[0])
    assert re.match(r"total +\S+  of --mem 1T$", lines[-1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_daemon_that_is_in_use(store, tmp_path, number):
    endpoint = f"ipc://{tmp_path}/d.sock"
    process = spawn(store, endpoint, "--mem", "64M", "--workers", "2")
    client = Client(parse_endpoint(endpoint))
    session = client.attach(num_neighbors=(5, 5), batch_size=10).session
    client.send(Start(session=session, run=1, epoch=0, step=0))
    assert isinstance(client.receive(), BatchReady)
    process.send_signal(number)
    assert client.hung_up()
    client.close()
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert all(" INFO " in line for line in errors.splitlines()), errors
    assert list(tmp_path.iterdir()) == []


@fresh
def test_a_signal_while_memory_is_taken(store, tmp_path):
    endpoint = parse_endpoint(f"ipc://{tmp_path}/d.sock")
    words = [sys.executable, "-m", "loaderd", "serve", store, "--endpoint", str(endpoint)]
    with subprocess.Popen([*words, "--mem", "64M"], cwd=ROOT, stderr=subprocess.PIPE) as process:
        until(endpoint.lock.exists, "no lock")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, b"")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_hangs_does_not_hold_up_the_end(store, tmp_path):
    endpoint = f"ipc://{tmp_path}/d.sock"
    words = ["serve", str(store), "--endpoint", endpoint, "--mem", "64M"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loaderd.hanging", *words],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving")
    assert stop(process) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_start_line_and_the_files(store, tmp_path):
    endpoint = f"ipc://{tmp_path}/d.sock"
    words = [sys.executable, "-m", "loaderd", "serve", str(store), "--endpoint", endpoint]
    process = subprocess.Popen(
        [*words, "--mem", "64M"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(
        rf"serving {store} \(fingerprint \w+\) at {endpoint}, budget 64M, "
        r"(O_DIRECT by .*|buffered.*)\n",
        line,
    )
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("d.sock", "d.sock.door", "d.sock.lock"), 0o600)
    assert stop(process) == 0


def test_a_reader_of_the_start_line_that_left_does_not_matter(store, tmp_path):
    endpoint = parse_endpoint(f"ipc://{tmp_path}/d.sock")
    words = [sys.executable, "-m", "loaderd", "serve", store, "--endpoint", str(endpoint)]
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [*words, "--mem", "64M"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    until(endpoint.door.exists, "no door")
    assert ask_status(endpoint).pid == process.pid
    assert stop(process) == 0


def test_status_for_people_and_for_scripts(shared, client):
    attached = client.attach(num_neighbors=(5,), batch_size=50)
    text = run("loaderd", "status", "--endpoint", shared).stdout
    assert "split:train" in text
    assert "bytes_read" in text
    told = json.loads(run("loaderd", "status", "--endpoint", shared, "--json").stdout)
    assert told["kind"] == "status-reply"
    assert attached.session in [s["session"] for s in told["sessions"]]
    assert told["stores"][0]["fingerprint"] == attached.resolved.fingerprint
    client.send(Detach(session=attached.session))


def test_a_killed_client_has_its_sessions_closed(shared):
    words = [sys.executable, "-c", CLIENT, shared]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        assert open_sessions(shared) == 1
        process.kill()
    until(lambda: open_sessions(shared) == 0, "the session is still open")


def test_an_epoch_through_the_shell(client):
    """Every step once and in order, each released, then a second epoch from its middle."""
    attached = client.attach(num_neighbors=(5, 5), batch_size=100)
    session, steps = attached.session, []
    client.send(Start(session=session, run=1, epoch=0, step=0))
    for run_number, first in ((1, 0), (2, 4)):
        if run_number == 2:
            client.send(Start(session=session, run=2, epoch=1, step=first))
        for step in range(first, attached.num_steps):
            ready = client.receive()
            steps.append((ready.run, ready.epoch, ready.step))
            assert ready.rows.last
            client.send(Release(session=session, run=ready.run, step=step, group=0))
    wanted = [(1, 0, s) for s in range(attached.num_steps)]
    assert steps == wanted + [(2, 1, s) for s in range(4, attached.num_steps)]


def test_whatever_is_asked_for_is_answered(client):
    """Attaches of which most have an odd field or two; seed 2.  None is a failure of the daemon."""
    random = Random(2)
    numbers = (-1, 0, 1, 5, 1000, 2**31, 2**63 - 1, 2**64 - 1)
    odd = {
        "num_neighbors": lambda: tuple(random.choices(numbers, k=random.choice((0, 1, 2, 20)))),
        "split": lambda: random.choice(("all", "", "nope", "\0", "../x")),
        "fanouts": lambda: random.choice(({"nodes__to__nodes": (5, 5)}, {"x": (5,)}, {"": ()})),
        "seed_type": lambda: random.choice(("node", "nodes", "\ud7ff")),
        "plan": lambda: random.choice(("minibatch", "x")),
        "return_e_id": lambda: True,
    } | dict.fromkeys(
        ("batch_size", "seed", "rank", "world_size", "window"), lambda: random.choice(numbers)
    )
    attached = 0
    for request in range(400):
        fields = {"num_neighbors": (5, 5)}
        fields |= {name: odd[name]() for name in odd if random.random() < 0.1}
        more = [random.randbytes(random.choice((0, 7, 8, 80)))] if random.random() < 0.1 else []
        reply = client.ask(Attach(token=client.welcome.token, request=request, **fields), *more)
        assert reply.request == (-1 if more else request)  # nothing of several frames is kept
        if isinstance(reply, Attached):
            attached += 1
            number = reply.session
            reply = client.ask(Start(session=number, run=1, epoch=random.choice(numbers), step=0))
            client.send(Detach(session=number))
            client.send(StatusRequest(request=request))
            while not isinstance(client.receive(), StatusReply):  # batches on their way
                pass
        if not isinstance(reply, BatchReady):
            assert reply.error == ("BadMessage" if more else "Refused"), (fields, reply)
            assert "the daemon failed" not in reply.message, (fields, reply)
    assert 40 < attached < 360


def test_bad_commands_are_refused_in_one_line(store, tmp_path):
    for words in (
        ("serve", store, "--endpoint", "tcp://127.0.0.1:5000"),
        ("serve", store, "--endpoint", f"ipc://{tmp_path}/no/d.sock"),
        ("serve", store, "--endpoint", f"ipc://{tmp_path}/d.sock", "--mem", "lots"),
        ("status", "--endpoint", f"ipc://{tmp_path}/d.sock"),
    ):
        result = CliRunner().invoke(app, [str(w) for w in words])
        assert result.exit_code == 2, result
        assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
    for words in (
        (),
        ("serve",),
        ("sing",),
        ("serve", store, "--endpoint", "x", "--workers", "-1"),
    ):
        assert CliRunner().invoke(app, [str(w) for w in words]).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_idle_daemon_is_light(shared):
    """The arena is shared memory; what stays is the interpreter, its libraries and the tables."""
    pid = ask_status(parse_endpoint(shared)).pid
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert found is not None
    assert int(found[1]) < 200 << 10


def test_a_daemon_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "ANSWER_S", 0.05)
    with Shell(tmp_path) as shell:
        shell.engine.may_idle.clear()
        hangs = threading.Event()
        shell.loop.call_soon_threadsafe(lambda: hangs.set() or shell.engine.may_idle.wait())
        assert hangs.wait(WAIT_S)
        with pytest.raises(NoDaemon, match=r"does not answer within 0\.05 s"):
            ask_status(shell.endpoint)
        shell.engine.may_idle.set()
