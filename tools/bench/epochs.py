"""The measure of loaders: epochs of batches, what they took, and what the daemon did for them."""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clients.torch import NeighborDataset, prefetch
from tools.bench.disk import disk_limit
from tools.bench.gpu import SageTrainer
from tools.bench.harness import Run
from tools.bench.resources import bytes_read, cpu_seconds, descendants, proportional_bytes
from tools.bench.setup import counters, serving

MOST = 1 << 40


class ServedEpochs(NamedTuple):
    """A daemon, and a client that takes epochs from it."""

    store: Path
    mem: str  # of the daemon
    options: Mapping[str, Any]  # of the dataset
    serve: tuple[str, ...] = ()  # options of the daemon
    before: int = 0  # batches that are not timed
    steps: int = MOST  # batches that are timed
    model: tuple[int, int, int] = (0, 0, 0)  # width, hidden, classes: it is trained, if any
    threads: int = 1  # of the model


def take(
    batches: Iterable[Any], before: int, steps: int, step: Callable[[Any], object] | None = None
) -> dict[str, float]:
    """Take batches to the end, or so many; those before are not timed.

    step   what a trainer does with a batch
    """
    ahead, opened = iter(batches), time.perf_counter()
    for batch in itertools.islice(ahead, before):
        assert batch.x.size(0) >= batch.batch_size
    pids, seeds, edges, waits = descendants(os.getpid()), 0, 0, []
    read, cpu = bytes_read(pids), cpu_seconds(pids)
    begun = asked = time.perf_counter()
    for batch in itertools.islice(ahead, steps):
        waits.append(time.perf_counter() - asked)
        assert batch.x.size(0) >= batch.batch_size
        if step is not None:
            step(batch)
        seeds += int(batch.batch_size)
        edges += batch.edge_index.size(1)
        asked = time.perf_counter()
    seconds, read = time.perf_counter() - begun, bytes_read(pids) - read
    return {
        "seeds_per_s": seeds / seconds, "seconds": seconds, "steps": len(waits),
        "waited": sum(waits) / seconds, "longest_wait_s": max(waits), "first_s": begun - opened,
        "cpu_s": cpu_seconds(pids) - cpu, "bytes_per_seed": read / seeds,
        "edges_per_seed": edges / seeds, "held_bytes": proportional_bytes(pids),
    }  # fmt: skip


@contextmanager
def open_epochs(given: ServedEpochs) -> Iterator[Run]:
    """One daemon and one session for all rounds."""
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(given.threads)
        with serving(given.store, Path(folder), given.mem, *given.serve) as endpoint:
            data: Any = NeighborDataset(endpoint, **given.options)
            step = None
            if any(given.model):  # as the training scripts do
                data = prefetch(data, "cpu")
                step = SageTrainer("cpu", *given.model, given.options["num_neighbors"]).step

            def run() -> Mapping[str, float]:
                before = counters(endpoint)
                figures = take(data, given.before, given.steps, step)
                grown = {n: c - before.get(n, 0) for n, c in counters(endpoint).items()}
                names = {f"hyper_{n}": n for n in ("groups", "rows_read", "rows_wanted")}
                names |= {"bytes_read": "daemon_bytes_read", "blocks_read": "blocks_read"}
                names |= {f"macro_{n}_ns": f"macro_{n}_ns" for n in ("read", "wait")}
                return figures | {to: grown.get(name, 0) for name, to in names.items()}

            yield run
            data.close()


@contextmanager
def open_fresh(given: ServedEpochs) -> Iterator[Run]:
    """A daemon and a session for each round, between two looks at the disk.

    `over_bound` is the time taken over the greater of two that none can beat: bytes read at the
    disk's limit, and the CPU seconds of all processes shared by the cores.
    """

    def run() -> Mapping[str, float]:
        disk = disk_limit(given.store)
        with open_epochs(given) as one:
            found = dict(one())
        disk = max(disk, disk_limit(given.store))
        rate = found["bytes_per_seed"] * found["seeds_per_s"] / 1e9
        bound = max(
            rate * found["seconds"] / disk, found["cpu_s"] / len(os.sched_getaffinity(0)), 1e-9
        )
        return found | {
            "disk_GB_per_s": disk, "share_of_disk": rate / disk,
            "over_bound": found["seconds"] / bound,
        }  # fmt: skip

    yield run
