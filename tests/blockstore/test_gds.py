"""Ranges of files read past the daemon, over several files, every page verified."""

import numpy as np
import pytest

import blockstore.format
import blockstore.writer
from blockstore.errors import CorruptBlock
from blockstore.io import gds
from blockstore.io.gds import DeviceReader, HostReader
from blockstore.store import open_store
from tests.hopstores import make_hops, write_hop_store


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """An array of 3,000 rows of 24 bytes over five files, as the store has it and as it was."""
    path = tmp_path_factory.mktemp("gds") / "store"
    with pytest.MonkeyPatch.context() as patch:
        for module in (blockstore.format, blockstore.writer):
            patch.setattr(module, "SHARD_BYTES", 1 << 14)
        wanted = make_hops(3000, 6, {"sym": 1}, 4)
        manifest = write_hop_store(path, {"train": wanted})
        array = manifest.types[0].hops["train"].operators["sym"][1]
        yield open_store(path).rows(array), wanted.x["sym", 1]


@pytest.mark.parametrize("step", [1, 3, gds.STEP_PAGES])
@pytest.mark.parametrize("rows", [(0, 3000), (1, 2), (700, 1500), (2999, 3000), (5, 5)])
def test_rows_are_read_to_the_host(stored, monkeypatch, step, rows):
    monkeypatch.setattr(gds, "STEP_PAGES", step)
    file, expected = stored
    assert len(file.shards) > 3
    reader = HostReader(file)
    for _ in range(2):  # files stay open
        out = np.full(24 * (rows[1] - rows[0]), 7, np.uint8)
        reader.read(file.row_ranges(24, *rows), out)
        np.testing.assert_array_equal(out.view("f4").reshape(-1, 6), expected[slice(*rows)])
    reader.close()


def test_a_wrong_bit_is_named(stored):
    file, _ = stored
    shard = file.shards[1]
    raw = shard.read_bytes()
    changed = bytearray(raw)
    changed[9000] ^= 4
    shard.write_bytes(changed)
    reader = HostReader(file)
    try:
        with pytest.raises(CorruptBlock, match=rf"{shard}\+8192: crc32c of the page"):
            reader.read(file.row_ranges(24, 0, 3000), np.empty(72000, np.uint8))
        before = (1 << 14) // 24 - 1
        reader.read(file.row_ranges(24, 0, before), np.empty(24 * before, np.uint8))
    finally:
        reader.close()
        shard.write_bytes(raw)


def test_no_kvikio_is_said(monkeypatch):
    monkeypatch.setattr(gds, "kvikio", None)
    with pytest.raises(RuntimeError, match=r"kvikio is not installed: pip install"):
        DeviceReader()
