"""Disks that fail, clients that are killed or stop: one session's error, and nothing is left."""

import ast
import errno
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from blockstore.errors import BudgetTooSmall
from blockstore.io import arena as arena_module
from blockstore.io.arena import Arena
from blockstore.store import open_store
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import Refused, ShuttingDown
from loaderd.api.protocol import Attach, BatchReady, Release, Start
from loaderd.sampling.macrobatch.graph import MacroGraph
from loaderd.server.transport import ask_status
from loaderd.sessions.engine import Engine, default_settings
from loaderd.sessions.workers import WorkerPool
from tests.daemons import ROOT, spawn, stop
from tests.graphs import make_csc
from tests.hopstores import make_hops, write_hop_store
from tests.loaderd.harness import WAIT_S, Client
from tests.loaderd.opened import PLANS, held, serve, session_of
from tests.reads import watch_reads
from tests.stores import write_store
from tools.faults.trainers import open_files

NODES = 6000
ALL = 1 << 30  # reads fail until a test ends it


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Larger than the smallest budget's pools: blocks come and go."""
    graph = make_csc(np.random.default_rng(3).integers(0, 30, NODES), 3)
    path = tmp_path_factory.mktemp("faults") / "store"
    write_store(path, graph, np.arange(NODES), offsets=range(0, NODES + 1, NODES // 8))
    return path


@pytest.fixture(scope="module")
def hop_store(tmp_path_factory):
    """Hop-wise rows, more than the smallest budget holds."""
    path = tmp_path_factory.mktemp("faults") / "hops"
    write_hop_store(path, {"train": make_hops(NODES, 40, {"sym": 3}, 4)})
    return path


@pytest.fixture(params=PLANS)
def running(request, monkeypatch):
    """A session, and a switch that makes reads fail; afterwards nothing is held any more."""
    store = "hop_store" if request.param in ("chunks", "rows") else "store"
    failing: dict[str, int] = {"left": 0, "met": 0}

    def meet(fd, offset):
        if failing["left"]:
            if failing["left"] < ALL:  # else a test may end it meanwhile
                failing["left"] -= 1
            failing["met"] += 1
            where = Path(f"/proc/self/fd/{fd}").readlink()
            raise OSError(errno.EIO, "Input/output error", f"{where}+{offset}")

    watch_reads(monkeypatch, meet)
    with session_of(request.getfixturevalue(store), 3 << 20, request.param) as session:
        session.failing = failing
        yield session
        failing["left"] = 0


def in_peace(running, steps):
    """Digests of the same steps from an engine that knows nothing of the first, nor its budget."""
    seen: list[str] = []
    with session_of(running.store, 16 << 20, running.plan) as other:
        assert serve(other, 1, steps, seen) is None
    return seen


def test_a_read_that_fails_once_is_not_noticed(running):
    running.failing["left"] = 1
    assert serve(running, 1, 5) is None
    assert running.failing["met"] == 1
    assert running.engine.reader.retries == 1


def test_a_disk_that_fails_ends_the_run_and_nothing_else(running):
    running.failing["left"] = ALL
    error = serve(running, 1, 5)
    assert error is not None
    assert error.error == "BatchFailed"
    assert "Input/output error" in error.message
    assert str(running.store) in error.message
    assert "+" in error.message  # and the offset
    running.failing["left"] = 0
    assert serve(running, 2, 5) is None


@pytest.mark.parametrize("running", ["macrobatch"], indirect=True)
def test_a_load_that_one_run_began_does_not_end_the_next(running, monkeypatch):
    """Both are of one epoch and need the same macro-batch: the second reads it again."""
    begun, gate, load = threading.Event(), threading.Event(), MacroGraph.load

    def load_or_fail(graph, members):
        if not begun.is_set():
            begun.set()
            assert gate.wait(WAIT_S)
            raise OSError(errno.EIO, "Input/output error")
        load(graph, members)

    monkeypatch.setattr(MacroGraph, "load", load_or_fail)
    running.engine.start(Start(session=running.session, run=1, epoch=0, step=0))
    assert begun.wait(WAIT_S)
    running.engine.start(Start(session=running.session, run=2, epoch=0, step=0))
    gate.set()
    message = running.take(0)
    assert isinstance(message, BatchReady), message
    assert message.run == 2


@pytest.mark.parametrize("running", ["minibatch", "hyperbatch", "macrobatch"], indirect=True)
def test_a_session_that_ends_as_a_step_does_is_cleared_once(running, monkeypatch):
    """Between the end of a step and its worker's last look the session may go: not twice."""
    session, cleared = running.engine._find(running.session), []
    recycle, pump, run_step = session._recycle, session._pump, session._run_step
    gone, steps = threading.Event(), threading.local()

    def note(job):
        cleared.append(id(job))
        recycle(job)

    def step(*args):
        steps.goes_on = True
        try:
            run_step(*args)
        finally:
            steps.goes_on = False

    def pump_and_detach():
        """Sampling of a hyperbatch pumps on a worker too: then there is no batch yet."""
        pump()
        if getattr(steps, "goes_on", False) and not gone.is_set():
            gone.set()
            running.engine.detach(running.session)

    monkeypatch.setattr(session, "_recycle", note)
    monkeypatch.setattr(session, "_pump", pump_and_detach)
    monkeypatch.setattr(session, "_run_step", step)
    running.engine.start(Start(session=running.session, run=1, epoch=0, step=0))
    assert gone.wait(WAIT_S)
    running.engine.wait_ended(WAIT_S)
    assert len(set(cleared)) == len(cleared) > 0


@pytest.mark.parametrize("running", ["chunks"], indirect=True)
def test_a_session_may_come_at_the_moment_another_goes(running, monkeypatch):
    came, others = [], []

    def attach():
        fields = {"batch_size": 50, "window": 2, "plan": "rows"}
        came.append(running.engine.attach(Attach(token=0, request=2, **fields), None).session)

    closer = running.engine.resources.closer
    close = closer.put

    def close_later(step):
        others.append(threading.Timer(0, attach))
        others[-1].start()
        others[-1].join(0.2)
        close(step)

    monkeypatch.setattr(closer, "put", close_later)
    running.engine.detach(running.session)
    (other,) = others
    other.join(WAIT_S)
    assert len(came) == 1
    monkeypatch.undo()
    running.engine.detach(came[0])


def test_a_step_that_fails_leaves_its_worker(caplog):
    floor, done = WorkerPool(1), threading.Event()
    floor.soon(1, lambda: 1 // 0)
    floor.soon(1, done.set)
    assert done.wait(WAIT_S)
    floor.close()
    assert "ZeroDivisionError" in caplog.text


def test_a_wrong_checksum_names_file_and_offset(running):
    shards = {s for f in running.engine.reader.files for s in f.shards}
    saved = {path: path.read_bytes() for path in shards}
    try:
        for path, raw in saved.items():
            with path.open("r+b") as f:
                f.write(bytes(b ^ 255 for b in raw[: 4096 * (len(raw) // 4096)]))
        error = serve(running, 1, 5)
        assert error is not None
        assert error.error == "BatchFailed"
        assert "crc32c" in error.message
        assert any(f"{path}+" in error.message for path in shards)
        assert running.engine.reader.retries >= 1
    finally:
        for path, raw in saved.items():
            with path.open("r+b") as f:
                f.write(raw)
    after: list[str] = []
    assert serve(running, 2, 5, after) is None
    assert after == in_peace(running, 5)


def test_an_exhausted_arena_says_what_is_free_and_gives_all_back(store):
    with Engine(open_store(store), default_settings(4 << 20, 1, 1)) as engine:
        before, sessions = held(engine), []
        attach = Attach(token=0, request=1, num_neighbors=(5, 5), batch_size=50, plan="minibatch")

        def attach_on():
            while True:
                sessions.append(engine.attach(attach, None).session)

        with pytest.raises(Refused, match=r"--mem \d+M"):
            attach_on()
        assert sessions
        for session in sessions:
            engine.detach(session)
        assert held(engine) == before
        engine.detach(engine.attach(attach, None).session)


WALL_CLOCK = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")


def test_no_decision_is_taken_by_a_clock_that_can_jump():
    for path in sorted(p for name in ("loaderd", "clients") for p in (ROOT / name).rglob("*.py")):
        calls = (n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        found = [ast.unparse(call) for call in calls]
        assert not [call for call in found if call.endswith(WALL_CLOCK)], path


def test_an_engine_that_drains_takes_nobody_in(store):
    with Engine(open_store(store), default_settings(16 << 20, 1, 1)) as engine:
        engine.drain()
        with pytest.raises(ShuttingDown):
            engine.attach(Attach(token=0, request=1, num_neighbors=(5,)), None)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFBIG, errno.ENOSPC])
def test_memory_that_the_system_refuses_is_said(monkeypatch, number):
    def refuse(fd, size):
        raise OSError(number, os.strerror(number))

    before = open_files()
    monkeypatch.setattr(arena_module.os, "ftruncate", refuse)
    with pytest.raises(BudgetTooSmall, match=r"smaller --mem, or raise .*ulimit"):
        Arena(4, 4096)
    assert open_files() == before


@pytest.fixture
def served(store, tmp_path):
    """A daemon, its process and what it held before anybody came."""
    endpoint = f"ipc://{tmp_path}/d.sock"
    process = spawn(store, endpoint, "--mem", "32M", "--workers", "2")
    ask_status(parse_endpoint(endpoint))
    yield SimpleNamespace(endpoint=endpoint, process=process, before=holds(endpoint))
    assert stop(process) == 0


def holds(endpoint):
    reply = ask_status(parse_endpoint(endpoint))
    slots = reply.counters["slots_in_pools"], reply.counters["slots_pinned"]
    return len(reply.sessions), reply.ledger, slots, open_files(reply.pid)


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def trainer(endpoint):
    words = [sys.executable, "-m", "tests.loaderd.trainer", endpoint, str(NODES // 50)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    return process


def test_killed_clients_leave_nothing(served):
    for _ in range(3):
        pair = [trainer(served.endpoint) for _ in range(2)]
        for process in pair:
            process.kill()
            process.communicate()
    until(lambda: holds(served.endpoint) == served.before)


def test_a_stopped_client_costs_its_window_and_delays_nobody(served):
    stopped = trainer(served.endpoint)
    stopped.send_signal(signal.SIGSTOP)
    try:
        other = Client(parse_endpoint(served.endpoint))
        session = other.attach(num_neighbors=(5, 5), batch_size=50, window=4).session
        for run in range(1, 4):
            other.send(Start(session=session, run=run, epoch=run, step=0))
            for step in range(NODES // 50):
                assert other.receive().step == step
                other.send(Release(session=session, run=run, step=step, group=0))
        (theirs,) = (
            s for s in ask_status(parse_endpoint(served.endpoint)).sessions if s.session != session
        )
        assert theirs.in_flight <= theirs.window == 4
        other.close()
        before = theirs.batches
        stopped.send_signal(signal.SIGCONT)
        until(lambda: ask_status(parse_endpoint(served.endpoint)).sessions[0].batches > before)
    finally:
        stopped.kill()
        stopped.communicate()
    until(lambda: holds(served.endpoint) == served.before)


def test_a_daemon_short_of_descriptors_says_so_and_goes_on(store, tmp_path):
    endpoint = f"ipc://{tmp_path}/d.sock"
    process = spawn(store, endpoint, "--mem", "32M", "--workers", "1")
    try:
        assert _serves(endpoint)  # kernels are loaded: that takes descriptors, too
        used = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        limits = f"{used + 5}:{used + 5}"
        subprocess.run(["prlimit", "--pid", str(process.pid), f"--nofile={limits}"], check=True)
        first = Client(parse_endpoint(endpoint))
        session = first.attach(num_neighbors=(5,), batch_size=50).session
        waiting = [_connect(endpoint) for _ in range(12)]  # more than there are descriptors for
        first.send(Start(session=session, run=1, epoch=0, step=0))
        for step in range(5):
            assert first.receive().step == step
            first.send(Release(session=session, run=1, step=step, group=0))
        for connection in waiting:
            connection.close()
        first.close()
        until(lambda: _serves(endpoint))
    finally:
        assert stop(process) == 0


def _connect(endpoint):
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.connect(str(parse_endpoint(endpoint).door))
    return door


def _serves(endpoint):
    client = Client(parse_endpoint(endpoint))
    try:
        session = client.attach(num_neighbors=(5,), batch_size=50).session
        client.send(Start(session=session, run=1, epoch=0, step=0))
        return client.receive().step == 0
    finally:
        client.close()


def test_what_is_lent_stays_when_an_engine_drains(store):
    """Clients may still be copying: no slot that was lent is free for others, or written."""
    came: queue.Queue = queue.Queue()
    with Engine(open_store(store), default_settings(32 << 20, 2, 2)) as engine:
        engine.deliver = lambda session, message: came.put((session, message))
        for number in range(3):
            attach = Attach(token=0, request=number, num_neighbors=(5, 5), batch_size=50, window=2)
            session = engine.attach(attach, None).session
            engine.start(Start(session=session, run=1, epoch=0, step=0))
        lent = [came.get(timeout=WAIT_S)[1] for _ in range(6)]
        slots = [s for m in lent for s in (*m.structure.slots, *m.rows.blob.slots)]
        assert len(set(slots)) == len(slots) > 0
        data = engine.arena.data.reshape(-1, engine.arena.slot_bytes)
        before = data[slots].copy()
        pinned = engine.status()[2]["slots_pinned"]
        engine.drain()
        np.testing.assert_array_equal(data[slots], before)
        counters = engine.status()[2]
        assert counters["slots_in_pools"] <= data.shape[0] - len(slots)
        assert counters["slots_pinned"] == pinned > 0  # blocks whose rows are used in place


def test_who_waits_for_a_session_that_ends_is_told_that_the_daemon_does(store, monkeypatch):
    """What a killed client was lent stays so while the daemon drains: nobody gives it back."""
    refused, waiting = [], threading.Event()
    request = Attach(token=0, request=1, batch_size=50, window=2, **PLANS["minibatch"])
    with Engine(open_store(store), default_settings(3 << 20, 1, 1)) as engine:
        with engine.lock:  # a session that still holds something
            engine._ending().append(SimpleNamespace(join=lambda: None, counters=dict))
        wait_for = engine._changed.wait_for

        def wait(*arguments):
            waiting.set()
            return wait_for(*arguments)

        monkeypatch.setattr(engine._changed, "wait_for", wait)

        def attach():
            with pytest.raises(ShuttingDown):
                engine.attach(request, None)
            refused.append(True)

        second = threading.Thread(target=attach)
        second.start()
        assert waiting.wait(WAIT_S)
        engine.drain()
        second.join(WAIT_S)  # half of what it waits for sessions that end
        assert refused
