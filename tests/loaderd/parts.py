"""Daemons with parts of a store, in threads of this process, that fetch from each other."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from blockstore.make_part import make_part, plan_part
from blockstore.owners import write_owners
from blockstore.store import Store, open_store
from loaderd.api.peers import PeerAddresses
from loaderd.api.tcp import parse_tcp
from loaderd.streams.service import StreamService
from tests.graphs import Csc
from tests.loaderd.threaded import serving
from tests.remotes import free_address
from tests.stores import write_store

NODES, PARTITIONS, WIDTH = 2000, 8, 64
AMPLE = 24 << 20  # beside the memory of peers, for the store of `write_whole`


def write_whole(path: Path) -> Path:
    """Partitions of 250 nodes, whose edges are mostly inside; rows of 256 bytes."""
    rng, each = np.random.default_rng(2), NODES // PARTITIONS
    dst = np.repeat(np.arange(NODES), 8)
    src = dst // each * each + rng.integers(0, each, dst.size)
    away = rng.random(dst.size) < 0.1
    src[away] = rng.integers(0, NODES, int(away.sum()))
    graph = Csc(
        np.arange(NODES + 1) * 8, src.astype(np.uint32), np.arange(dst.size, dtype=np.uint32)
    )
    offsets = list(range(0, NODES + 1, each))
    halos = [np.unique(rng.integers(0, each, 9) + (p + 1) % PARTITIONS * each) for p in range(8)]
    train = rng.permutation(NODES)[:400]
    write_store(path, graph, train, width=WIDTH, offsets=offsets, hubs=[5, 900], halos=halos)
    return path


def make_parts(whole: Path, folder: Path, owner: np.ndarray, servers: int) -> list[Path]:
    """A part of the store for each server."""
    store = open_store(whole)
    write_owners(store, folder.name, owner, servers, {})
    for server in range(servers):
        plan = plan_part(store, folder.name, server)
        make_part(store, folder / f"part{server}", plan, lambda _: None)
    return [folder / f"part{server}" for server in range(servers)]


def partition_owners(store: Store, servers: int) -> np.ndarray:
    """Partitions in turn."""
    offsets = store.partition_offsets(store.manifest.types[0]).astype(np.int64)
    return np.repeat(np.arange(offsets.size - 1) % servers, np.diff(offsets))


@contextmanager
def serving_parts(
    parts: list[Path], folder: Path, mem: int, wait_s: float = 20.0
) -> Iterator[tuple[list[str], list[StreamService], Callable[[int], None], Callable[[int], None]]]:
    """Endpoints and streams of daemons with these parts; and what stops and starts one of them."""
    addresses = [free_address() for _ in parts]
    peers = PeerAddresses({i: (parse_tcp(a),) for i, a in enumerate(addresses)}, wait_s)
    stacks: list[ExitStack] = [ExitStack() for _ in parts]
    endpoints, services = [""] * len(parts), [None] * len(parts)

    def start(i: int) -> None:
        (folder / f"d{i}").mkdir(exist_ok=True)
        endpoints[i], services[i] = stacks[i].enter_context(
            serving(parts[i], folder / f"d{i}", mem, peers=peers, listen=addresses[i])
        )

    def stop(i: int) -> None:
        stacks[i].close()

    with ExitStack() as all_of_them:
        for stack in stacks:
            all_of_them.callback(stack.close)
        for i in range(len(parts)):
            start(i)
        yield endpoints, services, stop, start  # type: ignore[misc]
