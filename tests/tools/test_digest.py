"""The digest of an epoch sees every array, and nothing but the batches."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from clients.torch import NeighborDataset  # noqa: E402
from tests.clients.fake import fake_daemon  # noqa: E402
from tools.digest import epoch_digest, main  # noqa: E402


def test_equal_epochs_have_equal_digests(tmp_path, capsys):
    with fake_daemon(tmp_path, groups=1) as daemon:
        data = NeighborDataset(daemon.endpoint)
        first = list(data)
        digest = epoch_digest(first)
        assert main([daemon.endpoint]) == digest
        assert capsys.readouterr().out == digest + "\n"
        assert main([daemon.endpoint, "--epoch", "1"]) != digest
        data.close()
    (tmp_path / "several").mkdir()
    with fake_daemon(tmp_path / "several", groups=3) as daemon:
        assert main([daemon.endpoint]) == digest


def test_every_array_counts(tmp_path):
    with fake_daemon(tmp_path) as daemon:
        batch = next(iter(NeighborDataset(daemon.endpoint)))
    before = epoch_digest([batch])
    tensors = {name: getattr(batch, name) for name in ("x", "y", "edge_index", "n_id", "input_id")}
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.view(-1)[-1] += 1
        assert epoch_digest([replace(batch, **{name: changed})]) != before, name
    half = {"half": batch.features["half"].flip(0)}
    assert epoch_digest([replace(batch, features=half)]) != before
    assert epoch_digest([replace(batch, x=batch.x.double())]) != before
    assert epoch_digest([replace(batch, step=9)]) != before
