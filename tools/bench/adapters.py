"""What the adapters add to a batch: `python -m tools.bench adapters`.

Each batch of an epoch is read as a training script would read it, then handed to every adapter in
turn.  Shares are of the median time of a batch, without a trainer.
"""

import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clients.mfg import to_hetero_mfgs, to_mfgs, to_minibatch
from clients.torch import HeteroDataset, NeighborDataset
from tools.bench.harness import GraphOptions, Plan, Run, Side
from tools.bench.setup import GraphSize, make_store, serving

Adapter = Callable[[Any], Any]

MAG = (("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author"),
       ("institution", "employs", "author"))  # fmt: skip


@dataclass(frozen=True)
class Options(GraphOptions):
    nodes: int = 200_000
    degree: int = 16
    batch_size: int = 1000
    fanouts: tuple[int, ...] = (15, 10)


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
    found: dict[str, Adapter] = {
        "graphbolt": to_minibatch, "numpy": lambda b: b.numpy(),
        "layers": to_hetero_mfgs if several else to_mfgs,
    }  # fmt: skip
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
        if batch is None:
            break
        times["batch"].append(time.perf_counter() - asked)
        for name, adapt in adapters.items():
            begun = time.perf_counter()
            adapt(batch)
            times[name].append(time.perf_counter() - begun)
    medians = {name: float(np.median(found)) for name, found in times.items()}
    figures = {f"{name}_us": 1e6 * median for name, median in medians.items()}
    shares = {f"{name}_percent": 100 * medians[name] / medians["batch"] for name in adapters}
    return figures | shares


@contextmanager
def open_side(store: Path, folder: Path, input_type: str, options: dict[str, Any]) -> Iterator[Run]:
    """A daemon, a dataset, and the adapters of its batches."""
    folder.mkdir(exist_ok=True)
    with serving(store, folder, "1G", "--workers", "2") as endpoint:
        if input_type:
            data: Any = HeteroDataset(endpoint, input_type=input_type, **options)
        else:
            data = NeighborDataset(endpoint, **options)
        adapters = adapters_of(bool(input_type))
        yield lambda: epoch(data, adapters)
        data.close()


def plans(given: Options) -> Iterator[Plan]:
    """A graph of one type, and one of several."""
    folder = given.folder
    options = {"num_neighbors": given.fanouts, "batch_size": given.batch_size}
    several = make_store(folder, make_mag(folder, given.size))
    yield Plan([
        Side("one type", open_side, (given.store(), folder / "one", "", options)),
        Side("MAG240M's types", open_side, (several, folder / "several", "paper", options)),
    ])  # fmt: skip
