"""Blocks read into an arena against the disk's limit in the same round, past the page cache."""

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from blockstore.format import graph_geometry
from blockstore.io.arena import Arena
from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.reader import BlockReader
from blockstore.kernels.crc import page_crcs
from blockstore.store import BlockedFile
from blockstore.units import format_bytes, parse_bytes
from tools.bench.harness import Peer, measure, report

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
    return BlockedFile(path.name, graph_geometry(count, block), (path,), crcs)


def fio_run(path: Path, size: int, block: int) -> Mapping[str, float]:
    """fio: sequential blocks, direct, depth 8, io_uring or else libaio."""
    for engine in ("io_uring", "libaio"):
        words = [
            "fio", "--name=limit", f"--filename={path}", "--rw=read", f"--bs={block}", "--direct=1",
            f"--ioengine={engine}", f"--iodepth={DEPTH}", f"--size={size}", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            job = json.loads(done.stdout)["jobs"][0]["read"]
            return {"GB_per_s": job["bw_bytes"] / 1e9}
    raise RuntimeError(f"fio failed: {done.stderr}")


def preadv_run(path: Path, size: int, block: int) -> Mapping[str, float]:
    """A bare loop: eight threads, one preadv a block, nothing verified."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [aligned_buffer(block) for _ in range(DEPTH)]

    def read(thread: int) -> None:
        view = byte_view(buffers[thread])
        for offset in range(thread * block, size, DEPTH * block):
            os.preadv(fd, [view], offset)

    begun = time.perf_counter()
    with ThreadPoolExecutor(DEPTH) as pool:
        list(pool.map(read, range(DEPTH)))
    seconds = time.perf_counter() - begun
    os.close(fd)
    return {"GB_per_s": size / seconds / 1e9}


def ours_run(reader: BlockReader, slots: int, count: int, block: int) -> Mapping[str, float]:
    """The engine's reader: into the arena's slots, every page verified."""
    begun = time.perf_counter()
    for first in range(0, count, slots):
        blocks = np.arange(first, min(first + slots, count))
        reader.read(0, blocks, np.arange(blocks.size))
    return {"GB_per_s": count * block / (time.perf_counter() - begun) / 1e9}


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
    try:
        file = make_file(path, size, block)
        count = size // block
        with (
            Arena(slots, block) as arena,
            BlockReader([file], arena.data, block, arguments.readers) as reader,
        ):
            peers = [
                Peer("ours, verified", lambda: ours_run(reader, slots, count, block)),
                Peer("bare preadv, 8 threads", lambda: preadv_run(path, size, block)),
            ]
            if shutil.which("fio"):
                peers.insert(1, Peer("fio, depth 8", lambda: fio_run(path, size, block)))
            found = measure(peers, arguments.rounds)
            mode = reader.mode
    finally:
        path.unlink(missing_ok=True)
    limit = found.get("fio, depth 8", found["bare preadv, 8 threads"])["GB_per_s"]
    ours = found["ours, verified"]
    ours["share_of_limit"] = [a / b for a, b in zip(ours["GB_per_s"], limit, strict=True)]
    setting = {
        "block": format_bytes(block),
        "size": format_bytes(size),
        "mode": mode,
        "cache": "cold",
    }
    return report("disk", setting, found, arguments.out)
