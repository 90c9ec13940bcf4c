"""GraphSAGE on looked-up features: the same as that of `clients.models` on dense rows."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.models import GraphSage  # noqa: E402
from tools.wide_sage import Features, WideSage  # noqa: E402

NODES, WIDTH, HIDDEN, CLASSES = 60, 23, 8, 4


def _features(folder: Path, sparse: bool) -> tuple[Features, torch.Tensor]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((NODES, WIDTH)).astype(np.float32)
    x[rng.random(x.shape) < 0.7] = 0
    x[5] = 0  # a row of nothing
    if sparse:
        rows, columns = np.nonzero(x)
        np.save(folder / "node_feat_indptr.npy", np.searchsorted(rows, np.arange(NODES + 1)))
        np.save(folder / "node_feat_indices.npy", columns.astype(np.int32))
        np.save(folder / "node_feat_data.npy", x[rows, columns])
        (folder / "node_feat_csr.json").write_text(json.dumps({"shape": x.shape}))
    else:
        np.save(folder / "node_feat.npy", x)
    return Features(folder, 0.0), torch.from_numpy(x)


def _batch() -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """A batch of 5 seeds: nodes, edges, nodes by hop, edges by hop.  Node 2 has no neighbors."""
    rng = np.random.default_rng(4)
    nodes = torch.from_numpy(rng.permutation(NODES)[:30])
    first = np.stack([rng.integers(0, 12, 14), np.sort(rng.choice([0, 1, 3, 4], 14))])
    second = np.stack([rng.integers(0, 30, 20), np.sort(rng.integers(5, 12, 20))])
    edges = torch.from_numpy(np.concatenate([first, second], axis=1))
    return nodes, edges, [5, 7, 18], [14, 20]


@pytest.mark.parametrize("sparse", [False, True])
def test_logits_and_gradients_are_those_of_the_dense_model(tmp_path, sparse):
    features, x = _features(tmp_path, sparse)
    nodes, edges, num_nodes, num_edges = _batch()
    ours = WideSage(features, HIDDEN, CLASSES, 2, 0.0)
    theirs = GraphSage(WIDTH, HIDDEN, CLASSES, 2, 0.0)
    with torch.no_grad():
        for i, layer in enumerate(theirs.layers):
            layer.neighbor.weight.copy_(ours.neighbor[i].T)
            layer.own.weight.copy_(ours.own[i].T)
            layer.own.bias.copy_(ours.bias[i])
    found = ours(nodes, edges, [12, 5], [34, 14])
    expected = theirs(x[nodes], edges, num_nodes, num_edges)
    torch.testing.assert_close(found, expected)
    direction = torch.randn(5, CLASSES)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for i, layer in enumerate(theirs.layers):
        torch.testing.assert_close(ours.neighbor[i].grad.T, layer.neighbor.weight.grad)
        torch.testing.assert_close(ours.own[i].grad.T, layer.own.weight.grad)
        torch.testing.assert_close(ours.bias[i].grad, layer.own.bias.grad)


def test_dropout_leaves_the_mean_and_is_drawn_anew(tmp_path):
    features, _ = _features(tmp_path, False)
    model = WideSage(features, HIDDEN, CLASSES, 2, 0.25)
    ones = torch.ones(500, 40)
    first, second = model._drop(ones), model._drop(ones)
    assert not torch.equal(first, second)
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(float(first.mean()) - 1) < 0.02  # deviation .004
    model.eval()
    assert model._drop(ones) is ones
