"""Training steps replayed as one CUDA graph: the weights of eager steps, with few launches."""

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from clients.large.padding import PaddedBatch, Padding, ReplayedStep
from clients.models import LAYERS, Layered
from clients.torch import Batch
from tests.differences import flat
from tests.graphs import make_csc
from tests.reference import sample_batch

STEPS, WIDTH = 6, 16


def batches() -> list[PaddedBatch]:
    graph, padding = make_csc([7] * 400, 3), Padding()
    found = []
    for step in range(STEPS):
        made = sample_batch(
            graph.indptr, graph.indices, range(50 * step, 50 * step + 50), (4, 3), 7, 0, step
        )
        n_id = torch.tensor(made.n_id)
        batch = Batch(
            x=torch.sin(n_id[:, None] * torch.arange(1, WIDTH + 1)), y=n_id % 5, n_id=n_id,
            edge_index=torch.tensor([flat(made.src_local), flat(made.dst_local)]), e_id=None,
            input_id=torch.arange(50), batch_size=50, num_sampled_nodes=made.nodes_per_hop,
            num_sampled_edges=[len(e) for e in made.edges], epoch=0, step=step,
        ).to("cuda")  # fmt: skip
        padding.observe(batch)
        found.append(batch)
    padding.settle(padding.maxima)
    return [padding(batch) for batch in found]


class Steps:
    """A model and its optimizer, which has stepped once."""

    def __init__(self, first: PaddedBatch) -> None:
        torch.manual_seed(1)
        self.model = Layered(LAYERS["sage"], WIDTH, 32, 5, dropout=0.0).cuda()
        for layer in self.model.layers:
            layer.kernel = "index_add"
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01, capturable=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.backward(first)
        self.optimizer.step()

    def backward(self, batch: PaddedBatch) -> torch.Tensor:
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
        logits = self.model(batch.x, batch.edge_index, *counts, batch.frontier)
        loss = functional.cross_entropy(logits, batch.y[: batch.batch_size], ignore_index=-1)
        loss.backward()
        return loss.detach()


def launches(run) -> int:
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both, acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if "Launch" in e.key)


def test_replayed_steps_give_the_weights_of_eager_ones():
    own = batches()
    eager, recorded = Steps(own[0]), Steps(own[0])
    replayed = ReplayedStep(recorded.backward, recorded.optimizer.step)
    for batch in own:
        loss = eager.backward(batch)
        eager.optimizer.step()
        torch.testing.assert_close(replayed(batch), loss, atol=1e-4, rtol=1e-4)
    for one, other in zip(recorded.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)  # index_add adds in any order

    def eager_step() -> None:
        eager.backward(own[0])
        eager.optimizer.step()

    assert launches(lambda: replayed(own[1])) <= 0.4 * launches(eager_step)
