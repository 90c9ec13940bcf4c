"""Compare predictions with a daemon's counters, by store and budget."""

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from blockstore.store import open_store
from blockstore.units import parse_bytes
from clients.hopwise.dataset import HopDataset
from clients.torch import NeighborDataset
from loaderd.api.protocol import Attach
from loaderd.monitoring.devicecost import FLASH, DeviceCost
from loaderd.sessions.engine import default_settings
from tools.bench.setup import counters, drop_cache, serving
from tools.model.graph import Graph, read_graph
from tools.model.predict import CHUNKS, MACRO, Job, Prediction, predict
from tools.model.rates import KernelRates

_STILL_S = 0.5  # without a byte read: reading ahead has ended


class Workload(NamedTuple):
    """A request to a daemon, and the daemon's store and memory."""

    store: Path
    mem: str
    plan: str
    fanouts: tuple[int, ...]
    batch_size: int
    steps: int  # of minibatches that do not stay in memory

    @property
    def request(self) -> Attach:
        return Attach(
            token=0, request=0, plan=self.plan, num_neighbors=self.fanouts,
            batch_size=self.batch_size,
        )  # fmt: skip


class Compared(NamedTuple):
    """Predicted and measured figures of an epoch, or of some of its steps."""

    workload: Workload
    predicted_bytes: float
    counted_bytes: float
    predicted_s: float
    measured_s: float
    size: int  # predicted number of minibatches that are built together
    limit: str  # predicted bottleneck


class _Counted(NamedTuple):
    bytes: float
    seconds: float
    counters: dict[str, int]  # at the end
    share: float  # of an epoch


def compare(workload: Workload, graph: Graph | None, rates: KernelRates, cores: int) -> Compared:
    """Predict, then measure.  Uses the disk's rates that the daemon measured, if it did.

    Raises BudgetTooSmall, Refused.
    """
    store = open_store(workload.store)
    settings = default_settings(parse_bytes(workload.mem))
    graph = read_graph(store, "train") if graph is None else graph

    def predicted(rates: KernelRates, planned: DeviceCost | None = None) -> Prediction:
        job = Job(cores=cores, planned=planned)
        return predict(store.manifest, graph, settings, workload.request, rates, job)

    whole = predicted(rates)
    partly = workload.plan == "minibatch" and whole.epoch.bytes > 0
    counted = _count(workload, partly, whole.size)
    if "device_run_ns" in counted.counters:
        cost = DeviceCost(*(counted.counters[f"device_{n}_ns"] / 1e9 for n in ("run", "page")))
        rates = structs.replace(rates, run_s=cost.run_s, page_s=cost.page_s)
        whole = predicted(rates, cost)
    else:  # rates by which a daemon plans its reads if it has not measured
        whole = predicted(rates, FLASH)
    of_epoch = workload.plan in (MACRO, "hyperbatch") or counted.share < 1
    return Compared(
        workload, (whole.epoch.bytes if of_epoch else whole.bytes) * counted.share, counted.bytes,
        whole.epoch_s * counted.share, counted.seconds, whole.size, whole.limit,
    )  # fmt: skip


def _count(workload: Workload, partly: bool, together: int) -> _Counted:
    """Warm a fresh daemon up until kernels and resident data are loaded; then measure.

    If all may stay in memory, counts the bytes of the warm-up, else those of the timed epoch.  For
    macro-batches the warm-up is a whole epoch, as it reads the first ones of the next.

    partly     for minibatches that do not stay: time some steps, as an epoch would take hours
    together   minibatches of a hyperbatch: resident data is loaded once a second one has come
    """
    drop_cache(workload.store)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(workload.store, Path(folder), workload.mem) as endpoint,
    ):
        data = _open(endpoint, workload)
        batches = iter(data)
        if partly:
            _take(itertools.islice(batches, data.attached().window))
        elif workload.plan == "hyperbatch":
            _take(itertools.islice(batches, together + 1))
        else:
            _take(batches)
        before = counters(endpoint)["bytes_read"] if partly else _settled(endpoint)
        begun = time.perf_counter()
        if not partly:
            batches = iter(data)  # the next epoch: reading ahead starts here
        taken = _take(itertools.islice(batches, workload.steps if partly else None))
        seconds = time.perf_counter() - begun
        read = counters(endpoint)["bytes_read"] if partly else _settled(endpoint)
        found = counters(endpoint)
        if partly or workload.plan in (MACRO, "hyperbatch"):
            read -= before
        share = taken / len(data) if partly else 1.0
        data.close()
    return _Counted(read, seconds, found, share)


def _open(endpoint: str, workload: Workload) -> Any:
    if workload.plan == CHUNKS:
        return HopDataset(endpoint, batch_size=workload.batch_size)
    return NeighborDataset(
        endpoint, num_neighbors=workload.fanouts, batch_size=workload.batch_size,
        plan=workload.plan,
    )  # fmt: skip


def _take(batches: Any) -> int:
    return sum(1 for _ in batches)


def _settled(endpoint: str) -> int:
    """Wait until nothing more is read; returns the bytes read."""
    read, last = counters(endpoint)["bytes_read"], -1
    while read != last:
        time.sleep(_STILL_S)
        read, last = counters(endpoint)["bytes_read"], read
    return read


def possible_plans(store: Path) -> Iterator[str]:
    """The plans that the model knows and the store supports."""
    node = open_store(store).manifest.types[0]
    yield from ("minibatch", "hyperbatch")
    if node.num_partitions:
        yield MACRO
    if "train" in node.hops:
        yield CHUNKS


HEAD = (
    "store", "--mem", "plan", "GB predicted", "counted", "ratio", "s predicted", "measured",
    "ratio", "together", "limit",
)  # fmt: skip


def row(found: Compared) -> list[str]:
    """A row of the table with header `HEAD`."""
    w = found.workload
    bytes_ratio = found.predicted_bytes / max(1.0, found.counted_bytes)
    return [
        w.store.name, w.mem, w.plan, f"{found.predicted_bytes / 1e9:.2f}",
        f"{found.counted_bytes / 1e9:.2f}", f"{bytes_ratio:.2f}", f"{found.predicted_s:.1f}",
        f"{found.measured_s:.1f}", f"{found.predicted_s / found.measured_s:.2f}",
        str(found.size), found.limit,
    ]  # fmt: skip
