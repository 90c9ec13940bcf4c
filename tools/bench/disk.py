"""Blocks read into an arena against the disk's limit in the same round, past the page cache."""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.io.arena import Arena
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.reader import BlockReader
from blockstore.kernels.crc import page_crcs
from blockstore.store import BlockedFile
from blockstore.units import parse_bytes
from tools.bench.harness import BenchOptions, BenchPlan, Ratio, Run, Side, SideSkipped

DEPTH = 8
LIMIT_BYTES = 1 << 30  # that are read to know a disk's limit
OURS, BARE = "ours, verified", f"bare preadv, {DEPTH} threads"


@dataclass(frozen=True)
class DiskOptions(BenchOptions):
    size: str = "2G"
    block_size: str = "1M"
    arena: str = "256M"
    readers: int = DEPTH
    rounds: int = 5


def make_file(path: Path, size: int, block: int) -> BlockedFile:
    """A file of random blocks, and their checksums."""
    count, pages = size // block, block // PAGE_BYTES
    crcs = np.empty(count * pages, np.uint32)
    buffer = aligned_buffer(block)
    generator = np.random.default_rng(0)
    with path.open("wb") as f:
        for i in range(count):
            buffer[:] = generator.integers(0, 256, block, np.uint8)
            page_crcs(buffer, pages, crcs[i * pages : (i + 1) * pages])
            f.write(buffer.data)
        f.flush()
        os.fsync(f.fileno())
    geometry = BlockGeometry(block, block, count, blocks_per_shard=count, rows_per_block=1)
    return BlockedFile(path.name, geometry, (path,), crcs)


def read_bare(path: Path, size: int, block: int) -> dict[str, float]:
    """GB/s of a bare loop: eight threads, one direct preadv a block, nothing verified."""

    def read(thread: int) -> None:
        view = byte_view(aligned_buffer(block))
        for offset in range(thread * block, size, DEPTH * block):
            os.preadv(fd, [view], offset)

    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(DEPTH) as pool:
            begun = time.perf_counter()
            list(pool.map(read, range(DEPTH)))
            return {"GB_per_s": size / (time.perf_counter() - begun) / 1e9}
    finally:
        os.close(fd)


def disk_limit(store: Path) -> dict[str, float]:
    """GB/s that the disk gives now, over the store's largest shard."""
    path = max((p for p in store.rglob("c/*/*") if p.is_file()), key=lambda p: p.stat().st_size)
    size = min(LIMIT_BYTES, path.stat().st_size)
    block = next(b for b in (1 << 20, PAGE_BYTES) if size >= b)
    return read_bare(path, size // block * block, block)


def open_ours(file: BlockedFile, slots: int, readers: int) -> Iterator[Run]:
    """The engine's reader: into the arena's slots, every page verified."""
    block, count = file.geometry.slot_bytes, file.geometry.num_blocks

    def run() -> Mapping[str, float]:
        begun = time.perf_counter()
        for first in range(0, count, slots):
            blocks = np.arange(first, min(first + slots, count))
            reader.read(0, blocks, np.arange(blocks.size))
        return {"GB_per_s": count * block / (time.perf_counter() - begun) / 1e9}

    with Arena(slots, block) as arena, BlockReader([file], arena.data, block, readers) as reader:
        if not reader.mode.startswith("O_DIRECT"):
            raise SideSkipped(f"reads are {reader.mode}")
        yield run


def disk(given: DiskOptions) -> Iterator[BenchPlan]:
    size, block = parse_bytes(given.size), parse_bytes(given.block_size)
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "disk.bin"
    try:
        file = make_file(path, size, block)
        slots = parse_bytes(given.arena) // block
        sides = [
            Side(OURS, open_ours, (file, slots, given.readers)),
            Side(BARE, read_bare, (path, size, block)),
        ]
        yield BenchPlan(sides, {"cache": "cold"}, [Ratio("share_of_limit", OURS, "GB_per_s", BARE)])
    finally:
        path.unlink(missing_ok=True)
