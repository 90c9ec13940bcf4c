"""All rows of a split on a device: batches drawn there are those of the plan."""

import pytest
import torch

from clients.hopwise.batch import HopBatch, ResidentRows
from loaderd.api.protocol import HopBatches, Resolved
from loaderd.plans.base import Part
from loaderd.plans.chunks import HopPlan
from tests.reference import hop_order

ROWS, BATCH, SEED = 103, 20, 5


def rows(labels: bool, piece: int) -> list[HopBatch]:
    """Batches in the stored order."""
    found = []
    for first in range(0, ROWS, piece):
        ids = torch.arange(first, min(first + piece, ROWS))
        hops = [torch.stack([ids, ids * 2], 1).float(), ids[:, None].double()]
        found.append(HopBatch(hops, ids % 7 if labels else None, 1000 - ids, ids, 0, 0))
    return found


@pytest.mark.parametrize("method", ["cr", "rr"])
@pytest.mark.parametrize(("labels", "piece"), [(True, 17), (False, 200)])
def test_batches_are_the_plans(method, labels, piece):
    hops = HopBatches(("sym",), 1, method, 7 if method == "cr" else 0, 0, labels)
    resolved = Resolved(
        family="hops", fingerprint="f00d", sampler=1, seeds="split:train", seed_type="node",
        num_seeds=ROWS, fanouts=(), frontier="", replace=False, weighted=False, batch_size=BATCH,
        shuffle=True, seed=SEED, edge_ids=False, hops=hops,
    )  # fmt: skip
    plan = HopPlan(resolved, Part())
    reader = ResidentRows(rows(labels, piece), plan, "cpu")
    for epoch in (0, 3):
        reader.epoch = epoch
        order = hop_order(ROWS, SEED, epoch, method, 7, True, 0)
        for step in range(plan.num_steps):
            batch = reader.read(step)
            own = order[step * BATCH : (step + 1) * BATCH]
            assert (batch.epoch, batch.step) == (epoch, step)
            assert batch.input_id.tolist() == own
            assert batch.n_id.tolist() == [1000 - i for i in own]
            assert batch.x[0].tolist() == [[i, 2 * i] for i in own]
            assert batch.x[1].tolist() == [[i] for i in own]
            assert (batch.y is not None) == labels
            assert batch.y is None or batch.y.tolist() == [i % 7 for i in own]
