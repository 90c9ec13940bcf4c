"""Sessions of other seeds: rows that stay in memory are there once, for all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd.sessions.lookahead import LookAhead
from loaderd.streams.opener import SETTLE_S
from loaderd.streams.stream import Stream
from tests.graphs import make_csc
from tests.loaderd.serving import Serving, Ticks, Trainer
from tests.stores import write_store

NODES, BATCH, MEM = 20_000, 50, 16 << 20
FOR_FOUR = 45 << 19  # of which some rows stay beside four sessions
SEEDS = np.arange(0, NODES, 10)
STEPS = SEEDS.size // BATCH
ASKED: dict[str, Any] = {"num_neighbors": (4, 4), "batch_size": BATCH}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 MB, most of which are rows; few nodes are most edges' sources."""
    graph = make_csc(np.random.default_rng(3).integers(0, 30, NODES), 3)
    sources = graph.indices.astype(np.int64) ** 3 // NODES**2
    path = tmp_path_factory.mktemp("shared-rows") / "store"
    write_store(path, graph._replace(indices=sources), SEEDS, width=128)
    return path


def attach(serving: Serving, seed: int) -> Trainer:
    return serving.attach("hyperbatch", seed=seed, **ASKED)


def read(trainers: list[Trainer], epoch: int = 0) -> list[list[list[bytes]]]:
    """What they get, step by step in turn."""
    for trainer in trainers:
        trainer.start(epoch)
    found: list[list[list[bytes]]] = [[] for _ in trainers]
    for step in range(STEPS):
        for own, trainer in zip(found, trainers, strict=True):
            own.append(trainer.consume(step))
    return found


@pytest.fixture(scope="module")
def alone(store: Path) -> tuple[list[list[list[bytes]]], int]:
    """What trainers of three seeds get, and the rows that are read for the first of them."""
    found, rows = list[list[list[bytes]]](), list[int]()
    for seed in range(3):
        serving = Serving(store, MEM)
        trainer = attach(serving, seed)
        found += read([trainer])
        rows.append(serving.service.status()[2]["hyper_rows_read"])
        trainer.detach()
        serving.close()
    return found, rows[0]


def staying(serving: Serving) -> list[int]:
    """Rows that stay, as each session that is open counts them."""
    return [one.counters()["hyper_stay_rows"] for one in serving.engine.status()[1]]


def test_two_seeds_read_what_stays_once(store, alone):
    batches, rows = alone
    serving = Serving(store, MEM)
    trainers = [attach(serving, seed) for seed in range(2)]
    assert read(trainers) == batches[:2]
    first, second = staying(serving)
    assert first == second > 1000
    # each alone with half of the memory: 2.3 times as many
    assert serving.service.status()[2]["hyper_rows_read"] < 1.9 * rows
    for trainer in trainers:
        trainer.detach()
    serving.close()  # all is given back


def test_sessions_come_and_go(store, alone):
    batches, _ = alone
    serving = Serving(store, MEM)
    one, two = attach(serving, 0), attach(serving, 1)
    assert read([one, two]) == batches[:2]
    three = attach(serving, 2)
    assert read([one, three]) == [batches[0], batches[2]]
    one.detach()
    assert read([two, three]) == batches[1:]
    two.detach()
    assert read([three]) == batches[2:]
    one = attach(serving, 0)
    assert read([one, three]) == [batches[0], batches[2]]
    for trainer in (three, one):
        trainer.detach()
    serving.close()


def test_who_keeps_a_batch_does_not_hold_up_those_who_do_not(store, monkeypatch):
    """Others whose streams ended for a third session go on before it is no longer waited for."""
    serving = Serving(store, MEM)
    slow, quick = attach(serving, 0), attach(serving, 1)
    slow.start()
    quick.start()
    assert slow.take(0) is not None
    quick.consume(0)
    ticks, opener, told = Ticks(serving), serving.service._opener, list[tuple[str, float]]()

    def pause(seconds: float) -> None:
        quick.release_all()  # it may have been sent more before the third one came
        ticks.pause(seconds)

    opener._pause = pause
    replace, go_on = opener._replace, opener._go_on
    monkeypatch.setattr(
        opener, "_replace", lambda *a: (told.append(("replaced", ticks.now)), replace(*a))
    )
    monkeypatch.setattr(
        opener, "_go_on", lambda *a: (told.append(("given up", ticks.now)), go_on(*a))
    )
    third = attach(serving, 2)
    (first, at), (second, later) = told
    assert (first, second) == ("replaced", "given up")
    assert at <= SETTLE_S + 0.1 < later
    slow.release(0)
    for trainer in (slow, quick, third):
        trainer.detach()
    serving.close()


def test_who_starts_while_its_stream_is_replaced_reads_the_one_in_its_place(store, alone):
    """Not a further one, for which those that are open already leave too little."""
    serving = Serving(store, MEM)
    opener = serving.service._opener
    trainers = [attach(serving, seed) for seed in range(2)]
    end = opener._end

    def start_then(stream: Stream) -> Any:
        ended = end(stream)
        number = ended.cursors[0].number
        next(t for t in trainers if t.session == number).start()
        return ended

    opener._end, opened = start_then, serving.note_opened()
    trainers.append(attach(serving, 2))
    opener._end = end
    trainers[2].start()
    for step in range(STEPS):
        for number, trainer in enumerate(trainers):
            assert trainer.consume(step) == alone[0][number][step]
    assert sorted(opened) == [(seed, 4) for seed in range(3)]  # a quarter of the arena each
    for trainer in trainers:
        trainer.detach()
    serving.close()


def test_rows_are_kept_for_sessions_that_are_to_come(store, alone):
    """The fourth finds all that stays, and none of the others is opened again for it."""
    serving = Serving(store, FOR_FOUR)
    trainers = [attach(serving, seed) for seed in range(3)]
    before = staying(serving)
    assert before[0] > 1000
    assert len(set(before)) == 1
    opened = serving.note_opened()
    trainers.append(attach(serving, 3))
    assert opened == [(3, 4)]
    assert staying(serving) == [before[0]] * 4
    assert read(trainers[:3]) == alone[0]
    trainers.append(attach(serving, 4))  # one more gets no room of its own without the others'
    assert sorted(opened[1:]) == [(seed, 8) for seed in range(5)]
    for trainer in trainers:
        trainer.detach()
    serving.close()


def test_sessions_of_another_kind_take_the_place_of_those_to_come(store, alone):
    serving = Serving(store, FOR_FOUR)
    trainers = [attach(serving, seed) for seed in range(3)]
    opened = serving.note_opened()
    other = serving.attach("minibatch", seed=7, **ASKED)
    assert sorted(opened) == [(0, 3), (1, 3), (2, 3), (7, 1)]
    assert read(trainers) == alone[0]
    for trainer in [*trainers, other]:
        trainer.detach()
    serving.close()


def test_a_session_whose_stream_has_ended_counts_among_those_that_share(store, alone):
    serving = Serving(store, MEM)
    opener, registry = serving.service._opener, serving.service._registry
    trainers = [attach(serving, seed) for seed in range(2)]
    half, opened = registry.fair_share(), serving.note_opened()
    with opener.opening:  # as if another session were being opened
        with registry.lock:
            cursor, group = registry.sessions[trainers[0].session]
            cursor.stream.closing = True
            trainers[0].start()  # it leaves its stream, and waits for another one
            assert len(registry.streams) == 1
            assert registry.fair_share() == registry.fair_share(group.key) == half
        trainers[1].start()  # its own is no smaller than it should be
        assert trainers[1].consume(0) == alone[0][1][0]
    assert trainers[0].consume(0) == alone[0][0][0]
    assert opened == [(0, 2)]
    for trainer in trainers:
        trainer.detach()
    serving.close()


@pytest.mark.parametrize("has_room", [True, False])
def test_batches_are_sampled_ahead_once_for_all_random_seeds(store, alone, monkeypatch, has_room):
    """Once more, if there was room for few of them at first."""
    serving, sampled = Serving(store, MEM), list[int]()
    sample = LookAhead._sample

    def note(look: LookAhead) -> Any:
        sampled.append(look._draft.spec.plan.resolved.seed)
        seen = sample(look)
        assert seen is not None
        return seen if has_room or sampled[1:] else seen._replace(structures=seen.structures[:3])

    monkeypatch.setattr(LookAhead, "_sample", note)
    trainers = [attach(serving, seed) for seed in range(3)]
    assert sampled == [0] * (1 if has_room else 2)  # not again when they get less memory
    assert read(trainers) == alone[0]
    trainers.append(serving.attach("hyperbatch", **ASKED | {"num_neighbors": (4, 2)}))
    assert len(sampled) == (2 if has_room else 3)  # these are other batches
    for trainer in trainers:
        trainer.detach()
    serving.close()
