"""What reading costs, measured over a real file, and what follows from it."""

import numpy as np
import pytest

from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader
from loaderd.monitoring.devicecost import FLASH, DeviceCost, measure_cost
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
