"""The bench harness: sides run in processes of their own, by turns; each gets a line and a column.

A bench is a generator in a module of this folder, listed in `BENCHES`.  Its only parameter,
`given`, is annotated with the dataclass of its options, and its docstring is the help text.  It
prepares what its sides need, yields plans of sides to measure together, and cleans up after the
`yield`.
"""

import importlib
import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple, get_type_hints

from blockstore.units import parse_bytes
from tools.bench.resources import bytes_read, descendants, proportional_bytes
from tools.bench.setup import make_graph, make_store
from tools.command import append, parse, stamped, table
from tools.group import group

BENCHES = {  # name of a generator -> its module
    "budgets": "budgets", "csc": "ingest", "disk": "disk", "gpu": "gpu", "handover": "epochs",
    "hops": "hops",
    "hyperbatch": "epochs", "ingest": "ingest", "large": "ranks", "loaders": "epochs",
    "macro": "epochs", "objects": "objects", "partition": "ingest", "peers": "peers",
    "placement": "ranks", "split": "ranks", "stripes": "stripes", "trainers": "trainers",
}  # fmt: skip
POLL_S = 0.1
CONTEXT = multiprocessing.get_context("spawn")  # so that a side's memory is its own

Run = Callable[[], Mapping[str, float]]  # one round: figure -> value


@dataclass(frozen=True)
class BenchOptions:
    folder: Annotated[Path, "for graphs and stores, which are kept"] = Path("/tmp/blockstore-bench")
    out: Annotated[Path | None, "append a line of JSON for each side"] = None
    rounds: int = 3


@dataclass(frozen=True)
class GraphOptions(BenchOptions):
    nodes: int = 1_000_000
    degree: int = 30
    features: int = 128

    def graph(self) -> Path:
        return make_graph(self.folder, self.nodes, self.degree, self.features)

    def store(self) -> Path:
        return make_store(self.folder, self.graph())


class SideSkipped(Exception):
    """A side cannot take part here; the message says why."""


class Side(NamedTuple):
    """One way to do the work.

    `work(*arguments)` does one round and returns its figures; or it is a generator that prepares,
    yields a function that does one round, and cleans up.  It runs in the side's own process, so it
    must be a module-level function.  `limit` is the memory of a control group for that process and
    its descendants.
    """

    name: str
    work: Callable[..., Mapping[str, float] | Iterator[Run]]
    arguments: tuple[Any, ...] = ()
    setting: Mapping[str, Any] = {}  # of its line only
    limit: str = ""


class Ratio(NamedTuple):
    """A figure of one side over that of another, by round; becomes a figure of the first side."""

    name: str
    side: str
    figure: str
    other: str


class BenchPlan(NamedTuple):
    sides: list[Side]
    setting: Mapping[str, Any] = {}  # in addition to the options
    ratios: Sequence[Ratio] = ()
    before: Callable[[], None] | None = None  # each timed round, to empty caches
    warm: bool = True  # begin with an untimed round that measures memory
    lines: list[dict[str, Any]] | None = None  # the lines of the sides are appended here


@dataclass(slots=True)
class Found:
    """The measurements of a side."""

    figures: dict[str, list[float]] = field(default_factory=dict)  # one value per round
    peak_bytes: int = 0  # of its processes, in the untimed round
    skipped: str = ""


_opened = ExitStack()  # in the process of a side
_round: list[Run] = []


def _open(side: Side) -> int:
    """In a side's process: prepare the side; returns the process id."""
    multiprocessing.set_start_method("fork", force=True)  # the default of scripts
    work: Any = side.work
    if inspect.isgeneratorfunction(work):
        _round.append(_opened.enter_context(contextmanager(work)(*side.arguments)))
    else:
        _round.append(partial(work, *side.arguments))
    return os.getpid()


def _run() -> dict[str, float]:
    return dict(_round[0]())


def _close() -> None:
    _opened.close()


class Host:
    """The process of a side, ready to run rounds."""

    def __init__(self, side: Side) -> None:
        """Raises what the side raises, such as SideSkipped."""
        self._stack, join = ExitStack(), None
        try:
            if side.limit:
                join = self._stack.enter_context(group(parse_bytes(side.limit))).join
        except OSError as error:
            raise SideSkipped(f"no control group can be made here: {error}") from error
        self._pool = ProcessPoolExecutor(1, mp_context=CONTEXT, initializer=join)
        self._stack.enter_context(self._pool)
        self.limited = join is not None
        try:
            self._pid = self._pool.submit(_open, side).result()
        except BaseException:
            self._stack.close()
            raise

    def run(self) -> dict[str, float]:
        """Run a round; returns its figures, the bytes read from disk, and the machine's load."""
        before = bytes_read(descendants(self._pid))
        figures = self._pool.submit(_run).result()
        read = bytes_read(descendants(self._pid)) - before
        return {**figures, "bytes_read": read, "load": os.getloadavg()[0]}

    def watch(self) -> int:
        """Run an untimed round; returns the peak of its memory."""
        peak, task = 0, self._pool.submit(_run)
        while not task.done():
            peak = max(peak, proportional_bytes(descendants(self._pid)))
            wait([task], POLL_S)
        task.result()
        return max(peak, proportional_bytes(descendants(self._pid)))

    def close(self) -> None:
        """Let the side clean up, and end its process."""
        with self._stack, suppress(BrokenExecutor):  # its process may have ended
            self._pool.submit(_close).result()


def measure(plan: BenchPlan, rounds: int) -> dict[str, Found]:
    """Prepare all sides, then run them in turn (A B A B ...); returns the results by name."""
    found = {side.name: Found() for side in plan.sides}
    with ExitStack() as stack:
        ready: dict[str, Host] = {}
        for side in plan.sides:
            try:
                host = stack.enter_context(closing(Host(side)))
            except SideSkipped as error:
                found[side.name].skipped = str(error)
                continue
            if plan.warm:
                found[side.name].peak_bytes = host.watch()
            ready[side.name] = host
        for _ in range(rounds):
            for name, host in ready.items():
                if plan.before is not None:
                    plan.before()
                try:
                    figures = host.run()
                except BrokenExecutor:
                    if not host.limited:
                        raise
                    found[name].skipped = "killed for memory"
                    continue
                for figure, value in figures.items():
                    found[name].figures.setdefault(figure, []).append(value)
    for ratio in plan.ratios:
        own, other = (found[n].figures.get(ratio.figure, []) for n in (ratio.side, ratio.other))
        if own and other:
            found[ratio.side].figures[ratio.name] = [
                a / b for a, b in zip(own, other, strict=False)
            ]
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum, to five digits."""
    ends = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.5g}") for name, value in ends.items()}


def report(
    bench: str,
    settings: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Found],
    out: Path | None,
) -> list[dict[str, Any]]:
    """Print a table, a column for each side; append a line of JSON for each to the file `out`."""
    lines = []
    for name, side in found.items():
        line = stamped(bench, side=name, **settings[name])
        if side.skipped:
            line["skipped"] = side.skipped
        else:
            line |= {figure: spread(values) for figure, values in side.figures.items()}
            line |= {"rounds": len(side.figures["load"]), "peak_bytes": side.peak_bytes}
        lines.append(line)
    append(lines, out)
    figures = dict.fromkeys(figure for side in found.values() for figure in side.figures)
    rows = [[bench, *found]]
    rows += [[name, *(_cell(line.get(name)) for line in lines)] for name in figures]
    rows.append(["peak MB", *(f"{side.peak_bytes / 1e6:,.0f}" for side in found.values())])
    print(table(rows), flush=True)
    for name, side in found.items():
        if side.skipped:
            print(f"{name}: {side.skipped}", flush=True)
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    minimum, maximum = f"{value['min']:,.4g}", f"{value['max']:,.4g}"
    return f"{value['median']:,.4g}" + (f" ({minimum} - {maximum})" if minimum != maximum else "")


def run(name: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """Run a bench; returns its lines."""
    # imported here, because a bench may need libraries that others do not
    bench = getattr(importlib.import_module(f"tools.bench.{BENCHES[name]}"), name)
    kind = get_type_hints(bench)["given"]
    given = parse(kind, words, f"tools.bench {name}", inspect.getdoc(bench))
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        print(f"the machine is busy: load {load:.1f} on {cores} cores", file=sys.stderr)
    setting = {k: v for k, v in asdict(given).items() if k not in ("folder", "out", "rounds")}
    lines = []
    with closing(bench(given)) as plans:
        for plan in plans:
            found = measure(plan, given.rounds)
            common = setting | dict(plan.setting)
            settings = {side.name: common | dict(side.setting) for side in plan.sides}
            own = report(name, settings, found, given.out)
            lines += own
            if plan.lines is not None:
                plan.lines.extend(own)
    return lines
