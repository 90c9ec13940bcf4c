"""Graphs, stores and daemons for benches: made once under a folder, found again the next time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blockstore.store import open_store, read_rows
from loaderd.wire.endpoint import parse_endpoint
from loaderd.wire.transport import ask_status
from preprocess.export.edges import columns_of


@dataclass(frozen=True, slots=True)
class GraphSize:
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
    store = folder / f"store-{graph.name}"
    if not store.exists():
        command("preprocess", "ingest", str(graph), str(store), "--mem", mem)
    return store


@contextmanager
def serving(store: Path, folder: Path, mem: str, *options: str) -> Iterator[str]:
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


def counters(endpoint: str) -> dict[str, int]:
    return ask_status(parse_endpoint(endpoint)).counters


def drop_cache(*folders: Path) -> None:
    """Ask the kernel to forget the pages of all files below."""
    for path in (p for folder in folders for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def make_csc(store: Path, folder: Path) -> Path:
    """`indptr.npy` and `indices.npy` of a store's graph by original ids; held in memory, once."""
    path = folder / f"csc-{store.name}"
    if not (path / "indptr.npy").exists():
        path.mkdir(parents=True, exist_ok=True)
        opened = open_store(store)
        (nodes,), (relation,) = opened.manifest.types, opened.manifest.relations
        original = read_rows(opened, nodes.original_id).astype(np.int32)
        pieces = [(original[s], original[d]) for d, s, _ in columns_of(opened, relation)]
        src, dst = (np.concatenate(ends) for ends in zip(*pieces, strict=True))
        np.save(path / "indices.npy", src[np.argsort(dst, kind="stable")].astype(np.int64))
        counts = np.bincount(dst, minlength=original.size)
        np.save(path / "indptr.npy", np.concatenate([[0], np.cumsum(counts)]))
    return path
