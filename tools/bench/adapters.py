"""What the adapters add to a batch: `python -m tools.bench adapters`.

Each batch of an epoch is read as a training script would read it, then handed to every adapter in
turn.  Shares are of the median time of a batch, without a trainer.
"""

import argparse
import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clients.mfg import to_hetero_mfgs, to_mfgs, to_minibatch
from clients.torch import HeteroDataset, NeighborDataset
from tools.bench.harness import Peer, Run, measure, report
from tools.bench.setup import GraphSize, make_graph, make_store, serving

Adapter = Callable[[Any], Any]

PLAIN: dict[str, Adapter] = {"graphbolt": to_minibatch, "numpy": lambda b: b.numpy()}
MAG = (("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author"),
       ("institution", "employs", "author"))  # fmt: skip


def make_mag(folder: Path, size: GraphSize) -> Path:
    """A random graph of MAG240M's shape in the plain layout: papers alone have features."""
    path = folder / f"mag-{size.nodes}-{size.degree}-{size.features}"
    if (path / "schema.json").exists():
        return path
    path.mkdir(parents=True)
    rng = np.random.default_rng(0)
    counts = {"paper": size.nodes, "author": size.nodes, "institution": max(1, size.nodes // 100)}
    for src, name, dst in MAG:
        num_edges = counts[dst] * max(1, size.degree // 2)
        ends = [rng.integers(0, counts[t], num_edges) for t in (src, dst)]
        np.save(path / f"edge__{src}__{name}__{dst}.npy", np.stack(ends))
    np.save(path / "feat__paper.npy", rng.random((size.nodes, size.features), np.float32))
    np.save(path / "label__paper.npy", rng.integers(0, size.classes, size.nodes))
    np.save(path / "split__paper__train.npy", rng.permutation(size.nodes)[: size.nodes // 5])
    schema = {"node_types": counts, "relations": ["|".join(r) for r in MAG]}
    (path / "schema.json").write_text(json.dumps(schema))
    return path


def adapters_of(several: bool) -> dict[str, Adapter]:
    """All that can be had here."""
    found: dict[str, Adapter] = PLAIN | {"layers": to_hetero_mfgs if several else to_mfgs}
    if importlib.util.find_spec("torch_geometric"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own imports
            from clients.pyg import Collate
        found["pyg"] = Collate()
    return found


def epoch(data: Any, adapters: dict[str, Adapter]) -> dict[str, float]:
    """Median microseconds of a batch, of each adapter, and its share of the batch."""
    times: dict[str, list[float]] = {name: [] for name in ("batch", *adapters)}
    batches = iter(data)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        times["batch"].append(time.perf_counter() - asked)
        if batch is None:
            break
        for name, adapt in adapters.items():
            begun = time.perf_counter()
            adapt(batch)
            times[name].append(time.perf_counter() - begun)
    whole = float(np.median(times.pop("batch")[:-1]))
    figures = {"batch_us": 1e6 * whole}
    for name, found in times.items():
        median = float(np.median(found))
        figures |= {f"{name}_us": 1e6 * median, f"{name}_percent": 100 * median / whole}
    return figures


@contextmanager
def open_peer(store: Path, folder: Path, input_type: str, options: dict[str, Any]) -> Iterator[Run]:
    """A daemon, a dataset, and the adapters of its batches."""
    with serving(store, folder, "1G", "--workers", "2") as endpoint:
        if input_type:
            data: Any = HeteroDataset(endpoint, input_type=input_type, **options)
        else:
            data = NeighborDataset(endpoint, **options)
        adapters = adapters_of(bool(input_type))
        yield lambda: epoch(data, adapters)
        data.close()


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench adapters", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--fanouts", type=int, nargs="+", default=(15, 10))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(words)
    folder, size = Path(given.folder), GraphSize(given.nodes, 16, 128, 8)
    options = {"num_neighbors": tuple(given.fanouts), "batch_size": given.batch_size}
    one, several = make_graph(folder, size), make_mag(folder, size)
    peers = [
        Peer("one type", open_peer, (make_store(folder, one), folder / "one", "", options)),
        Peer("MAG240M's types", open_peer,
             (make_store(folder, several), folder / "several", "paper", options)),
    ]  # fmt: skip
    for name in ("one", "several"):
        (folder / name).mkdir(exist_ok=True)
    setting = {
        "nodes": given.nodes, "fanouts": list(given.fanouts), "batch_size": given.batch_size,
        "features": size.features, "cache": "warm",
    }  # fmt: skip
    return report("adapters", setting, measure(peers, given.rounds), given.out)
