"""An ingest from end to end against the disk: bytes that it plans to move, and the disk's limit.

The limit is fio's, reading and writing at the same time, in the same round; a plain copy of the
source stands beside it.  `share_of_limit` is (bytes of all passes, as planned) / seconds of the
whole command / that limit.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockstore.units import parse_bytes
from tools.bench.disk import open_fio
from tools.bench.harness import Peer, Run, measure, report
from tools.bench.loaders import drop_cache
from tools.bench.setup import GraphSize, make_graph

COPY_BYTES = 1 << 20
LIMIT_BLOCK = 1 << 20
OURS, FIO, COPY = "ours", "fio, reads and writes", "copy"


def stage_seconds(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each stage; equal names are added."""
    found: dict[str, float] = {}
    for event in events:
        if event["event"] == "stage_end":
            name = re.sub(r"\W+", "_", event["stage"]).strip("_") + "_s"
            found[name] = found.get(name, 0.0) + event["elapsed_s"]
    return found


def planned_bytes(events: list[dict[str, Any]]) -> int:
    """Read and written by all stages, says the plan."""
    (begin,) = [e for e in events if e["event"] == "begin"]
    return sum(s["read_bytes"] + s["written_bytes"] for s in begin["plan"]["stages"])


@contextmanager
def open_ours(graph: Path, folder: Path, options: tuple[str, ...], size: int) -> Iterator[Run]:
    """`blockstore ingest`, into a store that is removed again."""
    store = folder / f"ingest-{os.getpid()}"
    words = [sys.executable, "-m", "preprocess", "ingest", str(graph), str(store), *options]

    def run() -> Mapping[str, float]:
        drop_cache((graph,))
        begun = time.perf_counter()
        done = subprocess.run([*words, "--json"], check=False, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise RuntimeError(done.stderr)
        shutil.rmtree(store)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        planned = planned_bytes(events)
        return {
            "seconds": seconds, "source_GB_per_s": size / seconds / 1e9,
            "planned_GB": planned / 1e9, "GB_per_s": planned / seconds / 1e9,
            "load": os.getloadavg()[0],
        } | stage_seconds(events)  # fmt: skip

    yield run


@contextmanager
def open_copy(graph: Path, folder: Path, size: int) -> Iterator[Run]:
    """The folder read and written once, to the disk: what no ingest can beat."""
    target = folder / f"copy-{os.getpid()}"

    def run() -> Mapping[str, float]:
        drop_cache((graph,))
        begun = time.perf_counter()
        target.mkdir()
        for path in graph.iterdir():
            with path.open("rb") as source, (target / path.name).open("wb") as out:
                shutil.copyfileobj(source, out, COPY_BYTES)
                out.flush()
                os.fsync(out.fileno())
        seconds = time.perf_counter() - begun
        shutil.rmtree(target)
        return {"source_GB_per_s": size / seconds / 1e9, "seconds": seconds}

    yield run


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench ingest", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--source", type=Path, help="a folder to ingest; else one is generated")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--degree", type=int, default=30)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--mem", default="512M")
    parser.add_argument("--order", default="bfs")
    parser.add_argument("--undirected", action="store_true")
    parser.add_argument("--limit-size", default="2G", help="that fio reads and writes")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(words)
    folder = Path(given.folder)
    graph = given.source or make_graph(folder, GraphSize(given.nodes, given.degree, given.features))
    size = sum(path.stat().st_size for path in graph.iterdir())
    options = ["--mem", given.mem, "--order", given.order]
    options += ["--undirected"] * given.undirected
    limit_file = folder / f"limit-{os.getpid()}"
    peers = [
        Peer(OURS, open_ours, (graph, folder, tuple(options), size)),
        Peer(FIO, open_fio, (limit_file, parse_bytes(given.limit_size), LIMIT_BLOCK, "rw")),
        Peer(COPY, open_copy, (graph, folder, size)),
    ]
    try:
        found = measure(peers, given.rounds)
    finally:
        limit_file.unlink(missing_ok=True)
    if not found[FIO].skipped:
        figures, limit = found[OURS].figures, found[FIO].figures["GB_per_s"]
        pairs = zip(figures["GB_per_s"], limit, strict=True)
        figures["share_of_limit"] = [mine / most for mine, most in pairs]
    setting = {
        "graph": graph.name, "options": options, "mem_bytes": parse_bytes(given.mem),
        "source_bytes": size, "cache": "cold",
    }  # fmt: skip
    return report("ingest", setting, found, given.out)
