"""Rates of an ingest and of its stages, beside a plain copy of the same folder."""

import argparse
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
from tools.bench.harness import Peer, Run, measure, report
from tools.bench.setup import GraphSize, make_graph

# " 2/10 count edges        0.0 s      566K  ..." as Progress writes
STAGE = re.compile(r"\s*\d+/\d+ (?P<name>\S.*?)\s{2,}(?P<seconds>[\d.]+) s\s")
COPY_BYTES = 1 << 20


def stage_seconds(text: str) -> dict[str, float]:
    """Seconds of each stage out of what an ingest wrote of its progress; equal names are added."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if (match := STAGE.match(line)) is not None:
            name = re.sub(r"\W+", "_", match["name"]).strip("_") + "_s"
            found[name] = found.get(name, 0.0) + float(match["seconds"])
    return found


@contextmanager
def open_ours(graph: Path, folder: Path, options: tuple[str, ...], size: int) -> Iterator[Run]:
    """`blockstore ingest`, into a store that is removed again."""
    store = folder / f"ingest-{os.getpid()}"
    words = [sys.executable, "-m", "preprocess", "ingest", str(graph), str(store), *options]

    def run() -> Mapping[str, float]:
        begun = time.perf_counter()
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
        shutil.rmtree(store)
        rate = {"source_GB_per_s": size / seconds / 1e9, "seconds": seconds}
        return rate | stage_seconds(done.stderr)

    yield run


@contextmanager
def open_copy(graph: Path, folder: Path, size: int) -> Iterator[Run]:
    """The folder read and written once, to the disk: what no ingest can beat."""
    target = folder / f"copy-{os.getpid()}"

    def run() -> Mapping[str, float]:
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
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--degree", type=int, default=30)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--mem", default="512M")
    parser.add_argument("--order", default="bfs")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(words)
    folder = Path(given.folder)
    graph = make_graph(folder, GraphSize(given.nodes, given.degree, given.features))
    size = sum(path.stat().st_size for path in graph.iterdir())
    options = ("--mem", given.mem, "--order", given.order)
    peers = [
        Peer("ours", open_ours, (graph, folder, options, size)),
        Peer("copy", open_copy, (graph, folder, size)),
    ]
    found = measure(peers, given.rounds)
    setting = {
        "nodes": given.nodes, "edges": given.nodes * given.degree, "features": given.features,
        "mem_bytes": parse_bytes(given.mem), "order": given.order, "source_bytes": size,
        "cache": "warm",
    }  # fmt: skip
    return report("ingest", setting, found, given.out)
