"""What a client waits for beyond its own copy and gather, when the batch is ready.

A step is ready where its descriptor has arrived before it is asked for; waits are those of such
steps, and the share of the others stands apart.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from clients.batch import BatchReader
from clients.connection.buffers import BufferPool
from clients.connection.session import Session
from clients.torch import Batch, batch_fields, only_type
from loaderd.protocol import Attach, BatchReady, Blob, BlobArray, RowArraySpec
from tools.bench.harness import Peer, Run, measure, report
from tools.bench.setup import GraphSize, make_graph, make_store, serving


class WatchedPoller(zmq.Poller):
    """Counts its polls: a session polls when what it wants is not there."""

    polls = 0

    def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
        """As zmq's."""
        self.polls += 1
        return super().poll(timeout)


class TimedSession(Session):
    """Notes how long the descriptor of the last batch took to come, and whether it was there."""

    received_s = 0.0
    was_ready = False

    def _open_socket(self) -> None:
        super()._open_socket()
        self._watched = WatchedPoller()
        for socket, events in self._poller.sockets:
            self._watched.register(socket, events)
        self._poller = self._watched

    def receive_batch(self, step: int) -> BatchReady:
        """As the session's."""
        polls, begun = self._watched.polls, time.perf_counter()
        message = super().receive_batch(step)
        self.received_s = time.perf_counter() - begun
        self.was_ready = self._watched.polls == polls
        return message


class TimedReader(BatchReader):
    """Notes how long the last batch's copies and gathers took."""

    copied_s = 0.0

    def _wide(self, blob: Blob, array: BlobArray) -> NDArray[np.int64]:
        begun = time.perf_counter()
        found = super()._wide(blob, array)
        self.copied_s += time.perf_counter() - begun
        return found

    def _edges(self, *given: Any) -> NDArray[np.int64]:
        begun = time.perf_counter()
        found = super()._edges(*given)
        self.copied_s += time.perf_counter() - begun
        return found

    def _gather_piece(
        self,
        spec: RowArraySpec,
        addresses: NDArray[np.uint64],
        first: int,
        positions: NDArray[np.uint32] | None,
        out: NDArray[np.uint8],
    ) -> None:
        begun = time.perf_counter()
        super()._gather_piece(spec, addresses, first, positions, out)
        self.copied_s += time.perf_counter() - begun


def epoch(
    session: TimedSession, reader: TimedReader, number: int, think_s: float
) -> Mapping[str, float]:
    """Times of an epoch with a trainer that thinks; the first window is not counted."""
    times: dict[str, list[float]] = {"wait": [], "beyond_copy": [], "copy_and_gather": []}
    ready = []
    session.start(number, 0)
    for step in range(session.attached.num_steps):
        reader.copied_s = 0.0
        begun = time.perf_counter()
        Batch(**only_type(batch_fields(reader.read(step), session.attached)))
        seconds = time.perf_counter() - begun
        times["wait"].append(session.received_s)
        times["copy_and_gather"].append(reader.copied_s)
        times["beyond_copy"].append(seconds - reader.copied_s)
        ready.append(session.was_ready)
        until = time.perf_counter() + think_s
        while time.perf_counter() < until:  # a trainer at work holds its core
            pass
    window = min(session.attached.window, session.attached.num_steps - 1)
    counted = np.array(ready[window:])
    figures = {"not_ready_share": float(1 - counted.mean())}
    for name, values in times.items():
        kept = np.array(values[window:])[counted]
        for share in (50, 90, 99):
            found = np.percentile(kept, share) if kept.size else np.nan
            figures[f"{name}_p{share}_us"] = 1e6 * float(found)
    late = np.array(times["wait"][window:])[~counted]
    return figures | {"late_wait_p50_us": 1e6 * float(np.median(late)) if late.size else 0.0}


@contextmanager
def open_ours(store: Path, folder: Path, request: Attach, think_s: float) -> Iterator[Run]:
    """A daemon, and a client whose trainer takes `think_s` a batch."""
    with serving(store, folder, "1G", "--workers", "2") as endpoint:
        session = TimedSession(endpoint, request)
        reader = TimedReader(session, BufferPool())
        yield lambda: epoch(session, reader, session.run, think_s)
        session.close()


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench handover", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--fanouts", type=int, nargs="+", default=(10, 10))
    parser.add_argument("--think-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(words)
    folder = Path(given.folder)
    graph = make_graph(folder, GraphSize(given.nodes, 16, 64, 8))
    request = Attach(
        token=0, request=0, num_neighbors=tuple(given.fanouts), batch_size=given.batch_size
    )
    arguments = (make_store(folder, graph), folder, request, given.think_ms / 1e3)
    found = measure([Peer("ours", open_ours, arguments)], given.rounds)
    setting = {
        "nodes": given.nodes, "fanouts": list(given.fanouts), "batch_size": given.batch_size,
        "think_ms": given.think_ms, "cache": "warm",
    }  # fmt: skip
    return report("handover", setting, found, given.out)
