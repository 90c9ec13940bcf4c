"""A store written again by partition is the store that an ingest with that partition gives."""

import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from blockstore.errors import BudgetTooSmall, StoreExists
from blockstore.store import Store, open_store, read_rows
from blockstore.verify import verify_store
from preprocess.__main__ import app
from preprocess.errors import BadInput
from preprocess.ingest import plan
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.partition.partition import InfluenceOptions, PartitionOptions
from preprocess.partition.repartition import repartition
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.result import IngestResult
from tests.preprocess.naive import Graph
from tests.preprocess.partitions import ingest_parts
from tests.preprocess.quiet import QUIET
from tests.preprocess.test_resume import tree

MB = 1 << 20
SETTINGS = PartitionOptions(6, passes=2)


def library() -> Graph:
    """Two types, four relations, every kind of array, splits of nodes and of edges."""
    rng = np.random.default_rng(11)
    graph = Graph()
    order = rng.permutation(300)
    graph.add_type(
        "paper", 300, x=rng.standard_normal((300, 9)).astype(np.float32),
        year=rng.integers(0, 50, 300), y=rng.integers(-1, 4, 300), train=order[:120],
        test=order[120:200],
    )  # fmt: skip
    graph.add_type("author", 140, x=rng.random((140, 700)), y=rng.integers(0, 2, (140, 3)))
    splits = {"train": np.arange(0, 900, 3), "test": np.arange(1, 900, 3)}
    cites = (300 * rng.random((900, 2)) ** 2).astype(np.int64)
    graph.add_relation(
        "paper", "cites", "paper", cites, splits, weight=rng.random(900),
        attr=rng.random((900, 3)).astype(np.float32),
    )  # fmt: skip
    writes = (rng.random((700, 2)) ** 2 * (140, 300)).astype(np.int64)
    pairs = {"valid": writes[:50]}
    graph.add_relation("author", "writes", "paper", writes, pairs, time=np.arange(700))
    graph.add_relation("author", "knows", "author", rng.integers(0, 140, (300, 2)))
    graph.add_relation("paper", "none", "author", [])
    return graph


def stored_partition(store: Store) -> np.ndarray:
    """Of each node, numbered through the types as the source numbers them; uint32."""
    found = []
    for t in store.manifest.types:
        ends = store.side(t.partition_offsets_path, np.uint64, t.num_partitions + 1)
        by_place = np.repeat(np.arange(t.num_partitions), np.diff(ends.astype(np.int64)))
        found.append(by_place[read_rows(store, t.store_id).astype(np.int64) - t.first])
    return np.concatenate(found).astype(np.uint32)


def same_stores(left: Path, right: Path) -> None:
    """Every file is the same, but for what the manifest says of the partition."""
    files = [{n: d for n, d in tree(path).items() if n != "zarr.json"} for path in (left, right)]
    assert files[0] == files[1]
    manifests = [open_store(path).manifest for path in (left, right)]
    bare = [msgspec.structs.replace(m, fingerprint="", partitioning=None) for m in manifests]
    assert bare[0] == bare[1]


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch):
    """So little memory that buckets, columns and rows go to disk."""
    monkeypatch.setattr(plan, "_MIN_SHARE", 1 << 10)
    monkeypatch.setattr(plan, "_FIXED_BYTES", 0)


def with_minimum(old: Path, new: Path, **more: Any) -> IngestResult:
    """In the least memory that a repartition names."""
    mem = 1
    while True:
        try:
            return repartition(open_store(old), new, SETTINGS, QUIET, mem, **more)
        except BudgetTooSmall as error:
            mem = int(str(error).split("at least --mem ")[1].split("M ")[0]) << 20


@pytest.mark.parametrize(
    "options",
    [
        IngestOptions(edge_ids=True, undirected=True),
        pytest.param(
            IngestOptions(edge_ids=True, duplicates="drop", self_loops="drop", dtype="bfloat16"),
            marks=pytest.mark.long,
        ),
        pytest.param(IngestOptions(dtype="int8", ids="uint64"), marks=pytest.mark.long),
        pytest.param(IngestOptions(undirected=True, dtype="float16"), marks=pytest.mark.long),
    ],
    ids=["ids", "dropped", "int8", "reverses"],
)
@pytest.mark.usefixtures("tight")
def test_it_is_the_ingest_with_that_partition(tmp_path: Path, options: IngestOptions):
    options = replace(options, block_bytes=4096, order="source", mem_bytes=64 * MB)
    ingest(library(), tmp_path / "old", options, QUIET)
    made = with_minimum(tmp_path / "old", tmp_path / "new").manifest
    verify_store(tmp_path / "new")
    assert made.partitioning is not None
    assert made.partitioning.num_train == 120
    assert [t.num_partitions for t in made.types] == [6, 6]
    partition = stored_partition(open_store(tmp_path / "new"))
    ingest_parts(partition, library(), tmp_path / "given", options)
    same_stores(tmp_path / "new", tmp_path / "given")
    if options.edge_ids and options.undirected:
        repartition(open_store(tmp_path / "old"), tmp_path / "roomy", SETTINGS, QUIET)
        assert tree(tmp_path / "roomy") == tree(tmp_path / "new")


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in partitions; to be copied."""
    path = tmp_path_factory.mktemp("parted") / "store"
    options = IngestOptions(block_bytes=4096, edge_ids=True, order="bfs", partition=SETTINGS)
    ingest(library(), path, options, QUIET)
    return path


def test_again_in_other_partitions_with_halos(parted: Path, tmp_path: Path):
    """Halos and hubs of the old partition are gone, those of the new one are there."""
    shutil.copytree(parted, tmp_path / "old")
    influence = InfluenceOptions(hubs=0.05, halo=0.4)
    settings = PartitionOptions(3, "random")
    found = repartition(
        open_store(tmp_path / "old"), tmp_path / "new", settings, QUIET, influence=influence, seed=4
    ).manifest
    verify_store(tmp_path / "new")
    assert found.partitioning is not None
    assert (found.partitioning.method, found.order) == ("random", "bfs")
    assert all(t.num_partitions == 3 and t.halo is not None for t in found.types)
    old, new = (open_store(tmp_path / name) for name in ("old", "new"))
    for before, after in zip(old.manifest.types, new.manifest.types, strict=True):
        assert np.array_equal(
            read_rows(old, before.features["x"])[read_rows(old, before.store_id) - before.first],
            read_rows(new, after.features["x"])[read_rows(new, after.store_id) - after.first],
        )


def test_the_command(small_graph: Path, tmp_path: Path):
    words = ["ingest", str(small_graph), str(tmp_path / "old"), "--no-summary"]
    assert CliRunner().invoke(app, words).exit_code == 0
    keys = tmp_path / "old.keys"
    keys.mkdir()
    (keys / "node.txt").write_text("whose")
    words = ["repartition", str(tmp_path / "old"), str(tmp_path / "new"), "--partitions", "8"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "8 by gap, 5 passes" in done.stdout
    assert (tmp_path / "new.keys" / "node.txt").read_text() == "whose"
    verify_store(tmp_path / "new")
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert "exists already" in again.output
    with pytest.raises(StoreExists):
        repartition(open_store(tmp_path / "old"), tmp_path / "new", SETTINGS, QUIET)


def test_a_store_that_another_one_replaces_is_refused(parted: Path, tmp_path: Path):
    """Arrays that are added meanwhile are no such change: the folder stays the same."""
    for name in ("old", "other"):
        shutil.copytree(parted, tmp_path / name)

    class Replacing(Progress):
        def stage(self, name, total, unit):
            if (tmp_path / "other").exists():
                (tmp_path / "old").rename(tmp_path / "gone")
                (tmp_path / "other").rename(tmp_path / "old")
            return super().stage(name, total, unit)

    with pytest.raises(BadInput, match="another file under this name"):
        repartition(open_store(tmp_path / "old"), tmp_path / "new", SETTINGS, Replacing(StringIO()))
    assert not (tmp_path / "new").exists()
