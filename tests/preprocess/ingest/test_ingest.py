"""Ingest and export: what goes in comes out, whatever memory was given."""

from pathlib import Path

import numpy as np
import pytest
import torch

from blockstore.store import open_store, read_rows
from blockstore.verify import verify_store
from preprocess.export.export import export
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.kernels.rows import to_bfloat16
from preprocess.pipeline.progress import Progress
from preprocess.sources.plain import PlainSource


@pytest.fixture
def quiet(tmp_path: Path):
    """Progress that nobody sees."""
    with (tmp_path / "progress.txt").open("w") as stream:
        yield Progress(stream)


def test_memory_does_not_show_in_the_store(small_graph: Path, tmp_path: Path, quiet: Progress):
    found = set()
    for number, mem in enumerate((12 << 20, 15 << 20, 256 << 20)):
        options = IngestOptions(mem_bytes=mem, block_bytes=8 << 10, edge_ids=True)
        target = tmp_path / str(number)
        found.add(ingest(PlainSource(small_graph), target, options, quiet).manifest.fingerprint)
        verify_store(target)
    assert len(found) == 1


def test_without_edge_ids_the_edges_come_out_sorted(
    small_graph: Path, tmp_path: Path, quiet: Progress
):
    target, back = tmp_path / "store", tmp_path / "back"
    ingest(PlainSource(small_graph), target, IngestOptions(), quiet)
    export(open_store(target), back, quiet)
    edges = np.load(small_graph / "edge_index.npy")
    order = np.lexsort((edges[0], edges[1]))
    assert np.array_equal(np.load(back / "edge_index.npy"), edges[:, order])


def test_undirected_adds_reverses_once(small_graph: Path, tmp_path: Path, quiet: Progress):
    source = tmp_path / "source"
    source.mkdir()
    np.save(source / "edge_index.npy", np.array([[0, 1, 2, 2, 3, 0], [1, 0, 2, 3, 4, 1]]))
    options = IngestOptions(undirected=True, edge_ids=True)
    manifest = ingest(PlainSource(source), tmp_path / "store", options, quiet).manifest
    # 0-1 both ways (three times listed), the loop at 2, 2-3 and 3-4 both ways
    assert manifest.relations[0].num_edges == 7
    back = tmp_path / "back"
    export(open_store(tmp_path / "store"), back, quiet)
    kept = np.load(back / "edge_index.npy").T.tolist()
    assert kept == [[0, 1], [1, 0], [2, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_features_are_rounded_to_nearest(
    small_graph: Path, tmp_path: Path, quiet: Progress, dtype: str
):
    target = tmp_path / "store"
    ingest(PlainSource(small_graph), target, IngestOptions(dtype=dtype), quiet)
    store = open_store(target)
    node = store.manifest.types[0]
    stored = read_rows(store, node.features["x"])[read_rows(store, node.store_id)]
    wide = torch.from_numpy(np.load(small_graph / "node_feat.npy"))
    expected = wide.to(getattr(torch, dtype))
    assert np.array_equal(stored.view(np.int16), expected.view(torch.int16).numpy())


def test_bfloat16_keeps_nan_and_infinity():
    values = np.array([np.nan, np.inf, -np.inf, 1.0, -0.0], np.float32)
    out = np.empty(5, np.uint16)
    to_bfloat16(values.view(np.uint32), out)
    back = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.isnan(back[0])
    assert back[1:].tolist() == values[1:].tolist()


def test_source_order_keeps_ids(small_graph: Path, tmp_path: Path, quiet: Progress):
    target = tmp_path / "store"
    ingest(PlainSource(small_graph), target, IngestOptions(order="source"), quiet)
    store = open_store(target)
    node = store.manifest.types[0]
    assert np.array_equal(read_rows(store, node.original_id), np.arange(node.num_nodes))
    x = np.load(small_graph / "node_feat.npy")
    assert np.array_equal(read_rows(store, node.features["x"]), x)
