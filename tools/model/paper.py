"""Predictions for graphs and machines that we do not have: tables of docs/scale.md."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import structs

from blockstore.errors import BudgetTooSmall
from blockstore.format import PAGE_BYTES
from blockstore.units import format_bytes
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach
from loaderd.memory.ledger import EngineSettings, table_entries
from tools.model.graph import Described
from tools.model.predict import Job, Network, Prediction, predict
from tools.model.rates import KernelRates

# name, nodes, mean degree, spread of its logarithm, seeds, row, dtype
GRAPHS = (
    Described("papers100M", 111_059_956, 29.1, 1.5, 1_207_179, 128, "float32"),
    Described("MAG240M, papers", 121_751_666, 21.3, 1.5, 1_112_392, 768, "float16"),
    Described("IGB-full", 269_346_174, 14.8, 1.5, 136_278_514, 1024, "float32"),
    Described("web", 3_500_000_000, 36.6, 2.0, 10_000_000, 128, "float32"),
)
MACHINES = (1, 8, 64)
_BUSY = ("disk", "network", "cores", "client")


class Instance(NamedTuple):
    """A quarter of an i4i.32xlarge; docs/scale.md lists the assumptions."""

    cores: int = 16
    mem: int = 224 << 30
    network_bytes_s: float = 2.3e9  # 18.75 Gbit/s
    reads_s: float = 800e3  # page reads, two NVMe disks
    disk_bytes_s: float = 5.6e9
    disk_bytes: float = 7.5e12
    dollars_hour: float = 2.72


class BucketPrices(NamedTuple):
    """Prices of object storage in the machines' region; assumptions likewise."""

    dollars_gb_month: float = 0.023
    dollars_request: float = 0.4e-6
    request_s: float = 0.05


def rates_on(instance: Instance, kernels: KernelRates) -> KernelRates:
    """Measured rates of kernels, with the disk of the instance."""
    page_s = PAGE_BYTES / instance.disk_bytes_s
    return structs.replace(kernels, page_s=page_s, run_s=max(0.0, 1 / instance.reads_s - page_s))


def paper_tables(kernels: KernelRates) -> Iterator[tuple[str, list[list[str]]]]:
    """(title, rows) of each table; the first row is its header."""
    instance, bucket = Instance(), BucketPrices()
    head = [
        "graph", "machines", "together", "disk GB", "network GB", *(f"s {n}" for n in _BUSY),
        "epoch", "$", "limit", "first: min", "from a bucket: min", "requests M", "$ requests",
    ]  # fmt: skip
    rows, sizes = [head], [["graph", "rows", "edges", "tables", "$ a month in a bucket"]]
    for described in GRAPHS:
        manifest = described.manifest
        row_bytes = manifest.types[0].features["x"].row_bytes * described.num_nodes
        edge_bytes = manifest.relations[0].num_blocks * manifest.block_bytes
        tables = sum(entry.num_bytes for entry in table_entries(manifest))
        month = (row_bytes + edge_bytes) / 1e9 * bucket.dollars_gb_month
        named = [format_bytes(size) for size in (row_bytes, edge_bytes, tables)]
        sizes.append([described.name, *named, f"{month:,.0f}"])
        for machines in MACHINES:
            rows.append([described.name, str(machines)])
            try:
                found = _predict(described, instance, bucket, kernels, machines)
            except (BudgetTooSmall, Refused) as error:
                rows[-1] += [f"refused: {error}", *[""] * (len(head) - 3)]
                continue
            dollars = found.epoch_s / 3600 * instance.dollars_hour * machines
            requests = found.bucket.calls * machines
            rows[-1] += [
                str(found.size), f"{found.epoch.bytes / 1e9:,.0f}",
                f"{found.network_bytes / 1e9:,.0f}",
                *(f"{found.busy[name]:,.0f}" for name in _BUSY), f"{found.epoch_s / 60:,.1f} min",
                f"{dollars:,.2f}", found.limit, f"{(found.first_s + found.epoch_s) / 60:,.1f}",
                f"{found.seconds / 60:,.1f}", f"{requests / 1e6:,.2f}",
                f"{requests * bucket.dollars_request:,.2f}",
            ]  # fmt: skip
    yield "Sizes", sizes
    yield "Hyperbatches of 1000 x 10,10,10, figures of each machine, dollars of all", rows


def _predict(
    described: Described, instance: Instance, bucket: BucketPrices, kernels: KernelRates,
    machines: int,
) -> Prediction:  # fmt: skip
    request = Attach(token=0, request=0, plan="hyperbatch", num_neighbors=(10, 10, 10))
    settings = EngineSettings(instance.mem, workers=instance.cores, readers=32)
    network = Network(instance.network_bytes_s)
    remote = Network(instance.network_bytes_s, bucket.request_s, cache_bytes=instance.disk_bytes)
    return predict(
        described.manifest, described.graph, settings, request, rates_on(instance, kernels),
        Job(machines, instance.cores, network, remote),
    )  # fmt: skip
