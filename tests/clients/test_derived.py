"""A derived array comes with the batches of a daemon that serves the extended store."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockstore.store import open_store, read_rows  # noqa: E402
from clients.torch import NeighborDataset  # noqa: E402
from preprocess.derive.derive import derive  # noqa: E402
from preprocess.derive.plan import Derivation  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402


def test_batches_have_the_rows(small_graph: Path, tmp_path: Path):
    path = tmp_path / "store"
    ingest(PlainSource(small_graph), path, IngestOptions(block_bytes=16 << 10), QUIET)
    derive(path, Derivation("node", "node", "node-to-node", name="around"), QUIET)
    store = open_store(path)
    node = store.manifest.types[0]
    rank = read_rows(store, node.store_id)
    rows = {name: read_rows(store, array) for name, array in node.features.items()}
    assert set(rows) == {"x", "around"}
    with daemon(path, "64M", 2) as endpoint:
        data = NeighborDataset(endpoint, num_neighbors=(6, 4), batch_size=100)
        for batch in islice(data, 3):
            places = rank[batch.n_id.numpy()]
            assert np.array_equal(batch.x.numpy(), rows["x"][places])
            assert np.array_equal(batch.features["around"].numpy(), rows["around"][places])
        data.close()


def test_the_mean_is_that_of_torch(small_graph: Path, tmp_path: Path):
    path = tmp_path / "store"
    ingest(PlainSource(small_graph), path, IngestOptions(block_bytes=4096, order="source"), QUIET)
    derive(path, Derivation("node", "node", "node-to-node", name="around"), QUIET)
    store = open_store(path)
    found = read_rows(store, store.manifest.types[0].features["around"])
    x = torch.from_numpy(np.load(small_graph / "node_feat.npy"))
    source, target = torch.from_numpy(np.load(small_graph / "edge_index.npy"))
    index = target[:, None].expand(-1, x.shape[1])
    mean = torch.zeros_like(x).scatter_reduce(0, index, x[source], "mean", include_self=False)
    assert np.allclose(found, mean.numpy(), rtol=1e-5, atol=1e-5)
