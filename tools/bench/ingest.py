"""An ingest from end to end against the disk: bytes that it plans to move, and the disk's limit.

The limit is fio's, reading and writing at the same time, in the same round; a plain copy of the
source stands beside it.  `share_of_limit` is (bytes of all passes, as planned) / seconds of the
whole command / that limit.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from blockstore.units import parse_bytes
from tools.bench.disk import open_fio
from tools.bench.harness import GraphOptions, Plan, Ratio, Run, Side
from tools.bench.setup import drop_cache

COPY_BYTES = 1 << 20
LIMIT_BLOCK = 1 << 20
OURS, FIO, COPY = "ours", "fio, reads and writes", "copy"


@dataclass(frozen=True)
class Options(GraphOptions):
    source: Annotated[Path | None, "a folder; a graph is generated if none is named"] = None
    mem: str = "512M"
    order: str = "bfs"
    undirected: bool = False
    limit_size: Annotated[str, "that fio reads and writes"] = "2G"


def ingest_events(
    source: Path, store: Path, options: Sequence[str]
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of `blockstore ingest`, and its events.  Raises RuntimeError: it failed."""
    words = [sys.executable, "-m", "preprocess", "ingest", str(source), str(store), *options]
    begun = time.perf_counter()
    done = subprocess.run([*words, "--json"], capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(done.stderr)
    return seconds, [json.loads(line) for line in done.stdout.splitlines()]


def stage_seconds(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each stage; equal names are added."""
    found: Counter[str] = Counter()
    for event in events:
        if event["event"] == "stage_end":
            name = re.sub(r"\W+", "_", event["stage"]).strip("_")
            found[f"{name}_s"] += event["elapsed_s"]
    return dict(found)


@contextmanager
def open_ours(graph: Path, folder: Path, options: tuple[str, ...], size: int) -> Iterator[Run]:
    """`blockstore ingest`, into a store that is removed again."""
    store = folder / f"ingest-{os.getpid()}"

    def run() -> Mapping[str, float]:
        drop_cache(graph)
        seconds, events = ingest_events(graph, store, options)
        shutil.rmtree(store)
        (begin,) = [e for e in events if e["event"] == "begin"]
        planned = sum(s["read_bytes"] + s["written_bytes"] for s in begin["plan"]["stages"])
        return {
            "seconds": seconds, "source_GB_per_s": size / seconds / 1e9,
            "planned_GB": planned / 1e9, "GB_per_s": planned / seconds / 1e9,
        } | stage_seconds(events)  # fmt: skip

    yield run


@contextmanager
def open_copy(graph: Path, folder: Path, size: int) -> Iterator[Run]:
    """The folder read and written once, to the disk: what no ingest can beat."""
    target = folder / f"copy-{os.getpid()}"

    def run() -> Mapping[str, float]:
        drop_cache(graph)
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


def plans(given: Options) -> Iterator[Plan]:
    graph, folder = given.source or given.graph(), given.folder
    size = sum(path.stat().st_size for path in graph.iterdir())
    options = ("--mem", given.mem, "--order", given.order, *["--undirected"] * given.undirected)
    limit_file = folder / f"limit-{os.getpid()}"
    try:
        yield Plan(
            [
                Side(OURS, open_ours, (graph, folder, options, size)),
                Side(FIO, open_fio, (limit_file, parse_bytes(given.limit_size), LIMIT_BLOCK, "rw")),
                Side(COPY, open_copy, (graph, folder, size)),
            ],
            {"graph": graph.name, "source_bytes": size, "cache": "cold"},
            [Ratio("share_of_limit", OURS, "GB_per_s", FIO)],
        )
    finally:
        limit_file.unlink(missing_ok=True)
