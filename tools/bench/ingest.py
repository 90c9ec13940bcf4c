"""An ingest from end to end, beside a plain copy of the source to the same disk."""

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tools.bench.harness import BenchPlan, GraphOptions, Ratio, Run, Side
from tools.bench.setup import command, drop_cache, stage_ends

COPY_BYTES = 1 << 20
OURS, COPY = "ours", "copy"


@dataclass(frozen=True)
class Options(GraphOptions):
    source: Annotated[Path | None, "a folder; a graph is generated if none is named"] = None
    mem: str = "512M"
    order: str = "bfs"
    undirected: bool = False


def run_ingest(source: Path, store: Path, *options: str) -> dict[str, float]:
    """Seconds of `blockstore ingest` and of each of its stages; the store is removed again."""
    begun = time.perf_counter()
    printed = command("preprocess", "ingest", str(source), str(store), *options, "--json")
    found = Counter({"seconds": time.perf_counter() - begun})
    shutil.rmtree(store)
    for event in stage_ends(printed):
        name = re.sub(r"\W+", "_", event["stage"]).strip("_")
        found[f"{name}_s"] += event["elapsed_s"]
    return dict(found)


@contextmanager
def open_ours(graph: Path, folder: Path, options: tuple[str, ...], size: int) -> Iterator[Run]:
    def run() -> Mapping[str, float]:
        drop_cache(graph)
        found = run_ingest(graph, folder / f"ingest-{os.getpid()}", *options)
        return {"source_GB_per_s": size / found["seconds"] / 1e9} | found

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


def plans(given: Options) -> Iterator[BenchPlan]:
    graph, folder = given.source or given.graph(), given.folder
    size = sum(path.stat().st_size for path in graph.iterdir())
    options = ("--mem", given.mem, "--order", given.order, *["--undirected"] * given.undirected)
    sides = [
        Side(OURS, open_ours, (graph, folder, options, size)),
        Side(COPY, open_copy, (graph, folder, size)),
    ]
    setting = {"graph": graph.name, "source_bytes": size, "cache": "cold"}
    yield BenchPlan(sides, setting, [Ratio("times_copy", OURS, "seconds", COPY)])
