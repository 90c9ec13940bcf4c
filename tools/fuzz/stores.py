"""Stores whose checksums are right and whose content is not: `python -m tools.fuzz --store 20000`.

Small stores of each kind are changed by what their files mean, and blindly, signed again, and used
by processes that are forked from one that is warm: open, verify, export, and an engine with a
session of every plan.  Each must be refused in a line, or served; what is a defect:

- a process that dies, or does not answer;
- an exception that nobody foresaw, MemoryError among them: memory is limited;
- a file that is opened outside of the store;
- a row that a client would read outside of the arena.

Every mutation has a name, `KIND:NUMBER`; `--only NAME` does it again, and prints all that it says.
`NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=...` makes kernels check every index.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from preprocess.__main__ import app
from tools.fuzz.drafts import Draft
from tools.fuzz.mutations import mutate
from tools.fuzz.trial import Bench, Outside
from tools.machine import machine, today

HANG_S = 120.0  # of one mutation, which takes a tenth of a second
_ROOM = 3 << 30  # bytes of addresses that a process may have beyond those of a warm one
_MOST_PER_PROCESS = 100


def _save(folder: Path, **arrays: Any) -> Path:
    folder.mkdir()
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return folder


def _edges(rng: np.random.Generator, sources: int, targets: int, count: int) -> Any:
    """Random ones, and one target with very many: its column takes several blocks."""
    dst = rng.integers(0, targets, count)
    dst[: count // 3] = targets // 2
    return np.stack([rng.integers(0, sources, count), dst])


def _run(*words: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app([str(word) for word in words], standalone_mode=False)


def make_stores(folder: Path) -> dict[str, Path]:
    """Small stores by kind: all that the format has, in blocks of 4 KiB."""
    rng, nodes, edges = np.random.default_rng(5), 600, 4000
    common: dict[str, Any] = {
        "node_feat": rng.standard_normal((nodes, 5)).astype(np.float32),
        "node_label": rng.integers(0, 4, nodes),
        "train_idx": rng.permutation(nodes)[:200],
    }
    one = _save(
        folder / "one", **common, edge_index=_edges(rng, nodes, nodes, edges),
        edge_weight=rng.random(edges).astype(np.float32), edge_time=rng.integers(0, 99, edges),
        edge_feat=rng.standard_normal((edges, 2)).astype(np.float32),
        near_edge=rng.permutation(edges)[:100], pairs_edge=rng.integers(0, nodes, (50, 2)),
    )  # fmt: skip
    parts = _save(folder / "parts", **common, edge_index=_edges(rng, nodes, nodes, edges))
    hetero = _save(
        folder / "hetero", feat__paper=common["node_feat"], label__paper=common["node_label"],
        split__paper__train=common["train_idx"],
        feat__author=rng.standard_normal((300, 3)).astype(np.float16),
        edge__author__writes__paper=_edges(rng, 300, nodes, edges),
        edge__paper__cites__paper=_edges(rng, nodes, nodes, edges),
        edge__paper__cites__paper__feat=rng.standard_normal((edges, 2)).astype(np.float32),
    )  # fmt: skip
    (hetero / "schema.json").write_text(
        '{"node_types": {"author": 300, "paper": 600, "venue": 0}, '
        '"relations": ["author|writes|paper", "paper|cites|paper"]}'
    )
    usual = ("--block-size", "4K", "--mem", "256M", "--no-summary")
    stores = {name: folder / f"{name}.store" for name in ("one", "parts", "hetero")}
    _run("ingest", one, stores["one"], *usual, "--edge-ids")
    influence = ("--partitions", "4", "--hubs", "0.02", "--halo", "0.3")
    hops = ("--hops", "2", "--operator", "sym", "--operator", "ppr")
    _run("ingest", parts, stores["parts"], *usual, *influence, *hops, "--dtype", "int8")
    hetero_parts = ("--partitions", "3", "--hubs", "0.02", "--halo", "0.2", "--undirected")
    _run("ingest", hetero, stores["hetero"], *usual, *hetero_parts, "--ids", "uint64")
    return stores


def mutated(base: Draft, name: str) -> tuple[Draft, list[str]]:
    """The mutation of this name, and what it is."""
    draft = base.copy()
    return draft, mutate(draft, Random(name))


@dataclass(slots=True)
class Worker:
    """A forked process, and what it is at."""

    pid: int
    reading: int
    folder: Path
    name: str = ""
    since: float = 0.0
    left: bytes = b""


@dataclass(slots=True)
class Tally:
    """What came of all."""

    said: Counter[str] = field(default_factory=Counter)
    done: int = 0
    defects: dict[str, list[str]] = field(default_factory=dict)  # by name of the mutation

    def take(self, name: str, said: dict[str, str], defects: list[str]) -> None:
        """One more."""
        self.done += 1
        refused = "refused" if said.get("open", "done") != "done" else "opened"
        self.said[refused] += 1
        for stage, how in said.items():
            self.said[f"{stage}: {how}"] += 1
        if defects:
            self.defects[name] = defects


class Fuzzer:
    """Forks workers, and looks at how they end."""

    def __init__(self, bases: dict[str, Draft], folder: Path, outside: Outside) -> None:
        self._bases, self._folder, self._outside = bases, folder, outside
        self.tally = Tally()
        self._begun = 0

    def run(self, names: list[str], jobs: int, seconds: float) -> Tally:
        """These mutations, `jobs` at a time; none is begun after so many seconds."""
        waiting, workers = names[::-1], list[Worker]()
        end = time.monotonic() + seconds
        while waiting or workers:
            if time.monotonic() > end:
                waiting.clear()
            while waiting and len(workers) < jobs:
                share = [waiting.pop() for _ in range(min(len(waiting), _MOST_PER_PROCESS))]
                workers.append(self._fork(share))
            ready, _, _ = select.select([w.reading for w in workers], [], [], 1.0)
            for worker in list(workers):
                over = worker.reading in ready and not self._read(worker)
                hangs = bool(worker.name) and time.monotonic() - worker.since > HANG_S
                if over or hangs:
                    workers.remove(worker)
                    self._bury(worker, waiting, hangs)
        return self.tally

    def _fork(self, names: list[str]) -> Worker:
        self._begun += 1
        folder = self._folder / f"worker-{self._begun}"
        folder.mkdir()
        (folder / "names").write_text("\n".join(names))
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            code = 1
            try:
                self._work(names, folder, writing)
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        return Worker(pid, reading, folder, since=time.monotonic())

    def _work(self, names: list[str], folder: Path, writing: int) -> None:
        """In a process of its own."""
        with (folder / "stderr").open("wb") as stream:
            os.dup2(stream.fileno(), 2)
        faulthandler.enable()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        benches: dict[str, Bench] = {}
        self._outside.allow(folder)
        for name in names:
            kind = name.partition(":")[0]
            os.write(writing, json.dumps({"begin": name}).encode() + b"\n")
            if kind not in benches:
                benches[kind] = Bench(folder / kind, self._bases[kind])
            draft, _ = mutated(self._bases[kind], name)
            self._outside.found.clear()
            self._outside.watching = True
            trial = benches[kind].attempt(draft, Random(f"{name} use"))
            self._outside.watching = False
            found = [f"outside: {what}" for what in sorted(set(self._outside.found))]
            note = {"name": name, "said": trial.said, "defects": trial.defects + found}
            os.write(writing, json.dumps(note).encode() + b"\n")

    def _read(self, worker: Worker) -> bool:
        """What a worker says; False when it has ended."""
        raw = os.read(worker.reading, 1 << 16)
        *lines, worker.left = (worker.left + raw).split(b"\n")
        for line in lines:
            note = json.loads(line)
            worker.since = time.monotonic()
            worker.name = note.get("begin", "")
            if "name" in note:
                self.tally.take(note["name"], note["said"], note["defects"])
                names = (worker.folder / "names").read_text().split("\n")
                (worker.folder / "names").write_text("\n".join(names[1:]))
        return bool(raw)

    def _bury(self, worker: Worker, waiting: list[str], hangs: bool) -> None:
        """A worker that has ended, or must: what it did not do others will."""
        if hangs:
            os.kill(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        os.close(worker.reading)
        code = os.waitstatus_to_exitcode(status)
        names = [n for n in (worker.folder / "names").read_text().split("\n") if n]
        if code or names:
            if not worker.name:
                text = (worker.folder / "stderr").read_text(errors="replace")
                raise SystemExit(
                    f"a worker ended with {code} between two mutations: {text[-3000:]}"
                )
            how = "hang" if hangs else f"crash: {signal.Signals(-code).name if code < 0 else code}"
            self.tally.take(worker.name, {"process": how.split(":")[0]}, [how])
            waiting += [n for n in names if n != worker.name][::-1]
        shutil.rmtree(worker.folder)


@contextlib.contextmanager
def prepared() -> Iterator[tuple[dict[str, Draft], Path, Outside]]:
    """Stores in memory, a folder in memory, and a process that has run every kernel."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="fuzz-") as name:
        folder = Path(name)
        bases = {kind: Draft.load(path) for kind, path in make_stores(folder).items()}
        outside = Outside()
        for kind, base in bases.items():
            bench = Bench(folder / f"warm-{kind}", base)
            for number in range(12):  # of one store: requests differ
                trial = bench.attempt(base.copy(), Random(f"{kind} {number}"))
                if trial.defects or set(trial.said.values()) - {"done", "Refused"}:
                    raise SystemExit(f"{kind} as it is: {trial.said}, {trial.defects}")
        yield bases, folder, outside


def main(words: list[str]) -> dict[str, Any]:
    """Run it; returns what is printed.  Raises SystemExit: a defect was found."""
    parser = argparse.ArgumentParser(prog="tools.fuzz", description=__doc__)
    parser.add_argument("--store", type=int, default=20_000, help="mutated stores")
    parser.add_argument("--seed", type=int, default=1, help="number of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after so long")
    parser.add_argument("--only", default="", help="one mutation by its name, in this process")
    parser.add_argument("--out", default="")
    given = parser.parse_args(words)
    begun = time.monotonic()
    with prepared() as (bases, folder, outside):
        if given.only:
            return _do_again(given.only, bases, folder, outside)
        kinds = list(bases)
        names = [f"{kinds[n % len(kinds)]}:{given.seed + n}" for n in range(given.store)]
        tally = Fuzzer(bases, folder, outside).run(names, given.jobs, given.seconds)
    line = {
        "bench": "fuzz-store", "date": today(), "machine": machine(), "stores": tally.done,
        "seconds": round(time.monotonic() - begun, 1), "said": dict(tally.said.most_common()),
        "failed": len(tally.defects), "defects": dict(list(tally.defects.items())[:200]),
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if given.out:
        with Path(given.out).open("a") as f:
            f.write(json.dumps(line) + "\n")
    if tally.defects:
        raise SystemExit(1)
    return line


def _do_again(name: str, bases: dict[str, Draft], folder: Path, outside: Outside) -> dict[str, Any]:
    """One mutation, in this process."""
    faulthandler.enable()
    kind = name.partition(":")[0]
    draft, what = mutated(bases[kind], name)
    print("\n".join(what), flush=True)
    bench = Bench(folder / "again", bases[kind])
    outside.allow(folder / "again")
    outside.watching = True
    trial = bench.attempt(draft, Random(f"{name} use"))
    outside.watching = False
    line = {"name": name, "said": trial.said, "defects": trial.defects + outside.found}
    print(json.dumps(line, indent=1), flush=True)
    return line


if __name__ == "__main__":
    main(sys.argv[1:])
