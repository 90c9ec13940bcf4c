"""Blocks read into an arena against the disk's limit in the same round, past the page cache."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from tools.bench import harness
from tools.bench.harness import Plan, Ratio, Run, Side, Skipped

DEPTH = 8
LIMIT_BYTES = 1 << 30  # that are read to know a disk's limit
OURS, FIO, BARE = "ours, verified", f"fio, depth {DEPTH}", f"bare preadv, {DEPTH} threads"


@dataclass(frozen=True)
class Options(harness.Options):
    size: str = "2G"
    block_size: str = "1M"
    arena: str = "256M"
    readers: int = DEPTH
    rounds: int = 5


def make_file(path: Path, size: int, block: int) -> BlockedFile:
    """A file of random blocks, and their checksums."""
    count = size // block
    crcs = np.empty(count * (block // PAGE_BYTES), np.uint32)
    buffer = aligned_buffer(block)
    generator = np.random.default_rng(0)
    with path.open("wb") as f:
        for i in range(count):
            buffer[:] = generator.integers(0, 256, block, np.uint8)
            pages = block // PAGE_BYTES
            page_crcs(buffer, pages, crcs[i * pages : (i + 1) * pages])
            f.write(buffer.data)
        f.flush()
        os.fsync(f.fileno())
    geometry = BlockGeometry(block, block, count, blocks_per_shard=count, rows_per_block=1)
    return BlockedFile(path.name, geometry, (path,), crcs)


@contextmanager
def open_fio(path: Path, size: int, block: int, what: str = "read") -> Iterator[Run]:
    """fio: sequential blocks, direct, depth 8, io_uring or else libaio.

    `what`: "read", or "rw": half of the blocks are written, and all bytes count.
    """
    if not shutil.which("fio"):
        raise Skipped("fio is not installed")

    def run() -> Mapping[str, float]:
        for engine in ("io_uring", "libaio"):
            words = [
                "fio", "--name=limit", f"--filename={path}", f"--rw={what}", f"--bs={block}",
                "--direct=1", f"--ioengine={engine}", f"--iodepth={DEPTH}", f"--size={size}",
                "--output-format=json",
            ]  # fmt: skip
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                job = json.loads(done.stdout)["jobs"][0]
                return {"GB_per_s": (job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9}
        raise RuntimeError(f"fio failed: {done.stderr}")

    yield run


@contextmanager
def open_preadv(path: Path, size: int, block: int) -> Iterator[Run]:
    """A bare loop: eight threads, one preadv a block, nothing verified."""
    buffers = [aligned_buffer(block) for _ in range(DEPTH)]

    def run() -> Mapping[str, float]:
        def read(thread: int) -> None:
            view = byte_view(buffers[thread])
            for offset in range(thread * block, size, DEPTH * block):
                os.preadv(fd, [view], offset)

        begun = time.perf_counter()
        list(pool.map(read, range(DEPTH)))
        return {"GB_per_s": size / (time.perf_counter() - begun) / 1e9}

    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(DEPTH) as pool:
            yield run
    finally:
        os.close(fd)


def disk_limit(store: Path) -> float:
    """GB/s that the disk gives the better of two readers now, over the store's largest shard."""
    path = max((p for p in store.rglob("c/*/*") if p.is_file()), key=lambda p: p.stat().st_size)
    size = min(LIMIT_BYTES, path.stat().st_size)
    block = next(b for b in (1 << 20, PAGE_BYTES) if size >= b)
    rates = []
    for opener in (open_fio, open_preadv):
        with contextlib.suppress(Skipped), opener(path, size // block * block, block) as run:
            rates.append(run()["GB_per_s"])
    return max(rates)


@contextmanager
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
        if reader.mode != "O_DIRECT":
            raise Skipped(f"reads are {reader.mode}")
        yield run


def plans(given: Options) -> Iterator[Plan]:
    """Ours, fio, and a bare loop: the limit if there is no fio."""
    size, block = parse_bytes(given.size), parse_bytes(given.block_size)
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "disk.bin"
    limit = FIO if shutil.which("fio") else BARE
    try:
        file = make_file(path, size, block)
        yield Plan(
            [
                Side(OURS, open_ours, (file, parse_bytes(given.arena) // block, given.readers)),
                Side(FIO, open_fio, (path, size, block)),
                Side(BARE, open_preadv, (path, size, block)),
            ],
            {"cache": "cold"},
            [Ratio("share_of_limit", OURS, "GB_per_s", limit)],
        )
    finally:
        path.unlink(missing_ok=True)
