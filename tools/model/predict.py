"""Bytes and seconds of an epoch, from a graph, a request, a budget and rates.  Pure."""

from typing import NamedTuple

from blockstore.format import PAGE_BYTES, Manifest
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import EngineSettings, make_budget, served_rows
from loaderd.sessions.resolve import resolve_fanouts
from tools.model.graph import Graph
from tools.model.memory import share_memory
from tools.model.occupancy import Occupancy, occupy
from tools.model.rates import KernelRates
from tools.model.traffic import (
    Load,
    Reads,
    chunk_reads,
    hyperbatch_reads,
    macrobatch_reads,
    minibatch_reads,
)

CHUNKS, MACRO = "chunks", "macrobatch"
_HELD = 0.95  # of what is free, that arrays of propagated features take at most
_ID_BYTES = 8  # of a node, beside its rows, as it is handed over


class Network(NamedTuple):
    """What lies between the machines of a job, or between one and a bucket."""

    bytes_s: float  # of one machine
    request_s: float = 0.0  # of a bucket: until the first byte comes
    at_once: int = 64  # requests on their way
    request_bytes: int = 1 << 20
    cache_bytes: float = float("inf")  # of the disk that keeps what a bucket has sent


class Job(NamedTuple):
    """Machines that share the seeds of an epoch; each has the graph, and its part of the rows."""

    machines: int = 1
    cores: int = 2  # of each
    network: Network = Network(3e9)
    bucket: Network | None = None  # where the store is, if the disk is a cache of it


class Prediction(NamedTuple):
    """Of one machine."""

    first: Load  # read from its disk before the first batch of the first epoch
    epoch: Load  # read from its disk in an epoch
    network_bytes: float  # rows of other machines, in an epoch
    size: int  # minibatches that are built together
    first_s: float  # before the first batch of the first epoch
    disk_s: float  # of an epoch, if nothing else took time; likewise below
    network_s: float
    cpu_s: float  # spread over all cores
    bucket: Load  # what a cold cache fetches, in the first epoch
    bucket_s: float

    @property
    def bytes(self) -> float:
        """Of the first epoch."""
        return self.first.bytes + self.epoch.bytes

    @property
    def seconds(self) -> float:
        """Of the first epoch: disk, network and cores work at the same time."""
        return max(self.first_s + self.epoch_s, self.bucket_s)

    @property
    def epoch_s(self) -> float:
        return max(self.disk_s, self.network_s, self.cpu_s)

    @property
    def limit(self) -> str:
        """What takes most of an epoch's time."""
        named = {"disk": self.disk_s, "network": self.network_s, "cores": self.cpu_s}
        return max(named, key=named.__getitem__)


def predict(
    manifest: Manifest, graph: Graph, settings: EngineSettings, request: Attach, rates: KernelRates,
    job: Job,
) -> Prediction:  # fmt: skip
    """The first epoch of a daemon that does nothing else.

    Raises BudgetTooSmall, Refused.
    """
    if request.plan == CHUNKS:
        return _predict_chunks(manifest, settings, request, rates, job)
    fanouts = [hop[0] for hop in resolve_fanouts(request, manifest.relations)]
    occupancy = occupy(graph, fanouts, request.batch_size)
    steps = -(-manifest.types[0].splits[request.split].num_rows // request.batch_size)
    if request.plan == MACRO:
        reads = macrobatch_reads(manifest)
    else:
        memory = share_memory(manifest, settings, request, occupancy)
        memory = memory._replace(steps=-(-steps // job.machines))
        if memory.hyper is None:
            reads = minibatch_reads(manifest, occupancy, memory, rates.disk)
        else:
            reads = hyperbatch_reads(manifest, occupancy, memory, memory.hyper, rates.disk)
    cpu = steps / job.machines * _batch_cpu(manifest, occupancy, rates)
    return _timed(reads, cpu, rates, job, _store_bytes(manifest))


def _store_bytes(manifest: Manifest) -> float:
    """Of graph and rows."""
    blocks, widths = manifest.relations[0].num_blocks, _widths(manifest)
    return float(blocks * manifest.block_bytes + manifest.num_nodes * sum(widths))


def _widths(manifest: Manifest) -> list[int]:
    """Bytes of a row in each array that comes with batches."""
    return [rows.array.row_bytes for rows in served_rows(manifest)]


def _batch_cpu(manifest: Manifest, occupancy: Occupancy, rates: KernelRates) -> float:
    """CPU seconds of a batch, reading not counted."""
    nodes, width = sum(occupancy.nodes), _ID_BYTES + sum(_widths(manifest))
    return sum(occupancy.edges) * rates.edge_s + nodes * width * rates.row_byte_s


def _timed(
    reads: Reads, cpu_s: float, rates: KernelRates, job: Job, store_bytes: float
) -> Prediction:  # fmt: skip
    """`cpu_s`: of an epoch, of one machine, reading not counted; `store_bytes`: it reads from."""

    def disk_s(load: Load) -> float:
        return load.calls * rates.run_s + load.bytes / PAGE_BYTES * rates.page_s

    cpu_s += reads.epoch.bytes / PAGE_BYTES * rates.page_cpu_s
    # what a machine asks of others these read from their disks, as it does for them
    elsewhere = 1 - 1 / job.machines
    bucket, bucket_s = Load(), 0.0
    if job.bucket is not None:
        again = max(0.0, reads.first.bytes + reads.epoch.bytes - store_bytes)
        fetched = reads.first.bytes + reads.epoch.bytes - again
        # of a cache that is too small for the store pages are missing in proportion
        fetched += again * max(0.0, 1 - job.bucket.cache_bytes / store_bytes)
        bucket = Load(fetched, fetched / job.bucket.request_bytes)
        waits = bucket.calls * job.bucket.request_s / job.bucket.at_once
        bucket_s = waits + fetched / job.bucket.bytes_s
    return Prediction(
        reads.first, reads.epoch, reads.rows * elsewhere, reads.size,
        max(disk_s(reads.first), reads.first_rows * elsewhere / job.network.bytes_s),
        disk_s(reads.epoch), reads.rows * elsewhere / job.network.bytes_s, cpu_s / job.cores,
        bucket, bucket_s,
    )  # fmt: skip


def _predict_chunks(
    manifest: Manifest, settings: EngineSettings, request: Attach, rates: KernelRates, job: Job
) -> Prediction:
    """Each machine reads its share of every batch."""
    hops, budget = manifest.types[0].hops[request.split], make_budget(manifest, settings)
    widths = [array.row_bytes for array in hops.arrays()[1:]]  # the first are ids of nodes
    room = _HELD * (budget.num_slots - budget.graph_least) * budget.slot_bytes
    rows = hops.nodes.num_rows // job.machines
    reads = chunk_reads(rows, widths, request.chunk or request.batch_size, room)
    size = float(hops.nodes.num_rows * sum(widths))
    return _timed(reads, rows * sum(widths) * rates.row_byte_s, rates, job, size)
