"""Bytes and seconds of an epoch, from a graph, a request, a budget and rates; pure functions."""

from typing import NamedTuple

from blockstore.format import PAGE_BYTES, Manifest
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import EngineSettings, make_budget, served_rows
from loaderd.monitoring.devicecost import DeviceCost
from loaderd.sessions.resolve import resolve, resolve_fanouts
from tools.model.graph import Graph, macro_graph
from tools.model.memory import share_memory
from tools.model.occupancy import Occupancy, occupy
from tools.model.pipeline import (
    BusyTime,
    GroupStage,
    batch_stages,
    hyper_stages,
    macro_stages,
    pipeline_s,
)
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
_HELD = 0.95  # most of the free memory that arrays of propagated features take
_GATHER_CORES = 4  # with this many, or more, the client gathers rows with two threads


class Network(NamedTuple):
    """The network between the machines of a job, or between one and a bucket."""

    bytes_s: float  # per machine
    request_s: float = 0.0  # latency of a bucket until the first byte
    at_once: int = 64  # requests in flight
    request_bytes: int = 1 << 20
    cache_bytes: float = float("inf")  # disk cache of a bucket


class Job(NamedTuple):
    """Machines that divide the seeds of an epoch; each has the graph, and its part of the rows.

    Each has one trainer, whose model takes no time.
    """

    machines: int = 1
    cores: int = 2  # of each
    network: Network = Network(3e9)
    bucket: Network | None = None  # that holds the store, if the disk is a cache
    planned: DeviceCost | None = None  # cost of reads that daemons assume; None: the real one


class Prediction(NamedTuple):
    """The predicted figures of one machine."""

    first: Load  # read from its disk before the first batch of the first epoch
    epoch: Load  # read from its disk in an epoch
    network_bytes: float  # rows from other machines, in an epoch
    size: int  # minibatches that are built together
    first_s: float  # before the first batch of the first epoch
    epoch_s: float
    busy: dict[str, float]  # seconds of work for an epoch, by thread, device and all cores
    bucket: Load  # what a cold cache fetches, in the first epoch
    bucket_s: float

    @property
    def bytes(self) -> float:
        """Bytes read for the first epoch."""
        return self.first.bytes + self.epoch.bytes

    @property
    def seconds(self) -> float:
        """Seconds of the first epoch."""
        return max(self.first_s + self.epoch_s, self.bucket_s)

    @property
    def limit(self) -> str:
        """The bottleneck: the resource that works longest."""
        return max(self.busy, key=self.busy.__getitem__)


def predict(
    manifest: Manifest, graph: Graph, settings: EngineSettings, request: Attach, rates: KernelRates,
    job: Job,
) -> Prediction:  # fmt: skip
    """Predict the first epoch of a daemon without other sessions.

    Raises BudgetTooSmall, Refused.
    """
    if request.plan == CHUNKS:
        return _predict_chunks(manifest, settings, request, rates, job)
    fanouts = [hop[0] for hop in resolve_fanouts(request, manifest.relations)]
    if request.plan == MACRO:
        return _predict_macro(manifest, graph, settings, request, rates, job)
    workers = min(settings.workers, job.cores)
    occupancy, row_bytes = occupy(graph, fanouts, request.batch_size), sum(_widths(manifest))
    memory = share_memory(manifest, settings, request, occupancy)
    memory = memory._replace(steps=-(-memory.steps // job.machines))
    work, planned = _work(manifest, occupancy, rates, memory.steps, job), job.planned or rates.disk
    if memory.hyper is None:
        reads = minibatch_reads(manifest, occupancy, memory, planned)
        work = work._replace(note=0.0, passing=work.passing * (reads.rows > 0))
        work = _reading(work, reads, row_bytes, rates, job)._replace(bring=0.0)
        stages = batch_stages(work, memory.steps, workers)
    else:
        reads = hyperbatch_reads(manifest, occupancy, memory, memory.hyper, planned)
        copied = reads.rows * rates.byte_s  # by readers, to the places where rows stay
        work = _reading(work._replace(passing=0.0, read=copied), reads, row_bytes, rates, job)
        stages = hyper_stages(work, reads.groups, len(fanouts), workers)
    return _timed(reads, work, stages, rates, job, _store_bytes(manifest))


def _predict_macro(
    manifest: Manifest, graph: Graph, settings: EngineSettings, request: Attach,
    rates: KernelRates, job: Job,
) -> Prediction:  # fmt: skip
    """Predict macro-batches of the usual number of partitions, with hubs as the only copies."""
    num_seeds = manifest.types[0].splits[request.split].num_rows
    resolved = resolve(manifest, request, request.split, num_seeds)
    macro, relation, node = resolved.macro, manifest.relations[0], manifest.types[0]
    assert macro is not None
    groups = -(-macro.num_partitions // macro.partitions)
    steps = -(-num_seeds // request.batch_size) + groups - 1  # each one's last batch is smaller
    within = macro_graph(graph, manifest, macro.partitions)
    occupancy = occupy(within, [hop[0] for hop in resolved.fanouts], num_seeds / steps)
    reads = macrobatch_reads(manifest)
    hub_edges = 0.0
    if relation.halo is not None and node.hubs is not None and node.halo is not None:
        hub_edges = relation.halo.num_edges * node.hubs.num_rows / node.halo.nodes.num_rows
    work = _work(manifest, occupancy, rates, steps, job)
    # blocks are filtered by members: those of partitions by readers, those of hubs every time
    work = work._replace(
        note=0.0, passing=0.0, bring=groups * hub_edges * rates.filter_s,
        read=relation.num_edges * rates.filter_s,
    )  # fmt: skip
    work = _reading(work, reads._replace(rows=0.0), 1, rates, job)
    stages = macro_stages(work, groups, min(settings.workers, job.cores))
    return _timed(reads, work, stages, rates, job, _store_bytes(manifest))


def _store_bytes(manifest: Manifest) -> float:
    """Bytes of the graph and all rows."""
    blocks, widths = manifest.relations[0].num_blocks, _widths(manifest)
    return float(blocks * manifest.block_bytes + manifest.num_nodes * sum(widths))


def _widths(manifest: Manifest) -> list[int]:
    """Bytes per row of each array that batches have."""
    return [rows.array.row_bytes for rows in served_rows(manifest)]


def _work(
    manifest: Manifest, occupancy: Occupancy, rates: KernelRates, steps: int, job: Job
) -> BusyTime:
    """The work for all batches of an epoch, without reading."""
    columns, nodes = sum(occupancy.nodes[:-1]), sum(occupancy.nodes)
    edges, row = sum(occupancy.edges), sum(_widths(manifest)) * rates.byte_s
    sample = rates.batch_s + columns * rates.column_s + edges * rates.edge_s + nodes * rates.node_s
    rows = nodes * (rates.client_node_s + row)
    threads = 2 if job.cores >= _GATHER_CORES else 1
    return BusyTime(
        sample=steps * sample,
        note=steps * nodes * rates.note_s,
        client=steps * (rates.client_batch_s + edges * rates.client_edge_s + rows / threads),
        helpers=steps * rows * (1 - 1 / threads),
        passing=steps * nodes * row,
    )


def _disk_s(load: Load, rates: KernelRates) -> float:
    return load.calls * rates.run_s + load.bytes / PAGE_BYTES * rates.page_s


def _reading(
    work: BusyTime, reads: Reads, row_bytes: int, rates: KernelRates, job: Job
) -> BusyTime:
    """Add the work of an epoch's reads."""
    cpu = reads.epoch.calls * rates.run_cpu_s
    cpu += reads.epoch.bytes / PAGE_BYTES * rates.page_cpu_s
    # rows from other machines are read from their disks, as this one reads for them
    crossing = reads.rows * (1 - 1 / job.machines)
    return work._replace(
        read=work.read + cpu,
        bring=work.bring + reads.rows / row_bytes * rates.bring_s,
        disk=_disk_s(reads.epoch, rates), graph_disk=_disk_s(reads.graph, rates),
        network=crossing / job.network.bytes_s,
    )  # fmt: skip


def _timed(
    reads: Reads, work: BusyTime, stages: list[GroupStage], rates: KernelRates, job: Job,
    store_bytes: float,
) -> Prediction:  # fmt: skip
    """The prediction for one machine, which reads from `store_bytes`."""
    elsewhere = 1 - 1 / job.machines
    bucket, bucket_s = Load(), 0.0
    if job.bucket is not None:
        again = max(0.0, reads.first.bytes + reads.epoch.bytes - store_bytes)
        fetched = reads.first.bytes + reads.epoch.bytes - again
        # if the cache is too small for the store, pages are missing in proportion
        fetched += again * max(0.0, 1 - job.bucket.cache_bytes / store_bytes)
        bucket = Load(fetched, fetched / job.bucket.request_bytes)
        waits = bucket.calls * job.bucket.request_s / job.bucket.at_once
        bucket_s = waits + fetched / job.bucket.bytes_s
    first_s = max(_disk_s(reads.first, rates), reads.first_rows * elsewhere / job.network.bytes_s)
    return Prediction(
        reads.first, reads.epoch, reads.rows * elsewhere, reads.size, first_s,
        pipeline_s(stages, job.cores), work.busy(job.cores), bucket, bucket_s,
    )  # fmt: skip


def _predict_chunks(
    manifest: Manifest, settings: EngineSettings, request: Attach, rates: KernelRates, job: Job
) -> Prediction:
    """Predict chunks: each machine reads its share of every batch."""
    hops, budget = manifest.types[0].hops[request.split], make_budget(manifest, settings)
    widths = [array.row_bytes for array in hops.arrays()[1:]]  # the first has node ids
    room = _HELD * (budget.num_slots - budget.graph_min) * budget.slot_bytes
    rows, row_bytes = hops.nodes.num_rows // job.machines, sum(widths)
    reads = chunk_reads(rows, widths, request.chunk or request.batch_size, room)
    work = BusyTime(client=rows * row_bytes * rates.byte_s)
    work = _reading(work, reads._replace(rows=0.0), row_bytes, rates, job)
    stages = batch_stages(work, -(-hops.nodes.num_rows // request.batch_size), settings.workers)
    return _timed(reads, work, stages, rates, job, float(hops.nodes.num_rows * row_bytes))
