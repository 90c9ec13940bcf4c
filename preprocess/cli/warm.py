"""Compile kernels ahead of use, by making small stores and sampling from them."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from blockstore.errors import NotServed
from blockstore.kernels.crc import page_crcs
from blockstore.kernels.jit import cache_folder
from blockstore.kernels.rows import expand_counts, gather_rows, scatter_rows
from blockstore.owners import write_owners
from blockstore.store import open_store
from blockstore.units import parse_bytes
from loaderd.api.protocol import Attach, Labor, SeedEdges, Temporal
from loaderd.cli.advise.trial import try_plan
from loaderd.sessions.engine import default_settings
from preprocess.hops.hops import make_hops
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import HopsRequest, IngestOptions
from preprocess.partition.partition import PartitionOptions
from preprocess.pipeline.progress import Progress
from preprocess.sources.layouts import open_source

_NODES, _EDGES = 40_000, 1_000_000
_ROOMY, _TIGHT = "256M", "24M"  # everything in memory; less than the graph and its rows take
_OWNERS = "servers"
_LAST = Temporal(times="edges", strategy="last")
_TYPED = {"node_types": {"a": 2_000, "b": 2_000}, "relations": ["a|to|b", "b|to|a", "a|to|a"]}


_USES: tuple[tuple[str, dict[str, Any]], ...] = (  # memory of a daemon, and a session's request
    (_ROOMY, {"plan": "minibatch"}),
    (_TIGHT, {"plan": "minibatch"}),
    (_ROOMY, {"num_neighbors": (-1, 3)}),
    (_ROOMY, {"owners": _OWNERS}),
    (_TIGHT, {"plan": "partitions", "frontier": "layer"}),
    (_ROOMY, {"plan": "chunks", "num_neighbors": ()}),
    (_TIGHT, {"plan": "rows", "num_neighbors": ()}),
    (_TIGHT, {"plan": "hyperbatch"}),
    (_TIGHT, {"plan": "macrobatch"}),
    (_ROOMY, {"labor": Labor()}),
    (_TIGHT, {"labor": Labor(), "plan": "hyperbatch"}),
    (_ROOMY, {"weighted": True, "edge_weights": True}),
    (_TIGHT, {"weighted": True, "plan": "hyperbatch"}),
    (_ROOMY, {"return_e_id": True, "edge_features": True}),
    (_ROOMY, {"edges": SeedEdges(negatives="binary", amount=1, exclude="self"), "split": "all"}),
    (_ROOMY, {"edges": SeedEdges(), "split": "all", "edge_times": True, "temporal": _LAST}),
    (_ROOMY, {"plan": "saint-walk", "return_e_id": True}),
    (_ROOMY, {"plan": "shadow", "batch_size": 100}),
    (_ROOMY, {"seed_type": "b"}),  # from the store of several types
)


def warm(progress: Progress) -> str:
    """Compile the kernels of ingest, a daemon and a trainer; returns the cache folder.

    Raises NotServed: there is no usable cache folder.
    """
    folder = cache_folder(page_crcs)
    if folder is None:
        raise NotServed(
            "warm: compiled kernels can be kept nowhere, expected an installation that can be "
            "written, or a folder of this user alone; see `loaderd doctor`"
        )
    with tempfile.TemporaryDirectory(prefix="blockstore-warm-") as name:
        place = Path(name)
        _ingest(place, progress)
        with progress.stage("sample", len(_USES), "kinds of batches") as stage:
            for mem, request in _USES:
                store = place / ("typed.store" if "seed_type" in request else "plain.store")
                asked: dict[str, Any] = {"num_neighbors": (5, 5), "batch_size": 200} | request
                settings = default_settings(parse_bytes(mem))
                try_plan(open_store(store), settings, Attach(token=0, request=0, **asked), 0)
                stage.advance(1)
    _gather()
    return folder


def _ingest(place: Path, progress: Progress) -> None:
    """Make a store of one type with all edge arrays, hops and owners, and one of two types."""
    random = np.random.default_rng(0)
    plain, typed = place / "plain", place / "typed"
    for folder in (plain, typed):
        folder.mkdir()
    arrays: dict[str, Any] = {
        "edge_index": random.integers(0, _NODES, (2, _EDGES)),
        "edge_weight": random.random(_EDGES, np.float32),
        "edge_time": np.arange(_EDGES),
        "edge_feat": random.random((_EDGES, 1), np.float32),
        "node_feat": random.random((_NODES, 128), np.float32),
        "node_label": random.integers(0, 4, _NODES),
        "train_idx": np.arange(_NODES // 2),
    }
    for name, array in arrays.items():
        np.save(plain / f"{name}.npy", array)
    (typed / "schema.json").write_bytes(msgspec.json.encode(_TYPED))
    for relation in _TYPED["relations"]:
        edges = random.integers(0, 2_000, (2, 8_000))
        np.save(typed / f"edge__{str(relation).replace('|', '__')}.npy", edges)
    np.save(typed / "feat__a.npy", random.random((2_000, 8), np.float32))
    np.save(typed / "split__b__train.npy", np.arange(2_000))
    parts = PartitionOptions(8, method="random")
    for folder, partition in ((plain, parts), (typed, None)):
        options = IngestOptions(block_bytes=1 << 16, edge_ids=True, partition=partition)
        opened = open_source(folder)
        ingest(opened.source, folder.with_suffix(".store"), options, progress, files=opened.files)
    store = plain.with_suffix(".store")
    make_hops(store, HopsRequest(), progress)
    write_owners(open_store(store), _OWNERS, np.arange(_NODES) * 2 // _NODES, 2, {})


def _gather() -> None:
    """Call the kernels that clients run themselves, on a read-only arena."""
    arena = np.zeros(4096, np.uint8)
    arena.flags.writeable = False
    addresses, out = np.zeros(1, np.uint64), np.zeros(8, np.uint8)
    gather_rows(arena, addresses, 0, 1, 8, out)
    scatter_rows(arena, addresses, np.zeros(1, np.int64), 0, 1, 8, out)
    expand_counts(np.ones(1, np.uint32), 0, np.zeros(1, np.int64))
