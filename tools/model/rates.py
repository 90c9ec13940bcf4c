"""How fast a disk and the kernels of this machine are: measured by themselves, in a minute."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader
from clients.torch import NeighborDataset
from loaderd.monitoring.devicecost import RUN_BYTES, DeviceCost, measure_cost
from preprocess.errors import BadInput
from tools.bench.disk import DEPTH, make_file
from tools.bench.resources import cpu_seconds, descendants
from tools.bench.setup import make_store, serving
from tools.rmat import generate

_NODES, _PAIRS, _WIDTHS = 500_000, 8_000_000, (8, 128)
_FANOUTS, _BATCH = (10, 10, 10), 1000
_DISK_BYTES, _BLOCK = 1 << 29, 1 << 20


class KernelRates(msgspec.Struct, frozen=True):
    """Of CPU seconds those of daemon and client together."""

    run_s: float  # of the disk, all readers at work: for one more run of pages
    page_s: float  # for one more page in a run
    page_cpu_s: float  # to read and verify a page
    edge_s: float  # CPU, for a sampled edge: drawn, renumbered, handed over as int64
    row_byte_s: float  # CPU, for a byte of a row that is handed over

    @property
    def disk(self) -> DeviceCost:
        return DeviceCost(self.run_s, self.page_s)


def load_rates(path: Path) -> KernelRates:
    """Raises BadInput: there is no such file; ValueError: it holds something else."""
    if not path.is_file():
        raise BadInput.at(
            str(path), "no such file", "measured rates",
            "give --rates, or measure: python -m tools.model calibrate FOLDER",
        )  # fmt: skip
    return msgspec.json.decode(path.read_bytes(), type=KernelRates)


def calibrate(folder: Path) -> KernelRates:
    """Measure in a folder of the disk in question; a graph of 0.6 GB stays there for next time."""
    folder.mkdir(parents=True, exist_ok=True)
    cost, page_cpu_s = _disk(folder / "disk")
    stores = []
    for width in _WIDTHS:
        graph = folder / f"rmat-{width}"
        if not graph.exists():
            generate(graph, _NODES, _PAIRS, width, 0)
        stores.append(make_store(folder, graph, options=("--undirected",)))
    taken = [_epoch(store) for store in stores]
    edges, row_bytes = (np.array([t[name] for t in taken]) for name in ("edges", "row_bytes"))
    edge_s, row_byte_s = np.linalg.solve(
        np.stack([edges, row_bytes], axis=1), [t["cpu_s"] for t in taken]
    ).tolist()
    return KernelRates(*cost, page_cpu_s, edge_s, row_byte_s)


def _disk(path: Path) -> tuple[DeviceCost, float]:
    """What reading costs, and the CPU seconds of a page."""
    file = make_file(path, _DISK_BYTES, _BLOCK)
    memory = aligned_buffer(DEPTH * RUN_BYTES)
    try:
        with BlockReader([file], memory, RUN_BYTES, DEPTH) as reader:
            begun = time.process_time()
            cost = measure_cost(reader, 0, file, np.split(memory, DEPTH))
            pages = reader.bytes_read / PAGE_BYTES
            return cost, (time.process_time() - begun) / pages
    finally:
        path.unlink()


def _epoch(store: Path) -> dict[str, float]:
    """The second epoch: what is compiled, and what stays in memory, is there by then."""
    where = store.parent / "run"
    where.mkdir(exist_ok=True)
    with serving(store, where, "2G", "--workers", "2") as endpoint:
        data: Any = NeighborDataset(endpoint, num_neighbors=_FANOUTS, batch_size=_BATCH)
        for _ in data:
            pass
        pids = descendants(os.getpid())
        cpu = cpu_seconds(pids)
        found = {"edges": 0.0, "row_bytes": 0.0}
        for batch in data:
            found["edges"] += batch.edge_index.size(1)
            found["row_bytes"] += batch.x.nbytes + batch.n_id.nbytes
        cpu = cpu_seconds(pids) - cpu
        data.close()
    return found | {"cpu_s": cpu}
