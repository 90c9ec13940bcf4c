"""What a client waits for, and gets, from a daemon on the same host and over tcp (loopback).

Each round is an epoch without think time (rates, processor time of the client) and one in which the
trainer is busy for `--think-ms` after each batch (waits, the first window not counted).
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clients.torch import NeighborDataset
from loaderd.api.keys import AUTHORIZED, KNOWN, PUBLIC, write_pair
from loaderd.server.curve import new_pair
from tools.bench.harness import BenchPlan, GraphOptions, Run, Side
from tools.bench.setup import free_port, serving

Way = Literal["local", "tcp", "tcp, keys"]


@dataclass(frozen=True)
class HandoverOptions(GraphOptions):
    nodes: int = 200_000
    degree: int = 16
    features: int = 64
    batch_size: int = 200
    fanouts: tuple[int, ...] = (10, 10)
    think_ms: float = 20.0
    ways: tuple[Way, ...] = ("local", "tcp", "tcp, keys")


def epoch(data: NeighborDataset, think_s: float) -> Mapping[str, float]:
    """Rates of an epoch, or waits."""
    waits, num_bytes = [], 0
    begun = asked = time.perf_counter()
    cpu = time.process_time()
    for batch in data:
        waits.append(time.perf_counter() - asked)
        tensors = (batch.x, batch.y, batch.edge_index, batch.n_id, batch.input_id)
        num_bytes += sum(t.nbytes for t in tensors if t is not None)
        until = time.perf_counter() + think_s
        while time.perf_counter() < until:  # a trainer at work holds its core
            pass
        asked = time.perf_counter()
    seconds, steps = time.perf_counter() - begun, len(waits)
    if think_s:
        first = min(data.attached().window, steps - 1)
        shares = (50, 90, 99)
        found = 1e6 * np.percentile(waits[first:], shares)
        return {f"batch_p{share}_us": float(v) for share, v in zip(shares, found, strict=True)}
    return {
        "batches_s": steps / seconds, "bytes_s": num_bytes / seconds,
        "client_cpu_ms": 1e3 * (time.process_time() - cpu) / steps,
    }  # fmt: skip


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Folders of a daemon and a client that know each other."""
    daemon, client = folder / "daemon", folder / "client"
    for place in (daemon, client):
        if not place.exists():
            write_pair(place, new_pair(), place.name)
    (daemon / AUTHORIZED).write_text((client / PUBLIC).read_text())
    (client / KNOWN).write_text((daemon / PUBLIC).read_text().split()[0] + "\n")
    return daemon, client


def open_way(way: Way, given: HandoverOptions) -> Iterator[Run]:
    """A daemon with everything in memory, and a client."""
    place = given.folder / "handover" / way.replace(", ", "-")
    place.mkdir(parents=True, exist_ok=True)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    options = ["--workers", "2", "--listen", endpoint]
    if way == "tcp, keys":
        daemon, client = make_keys(place / "keys")
        options, endpoint = [*options, "--keys", str(daemon)], f"{endpoint}?keys={client}"
    think_s = given.think_ms / 1e3
    asked: dict[str, Any] = {"num_neighbors": given.fanouts, "batch_size": given.batch_size}
    with serving(given.store(), place, "1G", *options) as local:
        data = NeighborDataset(local if way == "local" else endpoint, **asked)
        with closing(data):
            yield lambda: {**epoch(data, 0), **epoch(data, think_s)}


def handover(given: HandoverOptions) -> Iterator[BenchPlan]:
    given.store()
    yield BenchPlan([Side(way, open_way, (way, given)) for way in given.ways], {"cache": "warm"})
