"""Where rows lie in files, and rows read in parts: over blocks and shards."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blockstore.format
import blockstore.writer
from blockstore.format import BlockGeometry, RowArray
from blockstore.store import BlockedFile, open_store, scan_blocks, scan_rows
from tests.graphs import make_csc
from tests.stores import write_store

ROW, PER_BLOCK, PER_SHARD, BLOCKS = 64, 64, 3, 8
ROWS = PER_BLOCK * BLOCKS


@given(st.integers(0, ROWS), st.integers(0, ROWS))
def test_ranges_of_files_are_the_rows_in_order(first, stop):
    geometry = BlockGeometry(4096, 4096, BLOCKS, PER_SHARD, PER_BLOCK)
    shards = tuple(Path(str(i)) for i in range(geometry.num_shards))
    file = BlockedFile("hops", geometry, shards, np.empty(0, np.uint32))
    if first > stop:
        with pytest.raises(ValueError, match=f"hops: rows {first} to {stop}, expected 0 to {ROWS}"):
            file.row_ranges(ROW, first, stop)
        return
    found = [
        int(r.path.name) * PER_SHARD * PER_BLOCK * ROW + r.offset + byte
        for r in file.row_ranges(ROW, first, stop)
        for byte in range(0, r.num_bytes, ROW)
    ]
    assert found == list(range(first * ROW, stop * ROW, ROW))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """1,500 nodes: three blocks of features, in shards of two."""
    path = tmp_path_factory.mktemp("store") / "store"
    with pytest.MonkeyPatch.context() as patch:
        for module in (blockstore.format, blockstore.writer):
            patch.setattr(module, "SHARD_BYTES", 2 * 4096)
        write_store(path, make_csc([2] * 1500, 1), [1, 2])
        yield open_store(path)


@settings(deadline=None)
@given(bounds=st.tuples(st.integers(0, 1500), st.integers(0, 1500)))
def test_rows_are_read_in_part(store, bounds):
    low, high = sorted(bounds)
    x: RowArray = store.manifest.types[0].features["x"]
    pieces = scan_rows(store, x, start=low, stop=high)
    found = {first + i: row for first, rows in pieces for i, row in enumerate(rows.tolist())}
    assert all(found[i] == [float(i), 2.0 * i] for i in range(low, high))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_share_the_blocks_out(store, lanes):
    file = store.rows(store.manifest.types[0].features["x"])
    assert len(file.shards) == 2
    for start, stop in ((0, 3), (1, 3), (0, 2), (2, 2)):
        found = [
            [first + i for first, blocks in scan_blocks(file, 4096, start, stop, (lane, lanes))
             for i in range(len(blocks))]
            for lane in range(lanes)
        ]  # fmt: skip
        assert sorted(block for lane in found for block in lane) == list(range(start, stop))
        assert max(map(len, found)) - min(map(len, found)) <= 1
