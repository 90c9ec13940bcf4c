"""Graphs, stores and epochs whose digests are recorded in `tests/golden/digests.json`.

    python -m tests.golden_cases            # compare everything, graphs of ../shared/data included
    python -m tests.golden_cases --record   # write the file again

A batch and the content of a store are functions of their parameters alone, in this version of the
project and in every later one.  Record digests again only in a change that says, in CHANGES.md,
which batches change and why.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from blockstore.store import open_store, read_rows, scan_blocks
from clients.hopwise.dataset import HopDataset
from clients.link import HeteroLinkDataset, LinkDataset
from clients.torch import HeteroDataset, NeighborDataset
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import HopsRequest, IngestOptions
from preprocess.partition.partition import InfluenceOptions, PartitionOptions
from preprocess.sources.layouts import open_source
from tests.daemons import daemon
from tests.preprocess.quiet import QUIET

FILE = Path(__file__).parent / "golden" / "digests.json"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
NODES, EDGES = 3000, 24_000
BLOCK = 16 << 10
_breadth_first = partial(IngestOptions, order="bfs")  # the default when these were recorded
PARTITIONED = _breadth_first(
    block_bytes=BLOCK,
    edge_ids=True,
    partition=PartitionOptions(8),
    influence=InfluenceOptions(hubs=0.01, halo=0.3),
    hops=HopsRequest(operators=("sym", "row"), hops=2),
)
SMALL = {"num_neighbors": (6, 4, 3), "batch_size": 150, "seed": 3}


class Case(NamedTuple):
    """An epoch of a dataset."""

    dataset: Callable[..., Any]
    options: Mapping[str, Any]


# -- numbers: the generators of numpy may change between versions, this mixer does not ------------


def mixed(count: int, stream: int) -> np.ndarray:
    """uint64 (count,): splitmix64 of stream * 2^32 + i."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(stream << 32)
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def below(count: int, stream: int, bound: int) -> np.ndarray:
    """int64 (count,), uniform in [0, bound)."""
    return (mixed(count, stream) >> np.uint64(20)).astype(np.int64) % bound


def skewed(count: int, stream: int, bound: int) -> np.ndarray:
    """int64 (count,) in [0, bound), small numbers more often."""
    low = np.minimum(below(count, stream, bound), below(count, stream + 1, bound))
    return np.minimum(low, below(count, stream + 2, bound))


def write_plain(folder: Path) -> None:
    """One type: features, years, labels, splits; weights, times and rows of edges."""
    folder.mkdir(parents=True)
    edges = np.stack([skewed(EDGES, 1, NODES), below(EDGES, 4, NODES)])
    order = np.argsort(mixed(NODES, 5), kind="stable")
    arrays = {
        "edge_index": edges,
        "edge_weight": (below(EDGES, 6, 8) / 4).astype(np.float32),
        "edge_time": below(EDGES, 7, 1000),
        "edge_kind": below(EDGES * 2, 8, 100).reshape(EDGES, 2).astype(np.int32),
        "node_feat": (below(NODES * 12, 9, 2000) / 64 - 15).reshape(NODES, 12).astype(np.float32),
        "node_year": below(NODES, 10, 50),
        "node_label": (edges.sum() + below(NODES, 11, 7)) % 7,
        "train_idx": order[:900],
        "valid_idx": order[900:1200],
        "test_idx": order[1200:1500],
        "valid_edge": np.sort(below(40, 12, EDGES // 40) + np.arange(40) * (EDGES // 40)),
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)


def write_hetero(folder: Path) -> None:
    """Three types, four relations, weights and times on some."""
    folder.mkdir(parents=True)
    counts = {"author": 900, "paper": 1500, "term": 200}
    relations = ["author|writes|paper", "paper|cites|paper", "paper|has|term", "term|of|paper"]
    schema = {"node_types": counts, "relations": relations}
    (folder / "schema.json").write_text(json.dumps(schema))
    for i, relation in enumerate(relations):
        src, name, dst = relation.split("|")
        key, num = f"{src}__{name}__{dst}", 4000 + 1000 * i
        ends = [skewed(num, 20 + 10 * i, counts[src]), below(num, 24 + 10 * i, counts[dst])]
        np.save(folder / f"edge__{key}.npy", np.stack(ends))
        np.save(folder / f"edge__{key}__time.npy", below(num, 25 + 10 * i, 500))
        weights = (below(num, 26 + 10 * i, 8) / 4).astype(np.float32)
        np.save(folder / f"edge__{key}__weight.npy", weights)
    for i, (name, count) in enumerate(counts.items()):
        rows = (below(count * 6, 80 + i, 1000) / 32).reshape(count, 6).astype(np.float32)
        np.save(folder / f"feat__{name}.npy", rows)
    order = np.argsort(mixed(counts["paper"], 90), kind="stable")
    np.save(folder / "label__paper.npy", below(counts["paper"], 91, 5))
    np.save(folder / "split__paper__train.npy", order[:500])
    np.save(folder / "split__paper__test.npy", order[500:800])


# -- what is digested -----------------------------------------------------------------------------


_LATER = ("edge_weight", "edge_time")  # fields that the recorded batches did not have yet


def update(found: "hashlib._Hash", name: str, value: Any) -> None:
    """Add a value: arrays by dtype, shape and bytes; records and mappings part by part."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
        value = {k: v for k, v in value.items() if v is not None or k not in _LATER}
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            update(found, f"{name}.{key}", value[key])
    elif isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(raw.data)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
        for i, one in enumerate(value):
            update(found, f"{name}.{i}", one)
    else:
        found.update(f"{name} {value!r}".encode())


def epoch_digest(endpoint: str, case: Case) -> str:
    """sha256 of epoch 1 of a dataset: every field of every batch, in order."""
    data = case.dataset(endpoint, **case.options)
    data.set_epoch(1)
    found = hashlib.sha256()
    for batch in data:
        update(found, "batch", batch)
    data.close()
    return found.hexdigest()


def store_digest(path: Path) -> str:
    """sha256 of every array of a store: rows, graph blocks and what the manifest says of them."""
    store, found = open_store(path), hashlib.sha256()
    for array in store.manifest.row_arrays():
        rows = read_rows(store, array)
        found.update(f"{array.path} {array.dtype} {rows.shape}".encode())
        found.update(np.ascontiguousarray(rows).view(np.uint8).data)
    for relation in store.manifest.relations:
        for graph in (relation, relation.halo) if relation.halo else (relation,):
            found.update(f"{graph.path} {graph.num_edges} {graph.num_blocks}".encode())
            for _, blocks in scan_blocks(store.graph(graph)):
                found.update(np.ascontiguousarray(blocks).data)
    return found.hexdigest()


# -- the cases ------------------------------------------------------------------------------------


def neighbor(**options: Any) -> Case:
    """An epoch of minibatches."""
    return Case(NeighborDataset, SMALL | options)


def link(dataset: Callable[..., Any] = LinkDataset, **options: Any) -> Case:
    """An epoch of seed edges."""
    return Case(dataset, {"num_neighbors": (4, 3), "batch_size": 300, "seed": 3} | options)


def hops(**options: Any) -> Case:
    """An epoch of propagated features."""
    return Case(HopDataset, {"split": "train", "batch_size": 128, "seed": 3} | options)


IDS = np.argsort(mixed(NODES, 30), kind="stable")[:400]
PLAIN = {
    "new": neighbor(return_e_id=True),
    "layer": neighbor(frontier="layer"),
    "all-neighbors": neighbor(num_neighbors=(-1, 3), return_e_id=True),
    "replace": neighbor(replace=True),
    "layer-replace": neighbor(frontier="layer", replace=True),
    "weighted": neighbor(weighted=True, return_e_id=True),
    "labor": neighbor(sampler="labor", return_e_id=True),
    "labor-layer-all-hops": neighbor(sampler="labor", frontier="layer", layer_dependency=True),
    "labor-hyperbatch-three-steps": neighbor(
        sampler="labor", plan="hyperbatch", batch_dependency=3
    ),
    "labor-macrobatch": neighbor(sampler="labor", plan="macrobatch", macro_partitions=2),
    "edge-features": neighbor(edge_features=True),
    "ids-in-order": neighbor(input_nodes=IDS, shuffle=False),
    "split-valid": neighbor(split="valid"),
    "rank-0-of-3": neighbor(rank=0, world_size=3),
    "rank-2-of-3": neighbor(rank=2, world_size=3),
    "hyperbatch": neighbor(plan="hyperbatch", return_e_id=True),
    "times-uniform": neighbor(input_nodes=IDS, input_time=IDS % 900),
    "times-last-strict": neighbor(
        input_nodes=IDS, input_time=IDS % 900, temporal_strategy="last", strict=True
    ),
    "macrobatch": neighbor(plan="macrobatch", macro_partitions=2, return_e_id=True),
    "macrobatch-twice": neighbor(plan="macrobatch", macro_partitions=3, reuse=2),
    "macrobatch-layer": neighbor(plan="macrobatch", macro_partitions=2, frontier="layer"),
    "macrobatch-partitions-only": neighbor(
        plan="macrobatch", macro_partitions=2, hubs=False, halos=False
    ),
    "macrobatch-rank-1-of-2": neighbor(plan="macrobatch", macro_partitions=2, rank=1, world_size=2),
    "partitions": neighbor(plan="partitions", macro_partitions=2, frontier="layer"),
    "partitions-rank-1-of-2": neighbor(
        plan="partitions", macro_partitions=2, frontier="layer", rank=1, world_size=2
    ),
    "links-binary": link(edges="valid", amount=2),
    "links-triplet": link(negatives="triplet", amount=2, exclude="self"),
    "links-labor": link(edges="valid", amount=2, sampler="labor"),
    "links-own-times": link(edge_label_time="own", batch_size=3000),
    "hops-chunks": hops(),
    "hops-small-chunks": hops(chunk=16, operators="row", hops=1),
    "hops-redealt": hops(chunk=64, redeal=1),
    "hops-rows": hops(method="rr", labels=False),
    "hops-rank-1-of-2": hops(rank=1, world_size=2),
}
_TYPED = SMALL | {"num_neighbors": (4, 3), "input_type": "paper"}
HETERO = {
    "hetero": Case(HeteroDataset, _TYPED | {"return_e_id": True}),
    "hetero-layer": Case(HeteroDataset, _TYPED | {"frontier": "layer"}),
    "hetero-weighted": Case(HeteroDataset, _TYPED | {"weighted": True}),
    "hetero-labor": Case(HeteroDataset, _TYPED | {"sampler": "labor"}),
    "hetero-replace": Case(HeteroDataset, _TYPED | {"replace": True}),
    "hetero-times": Case(
        HeteroDataset,
        _TYPED | {"input_nodes": np.arange(0, 1500, 7), "input_time": np.arange(0, 1500, 7) % 450},
    ),
    "hetero-by-relation": Case(
        HeteroDataset,
        _TYPED | {"num_neighbors": {("author", "writes", "paper"): (3, 2),
                                    ("paper", "cites", "paper"): (4, 0),
                                    ("paper", "has", "term"): (0, 0),
                                    ("term", "of", "paper"): (2, 1)}},
    ),
    "hetero-macrobatch": Case(HeteroDataset, _TYPED | {"plan": "macrobatch"}),
    "hetero-links": link(
        HeteroLinkDataset, relation=("author", "writes", "paper"), exclude="self"
    ),
}  # fmt: skip
STORES: dict[str, tuple[str, IngestOptions]] = {
    "plain": ("plain", PARTITIONED),
    "plain-source-order": ("plain", IngestOptions(block_bytes=BLOCK, order="source")),
    "plain-degree": ("plain", IngestOptions(block_bytes=BLOCK, order="degree", ids="uint64")),
    "plain-random": ("plain", IngestOptions(block_bytes=BLOCK, order="random", seed=5)),
    "plain-undirected": ("plain", _breadth_first(block_bytes=4096, undirected=True, edge_ids=True)),
    "plain-dropped": (
        "plain",
        _breadth_first(block_bytes=BLOCK, duplicates="drop", self_loops="drop", dtype="float16"),
    ),
    "plain-int8": ("plain", _breadth_first(block_bytes=BLOCK, dtype="int8")),
    "plain-bfloat16": ("plain", _breadth_first(block_bytes=BLOCK, dtype="bfloat16")),
    "hetero": (
        "hetero",
        _breadth_first(
            block_bytes=4096,
            edge_ids=True,
            partition=PartitionOptions(8),
            influence=InfluenceOptions(hubs=0.02, halo=0.2),
        ),
    ),
    "hetero-undirected": ("hetero", _breadth_first(block_bytes=BLOCK, undirected=True)),
}
_REAL = {"num_neighbors": (8, 5), "batch_size": 500, "seed": 3}
_UNDIRECTED = _breadth_first(block_bytes=64 << 10, undirected=True, partition=PartitionOptions(16))
REAL: dict[str, tuple[IngestOptions, dict[str, Case]]] = {
    name: (
        _UNDIRECTED,
        {
            "new": Case(NeighborDataset, _REAL),
            "layer": Case(NeighborDataset, _REAL | {"frontier": "layer"}),
            "labor": Case(NeighborDataset, _REAL | {"sampler": "labor"}),
            "macrobatch": Case(NeighborDataset, _REAL | {"plan": "macrobatch"}),
        },
    )
    for name in ("facebook-pagepage", "amazon-computers", "cora-ml", "github-musae")
} | {
    "hetero-dblp": (
        _breadth_first(block_bytes=64 << 10),
        {"new": Case(HeteroDataset, _REAL | {"input_type": "author"})},
    )
}


def made(folder: Path, kind: str) -> Path:
    """The folder of a generated graph, written the first time."""
    path = folder / kind
    if not path.exists():
        {"plain": write_plain, "hetero": write_hetero}[kind](path)
    return path


def make_store(source: Path, target: Path, options: IngestOptions) -> Path:
    """Ingest a folder."""
    ingest(open_source(source).source, target, options, QUIET)
    return target


def epochs(store: Path, cases: Mapping[str, Case], mem: str = "64M") -> Iterator[tuple[str, str]]:
    """(case, digest), all served by one daemon."""
    with daemon(store, mem) as endpoint:
        for name, case in cases.items():
            yield name, epoch_digest(endpoint, case)


def generated_digests(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of everything that is made here."""
    for name, (kind, options) in STORES.items():
        store = make_store(made(folder, kind), folder / f"{name}.store", options)
        yield f"store/{name}", store_digest(store)
    for name, cases in (("plain", PLAIN), ("hetero", HETERO)):
        for case, digest in epochs(folder / f"{name}.store", cases):
            yield f"{name}/{case}", digest


def real_digests(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of graphs of ../shared/data."""
    for name, (options, cases) in REAL.items():
        subprocess.run([sys.executable, SHARED / "unpack.py", folder, name], check=True)
        store = make_store(folder / name, folder / f"{name}.store", options)
        yield f"store/{name}", store_digest(store)
        for case, digest in epochs(store, cases, "256M"):
            yield f"{name}/{case}", digest


def main() -> int:
    """Compare or record; the exit code is the number of digests that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    record = parser.parse_args().record
    with tempfile.TemporaryDirectory() as folder:
        found = dict(generated_digests(Path(folder))) | dict(real_digests(Path(folder)))
    if record:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    expected = json.loads(FILE.read_text())
    differ = [name for name in expected | found if expected.get(name) != found.get(name)]
    summary = differ or [f"{len(found)} digests as recorded"]
    sys.stdout.write("\n".join(summary) + "\n")
    return len(differ)


if __name__ == "__main__":
    raise SystemExit(main())
