"""Many trainers at one daemon: does one hold up others, what do they read, is it fair?

`python -m tools.bench trainers --case stopped`: four consumers with a think time; one is stopped
(SIGSTOP) for `--seconds`, and the others' throughput is set against the same time before, in pairs;
each with a plan of its own, and all with one plan.

`--case shared`: bytes that eight trainers of one plan read together in an epoch, over those of one
alone, each with a fresh daemon.

`--case fair`: sixteen trainers of different plans in one budget, without think time: of each, its
rate over that of its plan alone; the least, over the mean of all.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from loaderd.protocol import Attach
from loaderd.wire.endpoint import parse_endpoint
from loaderd.wire.transport import ask_status
from tools.bench.consumers import consumers, rates, wait_begun
from tools.bench.harness import Peer, Run, measure, report
from tools.bench.resources import resident_bytes
from tools.bench.setup import GraphSize, make_graph, make_store, serving

CASES = ("stopped", "shared", "fair")


class Task(NamedTuple):
    """What all of a case have."""

    store: Path
    folder: Path
    mem: str
    workers: int
    fanouts: tuple[int, ...]
    batch_size: int
    seconds: float
    think_s: float
    consumers: int  # 0: as many as the case has

    def request(self, **others: Any) -> Attach:
        """Of a consumer."""
        given: dict[str, Any] = {"num_neighbors": self.fanouts, "batch_size": self.batch_size}
        return Attach(token=0, request=0, **given | others)

    def serving(self, name: str) -> Any:
        """A daemon of its own."""
        (folder := self.folder / name).mkdir(parents=True, exist_ok=True)
        return serving(self.store, folder, self.mem, "--workers", str(self.workers))


@contextmanager
def open_stopped(task: Task, name: str, seeds: tuple[int, ...]) -> Iterator[Run]:
    """Consumers of these seeds, the last of which is stopped."""
    with (
        task.serving(name) as endpoint,
        consumers(endpoint, [task.request(seed=s) for s in seeds], task.think_s) as running,
    ):
        wait_begun(running)
        *others, stopped = running

        def run() -> Mapping[str, float]:
            free = sum(rates(others, task.seconds))
            stopped.stop()
            time.sleep(min(1.0, task.seconds / 10))  # it has had its window by then
            before = stopped.count.value
            beside = sum(rates(others, task.seconds))
            assert stopped.count.value == before
            stopped.go_on()
            again = sum(rates(others, task.seconds))
            return {
                "free_per_s": free, "beside_stopped_per_s": beside, "after_per_s": again,
                "kept": 2 * beside / (free + again),
            }  # fmt: skip

        yield run


def counter(endpoint: str, name: str) -> int:
    """Of the daemon."""
    return ask_status(parse_endpoint(endpoint)).counters[name]


def epoch_together(task: Task, count: int) -> tuple[float, int]:
    """Seconds of an epoch of so many trainers of one plan, and bytes read for them."""
    with (
        task.serving(f"shared-{count}") as endpoint,
        consumers(endpoint, [task.request(seed=1)] * count, task.think_s, 1) as running,
    ):
        begun, before = time.perf_counter(), counter(endpoint, "bytes_read")
        for consumer in running:
            consumer.process.join()
            if consumer.process.exitcode:
                raise RuntimeError("a consumer failed")
        return time.perf_counter() - begun, counter(endpoint, "bytes_read") - before


@contextmanager
def open_shared(task: Task) -> Iterator[Run]:
    """One, then all, each with a daemon that has nothing in memory yet."""

    def run() -> Mapping[str, float]:
        one_s, one = epoch_together(task, 1)
        all_s, together = epoch_together(task, task.consumers or 8)
        return {
            "one_s": one_s, "all_s": all_s, "one_bytes": one, "all_bytes": together,
            "over_one": together / max(1, one),
        }  # fmt: skip

    yield run


@contextmanager
def open_fair(task: Task) -> Iterator[Run]:
    """Each kind of plan alone, then all at once, in one daemon."""
    kinds = [
        task.request(),
        task.request(batch_size=max(1, task.batch_size // 4)),
        task.request(num_neighbors=task.fanouts[:1]),
        task.request(num_neighbors=(*task.fanouts[:-1], 2 * task.fanouts[-1])),
    ]
    count = task.consumers or 16
    given = [structs.replace(kinds[i % len(kinds)], seed=i, window=2) for i in range(count)]

    def run() -> Mapping[str, float]:
        alone = []
        with task.serving("fair") as endpoint:
            for kind in given[: len(kinds)]:
                with consumers(endpoint, [kind]) as running:
                    wait_begun(running)
                    alone += rates(running, task.seconds / len(kinds))
            with consumers(endpoint, given) as running:
                wait_begun(running)
                found = rates(running, task.seconds)
                status = ask_status(parse_endpoint(endpoint))
            held = resident_bytes([status.pid])
        parts = [rate / alone[i % len(kinds)] for i, rate in enumerate(found)]
        mean = statistics.mean(parts)
        return {
            "least_of_mean": min(parts) / mean, "most_of_mean": max(parts) / mean,
            "least_of_equal_part": min(parts) * count, "batches_per_s": sum(found),
            "resident_bytes": held, "sessions": len(status.sessions),
        }  # fmt: skip

    yield run


def peers(case: str, task: Task) -> list[Peer]:
    """Of a case."""
    if case == "shared":
        return [Peer("eight of one plan", open_shared, (task,))]
    if case == "fair":
        return [Peer("sixteen of different plans", open_fair, (task,))]
    seeds = tuple(range(task.consumers or 4))
    return [
        Peer("plans of their own", open_stopped, (task, "own", seeds)),
        Peer("one plan", open_stopped, (task, "one", (1,) * len(seeds))),
    ]


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench trainers", description=__doc__)
    parser.add_argument("--case", choices=CASES, default="stopped")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/blockstore-bench"))
    parser.add_argument("--out", default="")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--mem", default="", help="default: 256M, for `shared` 48M")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--fanouts", type=int, nargs="+", default=(10, 10))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part of a round")
    parser.add_argument("--think-ms", type=float, default=-1, help="default: 50; 0 but for stopped")
    parser.add_argument("--consumers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(words)
    graph = make_graph(given.folder, GraphSize(given.nodes, 16, 64, 8))
    think = given.think_ms if given.think_ms >= 0 else 50.0 * (given.case == "stopped")
    mem = given.mem or ("48M" if given.case == "shared" else "256M")
    task = Task(
        make_store(given.folder, graph), given.folder, mem, given.workers,
        tuple(given.fanouts), given.batch_size, given.seconds, think / 1e3, given.consumers,
    )  # fmt: skip
    found = measure(peers(given.case, task), given.rounds)
    setting = {
        "case": given.case, "nodes": given.nodes, "mem": mem, "workers": given.workers,
        "fanouts": list(given.fanouts), "batch_size": given.batch_size, "think_ms": think,
        "part_s": given.seconds, "cache": "cold" if given.case == "shared" else "warm",
    }  # fmt: skip
    return report("trainers", setting, found, given.out)
