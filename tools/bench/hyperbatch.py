"""Hyperbatches against minibatches and mapped files, each wholly in a control group of one size.

Daemon and client, or mapped files with their workers, share the group: interpreter, arena, page
cache and the gather into torch tensors are all inside.  Caches are emptied before each run; runs
take turns, and the disk's limit is measured before and after each (the greater counts).  What is
read and written is the kernel's count of the whole group, the daemon's own beside it.  `over_bound`
is the time taken over the greater of two that none can beat: bytes read at the disk's limit, and
the CPU seconds of all processes shared by the cores.  If no control group can be made the budget is
the daemon's alone, and `limited` is 0.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from blockstore.store import open_store
from blockstore.units import parse_bytes
from clients.torch import NeighborDataset
from tools.bench import harness
from tools.bench.disk import disk_limit
from tools.bench.harness import Plan, Run, Side
from tools.bench.loaders import check_sampler, mapped_loader
from tools.bench.resources import (
    bytes_read,
    bytes_written,
    cpu_seconds,
    descendants,
    proportional_bytes,
)
from tools.bench.setup import counters, drop_cache, make_csc, serving
from tools.memory import group


@dataclass(frozen=True)
class Options(harness.Options):
    """What is served, and within what."""

    stores: Annotated[tuple[Path, ...], "of one graph, of several orders or block sizes"] = ()
    graph: Annotated[Path | None, "its folder: mapped files are measured too"] = None
    limits: Annotated[tuple[str, ...], "of control groups"] = ("4G", "2G", "1G")
    mem: Annotated[tuple[str, ...], "of the daemon, by limit"] = ("3200M", "1300M", "256M")
    sizes: Annotated[tuple[int, ...], "minibatches of a hyperbatch; 0: as many as fit"] = (0,)
    plans: tuple[str, ...] = ("auto",)
    steps: Annotated[int, "batches timed; 0: to the end of the epoch"] = 0
    before: Annotated[int, "batches before these"] = 8
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000
    peer_steps: Annotated[int, "of mapped files; 0: leave out"] = 8
    peer_workers: int = 4


class Case(NamedTuple):
    case: str  # "ours" or "mapped"
    limit: str  # of the control group
    mem: str = ""  # of the daemon
    plan: str = "auto"
    size: int = 0
    workers: int = 4
    steps: int = 0
    before: int = 8
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000

    @property
    def name(self) -> str:
        if self.case == "mapped":
            return f"mapped files, {self.workers} workers, {self.limit}"
        size = f" H={self.size}" if self.size else ""
        return f"{self.plan}{size}, --mem {self.mem} in {self.limit}"


class Meter:
    """What this process and all below it do between two looks."""

    def __init__(self) -> None:
        self._begun = self._look()

    def _look(self) -> tuple[float, float, int, int]:
        pids = descendants(os.getpid())
        return time.perf_counter(), cpu_seconds(pids), bytes_read(pids), bytes_written(pids)

    def read(self, seeds: int) -> dict[str, float]:
        """Figures since the beginning, in which so many seeds were served."""
        seconds, cpu, read, written = (
            now - then for now, then in zip(self._look(), self._begun, strict=True)
        )
        return {
            "seeds_per_s": seeds / seconds, "seconds": seconds, "cpu_s": cpu,
            "bytes_per_seed": read / seeds, "GB_per_s": read / seconds / 1e9,
            "bytes_written": written, "held_bytes": proportional_bytes(descendants(os.getpid())),
        }  # fmt: skip


def run_ours(store: Path, case: Case) -> dict[str, float]:
    """A daemon and its client in this process, until `steps` batches were timed."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ("--workers", str(case.workers), "--session-share", "1")
        endpoint = stack.enter_context(serving(store, folder, case.mem, *options))
        data = NeighborDataset(
            endpoint, num_neighbors=case.fanouts, batch_size=case.batch_size, plan=case.plan,
            hyperbatch=case.size,
        )  # fmt: skip
        batches, opened = iter(data), time.perf_counter()
        for _ in range(case.before):
            next(batches)
        before, seeds, waits = counters(endpoint), 0, []
        begun, meter = time.perf_counter(), Meter()
        for step in range(case.steps or len(data) - case.before):
            asked = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - asked)
            seeds += batch.batch_size
            assert batch.x is not None, step
        figures = meter.read(seeds)
        counts = {k: v - before.get(k, 0) for k, v in counters(endpoint).items()}
        data.close()
    names = {f"hyper_{n}": n for n in ("groups", "rows_read", "rows_wanted", "runs_read")}
    return figures | {
        "daemon_bytes_per_seed": counts["bytes_read"] / seeds, "first_s": begun - opened,
        "longest_wait_s": max(waits), "blocks_read": counts["blocks_read"],
        **{name: counts.get(counter, 0) for counter, name in names.items()},
    }  # fmt: skip


def run_mapped(graph: Path, csc: Path, case: Case) -> dict[str, float]:
    """DataLoader workers over mapped files, sampled by PyG's operator."""
    loader = mapped_loader(
        graph, csc, np.load(graph / "train_idx.npy"), case.fanouts, batch_size=case.batch_size,
        num_workers=case.workers,
    )  # fmt: skip
    batches = iter(loader)
    for _ in range(case.before):
        next(batches)
    meter, seeds = Meter(), 0
    for _ in range(case.steps):
        seeds += next(batches).batch_size
    return meter.read(seeds)


@contextmanager
def limited(limit: str) -> Iterator[Any]:
    """A control group, or None if none can be made, or no limit is given."""
    with contextlib.ExitStack() as stack:
        made = None
        if limit:
            with contextlib.suppress(OSError):
                made = stack.enter_context(group(parse_bytes(limit)))
        yield made


def run_case(folders: dict[str, Path], case: Case) -> dict[str, float]:
    """One run in a process, and a control group, of its own, between two looks at the disk."""
    drop_cache(*folders.values())
    disk = disk_limit(folders["store"])
    words = [sys.executable, "-m", "tools.bench.hyperbatch"]
    words += [json.dumps({n: str(p) for n, p in folders.items()}), json.dumps(case._asdict())]
    with limited(case.limit) as limits:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False,
            preexec_fn=limits.join if limits else None,
        )  # fmt: skip
        kills = limits.kills() if limits else 0
    if done.returncode:
        print(f"{case.name}: {done.stderr.strip() or 'killed'}", file=sys.stderr, flush=True)
        return {"failed": 1, "kills": kills}
    run: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    disk = max(disk, disk_limit(folders["store"]))
    bound = max(
        run["GB_per_s"] * run["seconds"] / disk, run["cpu_s"] / len(os.sched_getaffinity(0)), 1e-9
    )
    return run | {
        "disk_GB_per_s": disk, "share_of_disk": run["GB_per_s"] / disk, "kills": kills,
        "over_bound": run["seconds"] / bound, "limited": limits is not None,
    }  # fmt: skip


@contextmanager
def open_case(folders: dict[str, Path], case: Case) -> Iterator[Run]:
    if case.case == "mapped":
        check_sampler()
    yield lambda: run_case(folders, case)


def one(folders: dict[str, str], case: Case) -> None:
    """In the process of a run."""
    paths = {name: Path(path) for name, path in folders.items()}
    if case.case == "ours":
        print(json.dumps(run_ours(paths["store"], case)))
    else:
        print(json.dumps(run_mapped(paths["graph"], paths["csc"], case)))


def _cases(given: Options) -> list[Case]:
    ours = Case(
        "ours", "", steps=given.steps, before=given.before, fanouts=given.fanouts,
        batch_size=given.batch_size,
    )  # fmt: skip
    cases = [
        ours._replace(limit=limit, mem=mem, plan=plan, size=size)
        for limit, mem in zip(given.limits, given.mem, strict=True)
        for plan in given.plans
        for size in given.sizes
    ]
    if given.peer_steps and given.graph:
        workers = given.peer_workers
        mapped = ours._replace(case="mapped", limit=given.limits[0], workers=workers)
        cases.append(mapped._replace(steps=given.peer_steps, before=max(1, workers)))
    return cases


def plans(given: Options) -> Iterator[Plan]:
    for store in given.stores:
        folders = {"store": store}
        if given.graph and given.peer_steps:
            folders |= {"graph": given.graph, "csc": make_csc(store, given.folder)}
        manifest = open_store(store).manifest
        setting = {
            "store": store.name, "order": manifest.order, "block_bytes": manifest.block_bytes,
            "store_bytes": sum(p.stat().st_size for p in store.rglob("*") if p.is_file()),
        }  # fmt: skip
        sides = [
            Side(case.name, open_case, (folders, case), case._asdict()) for case in _cases(given)
        ]
        yield Plan(sides, setting, warm=False)


if __name__ == "__main__":
    one(json.loads(sys.argv[1]), Case(**json.loads(sys.argv[2])))
