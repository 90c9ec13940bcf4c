"""Short trials: the machine, and plans over the store's own files with the real engine."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blockstore.format import PAGE_BYTES
from blockstore.io.buffers import aligned_buffer
from blockstore.io.reader import BlockReader, Transit
from blockstore.kernels.crc import page_crcs
from loaderd.devicecost import RUN_BYTES, DeviceCost
from loaderd.errors import BatchFailed
from loaderd.protocol import Attach, BatchReady, ChunkReady, ErrorReply, Release, RowGroup, Start
from loaderd.sessions.engine import Engine

_RATE_S = 0.4  # of reading in order
_CORES_S, _CORE_PAGES = 0.3, 256  # of keeping cores busy; checksums of so many pages
_SETTLED_S, _WAIT_S = 0.2, 60.0


@dataclass(frozen=True, slots=True)
class Device:
    """The disk, with all reader threads at work, and the cores that verify what it gives."""

    mode: str
    order_s: float  # of a byte read in order
    run_s: float  # of one more run of pages, however short
    page_s: float  # of one more page in a run
    byte_s: float  # CPU seconds of a byte

    @property
    def cost(self) -> DeviceCost:
        """Of runs of pages."""
        return DeviceCost(self.run_s, self.page_s)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    device: Device
    cores: int
    workers: int
    granted: float  # cores that the workers get: fewer where others are at work too
    mem_bytes: int


class Trial(NamedTuple):
    """A few batches, to their end."""

    batches: int
    edges: int
    cpu_s: float
    num_bytes: int
    reads: int  # calls


class Trials:
    """One session of an engine, whose batches are looked at and released."""

    def __init__(self, engine: Engine, request: Attach) -> None:
        """Raises Refused, StoreError."""
        self._engine, self._run = engine, 0
        self._free = engine.broker.available()
        self._ready: queue.SimpleQueue[object] = queue.SimpleQueue()
        engine.deliver = lambda _session, message: self._ready.put(message)
        self._attached = engine.attach(request, None)
        self.num_steps, self.plan = self._attached.num_steps, self._attached.plan

    def serve(self, count: int, epoch: int = 0) -> Trial:
        """The last batches of an epoch.  Raises BatchFailed."""
        self._run += 1
        session, run, edges = self._attached.session, self._run, 0
        count = min(count, self.num_steps)
        reader = self._engine.reader
        cpu_s, num_bytes, reads = time.process_time(), reader.bytes_read, reader.reads
        self._engine.start(
            Start(session=session, run=run, epoch=epoch, step=self.num_steps - count)
        )
        left = count
        while left:
            message = self._ready.get(timeout=_WAIT_S)
            if isinstance(message, ErrorReply):
                raise BatchFailed(message.message)
            assert isinstance(message, BatchReady | RowGroup | ChunkReady)
            group, last = 0, True
            if isinstance(message, BatchReady):
                edges += sum(sum(hop) for hop in message.edges_per_hop)
                last = message.rows.last
            elif isinstance(message, RowGroup):
                group, last = message.group, message.last
            self._engine.release(Release(session=session, run=run, step=message.step, group=group))
            left -= last
        _settle(reader)
        return Trial(
            count, edges, time.process_time() - cpu_s, reader.bytes_read - num_bytes,
            reader.reads - reads,
        )  # fmt: skip

    def close(self) -> None:
        """Wait until its memory is free."""
        self._engine.detach(self._attached.session)
        pause, end = threading.Event(), time.monotonic() + _WAIT_S
        while self._engine.broker.available() < self._free and time.monotonic() < end:
            pause.wait(0.01)


def _settle(reader: BlockReader) -> None:
    """Wait until nothing is read any more."""
    pause, end, known = threading.Event(), time.monotonic() + _WAIT_S, -1
    while known != reader.bytes_read and time.monotonic() < end:
        known = reader.bytes_read
        pause.wait(_SETTLED_S)


def measure_order(reader: BlockReader) -> tuple[float, float]:
    """(seconds, CPU seconds) of a byte read in order, from the largest of the reader's files.

    Seconds of the fastest 64 MiB: others may be reading too.
    """
    number = max(
        range(len(reader.files)),
        key=lambda i: reader.files[i].geometry.num_blocks * reader.files[i].geometry.slot_bytes,
    )
    geometry = reader.files[number].geometry
    pages = min(geometry.num_blocks, geometry.blocks_per_shard) * geometry.pages_per_block
    each = min(RUN_BYTES // PAGE_BYTES, pages)
    transit: Transit = queue.SimpleQueue()
    for _ in range(8):
        transit.put(aligned_buffer(each * PAGE_BYTES))
    first, num_bytes, best = 0, 0, np.inf
    begun, cpu_s = time.perf_counter(), time.process_time()
    while num_bytes == 0 or time.perf_counter() - begun < _RATE_S:
        starts = np.arange(first, min(first + 64 * each, pages - each + 1), each)
        runs = np.zeros((starts.size, 3), np.int64)
        runs[:, 1], runs[:, 2] = starts, each
        since = time.perf_counter()
        reader.stream(number, runs, transit, lambda _run, _data: None).wait()
        size = starts.size * each * PAGE_BYTES
        best = min(best, (time.perf_counter() - since) / size)
        num_bytes += size
        first = int(starts[-1]) + each
        first = first if first + each <= pages else 0
    return float(best), (time.process_time() - cpu_s) / num_bytes


def measure_cores(threads: int) -> float:
    """Cores that so many threads at work get: fewer where others are at work too."""
    data, none = np.zeros(_CORE_PAGES * PAGE_BYTES, np.uint8), np.zeros(_CORE_PAGES, np.uint32)
    page_crcs(data, 1, none.copy())
    end = time.perf_counter() + _CORES_S

    def work() -> None:
        out = none.copy()
        while time.perf_counter() < end:
            page_crcs(data, _CORE_PAGES, out)

    begun, cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
    share = (time.process_time() - cpu_s) / (time.perf_counter() - begun)
    return float(np.clip(share, 0.01, threads))
