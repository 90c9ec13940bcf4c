"""What reading costs, measured over a real file, and what follows from it."""

from dataclasses import replace

import numpy as np
import pytest

from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader
from blockstore.make_stripes import copy_blocks
from blockstore.stripes import StripeSet
from loaderd.monitoring.devicecost import FLASH, DeviceCost, DeviceGauge, measure_cost
from tools.bench.disk import make_file

BLOCK = 64 << 10


@pytest.mark.parametrize(
    ("cost", "gap"),
    [
        ((50e-6, 3e-6), 16),
        ((36e-6, 3e-6), 16),
        ((30e-6, 3e-6), 8),
        ((3e-6, 3e-6), 1),
        ((0.0, 1e-6), 0),
        ((8e-3, 1e-6), 256),
        ((1e-6, 3e-6), 0),
    ],
)
def test_a_gap_is_read_where_that_is_no_slower_than_another_run(cost, gap):
    assert DeviceCost(*cost).gap_pages == gap


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
    assert 0 <= cost.gap_pages <= 256


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
