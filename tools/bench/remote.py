"""What it costs to be on another host: local batches, batches over tcp (loopback), with keys.

Each round is an epoch without think time (`batches_s`, `bytes_s`, processor time of the client a
batch) and one with it (`wait`: what a trainer waits for a batch while it works for `--think-ms`).
`copied` takes pieces out of libzmq by a copy more, which is what `copy=False` saves.
"""

import argparse
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from clients.batch import BatchReader
from clients.connection.buffers import BufferPool
from clients.connection.remote import RemoteSession
from clients.connection.session import Session
from clients.torch import Batch, batch_fields, only_type
from loaderd.protocol import Attach
from loaderd.wire.curve import new_pair
from loaderd.wire.keys import AUTHORIZED, KNOWN, PUBLIC, write_pair
from tools.bench.harness import Peer, Run, measure, report
from tools.bench.setup import GraphSize, make_graph, make_store, serving

WAYS = ("local", "tcp", "tcp, copied", "tcp, keys")


class CopyingSession(RemoteSession):
    """Takes pieces by a copy more."""

    def _receive_bytes(self) -> Any:
        return self._socket.recv(zmq.NOBLOCK)


def epoch(session: Session, reader: BatchReader, think_s: float) -> Mapping[str, float]:
    """Rates and waits of an epoch."""
    waits, num_bytes = [], 0
    begun, cpu = time.perf_counter(), time.process_time()
    session.start(session.run, 0)
    for step in range(session.attached.num_steps):
        asked = time.perf_counter()
        batch = Batch(**only_type(batch_fields(reader.read(step), session.attached)))
        waits.append(time.perf_counter() - asked)
        tensors = (batch.x, batch.y, batch.edge_index, batch.n_id, batch.input_id)
        num_bytes += sum(t.nbytes for t in tensors if t is not None)
        until = time.perf_counter() + think_s
        while time.perf_counter() < until:  # a trainer at work holds its core
            pass
    seconds, steps = time.perf_counter() - begun, len(waits)
    if think_s:
        p50, p99 = np.percentile(waits[min(2, steps - 1) :], (50, 99))
        return {"wait_p50_ms": 1e3 * float(p50), "wait_p99_ms": 1e3 * float(p99)}
    return {
        "batches_s": steps / seconds,
        "bytes_s": num_bytes / seconds,
        "client_cpu_ms": 1e3 * (time.process_time() - cpu) / steps,
    }


def free_address() -> str:
    """Of loopback, at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Folders of a daemon and a client that know each other."""
    daemon, client = folder / "daemon", folder / "client"
    for place in (daemon, client):
        if not place.exists():
            write_pair(place, new_pair(), place.name)
    (daemon / AUTHORIZED).write_text((client / PUBLIC).read_text())
    (client / KNOWN).write_text((daemon / PUBLIC).read_text().split()[0] + "\n")
    return daemon, client


@contextmanager
def open_way(way: str, store: Path, folder: Path, request: Attach, think_s: float) -> Iterator[Run]:
    """A daemon with everything in memory, and a client."""
    address, options = free_address(), []
    place = folder / way.replace(", ", "-")
    place.mkdir(parents=True, exist_ok=True)
    endpoint = address
    if way == "tcp, keys":
        daemon, client = make_keys(place / "keys")
        options, endpoint = ["--keys", str(daemon)], f"{address}?keys={client}"
    words = ("--workers", "2", "--listen", address, *options)
    with serving(store, place, "1G", *words) as local:
        made: dict[str, Any] = {"local": Session, "tcp, copied": CopyingSession}
        session = made.get(way, RemoteSession)(local if way == "local" else endpoint, request)
        reader = BatchReader(session, BufferPool())
        try:
            yield lambda: {**epoch(session, reader, 0.0), **epoch(session, reader, think_s)}
        finally:
            session.close()


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench remote", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--fanouts", type=int, nargs="+", default=(10, 10))
    parser.add_argument("--think-ms", type=float, default=50.0)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(words)
    folder = Path(given.folder)
    store = make_store(folder, make_graph(folder, GraphSize(given.nodes, 16, given.width, 8)))
    request = Attach(
        token=0, request=0, num_neighbors=tuple(given.fanouts), batch_size=given.batch_size
    )
    rest = (store, folder / "remote", request, given.think_ms / 1e3)
    found = measure([Peer(way, open_way, (way, *rest)) for way in given.ways], given.rounds)
    setting = {
        "nodes": given.nodes, "width": given.width, "fanouts": list(given.fanouts),
        "batch_size": given.batch_size, "think_ms": given.think_ms, "cache": "warm",
    }  # fmt: skip
    return report("remote", setting, found, given.out)
