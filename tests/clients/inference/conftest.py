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
