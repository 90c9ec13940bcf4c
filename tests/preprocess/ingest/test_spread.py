"""An ingest by tasks of an executor writes the bytes that one process writes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from preprocess.errors import BadInput
from preprocess.ingest.contents import Contents
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline import tasks
from preprocess.sources.layouts import open_source
from preprocess.stages import spread
from tests.preprocess.executors import Shuffled
from tests.preprocess.quiet import QUIET
from tools.tree import file_digests

NODES, EDGES = 3000, 40_000
OPTIONS = IngestOptions(block_bytes=4096)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A plain graph, of skewed degrees, with features, labels, a split and rows of edges."""
    rng = np.random.default_rng(5)
    folder = tmp_path / "graph"
    folder.mkdir()
    edges = (NODES * rng.random((2, EDGES)) ** 2).astype(np.int64)
    np.save(folder / "edge_index.npy", edges)
    np.save(folder / "node_feat.npy", rng.random((NODES, 33), np.float32))
    np.save(folder / "node_label.npy", rng.integers(0, 7, NODES))
    np.save(folder / "train_idx.npy", rng.permutation(NODES)[:500])
    np.save(folder / "edge_weight.npy", rng.random(EDGES, np.float32))
    return folder


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tasks for a small graph."""
    monkeypatch.setattr(tasks, "_MIN_SPAN", 100)
    monkeypatch.setattr(spread, "_MIN_BUCKET", 1 << 10)


def digests(graph: Path, store: Path, options: IngestOptions, executor: Shuffled | None):
    ingest(open_source(graph).source, store, options, QUIET, executor=executor)
    return file_digests(store)


@pytest.mark.parametrize(  # every number of workers, and of options each
    ("options", "workers"),
    [
        (OPTIONS, 8),
        (replace(OPTIONS, undirected=True, edge_ids=True, dtype="float16"), 2),
        (replace(OPTIONS, order="degree", dtype="int8", duplicates="drop", self_loops="drop"), 1),
        pytest.param(replace(OPTIONS, order="source"), 2, marks=pytest.mark.long),
        pytest.param(replace(OPTIONS, order="random", ids="uint64"), 8, marks=pytest.mark.long),
    ],
    ids=["bfs", "undirected", "degree", "source", "random"],
)
def test_workers_and_deaths_change_no_byte(
    graph: Path, tmp_path: Path, options: IngestOptions, workers: int
):
    (graph / "edge_weight.npy").unlink()
    expected = digests(graph, tmp_path / "one", options, None)
    executor = Shuffled(workers, seed=workers)
    assert digests(graph, tmp_path / "some", options, executor) == expected
    assert executor.tasks > 3 * workers
    assert executor.deaths > 0
    assert {p.name for p in tmp_path.iterdir()} == {"graph", "one", "some"}


def test_rows_of_edges_stay_with_their_edges(graph: Path, tmp_path: Path):
    expected = digests(graph, tmp_path / "one", OPTIONS, None)
    assert digests(graph, tmp_path / "some", OPTIONS, Shuffled(3)) == expected


def test_columns_on_disk_are_sorted_again_by_tasks(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = digests(graph, tmp_path / "one", OPTIONS, None)
    (graph / "edge_weight.npy").unlink()
    plain = digests(graph, tmp_path / "plain", OPTIONS, None)
    assert plain != expected
    monkeypatch.setattr(Contents, "columns_fit", lambda *_: False)
    assert digests(graph, tmp_path / "some", OPTIONS, Shuffled(3)) == plain


def test_bad_edges_and_rows_are_named_by_their_place_in_the_file(graph: Path, tmp_path: Path):
    edges = np.load(graph / "edge_index.npy")
    edges[1, 31_234] = NODES
    np.save(graph / "edge_index.npy", edges)
    source = open_source(graph).source
    with pytest.raises(BadInput, match=r"edge_index\.npy\[1, 31234\]: found node id 3000"):
        ingest(source, tmp_path / "store", OPTIONS, QUIET, executor=Shuffled(2))
    edges[1, 31_234] = 0
    np.save(graph / "edge_index.npy", edges)
    features = np.load(graph / "node_feat.npy")
    features[2345, 3] = np.nan
    np.save(graph / "node_feat.npy", features)
    source = open_source(graph).source
    with pytest.raises(BadInput, match=r"node_feat\.npy\[2345\]: found NaN"):
        ingest(source, tmp_path / "store", OPTIONS, QUIET, executor=Shuffled(2))
    assert [p.name for p in tmp_path.iterdir()] == ["graph"]
