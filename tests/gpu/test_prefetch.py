"""Batches on a GPU against those of the dataset itself: a real daemon, every way, all bytes."""

import contextlib

import numpy as np
import pytest
import torch

from blockstore.io import gds
from clients.records import TensorRecord
from clients.torch import HopDataset, NeighborDataset, prefetch
from tests.daemons import daemon
from tests.hopstores import make_hops, write_hop_store
from tools.bench.setup import make_graph, make_store

MODES = ("auto", "staging", "direct", "cached")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    return make_store(folder, make_graph(folder, 20_000, 12, 48, 8), mem="512M")


@pytest.fixture(scope="module", params=["256M", "24M"], ids=["memory", "hyperbatch"])
def endpoint(store, request):
    with daemon(store, request.param) as endpoint:
        yield endpoint


def tensors(batch: TensorRecord) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    batch.map(lambda t: found.append(t) or t)
    return found


def assert_same(found: TensorRecord, expected: TensorRecord) -> None:
    assert (found.epoch, found.step) == (expected.epoch, expected.step)
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        assert a.is_cuda
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("mode", MODES)
def test_batches_are_those_of_the_dataset(endpoint, mode):
    options = {"num_neighbors": [8, 5], "batch_size": 50}
    plain = NeighborDataset(endpoint, **options)
    with prefetch(NeighborDataset(endpoint, **options), "cuda", 3, mode) as batches:
        for _ in range(2):
            kept = []
            for found, expected in zip(batches, plain, strict=True):
                assert_same(found, expected)
                kept.append((found, expected))
            for found, expected in kept[:20]:  # nothing was laid over them since
                assert_same(found, expected)
        choice = batches.choice()
        if mode in ("direct", "cached"):
            assert choice.mode == mode, choice.reason
        if mode == "cached":
            assert choice.cached_rows > 0
    plain.close()


def test_two_datasets_of_a_process_share_what_the_driver_knows(store):
    """Training and validation, say: the first to end leaves the other its memory."""
    options = {"num_neighbors": [8, 5], "batch_size": 50}
    with contextlib.ExitStack() as opened:
        endpoint = opened.enter_context(daemon(store, "256M"))
        train, valid = (
            opened.enter_context(
                prefetch(NeighborDataset(endpoint, split, **options), "cuda", 2, "direct")
            )
            for split in ("train", "valid")
        )
        plain = NeighborDataset(endpoint, "valid", **options)
        next(iter(train))
        for found, expected in zip(valid, plain, strict=True):
            assert_same(found, expected)
        assert valid.choice().mode == "direct", valid.choice().reason
        valid.close()
        assert len(list(train)) == len(train)
        assert train.choice().mode == "direct", train.choice().reason
        plain.close()


def test_a_batch_moves_by_itself(endpoint):
    data = NeighborDataset(endpoint, num_neighbors=[8, 5], batch_size=50)
    for _, batch in zip(range(5), data, strict=False):
        assert_same(batch.to("cuda"), batch)
    data.close()


def test_work_of_the_trainer_comes_after_the_copy(endpoint):
    """Sums begun at once, on streams of their own, see whole batches."""
    options = {"num_neighbors": [8, 5], "batch_size": 50}
    plain = NeighborDataset(endpoint, **options)
    expected = [float(b.x.double().sum()) for b in plain]
    sums = []
    with prefetch(NeighborDataset(endpoint, **options), "cuda", 2, "direct") as batches:
        for batch in batches:
            sums.append(batch.x.double().sum())
            del batch
    np.testing.assert_allclose([float(s) for s in sums], expected)
    plain.close()


@pytest.mark.parametrize("views", [False, True])
def test_hops(tmp_path, views):
    write_hop_store(tmp_path / "store", {"train": make_hops(20_000, 64, {"sym": 2}, 1)}, 1 << 16)
    with daemon(tmp_path / "store", "64M") as endpoint:
        plain = HopDataset(endpoint, batch_size=4000)
        with prefetch(HopDataset(endpoint, batch_size=4000, views=views), "cuda") as batches:
            for _ in range(3):
                for found, expected in zip(batches, plain, strict=True):
                    assert_same(found, expected)
        plain.close()


@pytest.mark.parametrize("kvikio", [False, True])
def test_chunks_read_past_the_daemon(tmp_path, kvikio, monkeypatch):
    if kvikio:
        pytest.importorskip("kvikio")
    else:
        monkeypatch.setattr(gds, "kvikio", None)
    store = tmp_path / "store"
    write_hop_store(store, {"train": make_hops(20_000, 64, {"sym": 2}, 1)}, 1 << 16)
    with daemon(store, "64M") as endpoint:
        plain = HopDataset(endpoint, batch_size=3000)
        with prefetch(HopDataset(endpoint, batch_size=3000, files=store), "cuda") as batches:
            for _ in range(2):
                for found, expected in zip(batches, plain, strict=True):
                    assert_same(found, expected)
            assert batches.files_by.startswith("kvikio" if kvikio else "host")
        plain.close()
