"""Ingest and serve inside a control group of `--mem` + 256 MiB: `python -m tools.memory`.

The client stays outside.  Prints one JSON line: peaks of both commands, and the kills.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockstore.units import parse_bytes
from clients.torch import NeighborDataset
from tools.bench.resources import resident_bytes
from tools.bench.setup import GraphSize, command, make_graph
from tools.machine import machine, today

SLACK_BYTES = 256 << 20  # interpreter and libraries
_END_S = 30.0
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Group:
    """A memory control group with a limit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._v1 = folder, (folder / "memory.limit_in_bytes").exists()
        self._write("memory.limit_in_bytes" if self._v1 else "memory.max", limit)

    def join(self) -> None:
        """Move the calling process in."""
        self._write("cgroup.procs", os.getpid())

    def kills(self) -> int:
        """Processes that were killed for memory."""
        name = "memory.oom_control" if self._v1 else "memory.events"
        for line in (self._folder / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def end(self) -> None:
        """Kill who is left: of a run that failed, or was killed in part.  Waits until all left."""
        deadline = time.monotonic() + _END_S
        while pids := (self._folder / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._folder}: processes {', '.join(pids)} do not end")
            time.sleep(0.01)

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value))


@contextmanager
def group(limit: int) -> Iterator[Group]:
    """A control group, removed at the end.  Raises OSError where none can be made."""
    parent = _V1 if (_V1 / "cgroup.procs").exists() else _V2
    folder = parent / f"blockstore-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        made = Group(folder, limit)
    except BaseException:
        folder.rmdir()
        raise
    try:
        yield made
    finally:
        made.end()
        folder.rmdir()


def inside(limits: Group, *words: str) -> "subprocess.Popen[str]":
    """One of our commands in the group."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limits.join,
    )


def ingest_peak(limits: Group, graph: Path, store: Path, mem: str) -> int:
    """Run an ingest to its end; its peak of RssAnon + RssShmem."""
    process = inside(limits, "preprocess", "ingest", str(graph), str(store), "--mem", mem)
    peak = 0
    while True:
        try:
            process.communicate(timeout=0.05)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, resident_bytes([process.pid]))
    if process.returncode:
        raise SystemExit(f"ingest ended with {process.returncode}, {limits.kills()} kills")
    return peak


def serve_peak(limits: Group, store: Path, folder: Path, mem: str, steps: int) -> dict[str, Any]:
    """Serve `steps` batches to a client outside; the daemon's peak."""
    endpoint = f"ipc://{folder}/memory.sock"
    serve = ("serve", str(store), "--mem", mem, "--endpoint", endpoint)
    process = inside(limits, "loaderd", *serve)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving"), process.communicate()
        idle = resident_bytes([process.pid])
        peak, seeds = idle, 0
        data = NeighborDataset(endpoint, num_neighbors=(15, 10, 5), batch_size=1000)
        for number, batch in enumerate(data):
            seeds += batch.batch_size
            peak = max(peak, resident_bytes([process.pid]))
            if number + 1 >= steps:
                break
        data.close()
    finally:
        process.terminate()
        process.communicate()
    if process.returncode:
        raise SystemExit(f"the daemon ended with {process.returncode}, {limits.kills()} kills")
    return {"serve_idle_bytes": idle, "serve_peak_bytes": peak, "seeds": seeds}


def main(words: list[str]) -> dict[str, Any]:
    """Run both; returns what is printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--mem", default="512M")
    parser.add_argument("--nodes", type=int, default=3_500_000)
    parser.add_argument("--degree", type=int, default=12)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args(words)
    graph = make_graph(
        Path(arguments.folder), GraphSize(arguments.nodes, arguments.degree, arguments.features)
    )
    limit = parse_bytes(arguments.mem) + SLACK_BYTES
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, group(limit) as limits:
        store = Path(name) / "store"
        found: dict[str, Any] = {
            "bench": "memory",
            "date": today(),
            "machine": machine(),
            "mem": arguments.mem,
            "limit_bytes": limit,
            "graph_bytes": sum(p.stat().st_size for p in graph.iterdir()),
        }
        found["ingest_peak_bytes"] = ingest_peak(limits, graph, store, arguments.mem)
        found |= serve_peak(limits, store, Path(name), arguments.mem, arguments.steps)
        found["kills"] = limits.kills()
        command("preprocess", "verify", str(store))
        shutil.rmtree(store)
    print(json.dumps(found))
    if arguments.out:
        with Path(arguments.out).open("a") as f:
            f.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
