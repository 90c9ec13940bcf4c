"""A small graph, as a store and as arrays."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from clients.inference import plan
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.plain import PlainSource
from tests.preprocess.quiet import QUIET


@pytest.fixture(scope="module")
def graph(small_graph, tmp_path_factory):
    """A store in another order than the source's arrays, and these."""
    folder = tmp_path_factory.mktemp("inference")
    ingest(PlainSource(small_graph), folder / "store", IngestOptions(block_bytes=16 << 10), QUIET)
    arrays = {name: np.load(small_graph / f"{name}.npy") for name in ("edge_index", "node_feat")}
    return SimpleNamespace(store=folder / "store", source=small_graph, **arrays)


@pytest.fixture
def tight(monkeypatch):
    """The minimum of --mem leaves room for little more than one part of a layer."""
    monkeypatch.setattr(plan, "_MIN_SHARE", 64 << 10)


def make_graph(folder, edges, num_nodes, width, **options):
    x = np.random.default_rng(3).standard_normal((num_nodes, width), np.float32)
    (folder / "source").mkdir()
    np.save(folder / "source/edge_index.npy", edges)
    np.save(folder / "source/node_feat.npy", x)
    made = IngestOptions(block_bytes=16 << 10, **options)
    ingest(PlainSource(folder / "source"), folder / "store", made, QUIET)
    return SimpleNamespace(store=folder / "store", edges=edges, x=x)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A graph of which two nodes in five have edges out, in an order of its own."""
    rng = np.random.default_rng(3)
    edges = np.stack([rng.integers(0, 4000 // 5, 40_000) * 5, rng.integers(0, 4000, 40_000)])
    edges[0, ::2] += 2
    return make_graph(tmp_path_factory.mktemp("sparse"), edges, 4000, 24)


@pytest.fixture(scope="module")
def lonely(tmp_path_factory):
    """A graph with all reverses, in which four nodes in ten have no edge, anywhere in the order."""
    rng = np.random.default_rng(4)
    pairs = rng.choice(20_000, 12_000, replace=False)[rng.integers(0, 12_000, (2, 60_000))]
    pairs = np.unique(pairs, axis=1)
    folder = tmp_path_factory.mktemp("lonely")
    made = make_graph(folder, pairs, 20_000, 64, undirected=True, order="random")
    made.edges = np.unique(np.hstack([pairs, pairs[::-1]]), axis=1)
    return made


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """A directed graph in which each node has edges in and out, two of them thousands."""
    rng = np.random.default_rng(6)
    around = np.stack([np.arange(4000), np.roll(np.arange(4000), 1)])
    hubs = np.stack([np.full(6000, 7), rng.integers(0, 4000, 6000)])
    hubs[:, ::2] = hubs[::-1, ::2]
    edges = np.hstack([around, hubs, rng.integers(0, 4000, (2, 12_000))])
    return make_graph(tmp_path_factory.mktemp("ring"), edges, 4000, 24, order="random")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A graph with all reverses, loops and a wide column, in which each node has an edge."""
    rng = np.random.default_rng(5)
    pairs = np.stack([np.arange(4000), rng.integers(0, 4000, 4000)])
    hub = np.stack([np.full(3000, 7), rng.integers(0, 4000, 3000)])
    pairs = np.hstack([pairs, rng.integers(0, 4000, (2, 12_000)), hub, np.arange(5) * [[1], [1]]])
    made = make_graph(
        tmp_path_factory.mktemp("full"), pairs, 4000, 24, undirected=True, order="random"
    )
    made.edges = np.unique(np.hstack([pairs, pairs[::-1]]), axis=1)
    return made
