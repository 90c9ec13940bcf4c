"""What reading costs, measured over a real file, and what follows from it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore import concurrency
from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader
from blockstore.kernels.rows import RowLayout
from blockstore.make_stripes import copy_blocks
from blockstore.stripes import StripeSet
from loaderd.monitoring.devicecost import FLASH, DeviceCost, DeviceGauge, measure_cost
from tools.bench.disk import make_file

BLOCK = 64 << 10


def read_over(pages: list[int], gap: int) -> tuple[int, int]:
    """Pages and runs that bring these pages, in one shard."""
    between = np.diff(pages) - 1
    return len(pages) + int(between[between <= gap].sum()), 1 + int((between > gap).sum())


@given(
    st.sets(st.integers(0, 400), min_size=1, max_size=120).map(sorted),
    st.sampled_from([(13e-6, 3.4e-6), (0.0, 1e-6), (8e-3, 40e-6), (1e-6, 3e-6)]),
)
def test_gaps_are_read_over_where_that_costs_least(pages, rates):
    cost, rows = DeviceCost(*rates), np.array(pages, np.uint32)
    runs = np.zeros((rows.size, 5), np.int64)
    layout = RowLayout(1 << 20, PAGE_BYTES, 1 << 32, 1)
    count = cost.plan_runs(rows, 0, rows.size, layout, 1 << 20, runs)
    ways = [read_over(pages, gap) for gap in range(257)]
    seconds = [r * cost.run_s + p * cost.page_s for p, r in ways]
    maximum = min(seconds) * 10 / 9
    fast = [(s * p, p, r) for s, (p, r) in zip(seconds, ways, strict=True) if s <= maximum]
    assert (int(runs[:count, 2].sum()), count) == min(fast)[1:]


def test_pages_far_apart_are_not_joined_and_dense_ones_are():
    draw, layout = np.random.default_rng(0), RowLayout(1 << 20, PAGE_BYTES, 1 << 32, 1)
    read = []
    for share in (0.03, 0.4):
        rows = np.flatnonzero(draw.random(20_000) < share).astype(np.uint32)
        runs = np.zeros((rows.size, 5), np.int64)
        count = FLASH.plan_runs(rows, 0, rows.size, layout, 256, runs)
        read.append((runs[:count, 2].sum() / rows.size, count / rows.size))
    (far, many), (near, few) = read
    assert far < 1.05
    assert many > 0.9
    assert 1.1 < near < 1.6
    assert few < 0.4


@pytest.mark.parametrize(("size", "measured"), [(16 << 20, True), (1 << 20, False)])
def test_cost_is_measured_where_there_is_enough_to_read(tmp_path, size, measured):
    file = make_file(tmp_path / "file", size, BLOCK)
    data = np.zeros(0, np.uint8)
    buffers = [aligned_buffer(BLOCK) for _ in range(4)]
    with BlockReader([file], data, BLOCK, 4) as reader:
        cost = measure_cost(reader, 0, file, buffers)
        assert (reader.bytes_read > 0) == measured
    assert measured or cost == FLASH
    assert cost.run_s >= 0
    assert cost.page_s > 0


def test_a_disk_that_is_slow_for_a_moment_is_not_taken_for_a_slow_one(tmp_path, monkeypatch):
    file, stall_s, calls = make_file(tmp_path / "file", 16 << 20, BLOCK), 60, itertools.count()
    late, clock = [0], concurrency.perf_counter_ns
    buffers = [aligned_buffer(BLOCK) for _ in range(4)]
    with BlockReader([file], np.zeros(0, np.uint8), BLOCK, 4) as reader:
        stream = reader.stream

        def slow_at_first(*args):
            if next(calls) < 4:
                late[0] += stall_s * 10**9
            return stream(*args)

        monkeypatch.setattr(reader, "stream", slow_at_first)
        monkeypatch.setattr(concurrency, "perf_counter_ns", lambda: clock() + late[0])
        cost = measure_cost(reader, 0, file, buffers)
    assert cost.run_s + cost.page_s < stall_s / 512


def test_each_disk_that_blocks_are_dealt_over_has_its_own_cost(tmp_path):
    """And the slowest one's is that by which runs are planned."""
    whole = make_file(tmp_path / "file", 64 << 20, BLOCK)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    deal = StripeSet(1, "id", 1 << 20, tuple(folders), ()).deal("array", whole.geometry)
    file = replace(whole, shards=deal.files, deal=deal)
    copy_blocks(whole, file, lambda _count: None)
    buffers = [aligned_buffer(1 << 20) for _ in range(4)]
    with BlockReader([file], np.zeros(0, np.uint8), BLOCK, 4) as reader:
        assert reader.disks is not None
        measure_cost(reader, 0, file, buffers, disk=1)
        assert [disk.bytes_read > 0 for disk in reader.disks.all] == [False, True]
        gauge = DeviceGauge(reader)
        cost = gauge.cost([0], buffers)
        assert list(gauge.disks) == folders
        assert cost in gauge.disks.values()
        assert cost.run_s + cost.page_s == max(sum(each) for each in gauge.disks.values())
        assert all(disk.bytes_read for disk in reader.disks.all)
