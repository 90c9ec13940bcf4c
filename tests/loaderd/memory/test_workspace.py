"""Arrays of a workspace that are in use at the same time have memory of their own."""

from dataclasses import fields
from itertools import combinations, product

import numpy as np
import pytest

from blockstore.kernels.records import EdgeRecord
from loaderd.memory.tables import RenumberingTables
from loaderd.memory.workspace import (
    Carver,
    RowName,
    Sizes,
    TableKind,
    Workspace,
    carve_workspace,
    workspace_bytes,
)
from loaderd.plans.base import Shape

# what only sampling needs: the addresses of rows come after it
SAMPLING = {"draws", "record_draws", "starts", "multi_block", "multi_block_degrees"}


def arrays(work: Workspace, kind: TableKind) -> dict[str, list[np.ndarray]]:
    found = {f.name: getattr(work, f.name) for f in fields(work)}
    if kind is not TableKind.SHARED:
        found["table"] = [part for part in work.tables.take() if part is not None]
    if work.items is work.n_id:
        del found["items"]
    return {
        name: value if isinstance(value, list) else [value]
        for name, value in found.items()
        if isinstance(value, list | np.ndarray) and name != "transit_slots"
    }


@pytest.mark.parametrize("record", [EdgeRecord(), EdgeRecord(items=1, weights=1)])
@pytest.mark.parametrize(
    ("kind", "trees"), [*((kind, False) for kind in TableKind), (TableKind.HASHED, True)]
)
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_no_array_lies_over_another_that_is_still_needed(record, kind, trees, num_rows):
    names = tuple(RowName(i, str(i)) for i in range(num_rows))
    sizes = Sizes(1000, "uint32", record, names, 50, 60, kind, trees)
    shape = Shape(10, (10, 90), ((40,), (700,)), 500)
    memory = np.zeros(workspace_bytes(shape, sizes), np.uint8)
    shared = RenumberingTables() if kind is TableKind.SHARED else None
    work = carve_workspace(Carver(memory), shape, sizes, shared)
    found = arrays(work, kind)
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
