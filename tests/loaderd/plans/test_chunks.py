"""Plans of hop-wise batches: pure functions of (seed, epoch, step), against plain Python."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blockstore.format
import blockstore.writer
from blockstore.format import BlockGeometry, RowArray
from blockstore.store import numpy_dtype, open_store
from loaderd.api.protocol import HopBatches, Resolved
from loaderd.plans.base import Part
from loaderd.plans.chunks import HopPlan
from loaderd.sampling.propagated.files import RUN_PAGES, HopArray, chosen_arrays
from loaderd.sampling.propagated.sizing import MAX_RANGES
from tests.differences import At
from tests.hopstores import make_hops, write_hop_store
from tests.reference import hop_order

ALL = Part()


def make_plan(
    rows: int, batch: int, method: str = "cr", chunk: int = 1, redeal: int = 0, seed: int = 0,
    shuffle: bool = True, part: Part = ALL,
) -> HopPlan:  # fmt: skip
    hops = HopBatches(("sym",), 2, method, chunk, redeal, True)
    resolved = Resolved(
        family="hops", fingerprint="f00d", sampler=1, seeds="split:train", seed_type="node",
        num_seeds=rows, fanouts=(), frontier="", replace=False, weighted=False, batch_size=batch,
        shuffle=shuffle, seed=seed, edge_ids=False, hops=hops,
    )  # fmt: skip
    return HopPlan(resolved, part)


def rows_of(plan: HopPlan, epoch: int, step: int) -> list[int]:
    unit = plan.unit(epoch, step)
    out = np.empty(unit.num_seeds, np.int64)
    plan.rows(unit, out)
    ranges = plan.ranges(unit)
    assert [i for a, b in ranges.tolist() for i in range(a, b)] == out.tolist()
    assert len(ranges) <= plan.max_ranges
    assert out.size <= plan.max_rows
    return out.tolist()


PLANS = {
    "rows": st.integers(1, 400),
    "chunk": st.integers(1, 400),
    "batch": st.integers(1, 90),
    "world": st.integers(1, 4),
    "seed": st.integers(0, 2**63 - 1),
    "epoch": st.integers(0, 2**40),
    "redeal": st.integers(0, 3),
    "method": st.sampled_from(["cr", "rr"]),
    "shuffle": st.booleans(),
}


@settings(deadline=None)
@given(**PLANS)
def test_an_epoch_is_the_references(
    rows, chunk, batch, world, seed, epoch, redeal, method, shuffle
):
    chunk, world = min(chunk, rows), min(world, rows, batch)
    chunk, redeal = (0, 0) if method == "rr" else (chunk, redeal * shuffle)
    plans = [
        make_plan(rows, batch, method, chunk, redeal, seed, shuffle, Part(rank, world))
        for rank in range(world)
    ]
    found = [
        row
        for step in range(plans[0].num_steps)
        for plan in plans
        for row in rows_of(plan, epoch, step)
    ]
    expected = hop_order(rows, seed, epoch, method, chunk, shuffle, redeal)
    for step in range(plans[0].num_steps):
        own = slice(plans[0].unit(epoch, step).start, plans[-1].unit(epoch, step).stop)
        At(epoch, step).same("rows", found[own], expected[own])
    assert found == expected
    assert sorted(found) == list(range(rows))


def test_chunks_of_one_row_are_the_rows_of_plan_rows():
    cr, rr = make_plan(5000, 700, "cr", 1), make_plan(5000, 700, "rr", 0)
    for step in range(cr.num_steps):
        assert rows_of(cr, 3, step) == rows_of(rr, 3, step)


def test_a_batch_of_one_chunk_is_one_range():
    plan = make_plan(10_001, 1000, "cr", 1000)
    ranges = [plan.ranges(plan.unit(2, step)) for step in range(plan.num_steps)]
    assert [len(r) for r in ranges] == [1] * 11
    assert ranges[-1].tolist() == [[10_000, 10_001]]
    assert sorted(int(r[0, 0]) for r in ranges) == list(range(0, 10_001, 1000))
    again = [plan.ranges(plan.unit(3, step))[0, 0] for step in range(10)]
    assert again != [r[0, 0] for r in ranges[:10]]


def test_dealing_again_changes_what_is_in_a_chunk_every_few_epochs():
    plan = make_plan(16_000, 1600, "cr", 1600, redeal=2)

    def chunks(epoch: int) -> set[frozenset[int]]:
        return {frozenset(rows_of(plan, epoch, step)) for step in range(10)}

    assert chunks(0) == chunks(1)
    assert chunks(2) == chunks(3)
    assert not chunks(1) & chunks(2)
    assert not chunks(3) & chunks(4)
    assert plan.max_ranges <= MAX_RANGES


@settings(deadline=None)
@given(
    row_items=st.integers(1, 3000),
    num_rows=st.integers(1, 5000),
    per_shard=st.integers(1, 9),
    data=st.data(),
)
def test_runs_of_pages_are_those_of_the_rows(row_items, num_rows, per_shard, data):
    block = 4096 // np.gcd(4096, 4 * row_items)
    pages = block * row_items * 4 // 4096
    geometry = BlockGeometry(pages * 4096, pages * 4096, -(-num_rows // block), per_shard, block)
    array = HopArray("x", RowArray("x", "float32", num_rows, (row_items,)), 0, geometry)
    first = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(first + 1, num_rows))
    low, high = array.pages(first, stop)
    assert low * 4096 <= first * array.row_bytes
    assert first * array.row_bytes < (low + 1) * 4096
    assert (high - 1) * 4096 < stop * array.row_bytes <= high * 4096 <= array.num_pages * 4096
    runs = array.runs(low, high)
    held = [s * per_shard * pages + p + i for s, p, n in runs.tolist() for i in range(n)]
    assert held == list(range(low, high))
    assert (runs[:, 1] + runs[:, 2] <= per_shard * pages).all()
    assert (runs[:, 2] <= RUN_PAGES).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_where_the_files_have_them(tmp_path, monkeypatch, dtype):
    for module in (blockstore.format, blockstore.writer):
        monkeypatch.setattr(module, "SHARD_BYTES", 1 << 14)  # several files an array
    wanted = make_hops(3000, 6, {"sym": 2, "row": 1}, 4, dtype)
    manifest = write_hop_store(tmp_path / "store", {"train": wanted})
    store = open_store(tmp_path / "store")
    hops = manifest.types[0].hops["train"]
    arrays = chosen_arrays(manifest, hops, ("sym", "row"), 1, True, 0)
    assert [a.name for a in arrays] == ["sym:0", "sym:1", "row:1", "y", "n_id"]
    assert len(store.rows(arrays[0].array).shards) > 2
    for array, (first, stop) in product(
        arrays, ((0, 3000), (700, 1500), (1, 2), (2999, 3000), (5, 5))
    ):
        ranges = store.rows(array.array).row_ranges(array.row_bytes, first, stop)
        raw = b"".join(r.path.read_bytes()[r.offset : r.offset + r.num_bytes] for r in ranges)
        found = np.frombuffer(raw, numpy_dtype(array.array.dtype))
        operator, _, hop = array.name.partition(":")
        values = {"y": wanted.y, "n_id": wanted.n_id}.get(array.name)
        expected = wanted.x[operator, int(hop)] if values is None else values
        assert np.array_equal(found, expected[first:stop].reshape(-1))
    file = store.rows(arrays[0].array)
    with pytest.raises(ValueError, match="expected 0 to"):
        file.row_ranges(arrays[0].row_bytes, 0, 4097)
    with pytest.raises(ValueError, match="gaps"):
        file.row_ranges(20, 0, 10)
