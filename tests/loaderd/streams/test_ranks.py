"""Ranks of one job at one stream: each batch is built once, rows are read once for all of them."""

import queue
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from loaderd.streams import service
from tests.graphs import make_csc
from tests.loaderd.serving import Serving, Trainer
from tests.stores import write_store

NODES, WORLD, BATCH = 6000, 2, 200
STEPS_BEHIND = 12  # more than the window, of one worker
ROOM, TIGHT = 24 << 20, 4 << 20  # all in memory; a part of the rows

pytestmark = pytest.mark.usefixtures("nobody_falls_behind")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = make_csc(np.random.default_rng(6).integers(0, 30, NODES), 7)
    path = tmp_path_factory.mktemp("ranks") / "store"
    write_store(path, graph, range(NODES), width=64)
    return path


def attach(serving: Serving, rank: int, plan: str, world: int = WORLD) -> Trainer:
    return serving.attach(plan, batch_size=BATCH, rank=rank, world_size=world)


def steps_of(serving: Serving) -> int:
    _, sessions, _ = serving.service.status()
    return sessions[0].num_steps


def streams_of(serving: Serving) -> int:
    return serving.service.status()[2]["streams"]


@cache
def alone(store: Path, rank: int, plan: str, mem: int) -> tuple[list[list[bytes]], int]:
    """Two epochs of one rank, and what is read for them; made once for all tests."""
    serving = Serving(store, mem)
    trainer, found = attach(serving, rank, plan), []
    for epoch in range(2):
        trainer.start(epoch)
        found += [trainer.consume(step) for step in range(steps_of(serving))]
    trainer.detach()
    read = serving.engine.reader.bytes_read
    serving.close()
    return found, read


@pytest.mark.parametrize(
    ("plan", "mem"),
    [
        ("minibatch", ROOM), ("hyperbatch", TIGHT), ("auto", TIGHT),
        pytest.param("minibatch", TIGHT, marks=pytest.mark.long),
        pytest.param("hyperbatch", ROOM, marks=pytest.mark.long),
        pytest.param("auto", ROOM, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_ranks_share_a_stream_and_get_their_own_batches(store, plan, mem):
    expected = [alone(store, rank, plan, mem) for rank in range(WORLD)]
    serving = Serving(store, mem)
    ranks = [attach(serving, rank, plan) for rank in range(WORLD)]
    steps, found = steps_of(serving), [[], []]
    assert steps == NODES // BATCH
    for epoch in range(2):
        for trainer in ranks:
            trainer.start(epoch)
        for step in range(steps):
            for trainer, own in zip(ranks, found, strict=True):
                own.append(trainer.consume(step))
        assert streams_of(serving) == 1
    for trainer in ranks:
        trainer.detach()
    read = serving.engine.reader.bytes_read
    serving.close()
    assert found == [batches for batches, _ in expected]
    if plan == "hyperbatch" and mem == TIGHT:
        assert read <= 1.05 * max(read for _, read in expected)


@pytest.mark.parametrize(
    "behind", [1, pytest.param(STEPS_BEHIND + 6, marks=pytest.mark.long), 2 * STEPS_BEHIND]
)
def test_a_rank_that_comes_late_joins_the_others(store, behind):
    """However far behind it is: its batches are its own, so that none is built twice."""
    serving = Serving(store, ROOM)
    first = attach(serving, 0, "minibatch")
    first.start(0)
    steps = steps_of(serving)
    for step in range(behind):
        first.consume(step)
    late = attach(serving, 1, "minibatch")
    late.start(0)
    for step in range(steps):
        late.consume(step)
        if step >= behind:
            first.consume(step)
    assert streams_of(serving) == 1
    late.start(1)
    first.start(1)
    for step in range(steps):
        assert first.consume(step) != late.consume(step)
    assert streams_of(serving) == 1
    for trainer in (first, late):
        trainer.detach()
    serving.close()


@pytest.mark.parametrize(("epoch", "behind"), [(0, 25), (1, 2)])
def test_another_job_does_not_hold_up_the_first_nor_wait_for_it(store, epoch, behind):
    """Of equal parameters: it comes late, or goes on in a later epoch; both go on at their pace."""
    serving = Serving(store, ROOM)
    first = [attach(serving, rank, "minibatch") for rank in range(WORLD)]
    for trainer in first:
        trainer.start(0)
    for step in range(behind):
        for trainer in first:
            trainer.consume(step)
    other = attach(serving, 0, "minibatch")
    other.start(epoch)
    assert other.take(0, wait_s=5) is not None
    assert streams_of(serving) == 2
    for step in range(behind, steps_of(serving)):
        for trainer in first:
            trainer.consume(step)
    for trainer in (*first, other):
        trainer.detach()
    serving.close()


@pytest.mark.parametrize(
    ("plan", "mem"),
    [
        ("minibatch", ROOM), ("hyperbatch", TIGHT),
        pytest.param("minibatch", TIGHT, marks=pytest.mark.long),
        pytest.param("hyperbatch", ROOM, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_rank_waits_for_the_others_before_it_begins_the_next_epoch(store, plan, mem):
    """As far ahead as the stream lets it be; another stream would take memory from all of them."""
    expected = [alone(store, rank, plan, mem)[0] for rank in range(WORLD)]
    serving = Serving(store, mem)
    quick, slow = (attach(serving, rank, plan) for rank in range(WORLD))
    steps, found = steps_of(serving), [[], []]
    for epoch in range(2):
        quick.start(epoch)
        slow.start(epoch)
        behind = 0
        for step in range(steps):
            while (batch := quick.take(step, wait_s=0.05)) is None:
                found[1].append(slow.consume(behind))
                behind += 1
            found[0].append(serving.bytes_of(batch.structure))
            quick.release(step)
        assert behind < steps
        quick.start(epoch + 1)
        quick.take(0, wait_s=0.05)
        assert streams_of(serving) == 1
        found[1] += [slow.consume(step) for step in range(behind, steps)]
    assert streams_of(serving) == 1
    for trainer in (quick, slow):
        trainer.detach()
    serving.close()
    assert found == expected


def test_a_rank_that_stops_holds_up_the_next_epoch_for_a_while_only(store, monkeypatch):
    monkeypatch.setattr(service, "RANK_WAIT_S", 0.2)
    serving = Serving(store, ROOM)
    quick, stopped = (attach(serving, rank, "minibatch") for rank in range(WORLD))
    steps, behind = steps_of(serving), 0
    quick.start(0)
    stopped.start(0)
    for step in range(steps):
        while quick.take(step, wait_s=0.05) is None:
            stopped.consume(behind)
            behind += 1
        quick.release(step)
    assert stopped.take(behind) is not None
    quick.start(1)
    for step in range(steps):
        quick.consume(step)
    assert serving.service.status()[2]["sessions_left_behind"] == 1
    stopped.release(behind)
    for step in range(behind + 1, steps):
        stopped.consume(step)
    for trainer in (quick, stopped):
        trainer.detach()
    serving.close()


@pytest.mark.parametrize(
    ("plan", "mem"),
    [
        ("minibatch", ROOM), ("hyperbatch", TIGHT),
        pytest.param("minibatch", TIGHT, marks=pytest.mark.long),
        pytest.param("hyperbatch", ROOM, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_one_stream_has_batches_enough_for_every_rank(store, plan, mem):
    """A rank for which there is none would take memory for a stream of its own."""
    serving = Serving(store, mem)
    ranks = [attach(serving, rank, plan, 6) for rank in range(6)]
    for trainer in ranks:
        trainer.start(0)
    for step in range(steps_of(serving)):
        for trainer in ranks:
            trainer.consume(step)
    assert streams_of(serving) == 1
    for trainer in ranks:
        trainer.detach()
    serving.close()


def test_a_rank_that_holds_its_last_batches_does_not_hold_up_the_next_epoch(store):
    """Its batches of the new epoch are built ahead: with those it holds they take all the room."""
    serving = Serving(store, ROOM)
    first, late = (attach(serving, rank, "minibatch") for rank in range(WORLD))
    first.start(0)
    late.start(0)
    steps, held, ahead = steps_of(serving), 2, 8
    for step in range(steps):
        first.consume(step)
        if step < steps - held:
            late.consume(step)
        else:
            assert late.take(step) is not None
    first.start(1)
    for step in range(ahead):
        first.consume(step)
    for step in range(steps - held, steps):
        late.release(step)
    late.start(1)
    for step in range(steps):
        late.consume(step)
        if step >= ahead:
            first.consume(step)
    assert streams_of(serving) == 1
    for trainer in (first, late):
        trainer.detach()
    serving.close()


def test_ranks_wait_for_one_that_takes_long_for_a_step(store, monkeypatch):
    """Others are parted at once here: ranks train in step, and gain nothing by being parted."""
    monkeypatch.setattr(service, "STRAGGLER_WAIT_S", 0.0)
    looks, real = queue.SimpleQueue[int](), service.StragglerWatch._check

    def look(self, stream, since):
        real(self, stream, since)
        looks.put(0)

    monkeypatch.setattr(service.StragglerWatch, "_check", look)
    serving = Serving(store, ROOM)
    quick, slow = (attach(serving, rank, "minibatch") for rank in range(WORLD))
    quick.start(0)
    slow.start(0)
    assert slow.take(0) is not None
    got = 0
    while quick.take(got, wait_s=0.2) is not None:
        quick.release(got)
        got += 1
    assert 0 < got < steps_of(serving)
    for _ in range(5):
        looks.get(timeout=10)
    assert streams_of(serving) == 1
    assert serving.service.status()[2]["sessions_left_behind"] == 0
    slow.release(0)
    for step in range(1, steps_of(serving)):
        slow.consume(step)
        if step >= got:
            quick.consume(step)
    for trainer in (quick, slow):
        trainer.detach()
    serving.close()
