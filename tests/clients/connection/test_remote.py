"""Datasets over tcp: the same bytes as on the daemon's host, whatever the plan; keys; ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.link import HeteroLinkDataset, LinkDataset  # noqa: E402
from clients.torch import HeteroDataset, HopDataset, NeighborDataset  # noqa: E402
from loaderd.api.errors import NoDaemon, Refused  # noqa: E402
from loaderd.api.keys import AUTHORIZED, KNOWN  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.partition.partition import PartitionOptions  # noqa: E402
from preprocess.pipeline.progress import Progress  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.daemons import ROOT, spawn, stop, until  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402
from tests.hopstores import make_hops, write_hop_store  # noqa: E402
from tests.remotes import free_address, introduce, make_keys, remote_daemon  # noqa: E402

OPTIONS = {"num_neighbors": (6, 4), "batch_size": 100, "seed": 5, "return_e_id": True}
READ_ONE = """
import sys
from clients.connection.remote import RemoteSession
from loaderd.api.protocol import Attach, BatchReady
request = Attach(token=0, request=0, num_neighbors=(6, 4), batch_size=100)
session = RemoteSession(sys.argv[1], request)
session.start(0, 0)
session.receive(BatchReady, 0)
print("read", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def store(small_graph, tmp_path_factory):
    """The small graph in partitions."""
    path = tmp_path_factory.mktemp("remote") / "store"
    options = IngestOptions(block_bytes=16 << 10, edge_ids=True, partition=PartitionOptions(8))
    with (path.parent / "progress.txt").open("w") as stream:
        ingest(PlainSource(small_graph), path, options, Progress(stream))
    return path


@pytest.fixture(scope="module")
def served(store):
    """Both endpoints of a daemon without keys."""
    with remote_daemon(store) as (local, remote):
        yield SimpleNamespace(local=local, remote=remote)


def tensors(value):
    """All tensors of a batch, with where they stand."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if isinstance(value, dict):
        return [(f"{k}{n}", t) for k, v in value.items() for n, t in tensors(v)]
    if isinstance(value, list | tuple):
        return [(f"{i}{n}", t) for i, v in enumerate(value) for n, t in tensors(v)]
    names = getattr(type(value), "__dataclass_fields__", {})
    return [(f"{f}{n}", t) for f in names for n, t in tensors(getattr(value, f))]


def assert_same(one, two):
    """Batch for batch, bit for bit; and what is there can be written to."""
    count = 0
    for a, b in zip(one, two, strict=True):
        assert (a.epoch, a.step) == (b.epoch, b.step)
        found, expected = tensors(b), tensors(a)
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (name, tensor), (_, other) in zip(found, expected, strict=True):
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor, other), name
            if tensor.numel():
                tensor.view(-1)[0] = tensor.view(-1)[0]
        count += 1
    assert count


def both(make, local, remote):
    """The same dataset at both endpoints, over one epoch."""
    one, two = make(local), make(remote)
    try:
        expected = list(one)
        one.close()
        assert_same(expected, two)
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch", "macrobatch"])
def test_sampled_batches_are_the_local_ones(served, plan):
    both(lambda e: NeighborDataset(e, plan=plan, **OPTIONS), served.local, served.remote)


def test_ids_layers_and_ranks_are_the_local_ones(served):
    options = {"num_neighbors": (5, 5), "batch_size": 90, "frontier": "layer", "world_size": 3}
    both(
        lambda e: NeighborDataset(e, input_nodes=range(700), rank=1, **options),
        served.local, served.remote,
    )  # fmt: skip


def test_rows_in_several_groups_are_the_local_ones(store):
    with remote_daemon(store, "1400K", "--remote-credit", "64K") as (local, remote):
        both(
            lambda e: NeighborDataset(e, "all", (8, 6), 1000, plan="minibatch", window=1),
            local, remote,
        )  # fmt: skip
        counters = ask_status(parse_either(remote)).counters
        assert counters["groups"] > counters["batches"]


def test_hop_wise_batches_are_the_local_ones(tmp_path):
    write_hop_store(tmp_path / "store", {"train": make_hops(5001, 25, {"sym": 2}, 1)})
    with remote_daemon(tmp_path / "store", "4M") as (local, remote):
        for method, chunk in (("cr", 300), ("rr", 0)):
            wanted = {"batch_size": 800, "method": method, "chunk": chunk, "operators": "sym"}
            both(lambda e, w=wanted: HopDataset(e, **w), local, remote)
            views = HopDataset(remote, views=True, **wanted)  # they are copies there
            assert_same(HopDataset(local, **wanted), views)
            views.close()


def test_batches_of_seed_edges_are_the_local_ones(served):
    for negatives in ("binary", "triplet"):
        both(
            lambda e, n=negatives: LinkDataset(
                e, np.arange(400).reshape(2, 200), (4, 3), 50, negatives=n, return_e_id=True
            ),
            served.local, served.remote,
        )  # fmt: skip


def test_batches_of_several_types_are_the_local_ones(tmp_path):
    generator = np.random.default_rng(1)
    types = {"author": 90, "paper": 120}
    relations = (("paper", "cites", "paper"), ("author", "writes", "paper"))
    graph = random_hetero(generator, types, relations, 12, {"paper": 3}, "paper", 2500)
    write_hetero_store(tmp_path / "store", graph, {"author": (0, 30, 90), "paper": (0, 50, 120)})
    with remote_daemon(tmp_path / "store", "16M") as (local, remote):
        both(
            lambda e: HeteroDataset(e, num_neighbors=(4, 3), batch_size=8, input_type="paper"),
            local, remote,
        )  # fmt: skip
        links = {"relation": relations[1], "exclude": "self"}
        both(lambda e: HeteroLinkDataset(e, "all", (4, 3), 200, **links), local, remote)


def test_an_epoch_goes_on_when_the_daemon_was_killed(store, served, tmp_path):
    endpoint, remote = f"ipc://{tmp_path}/d.sock", free_address()
    options = ("--mem", "64M", "--workers", "2", "--listen", remote)
    first = spawn(store, endpoint, *options)
    data, expected = NeighborDataset(remote, **OPTIONS), NeighborDataset(served.local, **OPTIONS)
    batches, wanted = iter(data), iter(expected)
    assert_same(islice(wanted, 3), islice(batches, 3))
    state = data.state_dict()
    first.kill()
    first.communicate()
    second = spawn(store, endpoint, *options)
    try:
        assert_same(islice(wanted, 3), islice(batches, 3))
        again = NeighborDataset(remote, **OPTIONS)
        again.load_state_dict(state)
        fresh = NeighborDataset(served.local, **OPTIONS)
        fresh.load_state_dict(state)
        assert_same(fresh, again)
        for opened in (data, again, expected, fresh):
            opened.close()
    finally:
        assert stop(second) == 0


def sessions(served):
    return ask_status(parse_either(served.local)).sessions


def test_a_trainer_that_is_killed_is_gone_in_a_moment(served):
    words = [sys.executable, "-c", READ_ONE, served.remote]
    with subprocess.Popen(words, cwd=ROOT, stdin=PIPE, stdout=PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"read\n"
        (session,) = sessions(served)
        assert session.owner == "loopback"
        trainer.send_signal(signal.SIGKILL)
    until(lambda: not sessions(served), "the session of a killed trainer stays")
    until(
        lambda: not any("pieces" in e.name for e in ask_status(parse_either(served.local)).ledger),
        "its buffers stay",
    )


def tcp_sockets():
    """Descriptors of this process that are tcp sockets."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this listing is gone
            if str(link.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as peer:
                    if peer.family == socket.AF_INET:
                        found.add(int(link.name))
    return found


def test_a_connection_of_one_session_that_breaks_is_replaced(served):
    """The one of another session, and the one that heartbeats come by, stand."""
    other, data = (
        NeighborDataset(served.remote, **OPTIONS),
        NeighborDataset(served.remote, **OPTIONS),
    )
    batches = iter(other)
    expected = [next(batches)]
    before = tcp_sockets()
    broken = iter(data)
    found = [next(broken)]
    (number,) = tcp_sockets() - before
    with socket.socket(fileno=os.dup(number)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    first = data._connect().session
    found += broken
    assert first.lost
    assert_same(expected + list(batches), found)
    for opened in (other, data):
        opened.close()
    until(lambda: not sessions(served), "a session stays")


def test_a_forked_child_leaves_the_connection_alone(served):
    data = NeighborDataset(served.remote, **OPTIONS)
    batches = iter(data)
    next(batches)
    child = os.fork()
    if not child:
        os._exit(0 if data._connection is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(batches)) == len(data) - 1
    data.close()


def test_nobody_there():
    with pytest.raises(NoDaemon, match=r"Connection refused.*--listen tcp://127"):
        next(iter(NeighborDataset(free_address(), **OPTIONS)))


@pytest.fixture(scope="module")
def guarded(store, tmp_path_factory):
    """A daemon with keys, and folders of clients' keys: a known one, and a stranger."""
    folder = tmp_path_factory.mktemp("keys")
    keys = make_keys(folder, "daemon", "known", "stranger")
    introduce(keys["daemon"], keys["known"])
    with remote_daemon(store, "64M", "--keys", str(keys["daemon"])) as (local, remote):
        yield SimpleNamespace(local=local, remote=remote, keys=keys)


def test_with_keys_batches_are_the_same(guarded):
    remote = f"{guarded.remote}?keys={guarded.keys['known']}"
    both(lambda e: NeighborDataset(e, **OPTIONS), guarded.local, remote)
    data = NeighborDataset(remote, **OPTIONS)
    len(data)
    assert [s.owner for s in ask_status(parse_either(remote)).sessions] == ["known"]
    data.close()


def test_who_has_no_key_is_turned_away(guarded, monkeypatch, tmp_path):
    monkeypatch.setattr("clients.connection.remote.WELCOME_TIMEOUT_S", 3.0)
    monkeypatch.setenv("LOADERD_KEYS", str(tmp_path))
    with pytest.raises(NoDaemon, match=r"each other's keys|does not answer"):
        len(NeighborDataset(guarded.remote, **OPTIONS))  # speaks without keys
    stranger = guarded.keys["stranger"]
    (stranger / KNOWN).write_text((guarded.keys["known"] / KNOWN).read_text())
    with pytest.raises(Refused, match="this side's key is not let in"):
        len(NeighborDataset(f"{guarded.remote}?keys={stranger}", **OPTIONS))
    (stranger / KNOWN).write_text((stranger / "public.key").read_text().split()[0] + " *\n")
    with pytest.raises(NoDaemon, match=r"each other's keys|does not answer"):
        len(NeighborDataset(f"{guarded.remote}?keys={stranger}", **OPTIONS))  # a wrong daemon


def test_a_key_that_is_taken_out_ends_its_sessions(guarded):
    late = make_keys(guarded.keys["known"].parent, "late")["late"]
    authorized = guarded.keys["daemon"] / AUTHORIZED
    before = authorized.read_text()
    introduce(guarded.keys["daemon"], late)
    data = NeighborDataset(f"{guarded.remote}?keys={late}", reconnect_s=0.0, **OPTIONS)
    next(iter(data))
    assert [s.owner for s in sessions(guarded)] == ["late"]
    authorized.write_text(before)
    until(lambda: not sessions(guarded), "a session of a key that is not allowed stays")
    data.close()


def test_other_hosts_are_spoken_to_with_keys_only(tmp_path, monkeypatch):
    monkeypatch.setenv("LOADERD_KEYS", str(tmp_path))
    with pytest.raises(Refused, match=r"known_daemons: no key of the daemon at tcp://10\.0"):
        len(NeighborDataset("tcp://10.0.0.5:7000", **OPTIONS))
