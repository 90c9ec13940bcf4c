"""A first layer from a large batch's rows, and both orders of layers: the same up to rounding."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.aggregate import KERNELS  # noqa: E402
from clients.large import order as orders  # noqa: E402
from clients.large.batch import FirstLayerRows, SharedDraws, fused_batches  # noqa: E402
from clients.large.order import Order, measure_order  # noqa: E402
from clients.models import LAYERS, Layered, OrderedLayer  # noqa: E402
from clients.torch import Batch  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.differences import flat  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.reference import sample_batch  # noqa: E402

WIDTH, FANOUTS = 12, (4, 3, 2)


@pytest.fixture(scope="module")
def large() -> SharedDraws:
    """Three steps of 20 seeds, one of them with fewer."""
    rng = np.random.default_rng(2)
    graph = make_csc(rng.integers(0, 12, 300), 3)
    seeds = rng.permutation(300)[:55].tolist()
    made = sample_batch(graph.indptr, graph.indices, seeds, FANOUTS, 7, 0, 0, "layer")
    torch.manual_seed(0)
    batch = Batch(
        x=torch.randn(len(made.n_id), WIDTH), y=None, n_id=torch.tensor(made.n_id), e_id=None,
        edge_index=torch.tensor([flat(made.src_local), flat(made.dst_local)]),
        input_id=torch.arange(55), batch_size=55, num_sampled_nodes=made.nodes_per_hop,
        num_sampled_edges=[len(e) for e in made.edges], epoch=0, step=0, frontier="layer",
    )  # fmt: skip
    return SharedDraws(batch, 0, [(0, 20), (20, 40), (40, 55)], (), 7)


def results(model, logits) -> list:
    """Logits, and the gradients of a loss of them."""
    model.zero_grad()
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


def check(found: list, expected: list, dtype) -> None:
    bound = {torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def plain(model, batch, exchange=None):
    counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
    return model(batch.x, batch.edge_index, *counts, batch.frontier, exchange)


def set_orders(model, aggregates_first: bool) -> None:
    for layer in model.layers:
        assert isinstance(layer, OrderedLayer)
        layer.aggregates_first = aggregates_first


@pytest.mark.parametrize("aggregates_first", [False, True])
@pytest.mark.parametrize("hidden", [8, 16])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_first_layer_gives_what_gathered_rows_give(
    large, kind, hidden, aggregates_first, dtype
):
    torch.manual_seed(1)
    model = Layered(LAYERS[kind], WIDTH, hidden, 4, len(FANOUTS), dropout=0.0).to(dtype)
    set_orders(model, aggregates_first)
    for fused, batch in zip(fused_batches(large), large.batches(), strict=True):
        assert fused.x.size(0) == sum(batch.num_sampled_nodes[:-1]) < batch.x.size(0)
        batch.x, fused.x, fused.rows = (t.to(dtype) for t in (batch.x, fused.x, fused.rows))
        expected = results(model, plain(model, batch))
        check(results(model, plain(model, fused, FirstLayerRows(fused))), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", LAYERS)
def test_both_orders_of_a_layer_agree(large, kind, dtype):
    torch.manual_seed(1)
    model = Layered(LAYERS[kind], WIDTH, 8, 4, len(FANOUTS), dropout=0.0).to(dtype)
    for batch in large.batches():
        batch.x = batch.x.to(dtype)
        found = []
        for aggregates_first in (False, True):
            set_orders(model, aggregates_first)
            found.append(results(model, plain(model, batch)))
        check(*found, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["sage", "gcn"])
def test_all_kernels_agree(large, kind, dtype, kernel):
    torch.manual_seed(1)
    model = Layered(LAYERS[kind], WIDTH, 8, 4, len(FANOUTS), dropout=0.0).to(dtype)
    for batch in large.batches():
        batch.x = batch.x.to(dtype)
        found = []
        for one in ("embedding_bag", kernel):
            Order.of(model, False)._replace(kernels=(one,) * 3).apply(model)
            found.append(results(model, plain(model, batch)))
        check(*found, dtype)


@pytest.mark.parametrize(
    "best",
    [
        Order(True, (False, True, True), ("csr", "index_add", "embedding_bag")),
        Order(False, (True,) * 3, ("segment_reduce",) * 3),
    ],
)
def test_the_fastest_order_is_taken(large, monkeypatch, best):
    model = Layered(LAYERS["sage"], WIDTH, 8, 4, len(FANOUTS))

    def differences(_model, order, _large) -> int:
        layers = zip((*order[1], *order[2]), (*best[1], *best[2]), strict=True)
        return sum(a != b for a, b in layers) + (order.fused != best.fused)

    monkeypatch.setattr(orders, "_seconds", differences)
    assert measure_order(model, large) == best


def test_an_order_is_measured_and_applied(large):
    model = Layered(LAYERS["gat"], WIDTH, 8, 4, len(FANOUTS))
    found = measure_order(model, large)
    assert found.kernels == ("index_add",) * 3
    Order(found.fused, (True, False, True), found.kernels).apply(model)
    assert [layer.aggregates_first for layer in model.layers] == [True, False, True]
    assert all(p.grad is not None for p in model.parameters())


def test_a_store_without_features_is_refused(large):
    whole = Batch(**({f: getattr(large.whole, f) for f in Batch.__slots__} | {"x": None}))
    with pytest.raises(Refused, match="found a store without features"):
        next(fused_batches(SharedDraws(whole, 0, large.cut_seeds, (), 7)))
