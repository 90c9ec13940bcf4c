"""Graphs, stores and daemons for benches; made once in a folder, then reused."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from blockstore.make_part import make_part, plan_part
from blockstore.owners import list_owners, write_owners
from blockstore.store import open_store
from loaderd.api.endpoint import parse_endpoint
from loaderd.api.keys import AUTHORIZED, KNOWN, PUBLIC, write_pair
from loaderd.server.curve import new_pair
from loaderd.server.transport import ask_status

CLASSES = 16  # of a generated graph

_PORTS = range(20_000, 32_000)  # below net.ipv4.ip_local_port_range, used for connections
_first = os.getpid() * 40 % len(_PORTS)  # concurrent processes begin at different ports
_ports: Iterator[int] = iter([*_PORTS[_first:], *_PORTS[:_first]])


def command(*words: str) -> str:
    """Run one of our commands; returns its output.  Raises SystemExit with its errors."""
    ran = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {ran.returncode}\n{ran.stderr.strip()}")
    return ran.stdout


def stage_ends(printed: str) -> list[dict[str, Any]]:
    """The stage-end events in the output of `--json`."""
    events = [json.loads(line) for line in printed.splitlines()]
    return [event for event in events if event["event"] == "stage_end"]


def generate(path: Path, **sizes: float) -> Path:
    """Generate a graph in the plain layout with these options, unless it exists."""
    if not (path / "test_idx.npy").exists():  # the last file to be written
        path.parent.mkdir(parents=True, exist_ok=True)
        words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        command("preprocess", "generate", str(path), *words)
    return path


def make_graph(
    folder: Path, nodes: int, degree: int, features: int, classes: int = CLASSES
) -> Path:
    path = folder / f"graph-{nodes}-{degree}-{features}-{classes}"
    return generate(path, nodes=nodes, degree=degree, features=features, classes=classes)


def make_store(
    folder: Path, graph: Path, mem: str = "2G", name: str = "store", options: Sequence[str] = ()
) -> Path:
    """Ingest the graph with these options, unless done before; `name` distinguishes its stores."""
    store = folder / f"{name}-{graph.name}"
    if not store.exists():
        command("preprocess", "ingest", str(graph), str(store), "--mem", mem, *options)
    return store


def make_parts(store: Path, servers: int) -> list[Path]:
    """Make parts beside the store, each with the rows of consecutive nodes."""
    whole, owners = open_store(store), f"parts-{servers}"
    nodes = whole.manifest.types[0].num_nodes
    if owners not in list_owners(whole):
        write_owners(whole, owners, np.arange(nodes) * servers // nodes, servers, {})
    found = [store.with_name(f"{store.name}-part-{s}-of-{servers}") for s in range(servers)]
    for server, path in enumerate(found):
        if not path.exists():
            make_part(whole, path, plan_part(whole, owners, server), lambda _: None)
    return found


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Folders with keys of a daemon and a client that accept each other."""
    daemon, client = folder / "daemon", folder / "client"
    for place in (daemon, client):
        if not place.exists():
            write_pair(place, new_pair(), place.name)
    (daemon / AUTHORIZED).write_text((client / PUBLIC).read_text())
    (client / KNOWN).write_text((daemon / PUBLIC).read_text().split()[0] + "\n")
    return daemon, client


def free_port() -> int:
    """A free port of 127.0.0.1, another one at each call.

    It lies outside of the range that the kernel assigns to connections: otherwise a connection to a
    peer that does not listen yet could reach another process, or itself.
    """
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise SystemExit(f"no free port of 127.0.0.1 in {_PORTS}")


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


def rate(num_bytes: int, work: Callable[[], object]) -> dict[str, float]:
    """GB/s of `work`, which processes `num_bytes`."""
    begun = time.perf_counter()
    work()
    return {"GB_per_s": num_bytes / (time.perf_counter() - begun) / 1e9}


def total_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def drop_cache(*folders: Path) -> None:
    """Ask the kernel to forget the pages of all files below."""
    for path in (p for folder in folders for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
