"""Arrays of a workspace that are in use at the same time have memory of their own."""

from dataclasses import fields
from itertools import combinations, product

import numpy as np
import pytest

from blockstore.kernels.records import EdgeRecord
from loaderd.memory.workspace import (
    Carver,
    RowName,
    Sizes,
    Workspace,
    carve_workspace,
    workspace_bytes,
)
from loaderd.plans.base import Shape

# what only sampling needs: the addresses of rows come after it
SAMPLING = {"draws", "record_draws", "starts", "multi_block", "multi_block_degrees"}


def arrays(work: Workspace) -> dict[str, list[np.ndarray]]:
    found = {f.name: getattr(work, f.name) for f in fields(work)}
    found["table"] = [part for part in work.table if part is not None]
    if work.items is work.n_id:
        del found["items"]
    return {
        name: value if isinstance(value, list) else [value]
        for name, value in found.items()
        if isinstance(value, list | np.ndarray) and name != "transit_slots"
    }


@pytest.mark.parametrize("record", [EdgeRecord(), EdgeRecord(items=1, weights=1)])
@pytest.mark.parametrize("stamp", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("trees", [False, True])
def test_no_array_lies_over_another_that_is_still_needed(record, stamp, num_rows, trees):
    names = tuple(RowName(i, str(i)) for i in range(num_rows))
    sizes = Sizes(1000, "uint32", record, names, 50, 60, stamp, trees)
    shape = Shape(10, (10, 90), ((40,), (700,)), 500)
    memory = np.zeros(workspace_bytes(shape, sizes), np.uint8)
    work = carve_workspace(Carver(memory), shape, sizes)
    found = arrays(work)
    assert {"n_id", "counts", "local", "order", "addresses", *SAMPLING} <= found.keys()
    assert len(found["addresses"]) == num_rows
    for (name, some), (other, more) in combinations(found.items(), 2):
        if {name, other} - SAMPLING == {"addresses"}:
            continue
        for one, two in product(some, more):
            assert not np.shares_memory(one, two), (name, other)
    for one, two in combinations(found["addresses"], 2):
        assert not np.shares_memory(one, two)
    for one in found["addresses"]:
        assert one.size == 500 + 740 * sizes.edge_rows
        assert np.shares_memory(one, memory)
