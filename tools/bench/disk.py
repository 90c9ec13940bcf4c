"""Blocks read into an arena against the disk's limit in the same round, past the page cache."""

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from blockstore.format import BlockGeometry
from blockstore.io.arena import Arena
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.reader import BlockReader
from blockstore.kernels.crc import page_crcs
from blockstore.store import BlockedFile
from blockstore.units import format_bytes, parse_bytes
from tools.bench.harness import Peer, Run, Skipped, measure, report

DEPTH = 8


def make_file(path: Path, size: int, block: int) -> BlockedFile:
    """A file of random blocks, and their checksums."""
    count = size // block
    crcs = np.empty(count * (block // 4096), np.uint32)
    buffer = aligned_buffer(block)
    generator = np.random.default_rng(0)
    with path.open("wb") as f:
        for i in range(count):
            buffer[:] = generator.integers(0, 256, block, np.uint8)
            pages = block // 4096
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


def main(words: list[str]) -> list[dict[str, Any]]:
    """Run the bench; returns its lines."""
    parser = argparse.ArgumentParser(prog="tools.bench disk", description=__doc__)
    parser.add_argument("--folder", default="/tmp/blockstore-bench")
    parser.add_argument("--out", default="")
    parser.add_argument("--size", default="2G")
    parser.add_argument("--block-size", default="1M")
    parser.add_argument("--arena", default="256M")
    parser.add_argument("--readers", type=int, default=DEPTH)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(words)
    size, block = parse_bytes(arguments.size), parse_bytes(arguments.block_size)
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "disk.bin"
    slots = parse_bytes(arguments.arena) // block
    ours, fio, bare = "ours, verified", f"fio, depth {DEPTH}", f"bare preadv, {DEPTH} threads"
    try:
        file = make_file(path, size, block)
        peers = [
            Peer(ours, open_ours, (file, slots, arguments.readers)),
            Peer(fio, open_fio, (path, size, block)),
            Peer(bare, open_preadv, (path, size, block)),
        ]
        found = measure(peers, arguments.rounds)
    finally:
        path.unlink(missing_ok=True)
    limit = found[bare if found[fio].skipped else fio].figures
    figures = found[ours].figures
    if figures:
        pairs = zip(figures["GB_per_s"], limit["GB_per_s"], strict=True)
        figures["share_of_limit"] = [mine / most for mine, most in pairs]
    setting = {"block": format_bytes(block), "size": format_bytes(size), "cache": "cold"}
    return report("disk", setting, found, arguments.out)
