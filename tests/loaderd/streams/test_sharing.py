"""Sessions that share a stream: the same bytes, read once; who falls behind holds nobody up."""

import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockstore.owners import write_owners
from blockstore.store import open_store
from loaderd.api.errors import Refused
from loaderd.api.protocol import Start
from loaderd.streams.registry import StreamRegistry
from loaderd.streams.service import StragglerWatch
from loaderd.streams.stream import Cursor, Stream
from tests.daemons import until
from tests.graphs import make_csc
from tests.loaderd.serving import WAIT_S, Serving, Trainer
from tests.stores import write_store

NODES, BATCH = 6000, 100
STEPS = NODES // BATCH


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Larger than the budgets below."""
    graph = make_csc(np.random.default_rng(3).integers(0, 30, NODES), 3)
    path = tmp_path_factory.mktemp("sharing") / "store"
    write_store(path, graph, np.arange(NODES))
    return path


@pytest.fixture(params=["minibatch", "hyperbatch"])
def plan(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def solo(
    store: Path, mem: int, plan: str, epochs: int = 1, steps: int = STEPS, **fields: Any
) -> tuple[list[list[bytes]], int]:
    """What one trainer gets, and the bytes that are read for it; made once for all tests."""
    serving = Serving(store, mem)
    one, found = serving.attach(plan, **fields), []
    for epoch in range(epochs):
        one.start(epoch)
        found += [one.consume(step) for step in range(steps)]
    read = serving.engine.reader.bytes_read
    one.detach()
    serving.close()
    return found, read


@pytest.mark.usefixtures("nobody_falls_behind")
def test_eight_trainers_of_one_plan_read_as_much_as_one(store, plan):
    mem = 8 << 20
    expected, read = solo(store, mem, plan, epochs=2)
    serving = Serving(store, mem)
    trainers = [serving.attach(plan) for _ in range(8)]
    for epoch in range(2):
        for trainer in trainers:
            trainer.start(epoch)
        for step in range(STEPS):
            for trainer in trainers:
                assert trainer.consume(step) == expected[epoch * STEPS + step]
    assert serving.service.status()[2]["streams"] == 1
    assert serving.engine.reader.bytes_read <= 1.1 * read
    for trainer in trainers:
        trainer.detach()
    serving.close()


@pytest.mark.parametrize(("world", "mem"), [(1, 4000), (8, 1300), (8, 3400)])
def test_those_who_join_leave_the_graph_its_memory(store, world, mem):
    """More batches for them would be sampled from a graph that is read again and again."""
    serving = Serving(store, mem << 10)
    ranks = [{"rank": i if world > 1 else 0, "world_size": world} for i in range(8)]
    trainers = [serving.attach("hyperbatch", window=2, **ranks[0])]
    slots = serving.engine.broker._graph.num_owned
    trainers += [serving.attach("hyperbatch", window=2, **rank) for rank in ranks[1:]]
    assert serving.service.status()[2]["streams"] == 1
    assert serving.engine.broker._graph.num_owned == slots
    for trainer in trainers:
        trainer.detach()
    serving.close()


def test_one_that_falls_behind_reads_on_its_own(store, plan):
    expected, _ = solo(store, 8 << 20, plan)
    serving = Serving(store, 8 << 20)
    quick, slow = serving.attach(plan, window=4), serving.attach(plan, window=4)
    quick.start()
    slow.start()
    assert slow.consume(0) == expected[0]
    for step in range(STEPS):
        assert quick.consume(step) == expected[step]
    assert serving.service.status()[2]["sessions_left_behind"] == 1
    for step in range(1, STEPS):
        assert slow.consume(step) == expected[step]
    quick.detach()
    slow.detach()
    serving.close()


def test_one_that_does_not_begin_is_waited_for_once(store, monkeypatch):
    """A session that is only kept open, such as one for evaluation, costs no pause an epoch."""
    left: list[int] = []
    leave = StreamRegistry.leave

    def count(registry: StreamRegistry, cursor: Cursor, stream: Stream) -> None:
        left.append(cursor.number)
        leave(registry, cursor, stream)

    monkeypatch.setattr(StreamRegistry, "leave", count)
    expected, _ = solo(store, 8 << 20, "minibatch", epochs=5)
    serving = Serving(store, 8 << 20)
    one, other = serving.attach(window=4), serving.attach(window=4)

    def epoch(number: int, *trainers: Trainer) -> None:
        for trainer in trainers:
            trainer.start(number)
        for step in range(STEPS):
            for trainer in trainers:
                assert trainer.consume(step) == expected[number * STEPS + step]

    for number in range(2):
        epoch(number, one)
    assert left == [other.session]
    for number in range(2):  # in turns: the first one waits for the other in vain, too, once
        epoch(number, other)
        epoch(number, one)
    assert left == [other.session, one.session]
    epoch(3, one, other)
    epoch(4, one)  # one that came along is expected to do so again
    assert left == [other.session, one.session, other.session]
    one.detach()
    other.detach()
    serving.close()


def test_streams_get_smaller_for_others_and_larger_again(store):
    """Four plans in a budget for three: all are served, with a quarter each at most."""
    mem, seeds = 12 << 20, range(4)
    expected = [solo(store, mem, "hyperbatch", seed=seed)[0] for seed in seeds]
    serving = Serving(store, mem)
    trainers: list[Trainer] = []
    found: dict[int, list[list[bytes]]] = {seed: [] for seed in seeds}

    def train(seed: int) -> None:
        found[seed] += [trainers[seed].consume(step) for step in range(STEPS)]

    threads = [threading.Thread(target=train, args=(seed,)) for seed in seeds]
    for seed in seeds:
        trainers.append(serving.attach("hyperbatch", seed=seed))
        trainers[-1].start()
        threads[seed].start()
    held = [status.held_bytes for status in serving.service.status()[1]]
    assert max(held) <= mem // 4
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in seeds] == expected
    for trainer in trainers[1:]:
        trainer.detach()
    trainers[0].start(epoch=0)
    assert [trainers[0].consume(step) for step in range(STEPS)] == expected[0]
    assert serving.service.status()[1][0].held_bytes > min(held)
    trainers[0].detach()
    serving.close()


def test_an_epoch_begun_ahead_in_a_share_begins_again_in_more(store):
    """The next epoch is begun while there are two sessions; then the other one leaves."""
    mem = 4 << 20
    expected, _ = solo(store, 12 << 20, "minibatch", epochs=4)
    serving = Serving(store, mem)
    one, other = serving.attach("hyperbatch"), serving.attach("hyperbatch", seed=5)
    found, held = list[list[bytes]](), list[int]()

    def epoch(number: int) -> None:
        one.start(number)
        found.extend(one.consume(step) for step in range(STEPS))
        held.append(serving.service.status()[1][0].held_bytes)

    epoch(0)
    epoch(1)
    until(lambda: serving.service.status()[2]["batches"] > 2 * STEPS, "nothing is built ahead")
    other.detach()
    epoch(2)
    epoch(3)
    assert held[0] == held[1] < held[2] == held[3]
    assert found == expected
    one.detach()
    serving.close()


def test_a_session_for_which_there_is_no_room_is_told_the_budget_that_would_do(store):
    serving = Serving(store, 8 << 20)
    one = serving.attach()
    with pytest.raises(Refused, match=r"serve with at least --mem \d+M"):
        serving.attach(num_neighbors=(200, 200), batch_size=6000)
    one.start()
    one.consume(0)
    one.detach()
    serving.close()


def test_a_stream_is_not_made_smaller_for_those_who_have_gone(store, monkeypatch):
    serving = Serving(store, 8 << 20)
    trainer = serving.attach("hyperbatch")
    with serving.service._registry.lock:
        (stream,) = serving.service._registry.streams
    opener = serving.service._opener
    take = opener._take

    def leave_first(*arguments):
        trainer.detach()
        return take(*arguments)

    monkeypatch.setattr(opener, "_take", leave_first)
    opener._replace(opener._end(stream), 0)
    serving.close()


def test_an_end_that_comes_as_a_stream_starves_is_not_missed():
    """The watching thread has seen that a stream starves, and then the service is closed."""

    class Late(threading.Event):
        def clear(self) -> None:
            watch._closed = True  # as `close` does
            self.set()
            super().clear()

    watch: Any = SimpleNamespace(_starved=Late(), _closed=False, _held_up=list)
    watch._starved.set()
    thread = threading.Thread(target=StragglerWatch._watch, args=(watch,), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_those_who_have_stopped_with_all_of_a_stream_hold_nobody_up(store):
    serving = Serving(store, 8 << 20)
    try:
        stopped = serving.attach()
        stopped.start()
        first = 0
        while stopped.take(first, 2) is not None:  # all that it may hold
            first += 1
        other = serving.attach()
        other.start(step=first - 1)
        for step in range(first - 1, STEPS):
            other.consume(step)
        assert serving.service.status()[2]["sessions_left_behind"] >= 1
        other.detach()
        stopped.detach()
    finally:
        serving.close()


def test_a_start_that_is_repeated_changes_nothing(store, plan):
    expected, _ = solo(store, 8 << 20, plan)
    serving = Serving(store, 8 << 20)
    trainer = serving.attach(plan, window=2)
    trainer.start()
    found = [trainer.consume(0)]
    serving.service.start(Start(session=trainer.session, run=trainer.run, epoch=0, step=0))
    found += [trainer.consume(step) for step in range(1, 4)]
    assert found == expected[:4]
    assert (trainer.run, 0) not in serving.out[trainer.session]  # it was not sent again
    trainer.detach()
    serving.close()


@pytest.mark.usefixtures("nobody_falls_behind")
def test_owners_share_a_stream_that_does_not_grow(store, plan):
    """Each batch names the owner of each of its nodes."""
    write_owners(open_store(store), f"thirds-{plan}", np.arange(NODES) % 3, 3, {})
    serving = Serving(store, 8 << 20)
    trainers = [serving.attach(plan, owners=f"thirds-{plan}")]
    ledger = [entry.num_bytes for entry in serving.service.status()[0]]
    trainers += [serving.attach(plan, owners=f"thirds-{plan}") for _ in range(3)]
    found, _, counters = serving.service.status()
    assert [entry.num_bytes for entry in found] == ledger
    assert counters["streams"] == 1
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        batch = trainer.take(0)
        assert batch is not None
        names = [array.name for array in batch.structure.arrays]
        arrays = dict(zip(names, serving.bytes_of(batch.structure), strict=True))
        owner = np.frombuffer(arrays["owner"], np.uint8)
        assert (owner == np.frombuffer(arrays["n_id"], np.uint32) % 3).all()
        trainer.release(0)
    for trainer in trainers:
        trainer.detach()
    serving.close()
