"""An engine behind a stream service, without a daemon, and trainers that say when they go on."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from blockstore.store import Store, open_store
from loaderd.api.protocol import Attach, BatchReady, Blob, ErrorReply, Release, Start
from loaderd.sessions.engine import Engine, default_settings
from loaderd.sessions.stores import Stores
from loaderd.streams.registry import StreamKey, StreamRequest
from loaderd.streams.service import StreamService
from loaderd.streams.stream import Stream

WAIT_S = 30


class Serving:
    """An engine behind a stream service, and what each session was sent."""

    open: ClassVar[list["Serving"]] = []

    def __init__(
        self, store: Path | list[Path], mem: int, workers: int = 1, reserve: int = 0
    ) -> None:
        """One store, or several; `paths` is what a reload opens."""
        self.paths = store if isinstance(store, list) else [store]
        settings = replace(default_settings(mem, workers, 2), reserve_bytes=reserve)
        self.stores = Stores(self._opened(), settings)
        self.service = StreamService(self.stores, self._opened)
        self.service.deliver = self._deliver
        self.out: dict[int, dict[tuple[int, int], Any]] = {}
        self.errors: list[ErrorReply] = []
        self.came = threading.Condition()
        self.before = self.held()
        Serving.open.append(self)

    def _deliver(self, session: int, message: Any) -> None:
        with self.came:
            if isinstance(message, ErrorReply):
                self.errors.append(message)
            else:
                self.out.setdefault(session, {})[message.run, message.step] = message
            self.came.notify_all()

    @property
    def engine(self) -> Engine:
        """Of the only store, or the first of several."""
        return self.stores.all()[0]

    def _opened(self) -> list[Store]:
        return [open_store(path) for path in self.paths]

    def held(self) -> Any:
        ledger, sessions, counters = self.service.status()
        assert not sessions
        return ledger, counters["slots_in_pools"], counters["slots_pinned"], counters["streams"]

    def attach(self, plan: str = "minibatch", **fields: Any) -> "Trainer":
        usual = {"num_neighbors": (5, 5), "batch_size": 100}
        request = Attach(token=0, request=1, plan=plan, **(usual | fields))
        return Trainer(self, self.service.attach(request, None).session)

    def note_opened(self) -> list[tuple[int, int]]:
        """Seed and shares of each stream, as they are opened from now on."""
        opener, opened = self.service._opener, list[tuple[int, int]]()
        take = opener._take

        def note(key: StreamKey, order: StreamRequest, share: int) -> Stream:
            opened.append((order.request.seed, order.alike))
            return take(key, order, share)

        opener._take = note
        return opened

    def bytes_of(self, blob: Blob) -> list[bytes]:
        """Arrays of a blob."""
        slot, data = self.engine.arena.slot_bytes, self.engine.arena.data
        laid = np.concatenate([data[s * slot : (s + 1) * slot] for s in blob.slots])
        return [
            laid[a.offset : a.offset + a.length * np.dtype(a.dtype).itemsize].tobytes()
            for a in blob.arrays
        ]

    def close(self) -> None:
        """All is given back."""
        end = time.monotonic() + WAIT_S
        while self.held() != self.before:
            assert time.monotonic() < end, (self.held(), self.before)
        self._end()

    def abandon(self) -> None:
        """End it with whatever sessions a failed test has left."""
        for session in self.service.status()[1]:
            self.service.detach(session.session)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()

    def _end(self) -> None:
        Serving.open.remove(self)
        self.service.close()
        self.stores.close()


class Trainer:
    """One session."""

    def __init__(self, serving: Serving, session: int) -> None:
        self.serving, self.session, self.run = serving, session, 0

    def start(self, epoch: int = 0, step: int = 0) -> None:
        self.run += 1
        self.serving.service.start(
            Start(session=self.session, run=self.run, epoch=epoch, step=step)
        )

    def take(self, step: int, wait_s: float = WAIT_S) -> BatchReady | None:
        """The batch of a step, not released."""
        with self.serving.came:
            found = self.serving.came.wait_for(
                lambda: (self.run, step) in self.serving.out.get(self.session, {}), wait_s
            )
            assert not self.serving.errors, self.serving.errors
            return self.serving.out[self.session].pop((self.run, step)) if found else None

    def release(self, step: int) -> None:
        self.serving.service.release(
            Release(session=self.session, run=self.run, step=step, group=0)
        )

    def release_all(self) -> None:
        """Give back all batches of this run that it was sent and has not taken."""
        with self.serving.came:
            sent = self.serving.out.get(self.session, {})
            steps = [step for run, step in sent if run == self.run]
            for step in steps:
                del sent[self.run, step]
        for step in steps:
            self.release(step)

    def consume(self, step: int) -> list[bytes]:
        """The structure of a batch; it is given back."""
        batch = self.take(step)
        assert batch is not None, (self.session, step)
        found = self.serving.bytes_of(batch.structure)
        self.release(step)
        return found

    def detach(self) -> None:
        self.serving.service.detach(self.session)


class Ticks:
    """A clock that only goes on while somebody pauses."""

    def __init__(self, serving: Serving) -> None:
        self.now = 0.0
        opener = serving.service._opener
        opener._clock, opener._pause = lambda: self.now, self.pause

    def pause(self, seconds: float) -> None:
        self.now += seconds
