"""Ranks of one job that go on as they like: each at its pace, in an epoch of its own."""

import threading
from pathlib import Path

import numpy as np
import pytest

from loaderd.api.protocol import Start
from loaderd.streams import service
from loaderd.streams.pieces import StreamShare
from tests.graphs import make_csc
from tests.loaderd.serving import Serving, Trainer
from tests.stores import write_store

NODES, WORLD, BATCH, EPOCHS = 3600, 3, 60, 3
STEPS = NODES // BATCH // WORLD
ROOM, TIGHT = 24 << 20, 3 << 20  # all in memory; a part of the rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = make_csc(np.random.default_rng(6).integers(0, 30, NODES), 7)
    path = tmp_path_factory.mktemp("speeds") / "store"
    write_store(path, graph, range(NODES), width=64)
    return path


def attach(serving: Serving, rank: int, plan: str) -> Trainer:
    return serving.attach(plan, batch_size=BATCH, rank=rank, world_size=WORLD)


@pytest.fixture(scope="module")
def alone(store):
    """Batches of one rank that is alone in its daemon, by epoch."""
    kept = {}

    def found(rank: int, plan: str, mem: int) -> list[list[list[bytes]]]:
        key = (rank, plan, mem)
        if key not in kept:
            serving = Serving(store, mem)
            trainer, epochs = attach(serving, rank, plan), []
            for epoch in range(EPOCHS):
                trainer.start(epoch)
                epochs.append([trainer.consume(step) for step in range(STEPS)])
            trainer.detach()
            serving.close()
            kept[key] = epochs
        return kept[key]

    return found


def begin(trainer: Trainer, epoch: int, step: int, stride: int) -> None:
    trainer.run += 1
    trainer.serving.service.start(
        Start(session=trainer.session, run=trainer.run, epoch=epoch, step=step, stride=stride)
    )


@pytest.mark.parametrize(
    ("plan", "mem"),
    [
        ("hyperbatch", TIGHT), pytest.param("minibatch", ROOM, marks=pytest.mark.long),
        pytest.param("minibatch", TIGHT, marks=pytest.mark.long),
        pytest.param("hyperbatch", ROOM, marks=pytest.mark.long),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [2])
def test_batches_are_the_same_whatever_ranks_do(store, alone, plan, mem, seed, monkeypatch):
    """Ranks in threads: starting again, in other epochs, with workers, stopping, leaving, coming.

    One that stops is parted from those that wait for the next epoch.
    """
    monkeypatch.setattr(service, "RANK_WAIT_S", 0.2)
    expected_of = [alone(rank, plan, mem) for rank in range(WORLD)]
    serving = Serving(store, mem)
    failures = list[BaseException]()

    def run(rank: int) -> None:
        rng = np.random.default_rng([seed, rank])
        try:
            for _ in range(3):
                stride = int(rng.integers(1, 3))
                workers = [attach(serving, rank, plan) for _ in range(stride)]
                for _ in range(3):
                    epoch, first = int(rng.integers(EPOCHS)), int(rng.integers(STEPS))
                    first *= int(rng.integers(2))
                    for number, worker in enumerate(workers):
                        begin(worker, epoch, first + number, stride)
                    for step in range(first, min(STEPS, first + int(rng.integers(2 * STEPS)))):
                        worker = workers[(step - first) % stride]
                        batch = worker.take(step)
                        assert batch is not None, (rank, epoch, step)
                        if rng.random() < 0.02:
                            threading.Event().wait(0.4)  # longer than others wait for it
                        assert serving.bytes_of(batch.structure) == expected_of[rank][epoch][step]
                        worker.release(step)
                    if rng.random() < 0.3:
                        threading.Event().wait(0.4)
                for worker in workers:
                    worker.detach()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    serving.close()


def test_a_rank_goes_on_when_one_dies_that_had_left_their_stream(store):
    """What that one held was all that the other waited for, which the stream cannot serve."""
    serving = Serving(store, ROOM)
    registry = serving.service._registry
    quick, stopped = (attach(serving, rank, "minibatch") for rank in range(2))
    quick.start(0)
    stopped.start(0)
    assert stopped.take(0) is not None
    for step in range(STEPS):
        if quick.take(step, wait_s=0.05) is None:
            break
        quick.release(step)
    with registry.lock:
        (stream,) = registry.streams
    stream.share = StreamShare(1)  # as if there had been another job
    quick.start(1)
    with registry.lock:
        registry.leave(registry.sessions[stopped.session][0], stream)
        assert stream.waiting
    stopped.detach()
    for step in range(STEPS):
        quick.consume(step)
    quick.detach()
    serving.close()
