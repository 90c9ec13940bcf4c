"""Ranks of one job on one daemon: macro-batches are read once, and nobody waits for who stops."""

import re
import shutil
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from blockstore.errors import BudgetTooSmall
from blockstore.store import open_store
from loaderd.api.errors import Refused
from loaderd.memory.ledger import is_session_entry, served_rows
from loaderd.sessions.sampled import SampledSession
from loaderd.streams import service
from tests.graphs import make_csc
from tests.loaderd.serving import WAIT_S, Serving, Trainer
from tests.stores import write_store

NODES, PARTS, BATCH = 2400, 8, 40
HUBS = tuple(range(0, NODES, 100))
LEAST, ROOM = 1 << 19, 4 << 20
OPTIONS = {"plan": "macrobatch", "batch_size": BATCH, "macro_partitions": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight partitions, hubs and halos."""
    graph = make_csc(np.random.default_rng(4).integers(0, 300, NODES), 5)
    offsets = tuple(range(0, NODES + 1, NODES // PARTS))
    halos = [[(300 * p + 450 + 7 * i) % NODES for i in range(20)] for p in range(PARTS)]
    path = tmp_path_factory.mktemp("job") / "store"
    write_store(path, graph, range(0, NODES, 2), offsets=offsets, hubs=HUBS, halos=halos)
    return path


def attach(serving: Serving, rank: int, world: int, **fields: object) -> Trainer:
    return serving.attach(rank=rank, world_size=world, **(OPTIONS | fields))


def steps_of(serving: Serving, trainer: Trainer) -> int:
    _, sessions, _ = serving.service.status()
    return next(s.num_steps for s in sessions if s.session == trainer.session)


def epoch_of(trainer: Trainer, steps: range) -> list[list[bytes]]:
    return [trainer.consume(step) for step in steps]


def go_on(ranks: list[Trainer], expected_of: list[list[list[bytes]]], epoch: int, steps: range):
    """Each rank takes its batch of one step after the other, as it was when it was alone."""
    for step in steps:
        for rank, expected in zip(ranks, expected_of, strict=True):
            assert rank.consume(step) == expected[epoch][step]


@pytest.fixture(scope="module")
def alone(store):
    """Of one rank that is alone in its daemon: each of two epochs' batches, and bytes read."""
    kept = {}

    def found(rank: int, world: int, **fields: object):
        key = (rank, world, *sorted(fields.items()))
        if key not in kept:
            serving = Serving(store, ROOM)
            trainer = attach(serving, rank, world, **fields)
            steps, before = steps_of(serving, trainer), serving.engine.reader.bytes_read
            epochs = []
            for epoch in range(2):
                trainer.start(epoch)
                epochs.append(epoch_of(trainer, range(steps)))
            # that of the next epoch, which is read ahead, may not be there yet
            end = time.monotonic() + WAIT_S
            while serving.service.status()[2]["macro_loaded"] < 2 * PARTS + 1:
                assert time.monotonic() < end
                time.sleep(0.01)
            trainer.detach()
            serving.close()
            kept[key] = epochs, serving.engine.reader.bytes_read - before
        return kept[key]

    return found


def num_memories(serving: Serving) -> int:
    """Macro-batches there is room for, as the ledger says."""
    ledger, _, _ = serving.service.status()
    found = [re.search(r"macro-batches: (\d+) x", e.basis) for e in ledger if is_session_entry(e)]
    (said,) = [match for match in found if match]
    return int(said[1])


@pytest.fixture(scope="module")
def min_mem(store):
    """Bytes with which so many ranks are served out of so many memories, and no more."""

    def fits(mem: int, world: int, memories: int) -> bool:
        try:
            serving = Serving(store, mem)
        except BudgetTooSmall:
            return False
        trainers: list[Trainer] = []
        try:
            for rank in range(world):
                trainers.append(attach(serving, rank, world))
            return num_memories(serving) >= memories
        except Refused:
            return False
        finally:
            for trainer in trainers:
                trainer.detach()
            serving.close()

    @cache
    def found(world: int, memories: int) -> int:
        low, high = LEAST, ROOM
        while high - low > 1 << 15:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle, world, memories) else (middle, high)
        return high

    return found


def test_the_next_epoch_is_read_before_it_begins(store, min_mem):
    """In memory for one macro-batch, as soon as the last one is given back."""
    serving = Serving(store, min_mem(1, 1))
    trainer = attach(serving, 0, 1)
    assert num_memories(serving) == 1
    trainer.start()
    epoch_of(trainer, range(steps_of(serving, trainer)))
    end = time.monotonic() + WAIT_S
    while serving.service.status()[2]["macro_loaded"] < PARTS + 1:
        assert time.monotonic() < end
        time.sleep(0.01)
    trainer.detach()
    serving.close()


@pytest.mark.usefixtures("nobody_falls_behind")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_read_as_much_as_one(store, alone, world):
    serving = Serving(store, ROOM)
    ranks = [attach(serving, rank, world) for rank in range(world)]
    expected = [alone(rank, world)[0] for rank in range(world)]
    before = serving.engine.reader.bytes_read
    for epoch in range(2):
        for rank in ranks:
            rank.start(epoch)
        go_on(ranks, expected, epoch, range(steps_of(serving, ranks[0])))
    for rank in ranks:
        rank.detach()
    serving.close()
    assert serving.engine.reader.bytes_read - before <= 1.05 * alone(0, world)[1]


@pytest.mark.parametrize(
    ("held", "tight"),
    [
        (1, False), (0, True), pytest.param(0, False, marks=pytest.mark.long),
        pytest.param(1, True, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_rank_that_stops_holds_nobody_up_and_goes_on_afterwards(
    store, alone, min_mem, tight, held, monkeypatch
):
    """In a budget without room for another macro-batch it keeps one of the two."""
    monkeypatch.setattr(service, "RANK_WAIT_S", 0.0)  # parted whenever another one waits
    serving = Serving(store, min_mem(3, 2) if tight else ROOM)
    ranks = [attach(serving, rank, 3) for rank in range(3)]
    expected = [alone(rank, 3)[0] for rank in range(3)]
    steps = steps_of(serving, ranks[0])
    for rank in ranks:
        rank.start()
    go_on(ranks, expected, 0, range(2))
    if held:
        ranks[2].take(2)
    go_on(ranks[:2], expected[:2], 0, range(2, steps))
    if held:
        ranks[2].release(2)
    go_on(ranks[2:], expected[2:], 0, range(2 + held, steps))
    for rank in ranks:
        rank.start(1)
    before = serving.engine.reader.bytes_read
    go_on(ranks, expected, 1, range(steps))
    assert serving.engine.reader.bytes_read - before <= 0.6 * alone(0, 3)[1]  # together again
    for rank in ranks:
        rank.detach()
    serving.close()


@pytest.mark.parametrize(
    ("world", "mem", "seed"),
    [(3, 1_003_958, 2), pytest.param(2, 1_099_748, 13, marks=pytest.mark.long)],
)
def test_ranks_that_wait_for_each_other_in_each_step_go_on(store, world, mem, seed, monkeypatch):
    """They stop and begin again at other times, are parted soon, and memory is for one stream.

    Who is ahead keeps its next batch until the others have had theirs, as trainers do.
    """
    monkeypatch.setattr(service, "RANK_WAIT_S", 0.25)
    monkeypatch.setattr(SampledSession, "widen", lambda *_: None)
    serving = Serving(store, mem)
    ranks = [attach(serving, rank, world) for rank in range(world)]
    rng, steps = np.random.default_rng(seed), steps_of(serving, ranks[0])
    ends = [int(rng.integers(1, steps + 1)) for _ in range(6)]
    in_step, failures = threading.Barrier(world), list[BaseException]()

    def train(number: int) -> None:
        own, rank = np.random.default_rng([seed, number]), ranks[number]
        try:
            for epoch, end in enumerate(ends):
                threading.Event().wait(0.05 * own.random())
                rank.start(epoch)
                for step in range(end):
                    assert rank.take(step) is not None, (number, epoch, step)
                    if own.random() < 0.05:
                        threading.Event().wait(0.1 * own.random())
                    rank.release(step)
                    in_step.wait()
        except BaseException as error:
            failures.append(error)
            in_step.abort()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for rank in ranks:
        rank.detach()
    serving.close()


@pytest.mark.parametrize("memories", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ranks_are_served_in_a_budget_of_one_jobs_memories(store, alone, min_mem, memories):
    """Ranks that go on in step, as they do in training, read each macro-batch once."""
    serving = Serving(store, min_mem(4, memories))
    ranks = [attach(serving, rank, 4) for rank in range(4)]
    assert num_memories(serving) == memories
    expected = [alone(rank, 4)[0] for rank in range(4)]
    before = serving.engine.reader.bytes_read
    for epoch in range(2):
        for rank in ranks:
            rank.start(epoch)
        go_on(ranks, expected, epoch, range(steps_of(serving, ranks[0])))
    assert serving.engine.reader.bytes_read - before <= 1.05 * alone(0, 4)[1]
    for rank in ranks:
        rank.detach()
    serving.close()


def test_what_cannot_be_read_fails_for_all_ranks_and_is_tried_again(store, tmp_path, alone):
    broken = tmp_path / "store"
    shutil.copytree(store, broken)
    opened = open_store(broken)
    shard = Path(opened.rows(served_rows(opened.manifest)[0].array).shards[0])
    raw = bytearray(shard.read_bytes())
    serving = Serving(broken, ROOM)
    ranks = [attach(serving, rank, 2) for rank in range(2)]
    shard.write_bytes(bytes(b ^ 1 for b in raw))
    for rank in ranks:
        rank.start()
    with serving.came:
        assert serving.came.wait_for(lambda: len(serving.errors) == 2, WAIT_S)
    assert {e.session for e in serving.errors} == {rank.session for rank in ranks}
    assert all(shard.name in e.message for e in serving.errors)
    serving.errors.clear()
    shard.write_bytes(raw)
    for number, rank in enumerate(ranks):
        rank.start()
        expected = alone(number, 2)[0][0]
        assert [rank.consume(step) for step in range(len(expected))] == expected
    for rank in ranks:
        rank.detach()
    serving.close()


@pytest.mark.parametrize("seed", [3])
def test_batches_are_the_same_whatever_ranks_do(store, alone, seed):
    """Ranks in threads, each at its pace: starting again, elsewhere, stopping, leaving, coming."""
    serving = Serving(store, ROOM)
    failures: list[BaseException] = []
    expected_of = [alone(number, 3, reuse=2)[0] for number in range(3)]

    def run(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        expected = expected_of[number]
        try:
            for _ in range(3):
                rank = attach(serving, number, 3, reuse=2)
                for _ in range(2):
                    epoch, first = int(rng.integers(2)), int(rng.integers(len(expected[0])))
                    rank.start(epoch, first)
                    for step in range(first, min(len(expected[0]), first + int(rng.integers(50)))):
                        assert rank.consume(step) == expected[epoch][step]
                    if rng.random() < 0.3:
                        threading.Event().wait(0.3)  # longer than others wait for it
                rank.detach()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    serving.close()
