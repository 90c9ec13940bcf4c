"""Batches of propagated features: rows, chunks, copied or where they lie; warm, and from disk.

Every side serves rows of propagated features in batches, and every byte of them is read (a sum).
Warm: all arrays in memory (the daemon's, or the page cache), beside a `DataLoader` over single
rows, chunks copied out of mapped files, and chunks of mapped files where they lie.  Cold: a budget
of half of them, beside the disk's limit.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from blockstore.format import shard_path
from blockstore.store import open_store
from clients.torch import HopDataset
from tools.bench.disk import disk_limit
from tools.bench.harness import BenchOptions, BenchPlan, Ratio, Run, Side
from tools.bench.setup import drop_cache, generate, make_store, serving

COPIED, VIEWS, ROWS = "CR, copied", "CR, views", "RR"
WAYS: dict[str, dict[str, Any]] = {ROWS: {"method": "rr"}, COPIED: {}, VIEWS: {"views": True}}
PEERS = ("row-wise DataLoader", "numpy chunk slices", "mapped, not copied")
LIMIT = "disk limit"


@dataclass(frozen=True)
class HopsBenchOptions(BenchOptions):
    rows: int = 1_000_000
    width: int = 128
    hops: int = 3
    batch_size: int = 8000
    mem: Annotated[str, "of the daemon, warm"] = "3G"
    budget: Annotated[str, "of the daemon, cold"] = "1G"
    row_batches: Annotated[int, "of the row-wise loader a round"] = 6
    cold_batches: Annotated[int, "of single rows a round"] = 2
    threads: Annotated[int, "of torch"] = 1
    readers: Annotated[
        int, "of the daemon, cold: while some verify, 8 read, as the disk's limit does"
    ] = 10
    rounds: int = 4
    only: Literal["", "warm", "cold"] = ""


def make_hops(given: HopsBenchOptions) -> Path:
    """Make a store with nearly all nodes in the training split, and one operator's rows."""
    graph = generate(
        given.folder / f"hops-{given.rows}-{given.width}", nodes=given.rows * 50 // 49, degree=2,
        features=given.width, classes=40, train=0.98, valid=0.01, test=0.01,
    )  # fmt: skip
    hops = ("--hops", str(given.hops), "--operator", "sym", "--no-summary")
    return make_store(given.folder, graph, name=f"store-{given.hops}", options=hops)


def _timed(batches: Callable[[], Iterator[Sequence[Tensor]]]) -> Run:
    """A round that takes all batches, and reads every byte."""

    def run() -> Mapping[str, float]:
        begun, rows, num_bytes = time.perf_counter(), 0, 0
        for x in batches():
            assert not np.isnan(sum(float(part.sum()) for part in x))
            rows += x[0].size(0)
            num_bytes += sum(part.nbytes for part in x)
        seconds = time.perf_counter() - begun
        return {"samples_per_s": rows / seconds, "GB_per_s": num_bytes / seconds / 1e9}

    return run


def open_ours(
    given: HopsBenchOptions, endpoint: str, way: str, num_batches: int | None = None
) -> Iterator[Run]:
    """A client of a daemon; a round takes the first batches of an epoch, or all of them."""
    torch.set_num_threads(given.threads)
    data = HopDataset(endpoint, batch_size=given.batch_size, **WAYS[way])

    def batches() -> Iterator[Sequence[Tensor]]:
        for batch in islice(data, num_batches):
            yield batch.x if isinstance(batch.x, list) else [batch.x]

    yield _timed(batches)
    data.close()


def open_peer(given: HopsBenchOptions, store: Path, peer: str) -> Iterator[Run]:
    """A peer on mapped files, in a new order each round: a shard without gaps is a plain array."""
    torch.set_num_threads(given.threads)
    (found,) = open_store(store).manifest.types[0].hops["train"].operators.values()
    arrays = [
        np.memmap(store / shard_path(a.path, 0, 2), np.float32, "c", 0, (a.num_rows, *a.row_shape))
        for a in found
    ]
    rows, size = arrays[0].shape[0], given.batch_size

    def single() -> Iterator[Sequence[Tensor]]:
        tensors = TensorDataset(*map(torch.from_numpy, arrays))
        return islice(DataLoader(tensors, size, shuffle=True), given.row_batches)

    def slices() -> Iterator[Sequence[Tensor]]:
        for low in (torch.randperm(rows // size) * size).tolist():
            yield [torch.from_numpy(np.array(a[low : low + size])) for a in arrays]

    def mapped() -> Iterator[Sequence[Tensor]]:
        tensors = [torch.from_numpy(a) for a in arrays]
        for low in (torch.randperm(rows // size) * size).tolist():
            yield [t[low : low + size] for t in tensors]

    yield _timed(dict(zip(PEERS, (single, slices, mapped), strict=True))[peer])


def hops(given: HopsBenchOptions) -> Iterator[BenchPlan]:
    store = make_hops(given)
    if given.only != "cold":
        with serving(store, given.folder, given.mem) as endpoint:
            sides = [Side(name, open_peer, (given, store, name)) for name in PEERS]
            sides += [Side(name, open_ours, (given, endpoint, name)) for name in WAYS]
            ratios = [Ratio(f"over {p}", n, "samples_per_s", p) for n in WAYS for p in PEERS]
            yield BenchPlan(sides, {"cache": "warm"}, ratios)
    if given.only != "warm":
        options = ("--readers", str(given.readers))
        with serving(store, given.folder, given.budget, *options) as endpoint:
            sides = [
                Side(VIEWS, open_ours, (given, endpoint, VIEWS)),
                Side(LIMIT, disk_limit, (store,)),  # next to both in each round
                Side(COPIED, open_ours, (given, endpoint, COPIED)),
                Side(ROWS, open_ours, (given, endpoint, ROWS, given.cold_batches)),
            ]
            shares = [Ratio("share_of_limit", n, "GB_per_s", LIMIT) for n in (VIEWS, COPIED)]
            setting = {"cache": f"cold, {given.budget}"}
            yield BenchPlan(sides, setting, shares, partial(drop_cache, store))
