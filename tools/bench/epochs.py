"""Benches of loaders: epochs of batches, their costs, and the daemon's counters."""

import importlib.util
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blockstore.store import open_store
from clients.torch import NeighborDataset, prefetch
from tools.bench.disk import disk_limit
from tools.bench.gpu import SageTrainer
from tools.bench.harness import BenchOptions, BenchPlan, GraphOptions, Run, Side, SideSkipped
from tools.bench.resources import bytes_read, cpu_seconds, descendants, proportional_bytes
from tools.bench.setup import (
    CLASSES,
    counters,
    drop_cache,
    free_port,
    make_keys,
    make_store,
    serving,
    total_bytes,
)

ALL_STEPS = 1 << 40
SHARES = (50, 90, 99)  # percentiles of waits


class ServedEpochs(NamedTuple):
    """Options of a daemon, and of a client that reads epochs from it."""

    store: Path
    mem: str  # of the daemon
    options: Mapping[str, Any]  # of the dataset
    serve: tuple[str, ...] = ()  # options of the daemon
    before: int = 0  # batches taken first, without timing
    steps: int = ALL_STEPS  # batches that are timed
    model: tuple[int, int, int] = (0, 0, 0)  # width, hidden, classes; zeros: no model is trained
    threads: int = 1  # of the model
    remote: str = ""  # endpoint for the client, if not the local one
    think_s: float = 0.0  # in a second epoch, the trainer is busy this long after each batch


def take(
    batches: Iterable[Any], before: int, steps: int, step: Callable[[Any], object] | None = None
) -> dict[str, float]:
    """Take `steps` batches, or all, after `before` untimed ones.

    step   called with each batch, as a trainer
    """
    ahead, opened = iter(batches), time.perf_counter()
    for batch in itertools.islice(ahead, before):
        assert batch.x.size(0) >= batch.batch_size
    pids, seeds, edges, num_bytes, waits = descendants(os.getpid()), 0, 0, 0, []
    read, cpu, client_cpu = bytes_read(pids), cpu_seconds(pids), time.process_time()
    begun = asked = time.perf_counter()
    for batch in itertools.islice(ahead, steps):
        waits.append(time.perf_counter() - asked)
        assert batch.x.size(0) >= batch.batch_size
        if step is not None:
            step(batch)
        seeds += int(batch.batch_size)
        edges += batch.edge_index.size(1)
        num_bytes += batch_bytes(batch)
        asked = time.perf_counter()
    seconds, read = time.perf_counter() - begun, bytes_read(pids) - read
    client_cpu = time.process_time() - client_cpu
    percentiles = np.percentile(waits, SHARES) * 1e6
    return {
        **{f"wait_p{n}_us": float(v) for n, v in zip(SHARES, percentiles, strict=True)},
        "GB_per_s": num_bytes / seconds / 1e9, "client_cpu_ms": 1e3 * client_cpu / len(waits),
        "seeds_per_s": seeds / seconds, "seconds": seconds, "steps": len(waits),
        "waited": sum(waits) / seconds, "longest_wait_s": max(waits), "first_s": begun - opened,
        "cpu_s": cpu_seconds(pids) - cpu, "bytes_per_seed": read / seeds,
        "edges_per_seed": edges / seeds, "held_bytes": proportional_bytes(pids),
    }  # fmt: skip


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors of a batch that have their own memory."""
    tensors = (getattr(batch, name, None) for name in ("x", "y", "edge_index", "n_id", "input_id"))
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def hold_core(seconds: float) -> None:
    """Keep a core busy, like a trainer."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def open_epochs(given: ServedEpochs) -> Iterator[Run]:
    """Rounds with one daemon and one session for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(given.threads)
        with serving(given.store, Path(folder), given.mem, *given.serve) as endpoint:
            data: Any = NeighborDataset(given.remote or endpoint, **given.options)
            step = None
            if any(given.model):  # as the training scripts do
                data = prefetch(data, "cpu")
                step = SageTrainer("cpu", *given.model, given.options["num_neighbors"]).step

            def run() -> Mapping[str, float]:
                before = counters(endpoint)
                figures = take(data, given.before, given.steps, step)
                if given.think_s:  # waits of a busy trainer, without the first window
                    first = min(data.attached().window, len(data) - 1)
                    busy = take(data, first, ALL_STEPS, lambda _: hold_core(given.think_s))
                    figures |= {name: v for name, v in busy.items() if "wait" in name}
                grown = {n: c - before.get(n, 0) for n, c in counters(endpoint).items()}
                names = {f"hyper_{n}": n for n in ("groups", "rows_read", "rows_wanted")}
                names |= {"bytes_read": "daemon_bytes_read", "blocks_read": "blocks_read"}
                names |= {f"macro_{n}_ns": f"macro_{n}_ns" for n in ("read", "wait")}
                return figures | {to: grown.get(name, 0) for name, to in names.items()}

            yield run
            data.close()


def run_fresh(given: ServedEpochs) -> Mapping[str, float]:
    """An epoch with a fresh daemon and session, between two measurements of the disk.

    `over_bound` is the time taken over the greater of two lower bounds: that of the bytes read at
    the disk's limit, and that of the CPU seconds of all processes shared by the cores.
    """
    disk = disk_limit(given.store)["GB_per_s"]
    with contextmanager(open_epochs)(given) as one:
        found = dict(one())
    disk = max(disk, disk_limit(given.store)["GB_per_s"])
    rate = found["bytes_per_seed"] * found["seeds_per_s"] / 1e9
    bound = max(rate * found["seconds"] / disk, found["cpu_s"] / len(os.sched_getaffinity(0)), 1e-9)
    return found | {
        "disk_GB_per_s": disk, "share_of_disk": rate / disk, "over_bound": found["seconds"] / bound
    }  # fmt: skip


@dataclass(frozen=True)
class LoaderOptions(GraphOptions):
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000
    seeds: Annotated[int, "of our epoch"] = 100_000
    peer_seeds: Annotated[int, "of the epoch of PyG's loader"] = 40_000
    workers: Annotated[tuple[int, ...], "of the daemon; 0: its own choice"] = (0,)
    pyg_workers: tuple[int, ...] = (0, 2, 4)
    mem: str = "4G"
    rounds: int = 5

    def tenth(self, seeds: int) -> int:
        return max(1, seeds // self.batch_size // 10)


def seeds_of(graph: Path, count: int) -> NDArray[np.int64]:
    """Original ids of training nodes.  Raises ValueError: there are fewer."""
    found: NDArray[np.int64] = np.load(graph / "train_idx.npy")[:count]
    if found.size < count:
        raise ValueError(f"the graph has {found.size} training nodes, {count} are asked for")
    return found


def pyg_sampler() -> str:
    """The library that PyG samples with here: pyg-lib, the faster one, if it is installed."""
    found = (name for name in ("pyg_lib", "torch_sparse") if importlib.util.find_spec(name))
    return next(found, "none")


def open_pyg(given: LoaderOptions, workers: int) -> Iterator[Run]:
    """PyG's loader; its sampler converts the edges to CSC before the rounds."""
    if pyg_sampler() == "none":
        raise SideSkipped("PyG samples with pyg-lib or torch-sparse, and neither is installed")
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    graph = given.graph()
    arrays = {
        name: torch.from_numpy(np.load(graph / f"{file}.npy"))
        for name, file in (("x", "node_feat"), ("y", "node_label"), ("edge_index", "edge_index"))
    }
    loader = NeighborLoader(
        Data(**arrays), num_neighbors=list(given.fanouts), batch_size=given.batch_size,
        input_nodes=torch.from_numpy(seeds_of(graph, given.peer_seeds)), shuffle=True,
        num_workers=workers, persistent_workers=workers > 0, filter_per_worker=True,
    )  # fmt: skip
    yield lambda: take(loader, given.tenth(given.peer_seeds), ALL_STEPS)


def loaders(given: LoaderOptions) -> Iterator[BenchPlan]:
    """Seeds per second of whole loaders: ours, and PyG's NeighborLoader over tensors in memory.

    Both by numbers of workers.  The first tenth of an epoch, in which pipelines fill, is not timed.
    """
    graph = given.graph()
    options = {
        "num_neighbors": given.fanouts, "batch_size": given.batch_size,
        "input_nodes": seeds_of(graph, given.seeds),
    }  # fmt: skip
    ours = ServedEpochs(given.store(), given.mem, options, before=given.tenth(given.seeds))
    sides = [
        Side(f"ours, {w} workers", open_epochs, (ours._replace(serve=("--workers", w)),))
        for w in map(str, given.workers)
    ]
    sides += [Side(f"PyG, {w} workers", open_pyg, (given, w)) for w in given.pyg_workers]
    yield BenchPlan(sides, {"cache": "warm", "pyg_sampler": pyg_sampler()})


@dataclass(frozen=True)
class HandoverOptions(GraphOptions):
    nodes: int = 200_000
    degree: int = 16
    features: int = 64
    batch_size: int = 200
    fanouts: tuple[int, ...] = (10, 10)
    think_ms: float = 20.0
    ways: tuple[Literal["local", "tcp", "tcp, keys"], ...] = ("local", "tcp", "tcp, keys")


def handover(given: HandoverOptions) -> Iterator[BenchPlan]:
    """What a client waits for, and gets, from a daemon on the same host and over tcp (loopback).

    Each round is an epoch without think time (rates, processor time of the client) and one in
    which the trainer is busy for `--think-ms` after each batch (waits).
    """
    options: dict[str, Any] = {"num_neighbors": given.fanouts, "batch_size": given.batch_size}
    think_s, sides = given.think_ms / 1e3, []
    for way in given.ways:
        place = f"tcp://127.0.0.1:{free_port()}"
        words, remote = ["--workers", "2", "--listen", place], place
        if way == "tcp, keys":
            daemon, client = make_keys(given.folder / "keys")
            words, remote = [*words, "--keys", str(daemon)], f"{place}?keys={client}"
        served = ServedEpochs(
            given.store(), "1G", options, tuple(words), think_s=think_s,
            remote="" if way == "local" else remote,
        )  # fmt: skip
        sides.append(Side(way, open_epochs, (served,)))
    yield BenchPlan(sides, {"cache": "warm"})


@dataclass(frozen=True)
class HyperbatchOptions(BenchOptions):
    stores: Annotated[tuple[Path, ...], "of one graph, of several orders or block sizes"] = ()
    limits: Annotated[tuple[str, ...], "of control groups"] = ("4G", "2G", "1G")
    mem: Annotated[tuple[str, ...], "of the daemon, by limit"] = ("3200M", "1300M", "256M")
    sizes: Annotated[tuple[int, ...], "minibatches of a hyperbatch; 0: as many as fit"] = (0,)
    plans: tuple[str, ...] = ("auto",)
    steps: Annotated[int, "batches timed; 0: to the end of the epoch"] = 0
    before: Annotated[int, "batches before these"] = 8
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1000


def hyperbatch(given: HyperbatchOptions) -> Iterator[BenchPlan]:
    """Hyperbatches against minibatches, daemon and client in a control group of one size.

    Interpreter, arena, page cache and the gather into torch tensors are all inside.  Caches are
    emptied before each run, and the disk's limit is measured before and after (the greater counts).
    """
    for store in given.stores:
        manifest = open_store(store).manifest
        setting = {
            "store": store.name, "order": manifest.order, "block_bytes": manifest.block_bytes,
            "store_bytes": total_bytes(store),
        }  # fmt: skip
        sides = []
        budgets = zip(given.limits, given.mem, strict=True)
        for (limit, mem), plan, size in itertools.product(budgets, given.plans, given.sizes):
            name = f"{plan}{f' H={size}' if size else ''}, --mem {mem} in {limit}"
            options = {"num_neighbors": given.fanouts, "batch_size": given.batch_size}
            served = ServedEpochs(
                store, mem, options | {"plan": plan, "hyperbatch": size},
                ("--workers", "4", "--session-share", "1"), given.before, given.steps or ALL_STEPS,
            )  # fmt: skip
            own = {"limit": limit, "mem": mem, "plan": plan, "size": size}
            sides.append(Side(name, run_fresh, (served,), own, limit))
        yield BenchPlan(sides, setting, before=partial(drop_cache, store), warm=False)


@dataclass(frozen=True)
class MacroOptions(GraphOptions):
    batch_size: int = 1000
    fanouts: tuple[int, ...] = (15, 10)
    hidden: Annotated[int, "of the model"] = 128
    mem: Annotated[str, "of macro-batches"] = "400M"
    whole: Annotated[str, "in memory"] = "2G"
    threads: Annotated[int, "of the model"] = 2
    workers: int = 2

    def store(self) -> Path:
        """The graph's store in 64 partitions, with hubs and halos."""
        parts = ("--partitions", "64", "--hubs", "0.01", "--halo", "0.3")
        return make_store(self.folder, self.graph(), name="partitioned", options=parts)


def macro(given: MacroOptions) -> Iterator[BenchPlan]:
    """Epochs from macro-batches at a fraction of the memory, against the graph in memory.

    In memory, and an eighth at a time used once and twice.  Each round is an epoch of every side,
    with a model and with one that does nothing.
    """
    store = given.store()
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "in memory": (given.whole, {"plan": "minibatch"}),
        "1/8, reuse 1": (given.mem, {"plan": "macrobatch", "reuse": 1}),
        "1/8, reuse 2": (given.mem, {"plan": "macrobatch", "reuse": 2}),
    }
    sides = []
    trained = (given.features, given.hidden, CLASSES)
    workers = ("--workers", str(given.workers))
    for model, name in (((0, 0, 0), "loading"), (trained, "model")):
        for way, (mem, options) in ways.items():
            options |= {"num_neighbors": given.fanouts, "batch_size": given.batch_size}
            served = ServedEpochs(
                store, mem, options, workers, model=model, threads=given.threads
            )  # fmt: skip
            sides.append(Side(f"{way}, {name}", open_epochs, (served,)))
    setting = {"store_MB": total_bytes(store) / 1e6} | {
        f"disk_{name}": value for name, value in disk_limit(store).items()
    }
    yield BenchPlan(sides, setting)
