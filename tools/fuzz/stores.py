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

import contextlib
import faulthandler
import io
import multiprocessing
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np

from preprocess.__main__ import app
from tools.command import parse, put, stamped
from tools.fuzz.drafts import Draft
from tools.fuzz.mutations import mutate
from tools.fuzz.trial import Bench, Outside

_CONTEXT = multiprocessing.get_context("fork")
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
class Tally:
    said: Counter[str] = field(default_factory=Counter)
    done: int = 0
    defects: dict[str, list[str]] = field(default_factory=dict)  # by name of the mutation

    def take(self, name: str, said: dict[str, str], defects: list[str]) -> None:
        self.done += 1
        self.said["refused" if said.get("open", "done") != "done" else "opened"] += 1
        self.said.update(f"{stage}: {how}" for stage, how in said.items())
        if defects:
            self.defects[name] = defects


@dataclass(slots=True)
class Worker:
    """A forked process, and the mutations that it has not said anything of."""

    process: BaseProcess
    pipe: Connection
    names: list[str]
    since: float = field(default_factory=time.monotonic)  # of the first of them


class Fuzzer:
    """Forks workers, and looks at how they end."""

    def __init__(self, bases: dict[str, Draft], folder: Path, outside: Outside) -> None:
        self._bases, self._folder, self._outside = bases, folder, outside
        self.tally = Tally()

    def run(self, names: list[str], jobs: int, seconds: float) -> Tally:
        """These mutations, `jobs` at a time; none is begun after so many seconds."""
        waiting, workers = list(names), list[Worker]()
        end = time.monotonic() + seconds
        while waiting or workers:
            if time.monotonic() > end:
                waiting.clear()
            while waiting and len(workers) < jobs:
                workers.append(self._fork(waiting[:_MOST_PER_PROCESS]))
                del waiting[:_MOST_PER_PROCESS]
            wait([w.pipe for w in workers], 1.0)
            for worker in list(workers):
                hangs = time.monotonic() - worker.since > HANG_S
                if self._read(worker) and not hangs:
                    continue
                workers.remove(worker)
                waiting[:0] = self._bury(worker, hangs)
        return self.tally

    def _fork(self, names: list[str]) -> Worker:
        reading, writing = _CONTEXT.Pipe(duplex=False)
        folder = Path(tempfile.mkdtemp(dir=self._folder, prefix="worker-"))
        process = _CONTEXT.Process(target=self._work, args=(names, folder, writing))
        process.start()
        writing.close()
        return Worker(process, reading, names)

    def _work(self, names: list[str], folder: Path, pipe: Connection) -> None:
        """In a process of its own."""
        faulthandler.enable()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        self._outside.allow(folder)
        benches: dict[str, Bench] = {}
        for name in names:
            kind = name.partition(":")[0]
            if kind not in benches:
                benches[kind] = Bench(folder / kind, self._bases[kind])
            pipe.send(self.attempt(benches[kind], name)[1:])
        shutil.rmtree(folder)

    def attempt(self, bench: Bench, name: str) -> tuple[list[str], dict[str, str], list[str]]:
        """What the mutation of this name is, what was said of it, and its defects."""
        draft, what = mutated(self._bases[name.partition(":")[0]], name)
        self._outside.found.clear()
        self._outside.watching = True
        trial = bench.attempt(draft, Random(f"{name} use"))
        self._outside.watching = False
        found = [f"outside: {path}" for path in sorted(set(self._outside.found))]
        return what, trial.said, trial.defects + found

    def _read(self, worker: Worker) -> bool:
        """What a worker says; False: it has ended."""
        with contextlib.suppress(EOFError):
            while worker.pipe.poll():
                said, defects = worker.pipe.recv()
                self.tally.take(worker.names.pop(0), said, defects)
                worker.since = time.monotonic()
            return True
        return False

    def _bury(self, worker: Worker, hangs: bool) -> list[str]:
        """A worker that has ended, or must; returns what it has not begun."""
        if hangs:
            worker.process.kill()
        worker.process.join()
        code = worker.process.exitcode or 0
        worker.pipe.close()
        if not worker.names:
            return []
        how = "hang" if hangs else f"crash: {signal.Signals(-code).name if code < 0 else code}"
        self.tally.take(worker.names.pop(0), {"process": how.split(":")[0]}, [how])
        return worker.names


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


@dataclass(frozen=True)
class Options:
    store: Annotated[int, "mutated stores"] = 20_000
    seed: Annotated[int, "number of the first"] = 1
    jobs: Annotated[int, "processes at a time"] = 1
    seconds: Annotated[float, "begin none after so long"] = 1e9
    only: Annotated[str, "one mutation by its name, in this process"] = ""
    out: Annotated[Path | None, "append the line of JSON"] = None


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run it; returns what is printed.  Raises SystemExit: a defect was found."""
    given = parse(Options, words, __doc__, "tools.fuzz")
    begun = time.monotonic()
    with prepared() as (bases, folder, outside):
        fuzzer = Fuzzer(bases, folder, outside)
        if given.only:
            outside.allow(folder / "again")
            bench = Bench(folder / "again", bases[given.only.partition(":")[0]])
            what, said, defects = fuzzer.attempt(bench, given.only)
            return put({"name": given.only, "what": what, "said": said, "defects": defects}, None)
        kinds = list(bases)
        names = [f"{kinds[n % len(kinds)]}:{given.seed + n}" for n in range(given.store)]
        tally = fuzzer.run(names, given.jobs, given.seconds)
    line = stamped(
        "fuzz-store", stores=tally.done, seconds=round(time.monotonic() - begun, 1),
        said=dict(tally.said.most_common()), failed=len(tally.defects),
        defects=dict(list(tally.defects.items())[:200]),
    )  # fmt: skip
    put(line, given.out)
    if tally.defects:
        raise SystemExit(1)
    return line


if __name__ == "__main__":
    main(sys.argv[1:])
