"""Hyperbatches against minibatches and mapped files, each wholly in a control group of one size.

Daemon and client, or the peer with its workers, share the group: interpreter, arena, page cache and
the gather into torch tensors are all inside.  Caches are emptied before each run; runs take turns,
and the disk's limit is measured before and after each (the greater counts).  What is read and
written is the kernel's count of the whole group, the daemon's own beside it.  `over_bound` is the
time taken over the greater of two that none can beat: bytes read at the disk's limit, and the CPU
seconds of all processes shared by the cores.  Where no control group can be made the budget is the
daemon's alone, and the line says so.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader

from blockstore.format import PAGE_BYTES
from blockstore.store import open_store, read_rows
from blockstore.units import format_bytes, parse_bytes
from clients.torch import NeighborDataset
from preprocess.export.edges import columns_of
from tools.bench.disk import open_fio, open_preadv
from tools.bench.harness import Skipped, spread
from tools.bench.loaders import MappedSampler, drop_cache
from tools.bench.resources import (
    bytes_read,
    bytes_written,
    cpu_seconds,
    descendants,
    proportional_bytes,
)
from tools.bench.setup import serving
from tools.machine import machine, today
from tools.memory import group

LIMIT_BYTES = 1 << 30  # that are read to know the disk's limit


class Case(NamedTuple):
    """One way to serve: a line of the results."""

    peer: str  # "ours" or "mapped"
    limit: str  # of the control group
    mem: str = ""  # of the daemon
    plan: str = "auto"
    size: int = 0  # minibatches of a hyperbatch, 0: as many as have room
    policy: str = "next-use"
    workers: int = 4
    steps: int = 0  # timed; 0: to the end of the epoch
    before: int = 8  # batches that are not measured
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000

    @property
    def name(self) -> str:
        """Of the line."""
        if self.peer == "mapped":
            return f"mapped files, {self.workers} workers, {self.limit}"
        size = f" H={self.size}" if self.size else ""
        policy = "" if self.policy == "next-use" else f", {self.policy}"
        return f"{self.plan}{size}{policy}, --mem {self.mem} in {self.limit}"


def status(endpoint: str) -> dict[str, Any]:
    """As `loaderd status --json` says."""
    words = [sys.executable, "-m", "loaderd", "status", "--endpoint", endpoint, "--json"]
    found: dict[str, Any] = json.loads(
        subprocess.run(words, capture_output=True, check=True).stdout
    )
    return found


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
            "seeds_per_s": seeds / seconds,
            "seconds": seconds,
            "cpu_s": cpu,
            "bytes_per_seed": read / seeds,
            "GB_per_s": read / seconds / 1e9,
            "bytes_written": written,
        }


def run_ours(store: Path, case: Case) -> dict[str, float]:
    """A daemon and its client in this process, until `steps` batches were timed."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ("--workers", str(case.workers), "--policy", case.policy, "--session-share", "1")
        endpoint = stack.enter_context(serving(store, folder, case.mem, *options))
        data = NeighborDataset(
            endpoint, num_neighbors=case.fanouts, batch_size=case.batch_size, plan=case.plan,
            hyperbatch=case.size,
        )  # fmt: skip
        batches, opened = iter(data), time.perf_counter()
        for _ in range(case.before):
            next(batches)
        before, seeds, waits = status(endpoint), 0, []
        begun, meter = time.perf_counter(), Meter()
        for step in range(case.steps or len(data) - case.before):
            asked = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - asked)
            seeds += batch.batch_size
            assert batch.x is not None, step
        figures = meter.read(seeds)
        after, held = status(endpoint), proportional_bytes(descendants(os.getpid()))
        counts = {k: v - before["counters"].get(k, 0) for k, v in after["counters"].items()}
        data.close()
    return figures | {
        "daemon_bytes_per_seed": counts["bytes_read"] / seeds,
        "first_s": begun - opened,
        "longest_wait_s": max(waits),
        "held_bytes": held,
        "groups": counts.get("hyper_groups", 0),
        "rows_read": counts.get("hyper_rows_read", 0),
        "rows_wanted": counts.get("hyper_rows_wanted", 0),
        "runs_read": counts.get("hyper_runs_read", 0),
        "blocks_read": counts["blocks_read"],
    }


def run_mapped(graph: Path, csc: Path, case: Case) -> dict[str, float]:
    """DataLoader workers over mapped files, sampled by PyG's operator."""
    try:
        import torch_sparse  # noqa: F401  registers the sampler
    except ImportError as error:
        raise Skipped(f"its sampler is torch-sparse's: {error}") from error
    loader: DataLoader[Any] = DataLoader(
        np.load(graph / "train_idx.npy").tolist(),
        batch_size=case.batch_size, shuffle=True, num_workers=case.workers,
        collate_fn=MappedSampler(graph, csc, case.fanouts),
    )  # fmt: skip
    batches = iter(loader)
    for _ in range(case.before):
        next(batches)
    meter, seeds = Meter(), 0
    for _ in range(case.steps):
        seeds += next(batches).batch_size
    figures = meter.read(seeds)
    return figures | {"held_bytes": proportional_bytes(descendants(os.getpid()))}


def disk_limit(store: Path) -> float:
    """GB/s that the disk gives the better of two readers now, over the store's largest shard."""
    shards = [p for p in store.rglob("c/*/*") if p.is_file()]
    path = max(shards, key=lambda p: p.stat().st_size)
    size = min(LIMIT_BYTES, path.stat().st_size)
    block = next(b for b in (1 << 20, PAGE_BYTES) if size >= b)
    rates = []
    for opener in (open_fio, open_preadv):
        with contextlib.suppress(Skipped), opener(path, size // block * block, block) as run:
            rates.append(run()["GB_per_s"])
    return max(rates)


@contextlib.contextmanager
def limited(limit: str) -> Iterator[Any]:
    """A control group, or None where none can be made."""
    try:
        made = group(parse_bytes(limit))
        entered = made.__enter__()
    except OSError:
        yield None
        return
    try:
        yield entered
    finally:
        made.__exit__(None, None, None)


def run_case(folders: dict[str, Path], case: Case) -> dict[str, Any]:
    """One run in a process, and a control group, of its own."""
    words = [sys.executable, "-m", "tools.bench.hyperbatch", "--one"]
    words.append(json.dumps({"case": case._asdict(), **{k: str(v) for k, v in folders.items()}}))
    with limited(case.limit) as limits:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False,
            preexec_fn=limits.join if limits else None,
        )  # fmt: skip
        kills = limits.kills() if limits else 0
    if done.returncode:
        words = (done.stderr.strip() or "killed").splitlines()
        return {"failed": words[-1], "kills": kills}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"kills": kills, "limited": limits is not None}


def one(text: str) -> None:
    """In the process of a run."""
    given = json.loads(text)
    case = Case(**given["case"])
    if case.peer == "ours":
        print(json.dumps(run_ours(Path(given["store"]), case)))
    else:
        print(json.dumps(run_mapped(Path(given["graph"]), Path(given["csc"]), case)))


def make_csc(store: Path, folder: Path) -> Path:
    """`indptr.npy` and `indices.npy` of the store's graph, by original ids, for the peer.

    Holds the whole graph in memory, once.
    """
    path = folder / f"csc-{store.name}"
    if (path / "indptr.npy").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    opened = open_store(store)
    original = read_rows(opened, opened.manifest.types[0].original_id).astype(np.int64)
    relation = opened.manifest.relations[0]
    counts = np.zeros(original.size, np.int64)
    for targets, *_ in columns_of(opened, relation):
        columns, edges = np.unique(targets, return_counts=True)
        counts[original[columns]] += edges
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = np.empty(relation.num_edges, np.int64)
    cursor = indptr[:-1].copy()
    for targets, sources, *_ in columns_of(opened, relation):
        columns, starts, edges = np.unique(targets, return_index=True, return_counts=True)
        nodes = original[columns]
        within = np.arange(targets.size) - np.repeat(starts, edges)
        indices[np.repeat(cursor[nodes], edges) + within] = original[sources]
        cursor[nodes] += edges
    np.save(path / "indices.npy", indices)
    np.save(path / "indptr.npy", indptr)
    return path


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench hyperbatch", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--graph", default="", help="a folder of tools.rmat")
    parser.add_argument("--stores", nargs="+", help="its stores, of several orders or block sizes")
    parser.add_argument("--limits", nargs="+", default=("4G", "2G", "1G"))
    parser.add_argument("--mem", nargs="+", default=("3200M", "1300M", "256M"), help="by limit")
    parser.add_argument("--sizes", type=int, nargs="+", default=(0,))
    parser.add_argument("--policies", nargs="+", default=("next-use",))
    parser.add_argument("--plans", nargs="+", default=("auto",))
    parser.add_argument("--steps", type=int, default=0, help="batches timed; 0: an epoch")
    parser.add_argument("--before", type=int, default=8, help="batches before these")
    parser.add_argument("--fanouts", type=int, nargs="+", default=(10, 10, 10))
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--peer-steps", type=int, default=8, help="of mapped files; 0: leave out")
    parser.add_argument("--peer-workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="")
    given = parser.parse_args(words)
    lines = []
    for name in given.stores:
        lines += _measure(Path(name), given)
    return lines


def _cases(given: argparse.Namespace) -> list[Case]:
    shape = {"fanouts": tuple(given.fanouts), "batch_size": given.batch_size}
    ours = Case("ours", "", steps=given.steps, before=given.before, **shape)
    cases = [
        ours._replace(limit=limit, mem=mem, plan=plan, size=size, policy=policy)
        for limit, mem in zip(given.limits, given.mem, strict=True)
        for plan in given.plans
        for size in given.sizes
        for policy in given.policies
    ]
    if given.peer_steps and given.graph:
        workers = given.peer_workers
        cases.append(
            Case(
                "mapped", given.limits[0], workers=workers, steps=given.peer_steps,
                before=max(1, workers), **shape,
            )
        )  # fmt: skip
    return cases


def _measure(store: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    cases, folders = _cases(given), {"store": store}
    if given.graph and given.peer_steps:
        folders |= {"graph": Path(given.graph), "csc": make_csc(store, Path(given.folder))}
    found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for _ in range(given.rounds):
        for case in cases:
            drop_cache(tuple(folders.values()))
            limit = disk_limit(store)
            run = run_case(folders, case)
            if "failed" not in run:
                run |= _bounds(run, max(limit, disk_limit(store)))
            found[case.name].append(run)
            print(f"# {case.name}: {json.dumps(run)}", file=sys.stderr, flush=True)
    lines = [_line(store, case, found[case.name]) for case in cases]
    for line in lines:
        print(json.dumps(line), flush=True)
    if given.out:
        with Path(given.out).open("a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


def _bounds(run: dict[str, Any], limit: float) -> dict[str, float]:
    """What the disk, at `limit` GB/s, and the cores would have allowed."""
    read_s = run["GB_per_s"] * run["seconds"] / limit
    compute_s = run["cpu_s"] / len(os.sched_getaffinity(0))
    return {
        "disk_GB_per_s": limit,
        "share_of_disk": run["GB_per_s"] / limit,
        "over_bound": run["seconds"] / max(read_s, compute_s, 1e-9),
    }


def _line(store: Path, case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
    manifest = open_store(store).manifest
    line = {
        **case._asdict(), "fanouts": list(case.fanouts), "bench": "hyperbatch",
        "case": case.peer, "peer": case.name,
        "date": today(), "machine": machine(), "store": store.name,
        "order": manifest.order, "block_bytes": manifest.block_bytes,
        "store_bytes": format_bytes(_size(store)),
        "rounds": len(runs), "kills": sum(r["kills"] for r in runs),
    }  # fmt: skip
    good = [r for r in runs if "failed" not in r]
    if len(good) < len(runs):
        line["failed"] = next(r["failed"] for r in runs if "failed" in r)
    for figure in good[0] if good else ():
        if figure not in ("kills", "limited"):
            line[figure] = spread([r[figure] for r in good])
    return line


def _size(store: Path) -> int:
    return sum(p.stat().st_size for p in store.rglob("*") if p.is_file())


if __name__ == "__main__":
    one(sys.argv[2])
