"""An engine in this process, its sessions, and what a client would copy of their steps."""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blockstore.store import open_store
from loaderd.api.protocol import (
    Attach,
    Attached,
    BatchReady,
    ChunkReady,
    ErrorReply,
    Release,
    Start,
)
from loaderd.sessions.engine import Engine, default_settings
from tests.loaderd.harness import WAIT_S

PLANS: dict[str, dict[str, Any]] = {
    "minibatch": {"num_neighbors": (5, 5)},
    "hyperbatch": {"num_neighbors": (5, 5)},
    "macrobatch": {"num_neighbors": (5, 5), "macro_partitions": 1},
    "chunks": {"chunk": 30},
    "rows": {},
}


def held(engine: Engine) -> Any:
    """What a status says is taken by an engine without sessions."""
    ledger, sessions, counters = engine.status()
    assert not sessions
    return ledger, counters["slots_in_pools"], counters["slots_pinned"]


def wait_held(engine: Engine, before: Any) -> None:
    """Until an engine without sessions holds what it held before."""
    end = time.monotonic() + WAIT_S
    while held(engine) != before:
        assert time.monotonic() < end, (held(engine), before)
    assert not any(engine.graph.pool.on_account.values())


@dataclass
class Opened:
    """A session of an engine, and the messages that are delivered to it."""

    engine: Engine
    attached: Attached
    store: Path
    plan: str
    came: threading.Condition
    out: list[Any] = field(default_factory=list)

    @property
    def session(self) -> int:
        """Its number."""
        return self.attached.session

    def take(self, step: int) -> Any:
        """What comes of a step, or the error that ends the run."""

        def found() -> Any:
            ended = (m for m in self.out if isinstance(m, ErrorReply) or m.step == step)
            return next(ended, None)

        with self.came:
            assert self.came.wait_for(lambda: found() is not None, WAIT_S)
            message = found()
            self.out.remove(message)
            return message


class Sessions:
    """An engine that delivers into lists."""

    def __init__(self, engine: Engine, store: Path) -> None:
        self.engine, self.store = engine, store
        self.came = threading.Condition()
        self._out: dict[int, list[Any]] = {}
        engine.deliver = self._deliver

    def _deliver(self, session: int, message: Any) -> None:
        with self.came:
            self._out.setdefault(session, []).append(message)
            self.came.notify_all()

    def attach(self, plan: str, **fields: Any) -> Opened:
        """A session of a plan.  Raises what `Engine.attach` raises."""
        fields = {"batch_size": 50, "window": 2, "plan": plan} | PLANS[plan] | fields
        attached = self.engine.attach(Attach(token=0, request=1, **fields), None)
        out = self._out.setdefault(attached.session, [])
        return Opened(self.engine, attached, self.store, plan, self.came, out)


@contextmanager
def sessions_of(store: Path, mem: int, workers: int = 1) -> Iterator[Sessions]:
    """An engine of its own."""
    with Engine(open_store(store), default_settings(mem, workers, workers)) as engine:
        yield Sessions(engine, store)


@contextmanager
def session_of(store: Path, mem: int, plan: str) -> Iterator[Opened]:
    """A session of an engine of its own; afterwards all that it held is back."""
    with sessions_of(store, mem) as sessions:
        before = held(sessions.engine)
        opened = sessions.attach(plan)
        yield opened
        opened.engine.detach(opened.session)
        wait_held(opened.engine, before)


def content(opened: Opened, message: Any) -> str:
    """Digest of what a client would copy."""
    data, found = opened.engine.arena.data, hashlib.sha256()

    def put(place: int, num_bytes: int) -> None:
        found.update(data[place : place + num_bytes])

    if isinstance(message, ChunkReady):
        index = range(message.num_rows)
        if message.form == "index":
            end = message.index + 8 * message.num_rows
            index = data[message.index : end].view(np.int64).tolist()
        for places, spec in zip(message.places, opened.attached.rows, strict=True):
            if message.form == "ranges":
                for place, count in zip(places, message.counts, strict=True):
                    put(place, count * spec.row_bytes)
            else:
                for row in index:
                    put(places[0] + row * spec.row_bytes, spec.row_bytes)
        return found.hexdigest()
    arrays = blob_arrays(opened, message.structure)
    for name in sorted(arrays):
        found.update(arrays[name])
    addresses = blob_arrays(opened, message.rows.blob)
    for address in addresses["address:x"].view(np.uint64).tolist():
        put(address, 8)
    return found.hexdigest()


def blob_arrays(opened: Opened, blob: Any) -> dict[str, Any]:
    """Bytes of each array, by name."""
    slots = opened.engine.arena.data.reshape(-1, opened.engine.arena.slot_bytes)
    raw = slots[list(blob.slots)].reshape(-1)
    return {
        a.name: raw[a.offset : a.offset + a.length * np.dtype(a.dtype).itemsize].copy()
        for a in blob.arrays
    }


def serve(opened: Opened, run: int, steps: int, seen: list[str] | None = None) -> Any:
    """Steps of epoch 0 taken and given back; the error that ends them, if one does.

    seen   gets the sha256 of each
    """
    opened.out.clear()
    opened.engine.start(Start(session=opened.session, run=run, epoch=0, step=0))
    for step in range(steps):
        message = opened.take(step)
        if isinstance(message, ErrorReply):
            return message
        assert isinstance(message, BatchReady | ChunkReady)
        if seen is not None:
            seen.append(content(opened, message))
        opened.engine.release(Release(session=opened.session, run=run, step=step, group=0))
    return None
