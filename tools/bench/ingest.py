"""Ingests against a plain copy of the source, against scipy's sort, and by partitioner."""

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
from scipy.sparse import coo_matrix

from blockstore.store import open_store
from preprocess.partition.partition import Partitioner
from tools.bench.harness import BenchPlan, GraphOptions, Ratio, Run, Side, SideSkipped
from tools.bench.setup import command, drop_cache, stage_ends

COPY_BYTES = 1 << 20
PARTITION_FIGURES = (
    "cut", "inside", "kept_8", "kept_16", "node_balance", "train_balance", "kl_mean", "kl_max",
    "kl_random",
)  # fmt: skip


@dataclass(frozen=True)
class SourceBenchOptions(GraphOptions):
    source: Annotated[Path | None, "a plain folder; a graph is generated if none is named"] = None
    mem: str = "512M"


@dataclass(frozen=True)
class IngestBenchOptions(SourceBenchOptions):
    order: str = "degree"
    undirected: bool = False


@dataclass(frozen=True)
class PartitionBenchOptions(SourceBenchOptions):
    k: tuple[int, ...] = (64,)
    methods: tuple[Partitioner, ...] = get_args(Partitioner)
    passes: int = 5
    deviations: Annotated[float, "of a random partition, that a class may exceed its mean by"] = 2.0
    undirected: bool = False
    mem: str = "8G"
    rounds: int = 1


@dataclass(frozen=True)
class CscOptions(SourceBenchOptions):
    nodes: int = 2_000_000
    features: int = 4
    mem: str = "1G"


def run_ingest(source: Path, store: Path, *options: str) -> dict[str, float]:
    """Seconds of `blockstore ingest` and of each of its stages, and figures of its partition.

    The store is removed afterwards.
    """
    begun = time.perf_counter()
    printed = command("preprocess", "ingest", str(source), str(store), *options, "--json")
    found = Counter({"seconds": time.perf_counter() - begun})
    partitioning = open_store(store).manifest.partitioning
    if partitioning is not None:
        found.update({figure: getattr(partitioning, figure) for figure in PARTITION_FIGURES})
    shutil.rmtree(store)
    for event in stage_ends(printed):
        name = re.sub(r"\W+", "_", event["stage"]).strip("_")
        found[f"{name}_s"] += event["elapsed_s"]
    return dict(found)


def ingest_cold(
    graph: Path, folder: Path, options: tuple[str, ...], size: int
) -> Mapping[str, float]:
    """One round of our ingest, with a cold cache."""
    drop_cache(graph)
    found = run_ingest(graph, folder / f"ingest-{os.getpid()}", *options)
    return {"source_GB_per_s": size / found["seconds"] / 1e9} | found


def copy_cold(graph: Path, folder: Path, size: int) -> Mapping[str, float]:
    """Read and write the folder once, to the disk: a lower bound for any ingest."""
    target = folder / f"copy-{os.getpid()}"
    drop_cache(graph)
    begun = time.perf_counter()
    target.mkdir()
    for path in graph.iterdir():
        with path.open("rb") as source, (target / path.name).open("wb") as out:
            shutil.copyfileobj(source, out, COPY_BYTES)
            out.flush()
            os.fsync(out.fileno())
    seconds = time.perf_counter() - begun
    shutil.rmtree(target)
    return {"source_GB_per_s": size / seconds / 1e9, "seconds": seconds}


def ingest(given: IngestBenchOptions) -> Iterator[BenchPlan]:
    """An ingest from end to end, beside a plain copy of the source to the same disk."""
    graph, folder = given.source or given.graph(), given.folder
    size = sum(path.stat().st_size for path in graph.iterdir())
    options = ("--mem", given.mem, "--order", given.order, *["--undirected"] * given.undirected)
    sides = [
        Side("ours", ingest_cold, (graph, folder, options, size)),
        Side("copy", copy_cold, (graph, folder, size)),
    ]
    setting = {"graph": graph.name, "source_bytes": size, "cache": "cold"}
    yield BenchPlan(sides, setting, [Ratio("times_copy", "ours", "seconds", "copy")])


def ingest_edges(edges: Path, mem: str) -> Mapping[str, float]:
    """`blockstore ingest --order source` of a folder with edges only."""
    took = run_ingest(edges, edges / "store", "--order", "source", "--mem", mem, "--no-summary")
    sort_s = sum(seconds for name, seconds in took.items() if name.startswith("edges_"))
    return {
        "seconds": took["count_edges_s"] + sort_s, "count_s": took["count_edges_s"],
        "sort_and_write_s": sort_s, "command_s": took["seconds"],
    }  # fmt: skip


def open_scipy(edges: Path) -> Iterator[Run]:
    """scipy's COO to CSC, with the edges loaded before."""
    src, dst = np.load(edges / "edge_index.npy")
    num_nodes = int(max(src.max(), dst.max())) + 1

    def run() -> Mapping[str, float]:
        ones = np.ones(src.size, np.int8)
        begun = time.perf_counter()
        coo_matrix((ones, (src, dst)), shape=(num_nodes, num_nodes)).tocsc()
        return {"seconds": time.perf_counter() - begun}

    yield run


def csc(given: CscOptions) -> Iterator[BenchPlan]:
    """Columns of a graph built within `--mem`, beside scipy's in memory, from the same edge list.

    Ours counts the edges, sorts them and writes blocks; scipy's `coo_matrix(...).tocsc()` has the
    edges in memory already, sorts each column, and writes nothing.
    """
    graph = given.source or given.graph()
    edges = given.folder / f"csc-{os.getpid()}"
    edges.mkdir(parents=True)
    (edges / "edge_index.npy").symlink_to((graph / "edge_index.npy").absolute())
    num_edges = np.load(graph / "edge_index.npy", mmap_mode="r").shape[1]
    sides = [Side("ours", ingest_edges, (edges, given.mem)), Side("scipy", open_scipy, (edges,))]
    try:
        ratio = Ratio("over_scipy", "ours", "seconds", "scipy")
        yield BenchPlan(sides, {"graph": graph.name, "edges": num_edges}, [ratio])
    finally:
        shutil.rmtree(edges)


def open_partitioner(
    source: Path, folder: Path, method: str, options: tuple[str, ...]
) -> Iterator[Run]:
    if method == "metis" and find_spec("pymetis") is None:
        raise SideSkipped("pymetis is not installed: pip install pymetis")
    store = folder / f"partition-{os.getpid()}"
    words = ("--partitioner", method, "--hubs", "0", *options)
    yield lambda: run_ingest(source, store, *words)


def partition(given: PartitionBenchOptions) -> Iterator[BenchPlan]:
    """Partitioners side by side: what is kept with 1/8 of the partitions, labels, balance, seconds.

    Each ingests the graph from scratch; what METIS keeps is what the others are compared with.
    """
    graph = given.source or given.graph()
    words = ("--mem", given.mem, "--no-summary", *["--undirected"] * given.undirected)
    words += ("--passes", str(given.passes), "--deviations", str(given.deviations))
    for k in given.k:
        sides = [
            Side(m, open_partitioner, (graph, given.folder, m, ("--partitions", str(k), *words)))
            for m in given.methods
        ]
        ratios = [Ratio("kept_8_of_metis", m, "kept_8", "metis") for m in given.methods]
        yield BenchPlan(sides, {"graph": graph.name, "partitions": k}, ratios, warm=False)
