"""Batches of propagated features: rows, chunks, copied or where they lie; warm, and from disk.

`python -m tools.bench hops`: every peer serves rows of hop-wise arrays in batches and every byte of
them is read (a sum).  Warm: all arrays in memory (page cache, or the daemon's).  Cold: a budget of
half of them; mapped files in a control group of the same size, where one can be made.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from blockstore.format import (
    FORMAT_VERSION,
    HopSet,
    Manifest,
    NodeType,
    Relation,
    RowArray,
    gapless_rows,
    shard_path,
)
from blockstore.pack import GraphPacker
from blockstore.store import open_store
from blockstore.writer import StoreWriter
from clients.torch import HopDataset
from tools.bench.harness import Found, Peer, Run, Skipped, measure, report, spread
from tools.bench.hyperbatch import disk_limit, limited
from tools.bench.loaders import drop_cache
from tools.bench.setup import serving

_BLOCK, _PIECE = 1 << 20, 1 << 14


class Task(NamedTuple):
    """What every peer does a round of."""

    store: Path
    folder: Path
    batch_size: int
    threads: int  # of torch
    limit: str  # of memory, for mapped files; empty: none


def make_store(folder: Path, rows: int, width: int, hops: int) -> Path:
    """A store of random rows float32, hops 0 to `hops` of one operator."""
    path = folder / f"hops-{rows}-{width}-{hops}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    rng, at = np.random.default_rng(0), "nodes/node"
    with StoreWriter(path, block_bytes=_BLOCK) as writer:

        def add(name: str, dtype: str, shape: tuple[int, ...], count: int, draw: Any) -> RowArray:
            array = RowArray(f"{at}/{name}", dtype, count, shape)
            if count == rows:
                array = RowArray(
                    array.path, dtype, count, shape,
                    rows_per_block=gapless_rows(array.row_bytes, _BLOCK, count),
                )  # fmt: skip
            with writer.rows(array) as out:
                for first in range(0, count, _PIECE):
                    out.append(draw(first, min(first + _PIECE, count)))
            return array

        def number(first: int, stop: int) -> NDArray[np.uint32]:
            return np.arange(first, stop, dtype=np.uint32)

        def values(first: int, stop: int) -> NDArray[np.float32]:
            return rng.random((stop - first, width), np.float32)

        arrays = tuple(
            add(f"hops/train/{hop}", "float32", (width,), rows, values) for hop in range(hops + 1)
        )
        chosen = HopSet(
            split="train",
            nodes=add("hops/train/nodes", "int64", (), rows, lambda a, b: np.arange(a, b)),
            label=add(
                "hops/train/label", "int64", (), rows, lambda a, b: rng.integers(0, 40, b - a)
            ),
            operators={"sym": arrays},
        )
        node_type = NodeType(
            name="node", first=0, num_nodes=rows,
            original_id=add("original_id", "uint32", (), rows, number),
            store_id=add("store_id", "uint32", (), rows, number), hops={"train": chosen},
        )  # fmt: skip
        writer.commit(
            Manifest(
                format=FORMAT_VERSION, block_bytes=_BLOCK, id_dtype="uint32", types=(node_type,),
                relations=(write_edge(writer, _BLOCK, rows),),
            )
        )  # fmt: skip
    return path


def write_edge(writer: StoreWriter, block_bytes: int, num_nodes: int) -> Relation:
    """A relation of one edge: there is no store without."""
    folder = "edges/node___to___node"
    blocks = writer.graph(f"{folder}/blocks")
    packer = GraphPacker(block_bytes, "uint32", None, 0, blocks.append)
    packer.append((np.arange(num_nodes) < 1).astype(np.int64), np.array([1], np.uint32), None, None)
    writer.side(f"{folder}/first_node", packer.close())
    writer.side(f"{folder}/first_edge", packer.first_edges())
    return Relation(
        src="node", name="to", dst="node", num_edges=1, num_blocks=blocks.close(),
        path=f"{folder}/blocks", first_node_path=f"{folder}/first_node",
        first_edge_path=f"{folder}/first_edge",
    )  # fmt: skip


def consume(x: Sequence[Tensor]) -> int:
    """Read every byte; returns the rows."""
    total = sum(float(part.sum()) for part in x)
    assert not np.isnan(total)
    return x[0].size(0)


def _timed(batches: Callable[[], Iterator[Sequence[Tensor]]], row_bytes: int) -> Run:
    """A round: all batches, read."""

    def run() -> Mapping[str, float]:
        begun, rows = time.perf_counter(), 0
        for x in batches():
            rows += consume(x)
        seconds = time.perf_counter() - begun
        return {"samples_per_s": rows / seconds, "GB_per_s": rows * row_bytes / seconds / 1e9}

    return run


@contextmanager
def open_ours(
    task: Task, endpoint: str, options: Mapping[str, Any], num_batches: int | None = None
) -> Iterator[Run]:
    """A client of a daemon, the first batches of an epoch a round, or all of them."""
    torch.set_num_threads(task.threads)
    data = HopDataset(endpoint, batch_size=task.batch_size, **options)
    row_bytes = sum(s.row_bytes for s in data.attached().rows if ":" in s.name)

    def batches() -> Iterator[Sequence[Tensor]]:
        for batch in islice(data, num_batches):
            yield batch.x if isinstance(batch.x, list) else [batch.x]

    yield _timed(batches, row_bytes)
    data.close()


class _Rows(Dataset[tuple[Tensor, ...]]):
    """Single rows of all arrays."""

    def __init__(self, x: list[Tensor]) -> None:
        self._x = x

    def __len__(self) -> int:
        return self._x[0].size(0)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return tuple(x[i] for x in self._x)


def mapped(store: Path) -> list[NDArray[np.float32]]:
    """The hop arrays, mapped: without gaps, a shard is a plain array."""
    found: list[NDArray[np.float32]] = []
    for array in open_store(store).manifest.types[0].hops["train"].operators["sym"]:
        shard = store / shard_path(array.path, 0, 2)
        found.append(np.memmap(shard, np.float32, "c", shape=(array.num_rows, *array.row_shape)))
    return found


@contextmanager
def open_mapped(task: Task, how: str, num_batches: int) -> Iterator[Run]:
    """Mapped files, `num_batches` a round in a new order.

    how   "rows": a `DataLoader` over single rows; "index": rows of a batch by one index an array;
          "slices": chunks, copied; "views": chunks where they are mapped
    """
    torch.set_num_threads(task.threads)
    with limited(task.limit) if task.limit else _nothing() as limits:
        if task.limit and limits is None:
            raise Skipped("no control group can be made here")
        if limits is not None:
            limits.join()
        batch = task.batch_size

        def batches() -> Iterator[Sequence[Tensor]]:
            arrays = mapped(task.store)  # for this round: what is mapped stays in the page cache
            rows, tensors = arrays[0].shape[0], [torch.from_numpy(a) for a in arrays]
            order = (torch.randperm(rows // batch)[:num_batches] * batch).tolist()
            if how == "rows":
                loader = DataLoader(_Rows(tensors), batch, shuffle=True)
                for _, x in zip(range(num_batches), loader, strict=False):
                    yield x
            elif how == "index":
                shuffled = torch.randperm(rows)
                for low in range(0, min(rows, num_batches * batch), batch):
                    yield [t[shuffled[low : low + batch]] for t in tensors]
            elif how == "slices":
                for low in order:
                    yield [torch.from_numpy(np.array(a[low : low + batch])) for a in arrays]
            else:
                for low in order:
                    yield [t[low : low + batch] for t in tensors]

        yield _timed(batches, sum(a[0].nbytes for a in mapped(task.store)))


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


@contextmanager
def open_limit(store: Path) -> Iterator[Run]:
    """The disk."""
    yield lambda: {"GB_per_s": disk_limit(store)}


def ratios(found: Mapping[str, Found], figure: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print how much more one peer gives than another, in the same rounds."""
    for ours, theirs in pairs:
        if found[ours].skipped or found[theirs].skipped:
            continue
        a, b = found[ours].figures[figure], found[theirs].figures[figure]
        print(f"{ours} / {theirs}: {spread([x / y for x, y in zip(a, b, strict=True)])}")


WAYS: dict[str, Mapping[str, Any]] = {
    "RR": {"method": "rr"},
    "CR, copied": {},
    "CR, views": {"views": True},
}
COLD = ("CR, copied", "CR, views")


def _warm(task: Task, endpoint: str, given: argparse.Namespace) -> list[Peer]:
    few, many = given.row_batches, given.peer_batches
    return [
        Peer("row-wise DataLoader", open_mapped, (task, "rows", few)),
        Peer("batched index", open_mapped, (task, "index", many)),
        Peer("numpy chunk slices", open_mapped, (task, "slices", many)),
        Peer("mapped chunks, no copy", open_mapped, (task, "views", many)),
        *(Peer(name, open_ours, (task, endpoint, options)) for name, options in WAYS.items()),
    ]


def _cold(task: Task, endpoint: str, given: argparse.Namespace) -> list[list[Peer]]:
    """Those of the second part have rounds of their own: what RR reads ahead takes long."""
    few, (copied, views) = given.cold_batches, COLD
    return [
        [
            Peer(views, open_ours, (task, endpoint, WAYS[views])),
            Peer("disk limit", open_limit, (task.store,)),  # right beside both
            Peer(copied, open_ours, (task, endpoint, WAYS[copied])),
        ],
        [
            Peer("RR", open_ours, (task, endpoint, WAYS["RR"], few)),
            Peer("batched index", open_mapped, (task, "index", few)),
            Peer("numpy chunk slices", open_mapped, (task, "slices", 4 * few)),
        ],
    ]


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench hops", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/blockstore-bench"))
    parser.add_argument("--out", default="")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8000)
    parser.add_argument("--mem", default="3G", help="of the daemon, warm")
    parser.add_argument("--budget", default="1G", help="of the daemon and of mapped files, cold")
    parser.add_argument("--row-batches", type=int, default=6, help="of the row-wise loader a round")
    parser.add_argument("--peer-batches", type=int, default=60, help="of other peers a round")
    parser.add_argument("--cold-batches", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument(
        "--readers", type=int, default=10,
        help="of the daemon, cold: while some verify, 8 read, as the disk's limit does",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=("warm", "cold"), default="")
    given = parser.parse_args(words)
    store = make_store(given.folder, given.rows, given.width, given.hops)
    task = Task(store, given.folder, given.batch_size, given.threads, "")
    setting: dict[str, Any] = {
        "rows": given.rows, "row_bytes": 4 * given.width * (given.hops + 1),
        "batch_size": given.batch_size,
    }  # fmt: skip
    lines = []
    if given.only != "cold":
        with serving(store, given.folder, given.mem) as endpoint:
            found = measure(_warm(task, endpoint, given), given.rounds)
        lines += report("hops", setting | {"cache": "warm"}, found, given.out)
        theirs = ("row-wise DataLoader", "numpy chunk slices")
        ratios(found, "samples_per_s", [(n, t) for n in WAYS for t in theirs])
    if given.only != "warm":
        options = ("--readers", str(given.readers))
        with serving(store, given.folder, given.budget, *options) as endpoint:
            found = {}
            for peers in _cold(task._replace(limit=given.budget), endpoint, given):
                found |= measure(peers, given.rounds, lambda: drop_cache((store,)))
        lines += report("hops", setting | {"cache": f"cold, {given.budget}"}, found, given.out)
        ratios(found, "GB_per_s", [(n, "disk limit") for n in COLD])
    return lines
