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
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np

from preprocess.__main__ import app
from tools.command import parse, put, running_tally, stamped
from tools.fuzz.mutations import StoreDraft, mutate
from tools.fuzz.trial import Bench, Outside

_CONTEXT = multiprocessing.get_context("fork")
HANG_S = 120.0  # for one mutation, which usually takes a tenth of a second
_ROOM = 3 << 30  # bytes of address space that a process may add to those of the warm one
_MAX_PER_PROCESS = 100


def _save(folder: Path, **arrays: Any) -> Path:
    folder.mkdir()
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return folder


def _edges(rng: np.random.Generator, sources: int, targets: int, count: int) -> Any:
    """Random edges, a third of them into one target: its column takes several blocks."""
    dst = rng.integers(0, targets, count)
    dst[: count // 3] = targets // 2
    return np.stack([rng.integers(0, sources, count), dst])


def _run(*words: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app([str(word) for word in words], standalone_mode=False)


def make_stores(folder: Path) -> dict[str, Path]:
    """Make small stores by kind, with all features of the format, in blocks of 4 KiB."""
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


def mutated(base: StoreDraft, name: str) -> tuple[StoreDraft, list[str]]:
    """The mutation with this name, and a description of it."""
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


class Fuzzer:
    """Tries mutations in processes forked from this one, and checks how they end."""

    def __init__(self, bases: dict[str, StoreDraft], folder: Path, outside: Outside) -> None:
        self._bases, self._folder, self._outside = bases, folder, outside
        self._benches: dict[str, Bench] = {}
        self.tally = Tally()

    def run(self, names: Sequence[str], look: Callable[[], None] = lambda: None) -> Tally:
        """Try mutations in order; `look` is called after each."""
        while names:
            names = names[self._run_some(names[:_MAX_PER_PROCESS], look) :]
        return self.tally

    def _run_some(self, names: Sequence[str], look: Callable[[], None]) -> int:
        """Try mutations in one process; returns how many were tried when it ended."""
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as folder,
            ProcessPoolExecutor(1, _CONTEXT, _begin, (self, Path(folder))) as pool,
        ):
            pid = pool.submit(os.getpid).result()
            for number, name in enumerate(names, 1):
                try:
                    _, *found = pool.submit(_try, name).result(HANG_S)
                except (TimeoutError, BrokenExecutor) as error:
                    how = "hang" if isinstance(error, TimeoutError) else "crash"
                    self.tally.take(name, {"process": how}, [how])
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return number
                self.tally.take(name, *found)
                look()
            return len(names)

    def enter(self, folder: Path) -> None:
        """Work in this folder, and open no file outside of it."""
        self._folder = folder
        self._outside.allow(folder)

    def attempt(self, name: str) -> tuple[list[str], dict[str, str], list[str]]:
        """Try a mutation: its description, how each use of it ended, and defects."""
        kind = name.partition(":")[0]
        draft, what = mutated(self._bases[kind], name)
        if kind not in self._benches:
            self._benches[kind] = Bench(self._folder / kind, self._bases[kind])
        self._outside.found.clear()
        self._outside.watching = True
        trial = self._benches[kind].attempt(draft, Random(f"{name} use"))
        self._outside.watching = False
        found = [f"outside: {path}" for path in sorted(set(self._outside.found))]
        return what, trial.said, trial.defects + found


_fuzzers: list[Fuzzer] = []  # in a forked process: the fuzzer that it works for


def _begin(fuzzer: Fuzzer, folder: Path) -> None:
    """In a forked process: limit memory and files; only the parent ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    fuzzer.enter(folder)
    _fuzzers.append(fuzzer)


def _try(name: str) -> Any:
    return _fuzzers[-1].attempt(name)


@contextlib.contextmanager
def prepared() -> Iterator[tuple[dict[str, StoreDraft], Path, Outside]]:
    """Drafts of stores, a folder in memory, and this process warmed up with every kernel."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="fuzz-") as name:
        folder = Path(name)
        bases = {kind: StoreDraft.load(path) for kind, path in make_stores(folder).items()}
        outside = Outside()
        for kind, base in bases.items():
            bench = Bench(folder / f"warm-{kind}", base)
            for number in range(12):  # per store, as requests vary
                trial = bench.attempt(base.copy(), Random(f"{kind} {number}"))
                if trial.defects or set(trial.said.values()) - {"done", "Refused"}:
                    raise SystemExit(f"{kind} as it is: {trial.said}, {trial.defects}")
        yield bases, folder, outside


@dataclass(frozen=True)
class StoreFuzzOptions:
    store: Annotated[int, "mutated stores"] = 20_000
    seed: Annotated[int, "number of the first"] = 1
    only: Annotated[str, "one mutation by its name, in this process"] = ""
    out: Annotated[Path | None, "append the line of JSON"] = None


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run it; returns the printed line.  Raises SystemExit: a defect was found."""
    given = parse(StoreFuzzOptions, words)
    begun = time.monotonic()
    with prepared() as (bases, folder, outside):
        fuzzer = Fuzzer(bases, folder, outside)
        if given.only:
            fuzzer.enter(folder / "again")
            what, said, defects = fuzzer.attempt(given.only)
            return put({"name": given.only, "what": what, "said": said, "defects": defects}, None)

        def figures() -> dict[str, Any]:
            tally = fuzzer.tally
            return stamped(
                "fuzz-store", stores=tally.done, seconds=round(time.monotonic() - begun, 1),
                said=dict(tally.said.most_common()), failed=len(tally.defects),
                defects=dict(list(tally.defects.items())[:200]),
            )  # fmt: skip

        kinds = list(bases)
        names = [f"{kinds[n % len(kinds)]}:{given.seed + n}" for n in range(given.store)]
        with running_tally(figures, given.out) as look:
            fuzzer.run(names, look)
    line = put(figures(), given.out)
    if fuzzer.tally.defects:
        raise SystemExit(1)
    return line


if __name__ == "__main__":
    main(sys.argv[1:])
