"""Promise 1, end to end: one batch, whatever budget, workers or restarts serve it."""

import hashlib
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from clients.torch import NeighborDataset
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.progress import Progress
from preprocess.sources.plain import PlainSource
from tests.daemons import daemon

GRAPHS = {  # name -> ingest options, --mem from the least of its plan to plenty, dataset options
    "small": (
        IngestOptions(block_bytes=16 << 10, edge_ids=True),
        ("2M", "32M", "64M"),
        {"num_neighbors": (6, 4, 3), "batch_size": 100, "return_e_id": True},
    ),
    "planetoid-cora": (
        IngestOptions(block_bytes=64 << 10),
        ("3M", "48M", "96M"),
        {"num_neighbors": (15, 10, 5), "batch_size": 30},
    ),
    "am-rdf": (
        IngestOptions(block_bytes=64 << 10),
        ("28M", "256M", "1G"),
        {"num_neighbors": (10, 10), "batch_size": 1000},
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        "small",
        pytest.param("planetoid-cora", marks=pytest.mark.long),
        pytest.param("am-rdf", marks=pytest.mark.long),
    ],
)
def graph(request, dataset, small_graph, tmp_path_factory):
    """(store, --mem from the least to plenty, dataset options)."""
    name = request.param
    options, mems, wanted = GRAPHS[name]
    source = small_graph if name == "small" else dataset(name)
    folder = tmp_path_factory.mktemp(name)
    store = folder / "store"
    with (folder / "progress.txt").open("w") as stream:
        ingest(PlainSource(source), store, options, Progress(stream))
    return store, mems, wanted


def epoch_digest(endpoint: str, loader_workers: int = 0, **options: object) -> str:
    """sha256 over all arrays of an epoch, in order."""
    data = NeighborDataset(endpoint, seed=5, **options)
    data.set_epoch(1)
    found = hashlib.sha256()
    for batch in DataLoader(data, batch_size=None, num_workers=loader_workers):
        for name in ("x", "y", "edge_index", "n_id", "e_id", "input_id"):
            tensor = getattr(batch, name)
            found.update(name.encode())
            if tensor is not None:
                found.update(tensor.numpy().tobytes())
        found.update(repr((batch.num_sampled_nodes, batch.num_sampled_edges)).encode())
    data.close()
    return found.hexdigest()


def test_an_epoch_is_the_same_for_every_budget_and_worker_count(
    graph: tuple[Path, tuple[str, ...], dict],
):
    store, mems, options = graph
    digests = {}
    for mem, workers in zip(mems, (1, 4, 1), strict=True):
        with daemon(store, mem, workers) as endpoint:
            digests.setdefault(epoch_digest(endpoint, **options), []).append((mem, workers))
    assert len(digests) == 1, digests


def test_data_loader_workers_keep_the_order(graph: tuple[Path, tuple[str, ...], dict]):
    store, mems, options = graph
    with daemon(store, mems[-1], 2) as endpoint:
        digests = {epoch_digest(endpoint, k, **options) for k in (0, 2)}
    assert len(digests) == 1
