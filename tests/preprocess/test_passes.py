"""What features take of the disk: bytes counted at the calls that move them."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockstore.format import PAGE_BYTES, row_geometry
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.sources.plain import PlainSource
from preprocess.stages.rows import dense_bytes
from tests.preprocess.ingest.test_plan import plan_ingest
from tests.preprocess.quiet import QUIET

NODES, WIDTH = 3000, 1024  # half of the larger share below does not hold the rows
TOTAL = NODES * WIDTH * 4
OPTIONS = IngestOptions(mem_bytes=24 << 20, block_bytes=1 << 16)
TEMPORARY = 10 * PAGE_BYTES  # of buckets: that their regions begin at pages, and are read in them


@pytest.fixture
def source(tmp_path: Path) -> PlainSource:
    """12 MB of features."""
    folder = tmp_path / "in"
    folder.mkdir()
    rng = np.random.default_rng(0)
    np.save(folder / "edge_index.npy", rng.integers(0, NODES, (2, 20_000)))
    np.save(folder / "node_feat.npy", rng.random((NODES, WIDTH), np.float32))
    return PlainSource(folder)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Bytes by ("read" or "write", name of the file or of the array that it is a shard of)."""
    found: Counter[tuple[str, str]] = Counter()
    read, write = os.preadv, os.pwrite

    def name(fd: int) -> str:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return path.parts[-4] if path.parts[-3] == "c" else path.name

    def counted_read(fd, buffers, offset, *flags):
        count = read(fd, buffers, offset, *flags)
        found["read", name(fd)] += count
        return count

    def counted_write(fd, data, offset):
        count = write(fd, data, offset)
        found["write", name(fd)] += count
        return count

    monkeypatch.setattr(os, "preadv", counted_read)
    monkeypatch.setattr(os, "pwrite", counted_write)
    return found


def stored_bytes(manifest) -> int:
    """Of the shards of the features: slots, 16 bytes of index each, a checksum a shard."""
    geometry = row_geometry(manifest.types[0].features["x"], OPTIONS.block_bytes)
    return geometry.num_blocks * (geometry.slot_bytes + 16) + 4


@pytest.mark.parametrize(("order", "mem"), [("source", 24 << 20), ("bfs", 42 << 20)])
def test_rows_that_stay_or_fit_are_read_once_and_written_once(
    source, tmp_path: Path, moved, order: str, mem: int
):
    options = replace(OPTIONS, order=order, mem_bytes=mem)
    manifest = ingest(source, tmp_path / "store", options, QUIET).manifest
    assert moved["read", "node_feat.npy"] == TOTAL
    assert moved["write", "x"] == stored_bytes(manifest)
    assert moved["read", "rows"] == moved["write", "rows"] == moved["read", "x"] == 0


@pytest.mark.parametrize("order", ["bfs", "random", "degree"])
def test_rows_that_do_not_fit_are_read_twice_and_written_twice(
    source, tmp_path: Path, moved, order: str
):
    options = replace(OPTIONS, order=order)
    manifest = ingest(source, tmp_path / "store", options, QUIET).manifest
    with_places = TOTAL + 4 * NODES
    assert moved["read", "node_feat.npy"] == TOTAL
    assert with_places <= moved["write", "rows"] <= with_places + TEMPORARY
    assert with_places <= moved["read", "rows"] <= with_places + 2 * TEMPORARY
    assert moved["write", "x"] == stored_bytes(manifest)
    assert moved["read", "x"] == 0


def test_plans_say_the_same(source):
    def features(**changes):
        (stage,) = [
            s for s in plan_ingest(source, replace(OPTIONS, **changes)).stages if "/x" in s.name
        ]
        return stage.read_bytes, stage.written_bytes - TOTAL // 1024

    once, twice = (TOTAL, TOTAL), (2 * TOTAL + 4 * NODES, 2 * TOTAL + 4 * NODES)
    assert features(order="source") == features(order="bfs", mem_bytes=42 << 20) == once
    assert features(order="bfs") == features(order="degree") == twice


def test_rows_fit_beside_their_chunks():
    """Half of a small share, nearly all of a large one."""
    assert dense_bytes(1024) == 512
    assert dense_bytes(4 << 30) == (4 << 30) - (64 << 20)
