"""Graphs, stores and daemons for benches: made once under a folder, found again the next time."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loaderd.api.endpoint import parse_endpoint
from loaderd.server.transport import ask_status

CLASSES = 16  # of a generated graph


def command(*words: str) -> str:
    """What one of our commands prints.  Raises SystemExit with what it said when it failed."""
    ran = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {ran.returncode}\n{ran.stderr.strip()}")
    return ran.stdout


def stage_ends(printed: str) -> list[dict[str, Any]]:
    """The end of each stage, as `--json` prints it."""
    events = [json.loads(line) for line in printed.splitlines()]
    return [event for event in events if event["event"] == "stage_end"]


def make_graph(
    folder: Path, nodes: int, degree: int, features: int, classes: int = CLASSES
) -> Path:
    """The graph in the plain layout."""
    path = folder / f"graph-{nodes}-{degree}-{features}-{classes}"
    if not (path / "test_idx.npy").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = {"nodes": nodes, "degree": degree, "features": features, "classes": classes}
        words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        command("preprocess", "generate", str(path), *words)
    return path


def make_store(folder: Path, graph: Path, mem: str = "2G") -> Path:
    store = folder / f"store-{graph.name}"
    if not store.exists():
        command("preprocess", "ingest", str(graph), str(store), "--mem", mem)
    return store


def free_port() -> int:
    """One of this host, at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def serving(store: Path, folder: Path, mem: str, *options: str) -> Iterator[str]:
    endpoint = f"ipc://{folder}/bench.sock"
    words = ["loaderd", "serve", str(store), "--endpoint", endpoint, "--mem", mem, *options]
    command_line = [sys.executable, "-m", *words]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            if not daemon.stdout.readline():
                raise SystemExit(f"no daemon for {store}")
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
