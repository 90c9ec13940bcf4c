"""Columns of a graph built within `--mem`, beside scipy's in memory, from the same edge list.

Ours counts the edges, sorts them and writes blocks; scipy's `coo_matrix(...).tocsc()` has the edges
in memory already, sorts each column, and writes nothing.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from scipy.sparse import coo_matrix

from tools.bench.harness import BenchPlan, GraphOptions, Ratio, Run, Side
from tools.bench.ingest import run_ingest


@dataclass(frozen=True)
class Options(GraphOptions):
    nodes: int = 2_000_000
    features: int = 4
    source: Annotated[Path | None, "a plain folder; one is generated if none is named"] = None
    mem: str = "1G"


@contextmanager
def open_ours(edges: Path, mem: str) -> Iterator[Run]:
    """`blockstore ingest --order source` of a folder that holds edges alone."""

    def run() -> Mapping[str, float]:
        took = run_ingest(edges, edges / "store", "--order", "source", "--mem", mem, "--no-summary")
        sort_s = sum(seconds for name, seconds in took.items() if name.startswith("edges_"))
        return {
            "seconds": took["count_edges_s"] + sort_s, "count_s": took["count_edges_s"],
            "sort_and_write_s": sort_s, "command_s": took["seconds"],
        }  # fmt: skip

    yield run


@contextmanager
def open_scipy(edges: Path) -> Iterator[Run]:
    """coo -> csc; edges are loaded before."""
    src, dst = np.load(edges / "edge_index.npy")
    num_nodes = int(max(src.max(), dst.max())) + 1

    def run() -> Mapping[str, float]:
        ones = np.ones(src.size, np.int8)
        begun = time.perf_counter()
        coo_matrix((ones, (src, dst)), shape=(num_nodes, num_nodes)).tocsc()
        return {"seconds": time.perf_counter() - begun}

    yield run


def plans(given: Options) -> Iterator[BenchPlan]:
    graph = given.source or given.graph()
    edges = given.folder / f"csc-{os.getpid()}"
    edges.mkdir(parents=True)
    (edges / "edge_index.npy").symlink_to((graph / "edge_index.npy").absolute())
    num_edges = np.load(graph / "edge_index.npy", mmap_mode="r").shape[1]
    sides = [Side("ours", open_ours, (edges, given.mem)), Side("scipy", open_scipy, (edges,))]
    try:
        ratio = Ratio("over_scipy", "ours", "seconds", "scipy")
        yield BenchPlan(sides, {"graph": graph.name, "edges": num_edges}, [ratio])
    finally:
        shutil.rmtree(edges)
