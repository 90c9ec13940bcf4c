"""Consumers for benches of many trainers: processes that read batches and do nothing with them."""

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any

from clients.batch import BatchReader
from clients.connection.buffers import BufferPool
from clients.connection.session import Session
from loaderd.protocol import Attach

BEGIN_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass
class Consumer:
    """A process, and how many batches it has had."""

    process: BaseProcess
    count: Any  # a shared integer

    def stop(self) -> None:
        """It takes nothing any more, until `go_on`."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """As before."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


def _consume(
    endpoint: str, request: Attach, think_s: float, epochs: int, count: Any, ready: Event, go: Event
) -> None:
    """`epochs` 0: until it is killed.  Connects, then waits for `go`."""
    session = Session(endpoint, request)
    reader = BatchReader(session, BufferPool())
    ready.set()
    go.wait()
    for epoch in itertools.count():
        if epochs and epoch == epochs:
            break
        session.start(epoch, 0)
        for step in range(session.attached.num_steps):
            reader.read(step)
            with count.get_lock():
                count.value += 1
            if think_s:
                time.sleep(think_s)
    reader.close()
    session.close()


@contextmanager
def consumers(
    endpoint: str, requests: Sequence[Attach], think_s: float = 0.0, epochs: int = 0
) -> Iterator[list[Consumer]]:
    """One for each request, attached one after the other, then let go all at once.

    Raises RuntimeError: one could not attach.
    """
    _CONTEXT.set_forkserver_preload(["tools.bench.consumers"])
    go, found = _CONTEXT.Event(), []
    try:
        for request in requests:
            count, ready = _CONTEXT.Value("q", 0), _CONTEXT.Event()
            arguments = (endpoint, request, think_s, epochs, count, ready, go)
            process = _CONTEXT.Process(target=_consume, args=arguments, daemon=True)
            process.start()
            found.append(Consumer(process, count))
            end = time.monotonic() + BEGIN_S
            while not ready.wait(0.2):
                if process.exitcode is not None or time.monotonic() > end:
                    raise RuntimeError(f"a consumer could not attach: {request}")
        go.set()
        yield found
    finally:
        for consumer in found:
            consumer.process.kill()
            consumer.process.join()


def wait_begun(running: Sequence[Consumer]) -> None:
    """Until each has had a batch.  Raises RuntimeError: one never has."""
    end = time.monotonic() + BEGIN_S
    while not all(c.count.value for c in running):
        if time.monotonic() > end:
            raise RuntimeError(f"batches of each: {[c.count.value for c in running]}")
        time.sleep(0.02)


def rates(running: Sequence[Consumer], seconds: float) -> list[float]:
    """Batches a second of each, over so long."""
    begun, before = time.perf_counter(), [c.count.value for c in running]
    time.sleep(seconds)
    span = time.perf_counter() - begun
    return [(c.count.value - n) / span for c, n in zip(running, before, strict=True)]
