"""Measure how fast a folder's disk writes and reads, in a few hundred milliseconds."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blockstore.io.buffers import aligned_buffer, byte_view
from blockstore.io.files import open_to_read, open_to_write, read_exact, write_exact

_THREADS, _AT_ONCE = 4, 16
_BLOCK_BYTES = 1 << 20
_MAX_BLOCKS = 512
_PHASE_S = 0.2  # of writing, then of reading


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Sequential rates in bytes a second, with several threads at once."""

    folder: str
    read: float
    write: float
    direct: bool  # whether the page cache was bypassed; else the read rate may be too high
    elapsed_s: float


def existing_folder(target: Path) -> Path:
    """The parent folder of a target, or its nearest ancestor that exists."""
    folder = target.absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    return folder


def measure_disk(folder: Path) -> DiskRates:
    """Write a file into `folder`, read it back, and remove it.  Raises OSError, OutOfSpace.

    The file takes at most 512 MiB, and at most an eighth of the free space.
    """
    begun = time.perf_counter()
    room = shutil.disk_usage(folder).free // 8 // _BLOCK_BYTES
    block = aligned_buffer(_BLOCK_BYTES)  # shared by all threads: read data is not used
    block[:] = np.random.default_rng(0).integers(0, 256, _BLOCK_BYTES, np.uint8)  # incompressible
    view = byte_view(block)
    with (
        tempfile.TemporaryDirectory(prefix=".blockstore-disk-", dir=folder) as name,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="disk") as pool,
        ExitStack() as held,
    ):
        path = Path(name) / "blocks"
        out, direct = open_to_write(path)
        held.callback(os.close, out)

        def put(number: int) -> None:
            write_exact(out, view, number * _BLOCK_BYTES, str(path))

        written, write = _rate(pool, put, max(1, min(_MAX_BLOCKS, room)), lambda: os.fsync(out))
        fd = open_to_read(path, direct)
        held.callback(os.close, fd)

        def get(number: int) -> None:
            read_exact(fd, [view], number * _BLOCK_BYTES, str(path))

        _, read = _rate(pool, get, written)
    return DiskRates(str(folder), read, write, direct, time.perf_counter() - begun)


def _rate(
    pool: ThreadPoolExecutor,
    move: Callable[[int], None],
    maximum: int,
    end: Callable[[], None] = lambda: None,
) -> tuple[int, float]:
    """Move blocks 0, 1, ... until time is up or `maximum` are done: (blocks, bytes a second)."""
    begun, done = time.perf_counter(), 0
    while done < maximum and (done == 0 or time.perf_counter() - begun < _PHASE_S):
        numbers = range(done, min(done + _AT_ONCE, maximum))
        list(pool.map(move, numbers))
        done = numbers.stop
    end()
    return done, done * _BLOCK_BYTES / max(time.perf_counter() - begun, 1e-9)
