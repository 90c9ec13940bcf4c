"""Runs that end in the middle, and batches that fail: nothing stays pinned, taken or waited for."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.store import open_store
from loaderd.api.protocol import Attach, BatchReady, ErrorReply, Release, Start
from loaderd.memory.ledger import EngineSettings
from loaderd.sessions.engine import Engine
from tests.graphs import make_csc
from tests.stores import write_store

NODES, STEPS, WAIT_S = 1200, 12, 30


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("leaks") / "store"
    degrees = np.random.default_rng(1).integers(0, 20, NODES)
    write_store(path, make_csc(degrees, 1), np.arange(NODES))
    return path


class Trainer:
    """A session at an engine, and what it is sent."""

    def __init__(self, engine: Engine, plan: str) -> None:
        self.engine, self.out = engine, queue.Queue[Any]()
        engine.deliver = lambda _session, message: self.out.put(message)
        request = Attach(token=0, request=1, split="train", num_neighbors=(4, 4), window=2,
                         batch_size=NODES // STEPS, plan=plan)  # fmt: skip
        self.session = engine.attach(request, None).session
        self.run = 0

    def start(self, step: int = 0) -> None:
        self.run += 1
        self.engine.start(Start(session=self.session, run=self.run, epoch=self.run, step=step))

    def next(self) -> Any:
        """The next message of the run."""
        while (message := self.out.get(timeout=WAIT_S)).run != self.run:
            pass
        return message

    def release(self, ready: BatchReady) -> None:
        rows = Release(session=self.session, run=ready.run, step=ready.step, group=0)
        self.engine.release(rows)

    def epoch(self) -> None:
        self.start()
        for step in range(STEPS):
            message = self.next()
            assert isinstance(message, BatchReady), message
            assert message.step == step
            self.release(message)


@contextmanager
def trainer_of(store: Path, plan: str, workers: int = 2) -> Iterator[Trainer]:
    with Engine(open_store(store), EngineSettings(24 << 20, workers, 2)) as engine:
        trainer = Trainer(engine, plan)
        yield trainer
        engine.detach(trainer.session)
        engine.wait_ended(WAIT_S)
        assert engine.broker.pinned() == 0, "a block is still pinned"
        assert engine.broker.whole, "slots are missing"


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch"])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_runs_that_end_in_the_middle_give_all_back(store, plan, kept):
    """Each run is left with batches that are built, waiting and lent."""
    with trainer_of(store, plan) as trainer:
        for run in range(6):
            trainer.start(run)
            lent = [trainer.next() for _ in range(kept)]
            for ready in lent[1:]:
                trainer.release(ready)
        trainer.epoch()
        trainer.start()
        trainer.next()


@pytest.mark.parametrize("plan", ["minibatch", "hyperbatch"])
@pytest.mark.parametrize("late", [False, True])
def test_batches_that_fail_give_all_back(store, plan, late, monkeypatch):
    """A run fails more often than there are workspaces; `late`: after its rows were addressed."""
    with trainer_of(store, plan) as trainer:
        trainer.epoch()
        builder, fails = trainer.engine.resources.builder, [False]
        name = "write" if late else "take_structure"
        real = getattr(builder, name)
        cached = plan == "hyperbatch" and not late

        def failing(*arguments: Any) -> Any:
            if fails[0]:
                raise OSError("cannot read")
            return real(*arguments)

        monkeypatch.setattr(builder, name, failing)
        for _ in range(7):
            fails[0] = True
            trainer.start()
            message = trainer.next()
            assert cached or isinstance(message, ErrorReply)
            fails[0] = False
        trainer.epoch()
