"""Padded batches: one shape, one compilation, and the results of the batches that they hold."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import _dynamo as dynamo  # noqa: E402

from clients.cut import BatchCutter  # noqa: E402
from clients.large.padding import PaddedBatch, Padding  # noqa: E402
from clients.models import LAYERS, Layered  # noqa: E402
from clients.torch import Batch  # noqa: E402
from tests.differences import flat  # noqa: E402
from tests.graphs import make_csc  # noqa: E402
from tests.reference import sample_batch  # noqa: E402

WIDTH, FANOUTS = 12, (4, 3, 2)


@pytest.fixture(params=["new", "layer"])
def batches(request) -> list[Batch]:
    """Of different sizes."""
    rng = np.random.default_rng(2)
    graph = make_csc(rng.integers(0, 12, 300), 3)
    torch.manual_seed(0)
    x, found = torch.randn(300, WIDTH), []
    for step, size in enumerate((20, 30, 25, 28)):
        seeds = rng.permutation(300)[:size].tolist()
        made = sample_batch(graph.indptr, graph.indices, seeds, FANOUTS, 7, 0, step, request.param)
        n_id = torch.tensor(made.n_id)
        found.append(
            Batch(
                x=x[n_id], y=n_id % 4, n_id=n_id, e_id=None, input_id=torch.arange(size),
                edge_index=torch.tensor([flat(made.src_local), flat(made.dst_local)]),
                batch_size=size, num_sampled_nodes=made.nodes_per_hop, epoch=0, step=step,
                num_sampled_edges=[len(e) for e in made.edges], frontier=request.param,
            )
        )  # fmt: skip
    return found


def settled(batches) -> Padding:
    padding = Padding()
    for batch in batches:
        padding.observe(batch)
    padding.settle(padding.maxima)
    return padding


def run(model, batch, seeds: int, dtype=torch.float32) -> list:
    """Logits of the seeds that there are, and the gradients of their loss."""
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = None
    counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
    logits = model(batch.x.to(dtype), batch.edge_index, *counts, batch.frontier)
    labels = batch.y[: batch.batch_size]
    torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1).backward()
    return [logits[:seeds].detach(), *(p.grad.clone() for p in parameters)]


def check(found: list, expected: list, bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", LAYERS)
def test_padded_batches_give_what_the_others_give(batches, kind, dtype, bound):
    torch.manual_seed(1)
    model = Layered(LAYERS[kind], WIDTH, 8, 4, len(FANOUTS), dropout=0.0).to(dtype)
    padding, shapes = settled(batches), set()
    for batch in batches:
        padded = padding(batch)
        assert isinstance(padded, PaddedBatch)
        assert bool((padded.edge_index[0] < padded.num_nodes).all())
        shapes.add((padded.x.shape, padded.edge_index.shape, padded.batch_size))
        expected = run(model, batch, batch.batch_size, dtype)
        check(run(model, padded, batch.batch_size, dtype), expected, bound)
    assert len(shapes) == 1
    assert padding.larger == 0


@pytest.mark.parametrize(
    ("kind", "batches"),
    [
        pytest.param(kind, frontier, marks=() if frontier == usual else pytest.mark.long)
        for kind, usual in (("sage", "new"), ("gcn", "layer"), ("gat", "new"))
        for frontier in ("new", "layer")
    ],
    indirect=["batches"],
)
def test_a_model_is_compiled_once(batches, kind):
    dynamo.reset()
    dynamo.utils.counters.clear()
    model = Layered(LAYERS[kind], WIDTH, 8, 4, len(FANOUTS), dropout=0.0)
    compiled = torch.compile(model.forward, dynamic=False, fullgraph=True, backend="aot_eager")
    padding = settled(batches)
    for batch in batches:
        padded, counts = padding(batch), (padding(batch).num_sampled_nodes,)
        counts += (padded.num_sampled_edges,)
        found = compiled(padded.x, padded.edge_index, *counts, padded.frontier)
        found.square().sum().backward()
        expected = run(model, batch, batch.batch_size)[0]
        torch.testing.assert_close(found[: batch.batch_size], expected, rtol=1e-5, atol=1e-5)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_larger_batch_is_left_as_it_is_and_counted(batches):
    padding = settled(batches[:1])  # of the fewest seeds
    assert isinstance(padding(batches[0]), PaddedBatch)
    assert padding(batches[1]) is batches[1]
    assert padding.larger == 1


def test_a_batch_of_fewer_seeds_is_padded_too(batches):
    padding = settled(batches)
    if batches[0].frontier == "layer":
        small = BatchCutter(batches[0]).batch(torch.arange(2))
        padded = padding(small)
        assert padded.y[: padded.batch_size].tolist()[:3] == [*small.y[:2].tolist(), -1]


def test_bounds_are_saved(batches):
    padding, other = settled(batches), Padding()
    other.load_state_dict(padding.state_dict())
    assert other.settled
    assert other.maxima == padding.maxima
