"""How fast a folder's disk writes and reads, found out in a few hundred milliseconds."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.files import open_to_read, open_to_write, read_exact, write_exact

_THREADS = 4
_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 512
_PHASE_S = 0.2  # of writing, then of reading


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes a second, sequential, by some threads at once."""

    folder: str
    read: float
    write: float
    direct: bool  # past the page cache: else reads may be too fast
    elapsed_s: float


def existing_folder(target: Path) -> Path:
    """The folder that a target will lie in, or the nearest above it that is there."""
    folder = target.absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    return folder


def measure_disk(folder: Path) -> DiskRates:
    """Write a file into `folder`, read it back, and remove it.  Raises OSError, OutOfSpace.

    It takes at most 512 MiB, and an eighth of what is free.
    """
    begun = time.perf_counter()
    room = shutil.disk_usage(folder).free // 8 // _BLOCK_BYTES
    most = max(1, min(_MOST_BLOCKS, room))
    with tempfile.TemporaryDirectory(prefix=".blockstore-disk-", dir=folder) as name:
        path = Path(name) / "blocks"
        buffers = [_noise(seed) for seed in range(_THREADS)]
        fd, direct = open_to_write(path)
        try:

            def put(thread: int, block: int) -> None:
                write_exact(fd, byte_view(buffers[thread]), block * _BLOCK_BYTES, str(path))

            written, write = _rate(put, most, lambda: os.fsync(fd))
        finally:
            os.close(fd)
        fd = open_to_read(path, direct)
        try:

            def get(thread: int, block: int) -> None:
                read_exact(fd, [byte_view(buffers[thread])], block * _BLOCK_BYTES, str(path))

            _, read = _rate(get, written)
        finally:
            os.close(fd)
    return DiskRates(str(folder), read, write, direct, time.perf_counter() - begun)


def _rate(
    move: Callable[[int, int], None], most: int, end: Callable[[], None] = lambda: None
) -> tuple[int, float]:
    """Blocks 0, 1, ... until time is over, or `most` are done: (blocks, bytes a second)."""
    numbers, lock = count(), Lock()
    begun = time.perf_counter()
    deadline = begun + _PHASE_S

    def work(thread: int) -> int:
        done = 0
        while done == 0 or time.perf_counter() < deadline:
            with lock:
                block = next(numbers)
            if block >= most:
                break
            move(thread, block)
            done += 1
        return done

    with ThreadPoolExecutor(min(_THREADS, most), thread_name_prefix="disk") as pool:
        blocks = sum(pool.map(work, range(min(_THREADS, most))))
    end()
    return blocks, blocks * _BLOCK_BYTES / max(time.perf_counter() - begun, 1e-9)


def _noise(seed: int) -> NDArray[Any]:
    """A block that no disk can make smaller."""
    block = aligned_buffer(_BLOCK_BYTES)
    block[:] = np.random.default_rng(seed).integers(0, 256, _BLOCK_BYTES, np.uint8)
    return block
