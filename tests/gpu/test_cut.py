"""Batches cut on a GPU are those that are cut on the CPU, to the bit."""

import numpy as np
import torch

from clients.cut import BatchCutter
from clients.large.batch import SecondStage
from clients.torch import Batch
from tests.clients.batches import different_fields
from tests.differences import flat
from tests.graphs import make_csc
from tests.reference import sample_batch


def test_a_cut_is_the_same_on_every_device():
    rng = np.random.default_rng(2)
    graph = make_csc(rng.integers(0, 12, 400), 3)
    seeds = rng.integers(0, 400, 90)
    made = sample_batch(graph.indptr, graph.indices, seeds, (4, 3, -1), 7, 0, 0, "layer")
    n_id = torch.tensor(made.n_id)
    batch = Batch(
        x=n_id[:, None].float(), y=n_id % 5, n_id=n_id, e_id=torch.tensor(flat(made.edges)),
        edge_index=torch.tensor([flat(made.src_local), flat(made.dst_local)]),
        input_id=torch.from_numpy(seeds), batch_size=90, num_sampled_nodes=made.nodes_per_hop,
        num_sampled_edges=[len(e) for e in made.edges], epoch=0, step=0, frontier="layer",
    )  # fmt: skip
    here, there = BatchCutter(batch), BatchCutter(batch.to("cuda"))
    for keep in (None, SecondStage((2, 2, 1), 7, 0, 3)):
        for places in (np.arange(30), rng.permutation(90)[:40], np.arange(60, 90)):
            own = torch.from_numpy(places)
            found = there.batch(own.cuda(), keep).to("cpu")
            assert different_fields(found, here.batch(own, keep)) == []
