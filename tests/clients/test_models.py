"""GraphSAGE against a plain mean, and trimming against the whole batch."""

import pytest

torch = pytest.importorskip("torch")

from clients.models import GraphSage, mean_of_neighbors  # noqa: E402


def plain_mean(h, edge_index, num_targets):
    rows = torch.zeros(num_targets, h.size(1))
    for v in range(num_targets):
        sources = edge_index[0][edge_index[1] == v]
        if sources.numel():
            rows[v] = h[sources].mean(dim=0)
    return rows


@pytest.mark.parametrize("ascending", [True, False])
def test_means_are_over_in_neighbors(ascending):
    torch.manual_seed(0)
    edge_index = torch.randint(0, 30, (2, 90))  # parallel edges, self-loops, lonely nodes
    if ascending:
        edge_index = edge_index[:, torch.argsort(edge_index[1])]
    h = torch.randn(30, 7, requires_grad=True)
    mean = mean_of_neighbors(h, edge_index, 30)
    torch.testing.assert_close(mean, plain_mean(h, edge_index, 30))
    (ours,) = torch.autograd.grad(mean.square().sum(), h)
    (plain,) = torch.autograd.grad(plain_mean(h, edge_index, 30).square().sum(), h)
    torch.testing.assert_close(ours, plain)


def test_no_edges_give_zeros():
    empty = torch.empty((2, 0), dtype=torch.int64)
    assert not mean_of_neighbors(torch.randn(4, 3), empty, 4).any()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_trimming_changes_nothing_for_the_seeds(depth):
    torch.manual_seed(1)
    nodes, edges, frontier = [5, 12, 30], [14, 40], 0
    targets, sources = [], []
    for hop, count in enumerate(edges):
        targets.append(torch.randint(frontier, frontier + nodes[hop], (count,)).sort().values)
        frontier += nodes[hop]
        sources.append(torch.randint(0, frontier + nodes[hop + 1], (count,)))
    edge_index = torch.stack([torch.cat(sources), torch.cat(targets)])
    x = torch.randn(sum(nodes), 8)
    model = GraphSage(8, 16, 3, num_layers=depth).eval()
    trimmed = model(x, edge_index, nodes, edges)
    # a model deeper than the batch sees the outermost nodes without neighbors, as the batch does
    torch.testing.assert_close(trimmed[: nodes[0]], model(x, edge_index)[: nodes[0]])
