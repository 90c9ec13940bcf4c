"""GraphSAGE against a plain mean, trimming against the whole batch, keyed dropout."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from blockstore.kernels.random import make_key  # noqa: E402
from clients.aggregate import KERNELS, mean_of_neighbors  # noqa: E402
from clients.models import LAYERS, Dropout, DropoutKeys, GraphSage, Layered, keep_mask  # noqa: E402
from tests.reference import BITS, draw_hash  # noqa: E402


def plain_mean(h, edge_index, num_targets):
    rows = torch.zeros(num_targets, h.size(1))
    for v in range(num_targets):
        sources = edge_index[0][edge_index[1] == v]
        if sources.numel():
            rows[v] = h[sources].mean(dim=0)
    return rows


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ascending", [True, False])
def test_means_are_over_in_neighbors(ascending, kernel):
    torch.manual_seed(0)
    edge_index = torch.randint(0, 30, (2, 90))  # parallel edges, self-loops, lonely nodes
    if ascending:
        edge_index = edge_index[:, torch.argsort(edge_index[1])]
    h = torch.randn(30, 7, requires_grad=True)
    mean = mean_of_neighbors(h, edge_index, 30, kernel)
    torch.testing.assert_close(mean, plain_mean(h, edge_index, 30))
    (ours,) = torch.autograd.grad(mean.square().sum(), h)
    (plain,) = torch.autograd.grad(plain_mean(h, edge_index, 30).square().sum(), h)
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_edges_give_zeros(kernel):
    empty = torch.empty((2, 0), dtype=torch.int64)
    assert not mean_of_neighbors(torch.randn(4, 3), empty, 4, kernel).any()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_trimming_changes_nothing_for_the_seeds(depth, kind):
    torch.manual_seed(1)
    nodes, edges, frontier = [5, 12, 30], [14, 40], 0
    targets, sources = [], []
    for hop, count in enumerate(edges):
        targets.append(torch.randint(frontier, frontier + nodes[hop], (count,)).sort().values)
        frontier += nodes[hop]
        sources.append(torch.randint(0, frontier + nodes[hop + 1], (count,)))
    edge_index = torch.stack([torch.cat(sources), torch.cat(targets)])
    x = torch.randn(sum(nodes), 8)
    model = Layered(LAYERS[kind], 8, 16, 3, num_layers=depth).eval()
    trimmed = model(x, edge_index, nodes, edges)
    # a model deeper than the batch sees the outermost nodes without neighbors, as the batch does
    torch.testing.assert_close(trimmed[: nodes[0]], model(x, edge_index)[: nodes[0]])


def test_with_frontier_layer_each_layer_has_the_edges_of_its_hop():
    """Of a batch whose second hop draws for the first seed again, by hand."""
    edge_index = torch.tensor([[1, 1, 2], [0, 0, 1]])  # hop 0: 1 -> 0; hop 1: 1 -> 0, 2 -> 1
    nodes, edges, x = [1, 1, 1], [1, 2], torch.randn(3, 4)
    model = GraphSage(4, 8, 3, num_layers=2).eval()
    first, second = model.layers
    h = first(x, x[:2], edge_index[:, 1:]).relu()
    expected = second(h, h[:1], edge_index[:, :1])
    torch.testing.assert_close(model(x, edge_index, nodes, edges, "layer"), expected)


@given(ids=st.lists(st.integers(0, 2**40), max_size=6), key=st.integers(0, BITS))
def test_keyed_masks_are_hashes_of_nodes(ids, key):
    width, rate = 6, 0.3
    found = keep_mask(torch.tensor(ids, dtype=torch.int64), width, rate, key)
    for v, row in zip(ids, found.tolist(), strict=True):
        words = [draw_hash(key, v, word) for word in range(2)]
        lanes = [words[c // 4] >> 16 * (c % 4) & 0xFFFF for c in range(width)]
        assert row == [(lane ^ 0x8000) >= round(rate * 2**16) for lane in lanes]


def test_keyed_masks_are_independent():
    """Shares of 100,000 entries, each within 5 standard deviations: sqrt(p (1 - p) / n) each."""
    ids, rate = torch.arange(1000), 0.3
    one = keep_mask(ids, 100, rate, make_key(0, 0, 0, 0, -1))
    others = [keep_mask(ids, 100, rate, make_key(*place, -1)) for place in _next_places()]
    pairs = [(one, other) for other in others]
    pairs += [(one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[:, 4:], one[:, :-4])]
    assert abs(one.double().mean() - 0.7) < 5 * sqrt(0.21 / one.numel())
    for left, right in pairs:
        both = (left & right).double().mean()
        assert abs(both - 0.49) < 5 * sqrt(0.49 * 0.51 / left.numel())


def _next_places():
    """(seed, epoch, step, layer): those that differ from the first in one of them."""
    return [tuple(int(i == k) for i in range(4)) for k in range(4)]


def test_a_node_has_one_mask_in_whichever_batch_and_process():
    drop, h = Dropout(0.5).train(), torch.randn(40, 9)
    whole = drop(h, DropoutKeys(1, 2, 3, {"": torch.arange(40) * 7}), 1)
    mine = torch.randperm(40)[:13]
    part = drop(h[mine], DropoutKeys(1, 2, 3, {"": mine * 7}), 1)
    torch.testing.assert_close(part, whole[mine], rtol=0, atol=0)
    kept = whole != 0
    torch.testing.assert_close(whole[kept], 2 * h[kept])
    typed = {"a": torch.arange(40) * 7, "b": torch.arange(40) * 7}
    assert not torch.equal(drop(h, DropoutKeys(1, 2, 3, typed), 1, "b"), whole)
    assert torch.equal(drop.eval()(h, DropoutKeys(1, 2, 3, typed), 1, "b"), h)
