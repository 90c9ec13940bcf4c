"""Columns of a graph built within `--mem`, beside scipy's in memory, from the same edge list.

Ours counts the edges, sorts them and writes blocks; scipy's `coo_matrix(...).tocsc()` has the edges
in memory already, sorts each column, and writes nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_matrix

from blockstore.units import parse_bytes
from tools.bench.harness import Peer, Run, measure, report
from tools.bench.setup import GraphSize, make_graph


@contextmanager
def open_ours(edges: Path, mem: str) -> Iterator[Run]:
    """`blockstore ingest --order source` of a folder that holds edges alone."""
    store = edges / f"csc-{os.getpid()}"
    options = ("--order", "source", "--mem", mem, "--no-summary", "--json")
    words = [sys.executable, "-m", "preprocess", "ingest", str(edges), str(store), *options]

    def run() -> Mapping[str, float]:
        begun = time.perf_counter()
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        command_s = time.perf_counter() - begun
        if done.returncode:
            raise RuntimeError(done.stderr)
        shutil.rmtree(store)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        took = {e["stage"]: e["elapsed_s"] for e in events if e["event"] == "stage_end"}
        count_s = took["count edges"]
        sort_s = sum(seconds for name, seconds in took.items() if name.startswith("edges/"))
        return {
            "seconds": count_s + sort_s, "count_s": count_s, "sort_and_write_s": sort_s,
            "command_s": command_s,
        }  # fmt: skip

    yield run


@contextmanager
def open_scipy(edges: Path) -> Iterator[Run]:
    """coo -> csc; edges are loaded before."""
    begun = time.perf_counter()
    src, dst = np.load(edges / "edge_index.npy")
    num_nodes = int(max(src.max(), dst.max())) + 1
    load_s = time.perf_counter() - begun

    def run() -> Mapping[str, float]:
        ones = np.ones(src.size, np.int8)
        begun = time.perf_counter()
        coo_matrix((ones, (src, dst)), shape=(num_nodes, num_nodes)).tocsc()
        return {"seconds": time.perf_counter() - begun, "load_s": load_s}

    yield run


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench csc", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--source", type=Path, help="a plain folder; else one is generated")
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--degree", type=int, default=30)
    parser.add_argument("--mem", default="1G")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(words)
    folder = Path(given.folder)
    graph = given.source or make_graph(folder, GraphSize(given.nodes, given.degree, 4))
    edges = folder / f"csc-{os.getpid()}"
    edges.mkdir(parents=True)
    (edges / "edge_index.npy").symlink_to((graph / "edge_index.npy").absolute())
    try:
        peers = [Peer("ours", open_ours, (edges, given.mem)), Peer("scipy", open_scipy, (edges,))]
        found = measure(peers, given.rounds)
    finally:
        shutil.rmtree(edges)
    figures, other = found["ours"].figures, found["scipy"].figures
    pairs = zip(figures["seconds"], other["seconds"], strict=True)
    figures["over_scipy"] = [mine / theirs for mine, theirs in pairs]
    num_edges = np.load(graph / "edge_index.npy", mmap_mode="r").shape[1]
    setting = {"graph": graph.name, "edges": num_edges, "mem_bytes": parse_bytes(given.mem)}
    return report("csc", setting, found, given.out)
