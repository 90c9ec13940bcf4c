"""What a client waits for beyond its own copy and gather, when the batch is ready."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clients.batch import BatchReader
from clients.buffers import BufferPool
from clients.session import Session
from loaderd.protocol import Attach, BatchReady
from tools.bench.harness import Peer, measure, report
from tools.bench.setup import GraphSize, make_graph, make_store, serving


class TimedSession(Session):
    """A session that notes how long it took to get each batch's descriptor."""

    waits: list[float]

    def receive_batch(self, step: int) -> BatchReady:
        begun = time.perf_counter()
        message = super().receive_batch(step)
        self.waits.append(time.perf_counter() - begun)
        return message


def run(session: TimedSession, think_s: float) -> Mapping[str, float]:
    """An epoch with a trainer that thinks; the first window is not counted."""
    reader = BatchReader(session, BufferPool())
    session.waits = []
    session.start(0, 0)
    copies = []
    for step in range(session.attached.num_steps):
        begun = time.perf_counter()
        reader.read(step)
        copies.append(time.perf_counter() - begun - session.waits[-1])
        until = time.perf_counter() + think_s
        while time.perf_counter() < until:  # a trainer at work holds its core
            pass
    waits = np.array(session.waits[session.attached.window :]) * 1e6
    return {
        "wait_p50_us": float(np.percentile(waits, 50)),
        "wait_p90_us": float(np.percentile(waits, 90)),
        "wait_p99_us": float(np.percentile(waits, 99)),
        "copy_and_gather_p50_us": float(np.median(copies) * 1e6),
    }


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
    arguments = parser.parse_args(words)
    folder = Path(arguments.folder)
    graph = make_graph(folder, GraphSize(arguments.nodes, 16, 64, 8))
    with serving(make_store(folder, graph), folder, "1G", "--workers", "2") as endpoint:
        request = Attach(
            token=0,
            request=0,
            num_neighbors=tuple(arguments.fanouts),
            batch_size=arguments.batch_size,
        )
        session = TimedSession(endpoint, request)
        peers = [Peer("ours", lambda: run(session, arguments.think_ms / 1e3))]
        found = measure(peers, arguments.rounds)
        setting = {"batch_size": arguments.batch_size, "think_ms": arguments.think_ms}
        session.close()
    return report("handover", setting, found, arguments.out)
