"""Splits of edges that a source listed, as pairs or by position, found in the store."""

import numpy as np
import pytest

from blockstore.store import open_store, read_rows
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, SeedEdges
from loaderd.sessions.resolve import resolve
from loaderd.sessions.seeds import count_edges, fill_edges
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.progress import Progress
from preprocess.sources.plain import PlainSource


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Edges, two splits of them, and a store of blocks of 4 KiB with a column over several."""
    folder, rng = tmp_path_factory.mktemp("splits"), np.random.default_rng(3)
    edges = rng.integers(0, 300, (2, 9000))
    edges[1, :4000] = 7
    train, test = rng.permutation(9000)[:500], edges[:, :60].T
    source = folder / "source"
    source.mkdir()
    arrays = {"edge_index": edges, "train_edge": train, "test_edge": test, "twice_edge": [8, 8, 9]}
    for name, values in arrays.items():
        np.save(source / f"{name}.npy", values)
    with (folder / "progress.txt").open("w") as stream:
        for ids in (True, False):
            options = IngestOptions(block_bytes=4096, edge_ids=ids)
            ingest(PlainSource(source), folder / f"store-{ids}", options, Progress(stream))
    return edges, {"train": train, "test": np.arange(60)}, folder


@pytest.mark.parametrize("split", ["train", "test"])
def test_ends_are_those_of_the_source(graph, split):
    edges, splits, folder = graph
    store = open_store(folder / "store-True")
    relation = store.manifest.relations[0]
    num = count_edges(store.manifest, relation, split, None)
    assert num == splits[split].size
    request = Attach(token=0, request=0, num_neighbors=(2,), edges=SeedEdges())
    resolved = resolve(store.manifest, request, f"edges:split:{split}", num)
    out, scratch = np.empty(2 * num, np.uint32), np.empty(num, np.int64)
    table = fill_edges(store, relation, resolved, split, None, scratch, out)
    original = read_rows(store, store.manifest.types[0].original_id)
    assert original[table.ends].tolist() == edges[:, splits[split]].tolist()
    assert table.first_edge.size == 0


def test_positions_need_edge_ids(graph):
    store = open_store(graph[2] / "store-False")
    relation = store.manifest.relations[0]
    assert count_edges(store.manifest, relation, "test", None) == 60
    if "train" in relation.splits:
        with pytest.raises(Refused, match="lists edge ids, the store has none"):
            count_edges(store.manifest, relation, "train", None)


def test_an_edge_that_is_listed_twice_is_refused(graph):
    store = open_store(graph[2] / "store-True")
    relation = store.manifest.relations[0]
    request = Attach(token=0, request=0, num_neighbors=(2,), edges=SeedEdges())
    resolved = resolve(store.manifest, request, "edges:split:twice", 3)
    with pytest.raises(Refused, match="2 of its 3 edge ids are in the store, expected each, once"):
        fill_edges(
            store, relation, resolved, "twice", None, np.empty(3, np.int64), np.empty(6, np.uint32)
        )
