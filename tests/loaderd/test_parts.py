"""Daemons with parts of a store give the batches of the whole store, whatever happens to peers."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.store import Store, open_store
from clients.torch import NeighborDataset
from loaderd.api.errors import BatchFailed, Refused
from loaderd.api.peers import PeerAddresses, part_with_peers, read_peers
from loaderd.api.tcp import parse_tcp
from preprocess.partition.owners import OwnerOptions, make_owners
from preprocess.partition.partition import PartitionOptions
from preprocess.partition.repartition import repartition
from preprocess.pipeline.progress import Progress
from tests.golden_cases import Case, epoch_digest
from tests.loaderd.parts import (
    AMPLE,
    NODES,
    WIDTH,
    make_parts,
    partition_owners,
    serving_parts,
    write_whole,
)
from tests.loaderd.threaded import serving
from tests.remotes import free_address

LEAST = 1900 << 10  # beside the memory of peers
PLANS = ("minibatch", "hyperbatch", "macrobatch")


def dataset(plan: str) -> Case:
    options: dict[str, Any] = {"macro_partitions": 2} if plan == "macrobatch" else {}
    options |= {"num_neighbors": (5, 4), "batch_size": 50, "seed": 3, "plan": plan}
    return Case(NeighborDataset, options | {"reconnect_s": 0})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole") / "store")


@pytest.fixture(scope="module")
def digests(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    with serving(whole, tmp_path_factory.mktemp("d"), AMPLE) as (endpoint, _):
        return {plan: epoch_digest(endpoint, dataset(plan)) for plan in PLANS}


def owners_of(store: Store, kind: str, servers: int) -> np.ndarray:
    if kind == "partitions":
        return partition_owners(store, servers)
    runs = np.random.default_rng(7).integers(0, servers, NODES // 40)
    return np.repeat(runs, 40)


LONG = pytest.mark.long


# each number of servers, each kind of map and each budget beside each other one
@pytest.mark.parametrize(
    ("servers", "kind", "mem"),
    [
        pytest.param(servers, kind, mem, marks=marks, id=f"{servers}-{kind}-{name}")
        for servers, kind, name, mem, marks in (
            (2, "partitions", "least", LEAST, ()), (2, "random", "ample", AMPLE, ()),
            (4, "random", "least", LEAST, ()), (4, "partitions", "ample", AMPLE, LONG),
            (2, "partitions", "ample", AMPLE, LONG), (2, "random", "least", LEAST, LONG),
            (4, "random", "ample", AMPLE, LONG), (8, "partitions", "least", LEAST, LONG),
            (8, "partitions", "ample", AMPLE, LONG), (8, "random", "least", LEAST, LONG),
            (8, "random", "ample", AMPLE, LONG),
        )
    ],
)  # fmt: skip
def test_every_daemon_gives_the_batches_of_the_whole_store(
    whole: Path, tmp_path: Path, digests: dict[str, str], mem: int, servers: int, kind: str
):
    copy = shutil.copytree(whole, tmp_path / "store")
    parts = make_parts(copy, tmp_path / "m", owners_of(open_store(copy), kind, servers), servers)
    check_digests(parts, tmp_path, mem, digests)


@pytest.mark.parametrize(
    ("maker", "servers", "mems"),
    [
        ("gap", 2, (LEAST,)), ("metis", 4, (AMPLE,)),
        pytest.param("gap", 2, (AMPLE,), marks=LONG),
        pytest.param("metis", 4, (LEAST,), marks=LONG),
        pytest.param("gap", 8, (LEAST, AMPLE), marks=LONG),
    ],
)  # fmt: skip
def test_parts_by_the_maps_that_commands_make(
    whole: Path, tmp_path: Path, maker: str, servers: int, mems: tuple[int, ...]
):
    if maker == "metis":
        pytest.importorskip("pymetis")
    store = tmp_path / "store"
    repartition(open_store(whole), store, PartitionOptions(num_partitions=24), Progress())
    options = OwnerOptions(name="servers", owners=servers)
    chosen = {"from_partitions": True} if maker == "gap" else {"method": "metis"}
    owner = make_owners(open_store(store), None, replace(options, **chosen), Progress()).owner
    parts = make_parts(store, tmp_path / "m", owner, servers)
    (tmp_path / "d").mkdir()
    with serving(store, tmp_path / "d", AMPLE) as (endpoint, _):
        digests = {plan: epoch_digest(endpoint, dataset(plan)) for plan in PLANS}
    for mem in mems:
        check_digests(parts, tmp_path, mem, digests)


def check_digests(parts: list[Path], folder: Path, mem: int, digests: dict[str, str]) -> None:
    """Daemons that fetch from each other at the same time all give those."""
    servers = len(parts)
    with serving_parts(parts, folder, mem) as (endpoints, services, _, _):
        found: dict[tuple[int, str], str] = {}

        def epochs(server: int) -> None:
            for plan in PLANS:
                found[server, plan] = epoch_digest(endpoints[server], dataset(plan))

        threads = [threading.Thread(target=epochs, args=(i,)) for i in range(servers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {(i, plan): digests[plan] for i in range(servers) for plan in PLANS}
        for service in services:
            ledger, _, counters = service.status()
            assert counters["peer_rows_asked"] > 0
            assert counters["peer_bytes_asked"] == counters["peer_rows_asked"] * 4 * WIDTH
            assert "peers" in [entry.name for entry in ledger]


def test_a_peer_that_comes_back_in_time(whole: Path, tmp_path: Path, digests: dict[str, str]):
    copy = shutil.copytree(whole, tmp_path / "store")
    parts = make_parts(copy, tmp_path / "m", partition_owners(open_store(copy), 2), 2)
    with serving_parts(parts, tmp_path, LEAST) as (endpoints, services, stop, start):
        stop(1)
        threading.Timer(1.0, start, [1]).start()
        assert epoch_digest(endpoints[0], dataset("minibatch")) == digests["minibatch"]
        assert services[0].status()[2]["peer_retries"] > 0


def test_a_peer_that_stays_away_is_named_and_a_replica_goes_on(
    whole: Path, tmp_path: Path, digests: dict[str, str]
):
    copy = shutil.copytree(whole, tmp_path / "store")
    parts = make_parts(copy, tmp_path / "m", partition_owners(open_store(copy), 2), 2)
    dead, alive, own = (free_address() for _ in range(3))
    for name in "abc":
        (tmp_path / name).mkdir()
    back = PeerAddresses({0: (parse_tcp(own),)}, 1.0)
    for replicas in ((dead,), (dead, alive)):
        peers = PeerAddresses({1: tuple(map(parse_tcp, replicas))}, 0.5)
        with (
            serving(parts[1], tmp_path / "a", LEAST, peers=back, listen=alive),
            serving(parts[0], tmp_path / "b", AMPLE, peers=peers, listen=own) as (endpoint, _),
        ):
            if len(replicas) == 2:
                assert epoch_digest(endpoint, dataset("hyperbatch")) == digests["hyperbatch"]
                continue
            begun = time.monotonic()
            with ThreadPoolExecutor(len(PLANS)) as pool:  # every trainer that waits
                waiting = [pool.submit(epoch_digest, endpoint, dataset(plan)) for plan in PLANS]
            for failed in waiting:
                with pytest.raises(BatchFailed, match=f"server 1 at {dead}: gave no rows"):
                    failed.result()
            assert time.monotonic() - begun < 10


def test_parts_of_other_stores_and_maps_are_refused(whole: Path, tmp_path: Path):
    copy = shutil.copytree(whole, tmp_path / "store")
    owner = partition_owners(open_store(copy), 2)
    (tmp_path / "n").mkdir()
    mine = make_parts(copy, tmp_path / "m", owner, 2)
    other = owner.copy()
    other[-1] ^= 1
    theirs = make_parts(copy, tmp_path / "n", other, 2)
    with (
        serving_parts([mine[0], theirs[1]], tmp_path, LEAST) as (endpoints, _, _, _),
        pytest.raises(BatchFailed, match=r"server 1 at .*by owner map .* this is the part of"),
    ):
        epoch_digest(endpoints[0], dataset("minibatch"))


def test_what_is_said_of_files_of_peers(whole: Path, tmp_path: Path):
    copy = shutil.copytree(whole, tmp_path / "store")
    part = open_store(make_parts(copy, tmp_path / "m", partition_owners(open_store(copy), 2), 2)[0])
    path, one = tmp_path / "peers", "tcp://127.0.0.1:1"
    for text, match in (
        (f"1 {one}\n1 {one}", r"peers:2: server 1 was named before"),
        ("1", "expected a server's number and its addresses"),
        (f"x {one}", "expected a server's number"),
        ("1 udp://x", "expected tcp://HOST:PORT"),
        (f"0 {one}", "no line of server 1, expected 0 to 1"),
        (f"1 {one}\n2 {one}", "server 2, expected 0 to 1"),
    ):
        path.write_text(text)
        with pytest.raises(Refused, match=match):
            part_with_peers(part, read_peers(path, None))
    path.write_text(f"# ours\n0 {one}\n1 {one} tcp://127.0.0.1:2 # and a replica\n")
    peers = read_peers(path, tmp_path)
    assert [a.place for a in peers.by_server[1]] == [one, "tcp://127.0.0.1:2"]
    assert part_with_peers(part, peers) == part.part
    with pytest.raises(Refused, match="expected --peers FILE"):
        part_with_peers(part, None)
    with pytest.raises(Refused, match="is a whole store, --peers is for parts"):
        part_with_peers(open_store(copy), peers)
    with pytest.raises(Refused, match="No such file or directory; expected a line"):
        read_peers(tmp_path / "nothing", None)
