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
    """The minimum of --mem leaves room for one part of a layer alone."""
    monkeypatch.setattr(plan, "_MIN_SHARE", 0)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A graph of which two nodes in five have edges out, in an order of its own."""
    folder = tmp_path_factory.mktemp("sparse")
    rng = np.random.default_rng(3)
    edges = np.stack([rng.integers(0, 4000 // 5, 40_000) * 5, rng.integers(0, 4000, 40_000)])
    edges[0, ::2] += 2
    x = rng.standard_normal((4000, 24), np.float32)
    (folder / "source").mkdir()
    np.save(folder / "source/edge_index.npy", edges)
    np.save(folder / "source/node_feat.npy", x)
    options = IngestOptions(block_bytes=16 << 10)
    ingest(PlainSource(folder / "source"), folder / "store", options, QUIET)
    return SimpleNamespace(store=folder / "store", edges=edges, x=x)
