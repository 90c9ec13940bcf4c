"""One plan served for some seconds by the engine that would serve it; batches are only released."""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from blockstore.store import Store
from loaderd.api.errors import BatchFailed
from loaderd.api.protocol import (
    Attach,
    BatchReady,
    ChunkReady,
    ErrorReply,
    Release,
    RowGroup,
    Start,
)
from loaderd.memory.ledger import EngineSettings
from loaderd.sessions.engine import Engine

_MIN_BATCHES = 4  # to wait for, however long one takes
_WAIT_S = 120.0


class BatchMoment(NamedTuple):
    """How much had been done when a batch was complete."""

    at: float  # seconds
    num_bytes: int  # read
    cpu_s: float


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """Measurements of one plan."""

    plan: str  # the one that served: `auto` chooses
    num_steps: int  # of an epoch
    batches: int  # between two arrivals far apart
    seconds: float  # between these
    num_bytes: int  # read meanwhile
    cpu_s: float  # of all threads
    first_s: float  # from the attach to the first batch

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch, at this pace."""
        return self.seconds * self.num_steps / self.batches

    @property
    def epoch_bytes(self) -> int:
        return int(self.num_bytes * self.num_steps / self.batches)

    @property
    def cores(self) -> float:
        """Cores that were at work on average, those of the readers included."""
        return self.cpu_s / self.seconds


def try_plan(store: Store, settings: EngineSettings, request: Attach, seconds: float) -> PlanTrial:
    """Serve this plan alone, within its memory, for so many seconds.

    Raises Refused, StoreError, BatchFailed.
    """
    begun = time.perf_counter()
    with Engine(store, settings) as engine:
        ready: queue.SimpleQueue[object] = queue.SimpleQueue()
        engine.deliver = lambda _session, message: ready.put(message)
        attached = engine.attach(request, None)
        session, steps, epoch = attached.session, attached.num_steps, 0
        arrivals: list[BatchMoment] = []
        engine.start(Start(session=session, run=1, epoch=0, step=0))
        while len(arrivals) < _MIN_BATCHES or time.perf_counter() - begun < seconds:
            message = ready.get(timeout=_WAIT_S)
            if isinstance(message, ErrorReply):
                raise BatchFailed(message.message)
            assert isinstance(message, BatchReady | RowGroup | ChunkReady)
            group, last = 0, True
            if isinstance(message, BatchReady):
                last = message.rows.last
            elif isinstance(message, RowGroup):
                group, last = message.group, message.last
            step = message.step
            engine.release(Release(session=session, run=epoch + 1, step=step, group=group))
            if not last:
                continue
            read = engine.reader.bytes_read
            arrivals.append(BatchMoment(time.perf_counter(), read, time.process_time()))
            if step == steps - 1:
                epoch += 1
                engine.start(Start(session=session, run=epoch + 1, epoch=epoch, step=0))
        engine.detach(session)
        _settle(engine)
    batches, first, last_one = steady(arrivals)
    return PlanTrial(
        attached.plan, steps, batches, last_one.at - first.at,
        last_one.num_bytes - first.num_bytes, last_one.cpu_s - first.cpu_s, arrivals[0].at - begun,
    )  # fmt: skip


def steady(arrivals: Sequence[BatchMoment]) -> tuple[int, BatchMoment, BatchMoment]:
    """Batches between two arrivals, and these: one of each half of the time.

    Plans that build many batches at a time deliver them in bursts.  Both arrivals are the first
    after the longest wait of their half, so that whole bursts lie between them.
    """
    assert len(arrivals) >= _MIN_BATCHES
    waits = [0.0, *(b.at - a.at for a, b in pairwise(arrivals))]
    middle = (arrivals[0].at + arrivals[-1].at) / 2
    half = next(i for i, a in enumerate(arrivals) if a.at >= middle)
    half = min(max(half, 2), len(arrivals) - 1)
    first = max(range(1, half), key=waits.__getitem__)
    last = max(range(half, len(arrivals)), key=lambda i: (waits[i], i))
    return last - first, arrivals[first], arrivals[last]


def _settle(engine: Engine) -> None:
    """Wait until a session that was closed holds nothing."""
    pause, end = threading.Event(), time.monotonic() + _WAIT_S
    while engine.ending and time.monotonic() < end:
        pause.wait(0.01)
