"""Running it: options by file and environment, readiness, the port, `top`, `doctor`, the log."""

import configparser
import io
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from typer.testing import CliRunner

from loaderd.api.endpoint import parse_endpoint
from loaderd.api.protocol import Attach, LedgerEntry, Release, Start
from loaderd.cli.commands import app
from loaderd.monitoring.rates import StatusSample, compare
from loaderd.monitoring.top import decimal, frame
from tests.daemons import ROOT, stop
from tests.loaderd.harness import Client
from tests.loaderd.statuses import MS, STORE, later, status
from tools.bench.setup import free_port

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


class Running(NamedTuple):
    endpoint: str
    page: str
    notified: socket.socket
    log: Path
    process: "subprocess.Popen[str]"


@pytest.fixture(scope="module")
def store(small_graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the small graph."""
    path = tmp_path_factory.mktemp("stores") / "small"
    words = [sys.executable, "-m", "preprocess", "ingest", str(small_graph), str(path)]
    subprocess.run([*words, "--block-size", "16K"], cwd=ROOT, check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def daemon(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A daemon by file and environment: the file's --mem loses, the rest of it counts."""
    folder = tmp_path_factory.mktemp("run")
    endpoint, port = f"ipc://{folder}/d.sock", free_port()
    config, log = folder / "c.toml", folder / "log"
    config.write_text(
        f'store = "{store}"\nendpoint = "{endpoint}"\nmem = "1K"\nworkers = 1\n'
        f'metrics-port = {port}\nlog-format = "json"\n'
    )
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(folder / "notify"))
    manager.settimeout(30)
    environment = os.environ | {"LOADERD_MEM": "64M", "NOTIFY_SOCKET": str(folder / "notify")}
    with log.open("wb") as errors, manager:
        process = subprocess.Popen(
            [sys.executable, "-m", "loaderd", "serve", "--config", str(config), "--workers", "2"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        assert "budget 64M" in process.stdout.readline(), log.read_text()
        yield Running(endpoint, f"http://127.0.0.1:{port}/", manager, log, process)
        assert stop(process) == 0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


def run_epoch(endpoint: str) -> tuple[Client, int]:
    """A client that has taken an epoch, its session still open; rows it was handed."""
    client = Client(parse_endpoint(endpoint))
    attached = client.attach(num_neighbors=(5, 5), batch_size=100)
    client.send(Start(session=attached.session, run=1, epoch=0, step=0))
    rows = 0
    for step in range(attached.num_steps):
        rows += sum(client.receive().nodes_per_hop)
        client.send(Release(session=attached.session, run=1, step=step, group=0))
    return client, rows


def test_a_daemon_shows_what_it_does(daemon):
    """Readiness, metrics, status.json, top and log of one epoch."""
    said = daemon.notified.recv(4096).decode().splitlines()
    assert said[0] == "READY=1"
    client, rows = run_epoch(daemon.endpoint)
    try:
        families = text_string_to_metric_families(get(f"{daemon.page}metrics"))
        found = {s.name: s.value for f in families for s in f.samples}
        assert found["loaderd_workers"] == 2  # the command line's
        assert found["loaderd_session_rows_total"] == found["loaderd_rows_total"] == rows
        assert found["loaderd_edges_total"] == found["loaderd_session_edges_total"] > 0
        assert found["loaderd_read_bytes_total"] > 0
        spent = "loaderd_session_ready_seconds_total", "loaderd_session_starved_seconds_total"
        assert 0 < sum(found[name] for name in spent) < found["loaderd_uptime_seconds"]
        told = json.loads(get(f"{daemon.page}status.json"))
        assert told["status"]["counters"]["rows"] == rows
        words = ["top", "--endpoint", daemon.endpoint, "--once", "--every", "0.1"]
        shown = CliRunner().invoke(app, words)
        assert shown.exit_code == 0, shown
        assert "minibatch" in shown.stdout
        assert "memory of 64M" in shown.stdout
        assert client.ask(Attach(token=client.welcome.token, request=9, split="no")).error
    finally:
        client.close()
    deadline = time.monotonic() + 30
    while "session detached" not in daemon.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        "serving", "graph read", "session attached", "session refused", "session detached",
    ]  # fmt: skip
    assert lines[0]["page"] == daemon.page
    assert lines[3]["level"] == "warning"
    assert "Refused" in lines[3]["error"]


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_the_page_in_a_browser(daemon, tmp_path):
    """Scripts run without an error; tiles, charts, sessions and ledger are filled."""
    client, _ = run_epoch(daemon.endpoint)
    deadline = time.monotonic() + 60
    while len(json.loads(get(f"{daemon.page}status.json"))["rates"]) < 3:  # a line has points
        assert time.monotonic() < deadline
        time.sleep(0.05)
    try:
        done = subprocess.run(
            [
                str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu",
                f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--dump-dom",
                "--virtual-time-budget=5000", daemon.page,
            ],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    finally:
        client.close()
    dom = re.sub(r"<script>.*</script>", "", done.stdout, flags=re.DOTALL)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "Memory: 64.0M" in dom
    assert dom.count('role="img"') == 6
    assert re.search(r"lines under 1 %", dom)
    assert re.search(r'<path d="M[\d.]+ [\d.]+L', dom)
    assert "<td>minibatch</td>" in dom
    assert '<span id="lost" style="display: none;">' in dom
    assert "NaN" not in dom
    assert "undefined" not in dom


@pytest.mark.parametrize("width", [60, 80, 140])
def test_top_fits_its_terminal(width):
    before = status()
    rates = compare(
        StatusSample(0, before), StatusSample(1, later(before, 1.0, starved_ns=900 * MS, fill_ns=9))
    )
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(frame(rates, before, width, 40))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "fill" in text
    if width >= 80:
        assert "20/120" in text
        assert "4/8" in text
        assert "session 3, out of the pools" in text
    assert ("split:train" in text) == (width >= 110)


def test_top_says_whose_sessions_are_of_several_stores():
    before = status(stores=(STORE, structs.replace(STORE, name="other")))
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(frame(compare(StatusSample(0, before), StatusSample(1, before)), before, 140, 40))
    (line,) = (s for s in console.export_text().splitlines() if "minibatch" in s)
    assert line.split()[1:4] == ["3", "store", "minibatch"]


def test_top_shows_the_busiest_of_many_sessions_within_24_lines():
    """Busy sessions and stores come first; what has no room is counted."""
    before = status()
    (one,) = before.sessions
    sessions = tuple(structs.replace(one, session=n, store=f"s{n % 3}") for n in range(1, 31))
    lines = [
        LedgerEntry(f"s{n}: {name}", (1 << 20) * size, "")
        for n in range(3)
        for name, size in (("graph pool", 2), ("row pool and sessions", 17), ("tables", 0))
    ]
    before = structs.replace(
        before, stores=[structs.replace(STORE, name=f"s{n}") for n in range(3)],
        sessions=sessions, ledger=lines,
    )  # fmt: skip
    more = (structs.replace(s, batches=s.batches + 5 * (s.session == 29)) for s in sessions)
    after = structs.replace(before, sessions=tuple(more))
    console = Console(width=80, record=True, file=io.StringIO())
    rates = compare(StatusSample(0, before), StatusSample(1, after))
    console.print(frame(rates, after, 80, 24))
    text = console.export_text().splitlines()
    assert len(text) <= 24
    shown = [line.split()[1] for line in text if "minibatch" in line]
    assert shown[0] == "29"
    assert f"and {30 - len(shown)} more" in "\n".join(text)
    memory = [line.split()[1:] for line in text if "%  " in line and ":" in line]
    assert memory[0][:2] == ["s2:", "row"]  # of session 29


@pytest.mark.parametrize("part", [False, True])
def test_top_says_what_peers_gave_to_a_daemon_with_a_part(part):
    before, console = status(), Console(width=120, record=True, file=io.StringIO())
    more = {"peer_requests": 9} if part else {}
    after = later(before, 1.0, peer_bytes_asked=1_250_000, peer_bytes_given=7, **more)
    console.print(frame(compare(StatusSample(0, before), StatusSample(1, after)), after, 120, 40))
    text = console.export_text()
    assert ("peers in" in text, "peers out" in text, "1.25 MB" in text) == (part,) * 3


def test_rates_are_decimal():
    assert [decimal(n) for n in (0, 999, 1250, 2.5e9, 3e12)] == [
        "0 B", "999 B", "1.25 KB", "2.5 GB", "3e+03 GB",
    ]  # fmt: skip


def test_top_draws_until_it_is_interrupted(daemon):
    """On a terminal of its own; what stood there before comes back."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "loaderd", "top", "--every", "0.1", "--endpoint"]
    with subprocess.Popen(
        [*words, daemon.endpoint], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    ) as process:  # fmt: skip
        os.close(theirs)
        drawn = b""
        while drawn.count(b"memory of") < 3:
            drawn += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        while b"\x1b[?1049l" not in drawn:  # the main screen again
            drawn += os.read(ours, 65536)
        assert process.wait(30) == 0
    os.close(ours)
    assert b"Traceback" not in drawn


def test_top_without_a_daemon_is_one_line(tmp_path):
    result = CliRunner().invoke(app, ["top", "--once", "--endpoint", f"ipc://{tmp_path}/no.sock"])
    assert result.exit_code == 2
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)


def test_draining_is_told(store, tmp_path):
    """To the log and to the service manager."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with manager, (tmp_path / "log").open("wb") as errors:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        environment = os.environ | {
            "NOTIFY_SOCKET": str(tmp_path / "notify"), "LOADERD_STORE": str(store),
            "LOADERD_ENDPOINT": f"ipc://{tmp_path}/d.sock", "LOADERD_MEM": "64M",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "loaderd", "serve"], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=errors, env=environment,
        )  # fmt: skip
        assert manager.recv(4096).startswith(b"READY=1\nSTATUS=serving ")
        process.send_signal(signal.SIGTERM)
        assert manager.recv(4096) == b"STOPPING=1"
        assert process.wait(30) == 0
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("draining")


def test_a_port_that_is_taken_is_one_line(daemon, store, tmp_path):
    port = daemon.page.split(":")[2].strip("/")
    done = subprocess.run(
        [sys.executable, "-m", "loaderd", "serve", str(store), "--mem", "64M", "--endpoint",
         f"ipc://{tmp_path}/d.sock", "--metrics-port", port, "--log-level", "error"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(r"error: --metrics-port [^\n]+ choose another one[^\n]*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_on_a_store(store, tmp_path):
    good = CliRunner().invoke(app, ["doctor", str(store), "--mem", "64M", "--json"])
    states = {c["name"]: c["state"] for c in json.loads(good.stdout)}
    assert {"kernel", "memory", "memlock", "memfd", "/dev/shm", "O_DIRECT", "disk speed"} <= set(
        states
    )
    assert good.exit_code == int("fail" in states.values())
    assert states["store"] == "ok"
    bad = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert bad.exit_code == 1
    assert re.search(r"^store +fail .+\n +-> .+ingest", bad.stdout, re.MULTILINE)
    huge = CliRunner().invoke(app, ["doctor", "--mem", "900T", "--json"])
    assert huge.exit_code == 1
    assert {c["name"]: c["state"] for c in json.loads(huge.stdout)}["memory"] == "fail"


def test_a_bad_file_is_one_line(tmp_path):
    (tmp_path / "c.toml").write_text("memory = 3\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "c.toml")])
    assert result.exit_code == 2
    assert re.fullmatch(r"error: [^\n]+memory is no option[^\n]+\n", result.stderr)


def test_the_document_lists_every_option():
    text = (ROOT / "docs/operations.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)`[^|]* \| `(LOADERD_\w+)` \|", text, re.MULTILINE)
    params = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    assert {(n.replace("-", "_"), e) for n, e in rows} == {
        (p.name, p.envvar) for p in params if p.name != "help"
    }


def test_the_examples_name_what_there_is():
    unit = configparser.ConfigParser(strict=False, comment_prefixes="#")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "examples/loaderd.service")
    assert unit["Service"]["Type"] == "notify"
    params = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    flags = {o for p in params for o in p.opts}
    assert set(re.findall(r"--[\w-]+", unit["Service"]["ExecStart"])) <= flags
    container = (ROOT / "examples/Containerfile").read_text()
    assert set(re.findall(r"LOADERD_\w+", container)) <= {p.envvar for p in params}
    for folder in re.findall(r"^COPY (\w+) ", container, re.MULTILINE):
        assert (ROOT / folder).is_dir()
