"""Many trainers at one daemon: does one hold up others, what do they read, is it fair?

`stopped`: four consumers with a think time; one is stopped (SIGSTOP) for `--seconds`, and the
others' throughput is set against the same time before and after; each with a plan of its own, and
all with one plan.

`shared`: an epoch of one trainer, of several of one plan, of the ranks of a job, and of trainers
of different seeds, attach included, each with a fresh daemon: batches per second in all, and bytes
that the daemon reads, over those of the one trainer.

`fair`: sixteen trainers of different plans in one budget, without think time: of each, its rate
over that of its plan alone; the least, over the mean of all.
"""

import itertools
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import structs

from clients.batch import BatchReader
from clients.connection.buffers import BufferPool
from clients.connection.session import Session
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.protocol import Attach
from loaderd.server.transport import ask_status
from tools.bench.harness import BenchPlan, GraphOptions, Ratio, Run, Side
from tools.bench.resources import resident_bytes
from tools.bench.setup import counters, serving

BEGIN_S = 120.0
ALONE = "one trainer"
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class TrainersOptions(GraphOptions):
    cases: tuple[Literal["stopped", "shared", "fair"], ...] = ("stopped", "shared", "fair")
    nodes: int = 200_000
    degree: int = 16
    features: int = 64
    mem: str = "256M"
    shared_mem: Annotated[str, "of case shared"] = "48M"
    workers: int = 2
    batch_size: int = 200
    fanouts: tuple[int, ...] = (10, 10)
    seconds: Annotated[float, "of each part of a round"] = 60.0
    think_ms: Annotated[float, "that a consumer waits after each batch, of case stopped"] = 50.0
    consumers: Annotated[tuple[int, ...], "of cases stopped, shared, fair"] = (4, 8, 16)
    of_store: Annotated[Path | None, "a store, instead of the generated graph's"] = None

    def store(self) -> Path:
        return self.of_store or super().store()

    def request(self, **others: Any) -> Attach:
        given: dict[str, Any] = {"num_neighbors": self.fanouts, "batch_size": self.batch_size}
        return Attach(token=0, request=0, **given | others)

    def serving(self, name: str, mem: str = "") -> Any:
        (folder := self.folder / name).mkdir(parents=True, exist_ok=True)
        return serving(self.store(), folder, mem or self.mem, "--workers", str(self.workers))


class ReadingProcess(NamedTuple):
    """A process that only reads batches, and a counter of these."""

    process: BaseProcess
    count: Any  # a shared integer

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def _consume(
    endpoint: str, request: Attach, think_s: float, epochs: int, count: Any, go: Barrier
) -> None:
    """Wait for all others, connect, then read `epochs` epochs; 0: until killed."""
    go.wait(BEGIN_S)
    session = Session(endpoint, request)
    reader = BatchReader(session, BufferPool())
    for epoch in range(epochs) if epochs else itertools.count():
        session.start(epoch, 0)
        for step in range(session.attached.num_steps):
            reader.read(step)
            count.value += 1
            time.sleep(think_s)
    reader.close()
    session.close()


@contextmanager
def consumers(
    endpoint: str, requests: Sequence[Attach], think_s: float = 0.0, epochs: int = 0
) -> Iterator[list[ReadingProcess]]:
    """Start one for each request, all at once; without `epochs`, wait until each has a batch.

    Raises BrokenBarrierError, RuntimeError: one could not attach, or gets nothing.
    """
    _CONTEXT.set_forkserver_preload(["tools.bench.trainers"])
    go, found = _CONTEXT.Barrier(len(requests) + 1), []
    try:
        for request in requests:
            count = _CONTEXT.Value("q", 0)
            arguments = (endpoint, request, think_s, epochs, count, go)
            process = _CONTEXT.Process(target=_consume, args=arguments, daemon=True)
            process.start()
            found.append(ReadingProcess(process, count))
        go.wait(BEGIN_S)
        end = time.monotonic() + BEGIN_S
        while not epochs and not all(c.count.value for c in found):
            if time.monotonic() > end:
                raise RuntimeError(f"batches of each: {[c.count.value for c in found]}")
            time.sleep(0.02)
        yield found
    finally:
        for consumer in found:
            consumer.process.kill()
            consumer.process.join()


def rates(running: Sequence[ReadingProcess], seconds: float) -> list[float]:
    """Batches per second of each process, over `seconds`."""
    begun, before = time.perf_counter(), [c.count.value for c in running]
    time.sleep(seconds)
    span = time.perf_counter() - begun
    return [(c.count.value - n) / span for c, n in zip(running, before, strict=True)]


def open_stopped(given: TrainersOptions, name: str, seeds: tuple[int, ...]) -> Iterator[Run]:
    """Rounds of consumers with these random seeds, the last of which is stopped."""
    requests = [given.request(seed=s) for s in seeds]
    with (
        given.serving(name) as endpoint,
        consumers(endpoint, requests, given.think_ms / 1e3) as (*others, stopped),
    ):

        def run() -> Mapping[str, float]:
            free = sum(rates(others, given.seconds))
            stopped.send(signal.SIGSTOP)
            time.sleep(min(1.0, given.seconds / 10))  # until it has received its window
            beside = sum(rates(others, given.seconds))
            stopped.send(signal.SIGCONT)
            again = sum(rates(others, given.seconds))
            return {
                "free_per_s": free, "beside_stopped_per_s": beside, "after_per_s": again,
                "kept": 2 * beside / (free + again),
            }  # fmt: skip

        yield run


def shared_requests(given: TrainersOptions, count: int) -> dict[str, list[Attach]]:
    """What `count` trainers request, in three ways; all batches have the same size."""
    one, job = given.request(), given.batch_size * count
    return {
        "one plan": [one] * count,
        "one job": [
            given.request(batch_size=job, rank=rank, world_size=count) for rank in range(count)
        ],
        "seeds of their own": [given.request(seed=seed) for seed in range(count)],
    }


def run_shared(given: TrainersOptions, requests: Sequence[Attach]) -> Mapping[str, float]:
    """An epoch of trainers that begin together, with a fresh daemon."""
    with (
        given.serving("shared", given.shared_mem) as endpoint,
        consumers(endpoint, requests, epochs=1) as running,
    ):
        begun = time.perf_counter()
        for consumer in running:
            consumer.process.join()
            if consumer.process.exitcode:
                raise RuntimeError("a consumer failed")
        seconds = time.perf_counter() - begun
        batches = sum(consumer.count.value for consumer in running)
        return {
            "batches_per_s": batches / seconds,
            "daemon_bytes": counters(endpoint)["bytes_read"],
        }


def run_fair(given: TrainersOptions) -> Mapping[str, float]:
    """Each kind of plan alone, then all at once, in one daemon."""
    kinds = [
        given.request(),
        given.request(batch_size=max(1, given.batch_size // 4)),
        given.request(num_neighbors=given.fanouts[:1]),
        given.request(num_neighbors=(*given.fanouts[:-1], 2 * given.fanouts[-1])),
    ]
    count = given.consumers[2]
    requests = [structs.replace(kinds[i % len(kinds)], seed=i, window=2) for i in range(count)]
    alone = []
    with given.serving("fair") as endpoint:
        for kind in requests[: len(kinds)]:
            with consumers(endpoint, [kind]) as running:
                alone += rates(running, given.seconds / len(kinds))
        with consumers(endpoint, requests) as running:
            found = rates(running, given.seconds)
            status = ask_status(parse_endpoint(endpoint))
        held = resident_bytes([status.pid])
    parts = [rate / alone[i % len(kinds)] for i, rate in enumerate(found)]
    mean = statistics.mean(parts)
    return {
        "least_of_mean": min(parts) / mean, "most_of_mean": max(parts) / mean,
        "least_of_equal_part": min(parts) * count, "batches_per_s": sum(found),
        "resident_bytes": held, "sessions": len(status.sessions),
    }  # fmt: skip


def trainers(given: TrainersOptions) -> Iterator[BenchPlan]:
    given.store()
    seeds = tuple(range(given.consumers[0]))
    sides = {
        "stopped": [
            Side("plans of their own", open_stopped, (given, "own", seeds)),
            Side("one plan", open_stopped, (given, "one", (1,) * len(seeds))),
        ],
        "shared": [Side(ALONE, run_shared, (given, [given.request()]))]
        + [
            Side(f"{len(requests)}, {way}", run_shared, (given, requests))
            for way, requests in shared_requests(given, given.consumers[1]).items()
        ],
        "fair": [Side("all of different plans", run_fair, (given,))],
    }
    for case in given.cases:
        setting = {"case": case, "cache": "cold" if case == "shared" else "warm"}
        ratios = [
            Ratio(f"{figure}_over_one", side.name, figure, ALONE)
            for side in (sides[case][1:] if case == "shared" else [])
            for figure in ("batches_per_s", "daemon_bytes")
        ]
        yield BenchPlan(sides[case], setting, ratios, warm=case != "shared")
