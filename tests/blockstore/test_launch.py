"""Daemons that a process starts: they end with it, are shared, start again, say why they do not."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import blockstore
from blockstore import launch
from blockstore.errors import NotAStore, NotServed
from blockstore.launch import runtime_folder
from loaderd.api.endpoint import connect, parse_endpoint
from loaderd.api.errors import NoDaemon
from tests.daemons import ROOT, until
from tests.graphs import make_csc
from tests.stores import write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched") / "store"
    write_store(folder, make_csc(np.full(200, 5), 1), range(100))
    return folder


def answers(endpoint: str) -> bool:
    try:
        connect(parse_endpoint(endpoint)).close()
    except NoDaemon:
        return False
    return True


def test_a_daemon_inside_a_with(store):
    with blockstore.serve(store, mem="16M", workers=1) as endpoint:
        assert answers(endpoint)
        until(lambda: "serving" in endpoint.log.read_text(), "nothing is logged")
    assert not answers(endpoint)
    assert not endpoint.log.parent.exists()


def test_what_keeps_a_daemon_from_starting_is_said(store, tmp_path):
    with pytest.raises(NotServed) as refused, blockstore.serve(store, mem="1K"):
        pass
    assert "ended with code 2: error: --mem" in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(NotAStore, match="expected a store"), blockstore.serve(tmp_path):
        pass


def test_it_ends_with_a_process_that_is_killed(store):
    """The next one to start a daemon deletes the folder."""
    script = (
        "import sys, blockstore\n"
        "with blockstore.serve(sys.argv[1], mem='16M') as endpoint:\n"
        "    print(endpoint, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(store)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    endpoint = process.stdout.readline().strip()
    assert answers(endpoint)
    process.kill()
    process.communicate()
    until(lambda: not Path(parse_endpoint(endpoint).lock).exists(), "the daemon has not ended")
    folder = parse_endpoint(endpoint).path.parent

    def starts_another() -> bool:
        with blockstore.serve(store, mem="16M") as other, blockstore.serve(store, mem="16M"):
            assert answers(other)
            return not folder.exists()

    until(starts_another, "the folder stays")


def test_a_folder_that_its_process_deletes_meanwhile_is_passed_over(store, monkeypatch):
    going, lock = Path(tempfile.mkdtemp(prefix="own-", dir=runtime_folder())), launch._lock

    def late(path: Path, kind: int) -> int:
        if path.parent == going:
            going.rmdir()
        return lock(path, kind)

    monkeypatch.setattr(launch, "_lock", late)
    with blockstore.serve(store, mem="16M") as endpoint:
        assert answers(endpoint)
    assert not going.exists()


USER = """
import os, sys, torch
from torch.utils.data import DataLoader
from clients.torch import NeighborDataset
data = NeighborDataset(sys.argv[1], "train", [2], 10)
workers = DataLoader(data, batch_size=None, num_workers=1)
data.set_epoch(0)
print(data.endpoint, len(data), sum(b.num_nodes for b in workers), flush=True)
for line in sys.stdin:
    data.set_epoch(0)
    print(sum(b.num_nodes for b in data), flush=True)
"""


@pytest.fixture
def runtime():
    """A folder whose path is short, as sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_path_in_place_of_an_endpoint_is_served_to_all_processes(store, runtime):
    """Two at a time share a daemon; it is killed and comes again; it ends with the last of them."""
    environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime), "LOADERD_MEM": "16M"}

    def user():
        return subprocess.Popen(
            [sys.executable, "-c", USER, str(store)], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def ask(process):
        process.stdin.write("again\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    users = [user(), user()]
    said = [u.stdout.readline().split() for u in users]
    assert all(said), [u.communicate()[1] for u in users]
    assert said[0] == said[1]
    endpoint, steps, nodes = said[0]
    assert steps == "10"
    lock = parse_endpoint(endpoint).lock
    os.kill(int(lock.read_text()), signal.SIGKILL)
    assert ask(users[0]) == nodes  # it was started again
    _, errors = users[0].communicate(timeout=60)
    assert ask(users[1]) == nodes
    _, more = users[1].communicate(timeout=60)
    assert (errors + more).count("started a daemon at ipc://") == 2
    until(lambda: not lock.exists(), "the daemon has not ended")
    with (lock.parent / "users").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # nobody uses it, and the daemon has ended


def test_a_runtime_folder_that_others_reach_is_refused(runtime, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert runtime_folder() == runtime / "loaderd"
    (runtime / "loaderd").chmod(0o755)
    with pytest.raises(NotServed, match="others can reach it"):
        runtime_folder()
