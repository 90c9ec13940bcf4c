"""Commands in a control group of `--mem` + 256 MiB: `python -m tools.memory COMMAND`.

`both` ingests a graph and serves it to a client outside; one JSON line: peaks, and the kills.

`hops` ingests a generated graph and propagates its features once for each `--mem` given: a JSON
line each, as of `ingest` below, and it fails as that does.

`attach` serves a graph to clients that attach, several at a time, with millions of ids, times,
masks and giant fanouts, or announce ids and send none, too many or others; each has a batch, or is
refused.  One JSON line; it fails where there were kills, or another error.

`macro` serves epochs of macro-batches to a client outside, with the least `--mem` that the daemon
says would do; one JSON line, and it fails where there were kills.

`ingest` ingests a folder of any layout once for each `--mem` given, one store at a time: a JSON
line each, with its peak, the kills and one sha256 over every file of the store.  It fails where a
run took more than its `--mem`, was killed, or made other bytes than the first.  Options of
`blockstore ingest` (or `hops`) stand behind `--`, as in `... ingest SOURCE -- --undirected`.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from blockstore.units import parse_bytes
from clients.torch import NeighborDataset
from loaderd.errors import Refused
from tools.attackers import Honest, attempt, ledger
from tools.bench.resources import resident_bytes
from tools.bench.setup import GraphSize, command, make_graph, make_store, make_timed_graph
from tools.machine import machine, today
from tools.tree import differences, file_digests, one_digest, split_options

SLACK_BYTES = 256 << 20  # interpreter and libraries
_END_S = 30.0
_LOOK_S = 0.01  # between looks at the memory of an ingest
_ATTACHERS = 6  # clients at a time
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


class Took(NamedTuple):
    """What a command took."""

    peak_bytes: int  # of RssAnon + RssShmem
    seconds: float
    text: str  # that it gave


class IngestRun(NamedTuple):
    """What an ingest took."""

    peak_bytes: int
    seconds: float
    stages: dict[str, float]  # seconds of each
    stage_peaks: dict[str, int]


def run_inside(limits: Group, *words: str) -> Took:
    """Run one of our commands to its end.  Raises SystemExit: it failed, or was killed."""
    begun = time.perf_counter()
    process = inside(limits, *words)
    peak = 0
    while True:
        try:
            text, errors = process.communicate(timeout=_LOOK_S)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, resident_bytes([process.pid]))
    seconds = time.perf_counter() - begun
    if process.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {process.returncode}, {limits.kills()} kills: {errors}"
        )
    return Took(peak, seconds, text)


def run_ingest(
    limits: Group, source: Path, store: Path, mem: str, options: Sequence[str] = ()
) -> IngestRun:
    """Run an ingest to its end.  Raises SystemExit: it failed, or was killed."""
    words = ("preprocess", "ingest", str(source), str(store), "--mem", mem, "--json", *options)
    took = run_inside(limits, *words)
    events = [json.loads(line) for line in took.text.splitlines()]
    ends = [e for e in events if e["event"] == "stage_end"]
    return IngestRun(
        took.peak_bytes, took.seconds, {e["stage"]: round(e["elapsed_s"], 2) for e in ends},
        {e["stage"]: e["peak_bytes"] for e in ends},
    )  # fmt: skip


@contextmanager
def serving_inside(limits: Group, store: Path, folder: Path, mem: str) -> Iterator[tuple[str, int]]:
    """Endpoint and process of a daemon in the group.  Raises SystemExit: it failed; its errors."""
    endpoint = f"ipc://{folder}/memory.sock"
    serve = ("serve", str(store), "--mem", mem, "--endpoint", endpoint, "--log-level", "error")
    process = inside(limits, "loaderd", *serve)
    errors = ""
    try:
        assert process.stdout is not None
        if process.stdout.readline().startswith("serving"):
            yield endpoint, process.pid
    finally:
        process.terminate()
        errors = process.communicate()[1]
    if process.returncode:
        raise SystemExit(
            f"the daemon ended with {process.returncode}, {limits.kills()} kills: {errors}"
        )


def serve_peak(
    served: tuple[str, int], steps: int, epochs: int = 1, **options: Any
) -> dict[str, Any]:
    """Take `steps` batches of each epoch; the daemon's peak.  Raises Refused.

    served   endpoint and process of the daemon
    options  of the NeighborDataset
    """
    endpoint, pid = served
    idle = resident_bytes([pid])
    peak, seeds = idle, 0
    data = NeighborDataset(endpoint, num_neighbors=(15, 10, 5), batch_size=1000, **options)
    try:
        for _ in range(epochs):
            for batch in islice(data, steps):
                seeds += batch.batch_size
                peak = max(peak, resident_bytes([pid]))
    finally:
        data.close()
    return {"serve_idle_bytes": idle, "serve_peak_bytes": peak, "seeds": seeds}


def both(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ingest and serve; returns what is printed."""
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
        found["ingest_peak_bytes"] = run_ingest(limits, graph, store, arguments.mem).peak_bytes
        with serving_inside(limits, store, Path(name), arguments.mem) as served:
            found |= serve_peak(served, arguments.steps)
        found["kills"] = limits.kills()
        command("preprocess", "verify", str(store))
        shutil.rmtree(store)
    _put(found, arguments.out)
    return found


def attach(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve a graph to clients that ask for too much; returns what is printed.

    Raises SystemExit: there were kills, another error than a refusal, a trainer beside them that
    was not served, or memory that was not given back.
    """
    size = GraphSize(arguments.nodes, arguments.degree, arguments.features)
    folder, limit = Path(arguments.folder), parse_bytes(arguments.mem) + SLACK_BYTES
    store, peak = make_store(folder, make_timed_graph(folder, size)), 0
    with tempfile.TemporaryDirectory(dir=folder) as name, group(limit) as limits:
        with (
            serving_inside(limits, store, Path(name), arguments.mem) as (endpoint, pid),
            ThreadPoolExecutor(_ATTACHERS) as pool,
        ):
            before, honest, begun = ledger(endpoint), Honest(endpoint), time.monotonic()
            idle = resident_bytes([pid])
            tries = [
                pool.submit(attempt, endpoint, number, arguments.nodes)
                for number in range(arguments.attempts)
            ]
            while not all(t.done() for t in tries):
                peak = max(peak, resident_bytes([pid]))
                wait(tries, _LOOK_S, return_when=FIRST_EXCEPTION)
            seconds = time.monotonic() - begun
            honest.close()
            given_back = ledger(endpoint) == before
        kills = limits.kills()
    found = [t.result() for t in tries]
    ends = Counter(a.end for a in found)
    line = {
        "bench": "memory of attaches", "date": today(), "machine": machine(),
        "mem": arguments.mem, "limit_bytes": limit, "nodes": arguments.nodes,
        "attempts": arguments.attempts, "ends": dict(ends), "seconds": round(seconds, 1),
        "longest_s": {a.kind: a.seconds for a in sorted(found, key=lambda a: a.seconds)},
        "serve_idle_bytes": idle, "serve_peak_bytes": peak, "kills": kills,
        "beside": [honest.batches, honest.longest_s, honest.error], "given_back": given_back,
    }  # fmt: skip
    _put(line, arguments.out)
    if kills or ends["failed"] or honest.error or not given_back:
        raise SystemExit(f"--mem {arguments.mem}: {kills} kills, {ends['failed']} other errors")
    return line


def macro(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve macro-batches with the least `--mem`; returns what is printed.  Raises SystemExit."""
    size = GraphSize(arguments.nodes, arguments.degree, arguments.features)
    graph = make_graph(Path(arguments.folder), size)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, store = Path(name), Path(name) / "store"
        parts = ("--partitions", str(arguments.partitions), "--halo", str(arguments.halo))
        command("preprocess", "ingest", str(graph), str(store), *parts)
        mem, tried = arguments.mem, []
        while mem not in tried:
            tried.append(mem)
            limit = parse_bytes(mem) + SLACK_BYTES
            with group(limit) as limits:
                try:
                    with serving_inside(limits, store, folder, mem) as served:
                        found = serve_peak(served, sys.maxsize, arguments.epochs, plan="macrobatch")
                except (Refused, SystemExit) as error:
                    if (named := re.search(r"at least\D*(\d+[KMG])", str(error))) is None:
                        raise
                    mem = named[1]
                    continue
                found["kills"] = limits.kills()
            break
        else:
            raise SystemExit(f"--mem {mem} was named, and is refused")
        sizes = [p.stat().st_size for p in store.rglob("*") if p.is_file()]
    line = {
        "bench": "memory of macro-batches", "date": today(), "machine": machine(), "mem": mem,
        "mem_bytes": parse_bytes(mem), "limit_bytes": limit, "refused": tried[:-1],
        "store_bytes": sum(sizes), **found,
    }  # fmt: skip
    _put(line, arguments.out)
    if line["kills"]:
        raise SystemExit(f"--mem {mem}: {line['kills']} kills")
    return line


def ingest(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ingest a folder within each `--mem`; returns what is printed.  Raises SystemExit."""
    first: dict[str, str] = {}
    lines = []
    for mem in arguments.mem:
        limit = parse_bytes(mem) + SLACK_BYTES
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name, group(limit) as limits:
            store = Path(name) / "store"
            run = run_ingest(limits, arguments.source, store, mem, arguments.options)
            kills, digests = limits.kills(), file_digests(store)
            store_bytes = sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
        first = first or digests
        lines.append({
            "bench": "memory of an ingest", "date": today(), "machine": machine(), "mem": mem,
            "mem_bytes": parse_bytes(mem), "limit_bytes": limit, "source": str(arguments.source),
            "options": arguments.options, **run._asdict(), "kills": kills,
            "store_bytes": store_bytes, "sha256": one_digest(digests),
        })  # fmt: skip
        _put(lines[-1], arguments.out)
        _check(lines[-1], differences(first, digests))
    return lines


def hops(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Propagate features within each `--mem`; returns what is printed.  Raises SystemExit."""
    folder = Path(arguments.folder)
    graph = make_graph(folder, GraphSize(arguments.nodes, arguments.degree, arguments.features))
    lines: list[dict[str, Any]] = []
    first: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        plain = Path(name) / "plain"
        command("preprocess", "ingest", str(graph), str(plain), "--mem", "1G", "--no-summary")
        if arguments.alone:
            shutil.rmtree(graph)
        for mem in arguments.mem:
            store = Path(name) / "store"
            shutil.copytree(plain, store, copy_function=os.link)  # the command adds files only
            limit = parse_bytes(mem) + SLACK_BYTES
            with group(limit) as limits:
                words = ("preprocess", "hops", str(store), "--mem", mem, *arguments.options)
                took = run_inside(limits, *words)
                kills = limits.kills()
            digests = file_digests(store)
            first = first or digests
            lines.append({
                "bench": "memory of hops", "date": today(), "machine": machine(), "mem": mem,
                "mem_bytes": parse_bytes(mem), "limit_bytes": limit, "nodes": arguments.nodes,
                "features": arguments.features, "options": arguments.options,
                "peak_bytes": took.peak_bytes, "seconds": took.seconds, "kills": kills,
                "store_bytes": sum(p.stat().st_size for p in store.rglob("*") if p.is_file()),
                "sha256": one_digest(digests),
            })  # fmt: skip
            shutil.rmtree(store)
            _put(lines[-1], arguments.out)
            _check(lines[-1], differences(first, digests))
    return lines


def _check(line: dict[str, Any], other: Sequence[str]) -> None:
    """Raises SystemExit: a run took more than its `--mem`, was killed, or made `other` files."""
    mem, peak, kills = line["mem"], line["peak_bytes"], line["kills"]
    if kills or peak > line["mem_bytes"]:
        raise SystemExit(f"--mem {mem}: {kills} kills, a peak of {peak} bytes")
    if other:
        raise SystemExit(f"--mem {mem}: other bytes than before in {', '.join(other)}")


def _put(line: dict[str, Any], out: str) -> None:
    print(json.dumps(line), flush=True)
    if out:
        with Path(out).open("a") as f:
            f.write(json.dumps(line) + "\n")


def main(words: list[str]) -> Any:
    """Run one of the commands; returns what it printed."""
    parser = argparse.ArgumentParser(prog="tools.memory", description=__doc__)
    commands = parser.add_subparsers(required=True)
    pair = commands.add_parser("both", help="ingest, then serve")
    pair.add_argument("--mem", default="512M")
    pair.add_argument("--steps", type=int, default=30)
    pair.set_defaults(run=both)
    crowd = commands.add_parser("attach", help="attach with millions of ids, and odd ones")
    crowd.add_argument("--mem", default="64M")
    crowd.add_argument("--attempts", type=int, default=200)
    crowd.set_defaults(run=attach)
    parts = commands.add_parser("macro", help="serve macro-batches with the least --mem")
    parts.add_argument("--mem", default="16M", help="tried first")
    parts.add_argument("--partitions", type=int, default=64)
    parts.add_argument("--halo", type=float, default=0.3)
    parts.add_argument("--epochs", type=int, default=2)
    parts.set_defaults(run=macro)
    spread = commands.add_parser("hops", help="propagate features within each --mem")
    spread.add_argument("--mem", nargs="+", default=["1G"])
    spread.add_argument("--alone", action="store_true", help="remove the graph once it is a store")
    spread.set_defaults(run=hops)
    for served in (pair, spread, parts, crowd):
        served.add_argument("--folder", default="/tmp/blockstore-bench")
        served.add_argument("--nodes", type=int, default=3_500_000)
        served.add_argument("--degree", type=int, default=12)
        served.add_argument("--features", type=int, default=128)
        served.add_argument("--out", default="")
    alone = commands.add_parser("ingest", help="ingest a folder within each --mem")
    alone.add_argument("source", type=Path)
    alone.add_argument("--folder", type=Path, help="for a store at a time; beside the source")
    alone.add_argument("--mem", nargs="+", default=["512M", "4G"])
    alone.add_argument("--out", default="")
    own, options = split_options(words)
    for command_line in (alone, spread):
        command_line.set_defaults(options=options)
    alone.set_defaults(run=ingest)
    arguments = parser.parse_args(own)
    if arguments.run is ingest and arguments.folder is None:
        arguments.folder = arguments.source.absolute().parent
    return arguments.run(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
