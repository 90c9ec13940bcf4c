"""Batches of propagated features: rows, chunks, copied or where they lie; warm, and from disk.

`python -m tools.bench hops`: every side serves rows of propagated features in batches and every
byte of them is read (a sum).  Warm: all arrays in memory (page cache, or the daemon's).  Cold: a
budget of half of them; mapped files in a control group of the same size, if one can be made.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from blockstore.format import shard_path
from blockstore.store import open_store
from clients.torch import HopDataset
from tools.bench import harness
from tools.bench.disk import disk_limit
from tools.bench.harness import Plan, Ratio, Run, Side, Skipped
from tools.bench.hyperbatch import limited
from tools.bench.setup import command, drop_cache, serving

WAYS: dict[str, dict[str, Any]] = {
    "RR": {"method": "rr"},
    "CR, copied": {},
    "CR, views": {"views": True},
}
COPIED, VIEWS = "CR, copied", "CR, views"
LIMIT = "disk limit"


@dataclass(frozen=True)
class Options(harness.Options):
    rows: int = 1_000_000
    width: int = 128
    hops: int = 3
    batch_size: int = 8000
    mem: Annotated[str, "of the daemon, warm"] = "3G"
    budget: Annotated[str, "of the daemon and of mapped files, cold"] = "1G"
    row_batches: Annotated[int, "of the row-wise loader a round"] = 6
    peer_batches: Annotated[int, "of other loaders a round"] = 60
    cold_batches: int = 2
    threads: Annotated[int, "of torch"] = 1
    readers: Annotated[
        int, "of the daemon, cold: while some verify, 8 read, as the disk's limit does"
    ] = 10
    rounds: int = 4
    only: Literal["", "warm", "cold"] = ""


def make_store(given: Options) -> Path:
    """A store whose nodes are nearly all to train on, with one operator's rows."""
    path = given.folder / f"hops-{given.rows}-{given.width}-{given.hops}"
    graph = path.with_name(f"graph-of-{path.name}")
    if not path.exists():
        sizes: dict[str, float] = {
            "nodes": given.rows * 50 // 49,
            "degree": 2,
            "features": given.width,
        }
        sizes |= {"train": 0.98, "valid": 0.01, "test": 0.01, "classes": 40}
        words = [w for name, n in sizes.items() for w in (f"--{name}", str(n))]
        command("preprocess", "generate", str(graph), *words)
        hops = ("--hops", str(given.hops), "--operator", "sym", "--no-summary")
        command("preprocess", "ingest", str(graph), str(path), *hops)
    return path


def _timed(batches: Callable[[], Iterator[Sequence[Tensor]]], row_bytes: int) -> Run:
    """A round: all batches, every byte read."""

    def run() -> Mapping[str, float]:
        begun, rows = time.perf_counter(), 0
        for x in batches():
            assert not np.isnan(sum(float(part.sum()) for part in x))
            rows += x[0].size(0)
        seconds = time.perf_counter() - begun
        return {"samples_per_s": rows / seconds, "GB_per_s": rows * row_bytes / seconds / 1e9}

    return run


@contextmanager
def open_ours(
    given: Options, endpoint: str, options: Mapping[str, Any], num_batches: int | None = None
) -> Iterator[Run]:
    """A client of a daemon, the first batches of an epoch a round, or all of them."""
    torch.set_num_threads(given.threads)
    data = HopDataset(endpoint, batch_size=given.batch_size, **options)
    row_bytes = sum(s.row_bytes for s in data.attached().rows if ":" in s.name)

    def batches() -> Iterator[Sequence[Tensor]]:
        for batch in islice(data, num_batches):
            yield batch.x if isinstance(batch.x, list) else [batch.x]

    yield _timed(batches, row_bytes)
    data.close()


def mapped(store: Path) -> list[NDArray[np.float32]]:
    """The arrays, mapped: without gaps, a shard is a plain array."""
    found: list[NDArray[np.float32]] = []
    (arrays,) = open_store(store).manifest.types[0].hops["train"].operators.values()
    for array in arrays:
        shard = store / shard_path(array.path, 0, 2)
        found.append(np.memmap(shard, np.float32, "c", shape=(array.num_rows, *array.row_shape)))
    return found


@contextmanager
def open_mapped(
    given: Options, store: Path, how: str, num_batches: int, limit: str = ""
) -> Iterator[Run]:
    """Mapped files, `num_batches` a round in a new order.

    how     "rows": a `DataLoader` over single rows; "index": rows of a batch by one index an array;
            "slices": chunks, copied; "views": chunks where they are mapped
    limit   of memory; empty: none
    """
    torch.set_num_threads(given.threads)
    with limited(limit) as limits:
        if limit and limits is None:
            raise Skipped("no control group can be made here")
        if limits is not None:
            limits.join()
        size = given.batch_size

        def batches() -> Iterator[Sequence[Tensor]]:
            arrays = mapped(store)  # for this round: what is mapped stays in the page cache
            rows, tensors = arrays[0].shape[0], [torch.from_numpy(a) for a in arrays]
            order = (torch.randperm(rows // size)[:num_batches] * size).tolist()
            if how == "rows":
                loader = DataLoader(TensorDataset(*tensors), size, shuffle=True)
                yield from islice(loader, num_batches)
            elif how == "index":
                shuffled = torch.randperm(rows)
                for low in range(0, min(rows, num_batches * size), size):
                    yield [t[shuffled[low : low + size]] for t in tensors]
            elif how == "slices":
                for low in order:
                    yield [torch.from_numpy(np.array(a[low : low + size])) for a in arrays]
            else:
                for low in order:
                    yield [t[low : low + size] for t in tensors]

        yield _timed(batches, sum(a[0].nbytes for a in mapped(store)))


@contextmanager
def open_limit(store: Path) -> Iterator[Run]:
    yield lambda: {"GB_per_s": disk_limit(store)}


def plans(given: Options) -> Iterator[Plan]:
    """Warm; then cold, those that read ahead for long in rounds of their own."""
    store, few = make_store(given), given.cold_batches
    row_bytes = 4 * given.width * (given.hops + 1)
    if given.only != "cold":
        with serving(store, given.folder, given.mem) as endpoint:
            ours = [Side(n, open_ours, (given, endpoint, way)) for n, way in WAYS.items()]
            peers = {
                "row-wise DataLoader": ("rows", given.row_batches),
                "batched index": ("index", given.peer_batches),
                "numpy chunk slices": ("slices", given.peer_batches),
                "mapped chunks, no copy": ("views", given.peer_batches),
            }
            theirs = [Side(n, open_mapped, (given, store, *how)) for n, how in peers.items()]
            ratios = [
                Ratio(f"over {other}", name, "samples_per_s", other)
                for name in WAYS
                for other in ("row-wise DataLoader", "numpy chunk slices")
            ]
            yield Plan([*theirs, *ours], {"cache": "warm", "row_bytes": row_bytes}, ratios)
    if given.only != "warm":
        setting = {"cache": f"cold, {given.budget}", "row_bytes": row_bytes}
        forget = partial(drop_cache, store)
        options = ("--readers", str(given.readers))
        with serving(store, given.folder, given.budget, *options) as endpoint:
            sides = [
                Side(VIEWS, open_ours, (given, endpoint, WAYS[VIEWS])),
                Side(LIMIT, open_limit, (store,)),  # right beside both
                Side(COPIED, open_ours, (given, endpoint, WAYS[COPIED])),
            ]
            shares = [Ratio("share_of_limit", n, "GB_per_s", LIMIT) for n in (VIEWS, COPIED)]
            yield Plan(sides, setting, shares, forget)
            sides = [Side("RR", open_ours, (given, endpoint, WAYS["RR"], few))]
            for name, how, count in (
                ("batched index", "index", few), ("numpy chunk slices", "slices", 4 * few)
            ):  # fmt: skip
                arguments = (given, store, how, count, given.budget)
                sides.append(Side(name, open_mapped, arguments))
            yield Plan(sides, setting, (), forget)
