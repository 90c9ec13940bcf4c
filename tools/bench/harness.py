"""One way to measure for all: interleaved rounds, medians and spreads, peak memory, JSON lines."""

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tools.machine import machine, today

_POLL_S = 0.05


class Peer(NamedTuple):
    """One way to do the work: `run` does one round and returns what it measured."""

    name: str
    run: Callable[[], Mapping[str, float]]


def measure(peers: list[Peer], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Every peer once a round, in turn (A B A B ...): by peer and figure, one value a round."""
    found: dict[str, dict[str, list[float]]] = {p.name: {} for p in peers}
    for _ in range(rounds):
        for peer in peers:
            for figure, value in peer.run().items():
                found[peer.name].setdefault(figure, []).append(value)
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def report(
    bench: str, setting: Mapping[str, Any], found: dict[str, dict[str, list[float]]], out: str
) -> list[dict[str, Any]]:
    """Print a JSON line per peer, and append them to the file `out` where one is named."""
    lines = []
    for name, figures in found.items():
        line = {
            "bench": bench,
            "peer": name,
            "date": today(),
            "machine": machine(),
            **setting,
            "rounds": max(len(v) for v in figures.values()),
            **{figure: spread(values) for figure, values in figures.items()},
        }
        lines.append(line)
        print(json.dumps(line), flush=True)
    if out:
        with Path(out).open("a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


def resident_bytes(pids: list[int]) -> int:
    """RssAnon + RssShmem of processes, the arena counted once."""
    anonymous, shared = 0, 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        anonymous += int(fields.get("RssAnon", "0 kB").split()[0]) * 1024
        shared = max(shared, int(fields.get("RssShmem", "0 kB").split()[0]) * 1024)
    return anonymous + shared


def descendants(root: int) -> list[int]:
    """A process and all below it."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                todo += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Watches this process and its children; the function gives the peak so far, in bytes."""
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident_bytes(descendants(os.getpid())))
            done.wait(_POLL_S)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: peak
    finally:
        done.set()
        thread.join()


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
