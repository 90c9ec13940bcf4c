"""Graphs, stores and daemons for benches: made once under a folder, found again the next time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class GraphSize:
    """A generated graph."""

    nodes: int = 1_000_000
    degree: int = 30
    features: int = 128
    classes: int = 16


def command(*words: str) -> None:
    """One of our commands, quietly.  Raises SystemExit with what it said when it failed."""
    ran = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {ran.returncode}\n{ran.stderr.strip()}")


def make_graph(folder: Path, size: GraphSize) -> Path:
    """The graph in the plain layout."""
    path = folder / f"graph-{size.nodes}-{size.degree}-{size.features}-{size.classes}"
    if not (path / "test_idx.npy").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command(
            "preprocess", "generate", str(path), "--nodes", str(size.nodes), "--degree",
            str(size.degree), "--features", str(size.features), "--classes", str(size.classes),
        )  # fmt: skip
    return path


def make_timed_graph(folder: Path, size: GraphSize) -> Path:
    """The same graph, each edge with a time in [0, nodes)."""
    graph = make_graph(folder, size)
    path = graph.with_name(f"{graph.name}-times")
    if not (path / "edge_time.npy").exists():
        path.mkdir(exist_ok=True)
        for file in graph.iterdir():
            if not (path / file.name).exists():
                os.link(file, path / file.name)
        num_edges = np.load(graph / "edge_index.npy", mmap_mode="r").shape[1]
        times = np.random.default_rng(0).integers(0, size.nodes, num_edges, dtype=np.int32)
        np.save(path / "times.npy", times)
        (path / "times.npy").rename(path / "edge_time.npy")
    return path


def make_store(folder: Path, graph: Path, mem: str = "2G") -> Path:
    """The graph's store."""
    store = folder / f"store-{graph.name}"
    if not store.exists():
        command("preprocess", "ingest", str(graph), str(store), "--mem", mem)
    return store


@contextmanager
def serving(store: Path, folder: Path, mem: str, *options: str) -> Iterator[str]:
    """The endpoint of a daemon."""
    endpoint = f"ipc://{folder}/bench.sock"
    words = ["loaderd", "serve", str(store), "--endpoint", endpoint, "--mem", mem, *options]
    command_line = [sys.executable, "-m", *words]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            if not daemon.stdout.readline():
                raise RuntimeError(f"no daemon for {store}")
            yield endpoint
        finally:
            daemon.terminate()
