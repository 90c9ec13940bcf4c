"""Blocks read into an arena against the disk's limit in the same round, past the page cache."""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockstore.format import PAGE_BYTES, BlockGeometry
from blockstore.io.arena import Arena
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.reader import BlockReader, make_transit
from blockstore.io.ring import MAX_PIECES, QueueOwner
from blockstore.kernels.crc import page_crcs
from blockstore.kernels.reads import read_pieces
from blockstore.store import BlockedFile
from blockstore.units import parse_bytes
from tools.bench.harness import BenchOptions, BenchPlan, Ratio, Run, Side, SideSkipped
from tools.bench.setup import rate

DEPTH = 8
LIMIT_BYTES = 1 << 30  # read to measure a disk's limit
TRANSIT_BYTES = 1 << 20  # per thread, for pages at random
OURS, BARE = "ours, verified", f"bare preadv, {DEPTH} threads"
OUR_PAGES, BARE_PAGES = "ours, pages verified", "bare, pages at random"


@dataclass(frozen=True)
class DiskOptions(BenchOptions):
    size: str = "2G"
    block_size: str = "1M"
    arena: str = "256M"
    readers: int = DEPTH
    pages: int = 50_000  # read at random
    rounds: int = 5


def make_file(path: Path, size: int, block: int) -> BlockedFile:
    """Make a file of random blocks with checksums."""
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
    """GB/s of a bare loop: eight threads, one direct preadv per block, nothing verified."""

    def read(thread: int) -> None:
        view = byte_view(aligned_buffer(block))
        for offset in range(thread * block, size, DEPTH * block):
            os.preadv(fd, [view], offset)

    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(DEPTH) as pool:
            return rate(size, lambda: list(pool.map(read, range(DEPTH))))
    finally:
        os.close(fd)


def disk_limit(store: Path) -> dict[str, float]:
    """Current GB/s of the disk, measured on the store's largest shard."""
    path = max((p for p in store.rglob("c/*/*") if p.is_file()), key=lambda p: p.stat().st_size)
    size = min(LIMIT_BYTES, path.stat().st_size)
    block = next(b for b in (1 << 20, PAGE_BYTES) if size >= b)
    return read_bare(path, size // block * block, block)


def open_ours(file: BlockedFile, slots: int, readers: int) -> Iterator[Run]:
    """The engine's reader: into the arena's slots, every page verified."""
    block, count = file.geometry.slot_bytes, file.geometry.num_blocks

    def read() -> None:
        for first in range(0, count, slots):
            blocks = np.arange(first, min(first + slots, count))
            reader.read(0, blocks, np.arange(blocks.size))

    with Arena(slots, block) as arena, BlockReader([file], arena.data, block, readers) as reader:
        _expect_direct(reader)
        yield lambda: rate(count * block, read)


def _expect_direct(reader: BlockReader) -> None:
    if not reader.mode.startswith("O_DIRECT"):
        raise SideSkipped(f"reads are {reader.mode}")


def _pages_at_random(file: BlockedFile, count: int) -> NDArray[np.int64]:
    """Runs of one page."""
    runs = np.ones((count, 3), np.int64)
    pages = file.geometry.num_blocks * file.geometry.pages_per_block
    runs[:, 0], runs[:, 1] = 0, np.random.default_rng(count).integers(0, pages, count)
    return runs


def open_our_pages(file: BlockedFile, count: int, readers: int) -> Iterator[Run]:
    """The engine's reader: through buffers, every page verified."""
    runs = _pages_at_random(file, count)

    def run() -> Mapping[str, float]:
        begun = time.perf_counter()
        reader.stream(0, runs, transit, lambda _low, _high, _pages: None).wait()
        return {"reads_per_s": count / (time.perf_counter() - begun)}

    memory = aligned_buffer(readers * TRANSIT_BYTES)
    transit = make_transit(np.split(memory, readers))
    with BlockReader([file], memory, TRANSIT_BYTES, readers) as reader:
        _expect_direct(reader)
        yield run


def read_bare_pages(file: BlockedFile, count: int, readers: int) -> dict[str, float]:
    """Reads/s with the same numbers of threads and reads in flight, and nothing verified."""
    pieces = np.zeros((count, 4), np.int64)
    pieces[:, :3] = _pages_at_random(file, count)
    pieces[:, 3] = np.arange(count) % MAX_PIECES * PAGE_BYTES

    def read(own: NDArray[np.int64]) -> None:
        memory = aligned_buffer(MAX_PIECES * PAGE_BYTES)
        with QueueOwner() as owner:
            for i in range(0, len(own), MAX_PIECES):
                part = own[i : i + MAX_PIECES]
                read_pieces(owner.queue, fds, part, memory, file.crcs[:0], 0)

    fds = np.array([os.open(file.shards[0], os.O_RDONLY | os.O_DIRECT)])
    try:
        with ThreadPoolExecutor(readers) as pool:
            read(pieces[:1])  # loads the kernel
            begun = time.perf_counter()
            list(pool.map(read, np.array_split(pieces, readers)))
            return {"reads_per_s": count / (time.perf_counter() - begun)}
    finally:
        os.close(int(fds[0]))


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
        sides = [
            Side(OUR_PAGES, open_our_pages, (file, given.pages, given.readers)),
            Side(BARE_PAGES, read_bare_pages, (file, given.pages, given.readers)),
        ]
        ratio = Ratio("share_of_limit", OUR_PAGES, "reads_per_s", BARE_PAGES)
        yield BenchPlan(sides, {"cache": "cold"}, [ratio])
    finally:
        path.unlink(missing_ok=True)
