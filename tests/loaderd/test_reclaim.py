"""The memory of a daemon that died is freed, whoever still has it mapped; no batch is of zeros."""

import contextlib
import fcntl
import hashlib
import mmap
import os
import signal
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from blockstore.io import arena as arena_module
from blockstore.io.arena import Arena
from clients.torch import HopDataset, NeighborDataset
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.errors import SessionLost
from tests.clients.fake import fake_daemon
from tests.daemons import ROOT, spawn, stop, until
from tests.graphs import make_csc
from tests.hopstores import make_hops, write_hop_store
from tests.loaderd.harness import WAIT_S, Client
from tests.stores import write_store
from tools.group import ControlGroup, group
from tools.memory import SLACK_BYTES

NODES, MEM = 2000, "48M"
TRAINER = """
import sys
from clients.torch import NeighborDataset
dataset = NeighborDataset(sys.argv[1], "train", [5, 5], batch_size=50, reconnect_s=120)
for batch in dataset:
    print(batch.step, float(batch.x.double().sum()), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("reclaim") / "store"
    write_store(path, make_csc(np.full(NODES, 10), 5), np.arange(NODES))
    return path


@pytest.fixture(scope="module")
def hop_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("reclaim") / "hops"
    write_hop_store(path, {"train": make_hops(NODES, 40, {"sym": 2}, 4)})
    return path


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/d.sock"


def taken(fd: int) -> int:
    """Bytes of memory behind an arena's descriptor."""
    return os.fstat(fd).st_blocks * 512


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def dataset(endpoint: str, **options):
    options = {"batch_size": 50, "reconnect_s": 0.0, **options}
    return NeighborDataset(endpoint, "train", [5, 5], **options)


def digest(batches) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for array in (batch.n_id, batch.edge_index, batch.x):
            found.update(array.numpy().tobytes())
    return found.hexdigest()


# -- nobody but the daemon can write --------------------------------------------------------------


def test_the_descriptor_of_a_client_cannot_write():
    with Arena(4, 4096) as arena:
        fd = arena.open_to_read()
        size = os.fstat(fd).st_size
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        for attempt in (
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.posix_fallocate(fd, 0, size),
            lambda: fcntl.fcntl(fd, 1033, 0x8),  # F_ADD_SEALS: against writing
        ):
            with pytest.raises(OSError, match=r"Bad file|Invalid|not permitted"):
                attempt()
        os.close(fd)


def test_the_file_of_an_arena_is_for_its_owner_to_read_and_no_longer_grows_or_shrinks():
    with Arena(4, 4096) as arena:
        assert os.fstat(arena.fd).st_mode & 0o777 == 0o400
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, size)


def test_where_the_capability_is_there_not_even_root_can_open_an_arena_for_writing():
    with Arena(4, 4096) as arena:
        try:
            arena_module.set_immutable(arena.fd, True)
        except OSError as error:
            pytest.skip(f"this process may not: {error}")
        fd = arena.open_to_read()
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        os.close(fd)


# -- the memory comes back ------------------------------------------------------------------------


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ended_takes_no_memory_though_a_client_maps_it(store, endpoint, end):
    daemon = spawn(store, endpoint, "--mem", MEM, "--workers", "1")
    client = Client(parse_endpoint(endpoint))
    with mmap.mmap(client.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert taken(client.fd) > 16 << 20
        daemon.send_signal(end)
        daemon.communicate()
        until(lambda: taken(client.fd) == 0, "the arena is still there")
        assert mapped[client.welcome.stamp : client.welcome.stamp + 8] == bytes(8)
        assert mapped[:8] == bytes(8)  # and no SIGBUS
    client.close()


@pytest.mark.usefixtures("fresh_processes")
def test_what_frees_the_memory_outlives_the_signals_of_its_daemons_group(store, endpoint):
    words = [sys.executable, "-m", "loaderd", "serve", store, "--endpoint", endpoint]
    daemon = subprocess.Popen(
        [*words, "--mem", MEM], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert daemon.stdout is not None
    assert daemon.stdout.readline().startswith("serving")
    client = Client(parse_endpoint(endpoint))
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, number)
    daemon.communicate()
    until(lambda: taken(client.fd) == 0, "the arena is still there")
    client.close()


def test_a_refusal_waits_while_memory_comes_back(monkeypatch):
    rooms = [8 << 20, 24 << 20, 48 << 20]
    monkeypatch.setattr(arena_module, "available_memory", lambda: (rooms.pop(0), "a test"))
    monkeypatch.setattr(arena_module, "_POLL_S", 0.0)
    with Arena(32, 1 << 20) as arena:
        assert arena.num_slots == 32
    assert rooms == []


# -- no batch is of zeros -------------------------------------------------------------------------


def test_a_trainer_that_was_asleep_gets_an_error_or_the_same_batches(store, endpoint):
    daemon = spawn(store, endpoint, "--mem", MEM, "--workers", "1")
    expected = digest(dataset(endpoint))
    impatient, patient = (
        dataset(endpoint, reconnect_s=seconds, seed=0) for seconds in (0.0, float(WAIT_S))
    )
    ahead, steps = iter(impatient), iter(patient)
    begun = list(islice(steps, 3))
    next(ahead)
    fd = patient._connection.session.attachment._arena_fd
    kill(daemon)
    until(lambda: taken(fd) == 0, "the arena is still there")
    with pytest.raises(SessionLost, match="the daemon went away"):
        next(ahead)
    daemon = spawn(store, endpoint, "--mem", MEM, "--workers", "1")
    assert digest([*begun, *steps]) == expected
    for each in (impatient, patient):
        each.close()
    assert stop(daemon) == 0


@pytest.mark.parametrize("moment", ["receive", "release"])
def test_a_batch_that_was_read_while_the_arena_was_emptied_is_not_handed_out(
    tmp_path, monkeypatch, moment
):
    """Emptied before the first array is copied, and after the last one."""
    with fake_daemon(tmp_path) as daemon:
        steps = iter(NeighborDataset(daemon.endpoint, "train", [4, 3], reconnect_s=0.0))
        next(steps)
        session = steps.gi_frame.f_locals["self"]._connection.session
        usual = getattr(session, moment)

        def emptied(*arguments):
            found = usual(*arguments)
            daemon.stamp[0] = 0
            daemon.arena[:] = 0
            return found

        monkeypatch.setattr(session, moment, emptied)
        with pytest.raises(SessionLost, match="the daemon went away"):
            next(steps)
        session.close()


def test_views_keep_the_memory_until_batches_are_given_back(hop_store, endpoint):
    """Several at once: so many more are handed out, of those that came before the daemon died."""
    daemon = spawn(hop_store, endpoint, "--mem", MEM)
    data = HopDataset(endpoint, "train", "sym", 2, batch_size=100, views=True, reconnect_s=0.0)
    steps = iter(data)
    batch = next(steps)
    before = [x.clone() for x in batch.x]
    session = data._connection.session
    fd = os.dup(session.attachment._arena_fd)
    other = Client(parse_endpoint(endpoint))
    kill(daemon)
    assert other.hung_up()
    until(lambda: _is_waited_for(fd), "nobody waits for the views")
    assert all(bool((a == b).all()) for a, b in zip(before, batch.x, strict=True))
    late = list[int]()
    with pytest.raises(SessionLost, match="the daemon went away"):
        late.extend(batch.step for batch in steps)
    assert _is_waited_for(fd)
    assert late == [*range(1, 1 + len(late))]
    assert len(late) <= session.attached.window // 8
    os.close(fd)
    data.close()
    until(lambda: taken(other.fd) == 0, "the arena is still there")
    other.close()


def _is_waited_for(fd: int) -> bool:
    """Whether somebody waits for the lock that readers of views hold."""
    inode = os.fstat(fd).st_ino
    with open("/proc/locks") as locks:  # noqa: PTH123
        return any("->" in line and f":{inode} " in line for line in locks)


def test_views_of_an_arena_that_is_being_emptied_are_not_handed_out(hop_store, endpoint):
    daemon = spawn(hop_store, endpoint, "--mem", MEM)
    data = HopDataset(endpoint, "train", "sym", 2, batch_size=100, reconnect_s=0.0)
    steps = iter(data)
    next(steps)
    session = data._connection.session
    kill(daemon)
    until(lambda: session.attachment.stamp[0] == 0, "the arena is still there")
    with pytest.raises(SessionLost, match="the daemon went away"):
        session.hold()
    data.close()


# -- as in a container ----------------------------------------------------------------------------


@pytest.fixture
def limits():
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(group((48 << 20) + SLACK_BYTES))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield made


def served_in(limits: ControlGroup, store, endpoint: str) -> "subprocess.Popen[str]":
    members = limits._folder / "cgroup.procs"
    words = ["serve", str(store), "--mem", "200M", "--workers", "1", "--endpoint", endpoint]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loaderd.joined", str(members), *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving"), process.communicate()
    used = limits._folder / ("memory.usage_in_bytes" if limits._v1 else "memory.current")
    assert int(used.read_text()) > 150 << 20  # its arena counts: for two there is no room
    return process


@pytest.mark.slow
def test_the_next_daemon_finds_room_beside_a_trainer_that_is_stopped(store, endpoint, limits):
    daemon = served_in(limits, store, endpoint)
    words = [sys.executable, "-c", TRAINER, endpoint]
    steps = "\n" * (NODES // 50)
    data = dataset(endpoint)
    undisturbed = [f"{batch.step} {float(batch.x.double().sum())}\n" for batch in data]
    data.close()
    trainer = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    try:
        lines = [trainer.stdout.readline()]
        for _ in range(2):
            trainer.send_signal(signal.SIGSTOP)
            kill(daemon)
            daemon = served_in(limits, store, endpoint)
            trainer.send_signal(signal.SIGCONT)
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            lines.append(trainer.stdout.readline())
        trainer.stdin.write(steps)
        trainer.stdin.flush()
        lines += trainer.stdout.readlines()
    finally:
        trainer.kill()
        trainer.communicate()
    assert lines == undisturbed
    assert limits.kills() == 0
    assert stop(daemon) == 0
