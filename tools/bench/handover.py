"""What a client waits for, and gets, from a daemon on the same host and over tcp (loopback).

Each round is an epoch without think time (rates, processor time of the client) and one in which the
trainer is busy for `--think-ms` after each batch (waits).  A local step is ready if its descriptor
has arrived before it is asked for: `descriptor` is the wait for it in such steps, and the share of
the others stands apart; `batch` is the wait for the whole batch in all steps.  `copied` takes
pieces out of libzmq by a copy more, which is what `copy=False` saves.
"""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zmq

from clients.batch import BatchReader
from clients.connection.buffers import BufferPool
from clients.connection.remote import RemoteSession
from clients.connection.session import Session
from clients.torch import Batch, batch_fields, only_type
from loaderd.protocol import Attach, BatchReady
from loaderd.wire.curve import new_pair
from loaderd.wire.keys import AUTHORIZED, KNOWN, PUBLIC, write_pair
from tools.bench.harness import GraphOptions, Plan, Run, Side
from tools.bench.setup import serving

Way = Literal["local", "tcp", "tcp, copied", "tcp, keys"]


@dataclass(frozen=True)
class Options(GraphOptions):
    nodes: int = 200_000
    degree: int = 16
    features: int = 64
    batch_size: int = 200
    fanouts: tuple[int, ...] = (10, 10)
    think_ms: float = 20.0
    ways: tuple[Way, ...] = ("local", "tcp", "tcp, copied", "tcp, keys")


class WatchedPoller(zmq.Poller):
    """Counts its polls: a session polls when what it wants is not there."""

    polls = 0

    def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
        self.polls += 1
        return super().poll(timeout)


class LocalSession(Session):
    """Notes how long the descriptors of ready batches took to come, and which were not there."""

    def _open_socket(self) -> None:
        super()._open_socket()
        self.waits: list[float] = []  # nan: it was not there
        self._watched = WatchedPoller()
        for listened, events in self._poller.sockets:
            self._watched.register(listened, events)
        self._poller = self._watched

    def receive_batch(self, step: int) -> BatchReady:
        polls, begun = self._watched.polls, time.perf_counter()
        message = super().receive_batch(step)
        seconds = time.perf_counter() - begun
        self.waits.append(seconds if self._watched.polls == polls else np.nan)
        return message


class CopyingSession(RemoteSession):
    """Takes pieces by a copy more."""

    def _receive_bytes(self) -> Any:
        return self._socket.recv(zmq.NOBLOCK)


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Those of waits that are numbers."""
    shares = (50, 90, 99)
    found = np.nanpercentile(seconds, shares) if np.isfinite(seconds).any() else [np.nan] * 3
    return {f"{name}_p{share}_us": 1e6 * float(v) for share, v in zip(shares, found, strict=True)}


def epoch(session: Session, reader: BatchReader, think_s: float) -> Mapping[str, float]:
    """Rates of an epoch, or waits, in which the first window is not counted."""
    waits, num_bytes = [], 0
    session.start(session.run, 0)
    if isinstance(session, LocalSession):
        session.waits.clear()
    begun, cpu = time.perf_counter(), time.process_time()
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
    if not think_s:
        return {
            "batches_s": steps / seconds,
            "bytes_s": num_bytes / seconds,
            "client_cpu_ms": 1e3 * (time.process_time() - cpu) / steps,
        }
    first = min(session.attached.window, steps - 1)
    figures = percentiles("batch", waits[first:])
    if isinstance(session, LocalSession):
        descriptors = session.waits[first:]
        figures |= percentiles("descriptor", descriptors)
        figures["not_ready_share"] = float(np.isnan(descriptors).mean())
    return figures


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
def open_way(way: Way, given: Options) -> Iterator[Run]:
    """A daemon with everything in memory, and a client."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    place = given.folder / "handover" / way.replace(", ", "-")
    place.mkdir(parents=True, exist_ok=True)
    options = ["--workers", "2", "--listen", address]
    if way == "tcp, keys":
        daemon, client = make_keys(place / "keys")
        options, endpoint = [*options, "--keys", str(daemon)], f"{address}?keys={client}"
    made: dict[str, Any] = {"local": LocalSession, "tcp, copied": CopyingSession}
    request = Attach(
        token=0, request=0, num_neighbors=given.fanouts, batch_size=given.batch_size
    )  # fmt: skip
    with serving(given.store(), place, "1G", *options) as local:
        session = made.get(way, RemoteSession)(local if way == "local" else endpoint, request)
        reader, think_s = BatchReader(session, BufferPool()), given.think_ms / 1e3
        try:
            yield lambda: {**epoch(session, reader, 0), **epoch(session, reader, think_s)}
        finally:
            session.close()


def plans(given: Options) -> Iterator[Plan]:
    given.store()
    yield Plan([Side(way, open_way, (way, given)) for way in given.ways], {"cache": "warm"})
