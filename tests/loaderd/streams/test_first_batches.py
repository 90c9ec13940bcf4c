"""Batches that were sampled to size a session are the first that it hands out."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd.sampling.hyperbatch.single import BatchSampler
from loaderd.sampling.hyperbatch.together import BlockSampler
from tests.graphs import make_csc
from tests.loaderd.serving import Serving, Trainer
from tests.stores import write_store

NODES, BATCH = 20_000, 50
SEEDS = np.arange(0, NODES, 10)
STEPS = SEEDS.size // BATCH
ASKED: dict[str, Any] = {"num_neighbors": (4, 4), "batch_size": BATCH, "hyperbatch": 18}
AHEAD = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 MB of graph, a little more than a megabyte of rows."""
    graph = make_csc(np.random.default_rng(3).integers(0, 400, NODES), 3)
    path = tmp_path_factory.mktemp("first-batches") / "store"
    write_store(path, graph, SEEDS, block_bytes=32768, width=16)
    return path


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(epoch, step) of each batch that is sampled, in order."""
    found: list[tuple[int, int]] = []
    for sampler in (BatchSampler, BlockSampler):
        sample = sampler.sample

        def note(self: Any, *arguments: Any, sample: Any = sample) -> Any:
            batches = sample(self, *arguments)
            found.extend((s.unit.epoch, s.unit.step) for s in batches)
            return batches

        monkeypatch.setattr(sampler, "sample", note)
    return found


def batches(trainer: Trainer, epoch: int = 0, first: int = 0) -> list[list[bytes]]:
    trainer.start(epoch, first)
    return [trainer.consume(step) for step in range(first, STEPS)]


def plain(store: Path, epoch: int = 0, first: int = 0) -> list[list[bytes]]:
    with Serving(store, 192 << 20) as serving:  # the graph stays in memory
        return batches(serving.attach("minibatch", **ASKED), epoch, first)


@pytest.mark.parametrize("mib", [10, 12])
def test_they_are_not_sampled_again(store: Path, sampled: list[tuple[int, int]], mib: int):
    expected = plain(store)
    with Serving(store, mib << 20) as serving:
        assert serving.engine.broker.graph_preferred < serving.engine.budget.graph_blocks
        trainer = serving.attach("hyperbatch", **ASKED)
        assert sampled == [(0, step) for step in range(AHEAD)]
        assert batches(trainer) == expected
        assert Counter(step for epoch, step in sampled if epoch == 0) == Counter(range(STEPS))


@pytest.mark.parametrize(("mib", "passes"), [(10, 2), (48, 1)])
def test_those_that_follow_are_begun_while_the_graph_is_in_memory(
    store: Path, monkeypatch: pytest.MonkeyPatch, mib: int, passes: int
):
    """If there is room for all of it: else a pass reads it, whoever makes it."""
    made, found = [0], list[tuple[int, int]]()  # passes; first step and passes of a hyperbatch
    one, sample = BlockSampler._pass, BlockSampler.sample

    def count(self: Any, *arguments: Any) -> None:
        made[0] += 1
        one(self, *arguments)

    def note(self: Any, units: Any, *arguments: Any) -> Any:
        before = made[0]
        batches = sample(self, units, *arguments)
        found.append((units[0].step, made[0] - before))
        return batches

    monkeypatch.setattr(BlockSampler, "_pass", count)
    monkeypatch.setattr(BlockSampler, "sample", note)
    with Serving(store, mib << 20) as serving:
        trainer = serving.attach("hyperbatch", **ASKED)
        assert found == [(0, 2)]  # a pass for each hop
        assert batches(trainer) == plain(store)
    assert (found[1][0], [passes for _, passes in found[1:3]]) == (AHEAD, [passes, 1])


@pytest.mark.parametrize(("epoch", "first"), [(0, 1), (0, 20), (1, 0)])
@pytest.mark.parametrize("mib", [10, 48])
def test_a_session_that_begins_elsewhere_has_its_own(store: Path, mib: int, epoch: int, first: int):
    with Serving(store, mib << 20) as serving:
        trainer = serving.attach("hyperbatch", **ASKED)
        assert batches(trainer, epoch, first) == plain(store, epoch, first)
        assert batches(trainer) == plain(store)


def test_a_run_that_ends_at_once_may_take_them_along(store: Path):
    with Serving(store, 10 << 20) as serving:
        trainer = serving.attach("hyperbatch", **ASKED)
        for _ in range(3):
            trainer.start(0, 0)
        assert batches(trainer) == plain(store)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_begin_with_them(store: Path, sampled: list[tuple[int, int]], ranks: int):
    asked = ASKED | {"batch_size": BATCH * ranks, "world_size": ranks}
    with Serving(store, 48 << 20) as serving:
        trainers = [serving.attach("minibatch", rank=rank, **asked) for rank in range(ranks)]
        steps = STEPS // ranks
        for trainer in trainers:
            trainer.start(0, 0)
        expected = [[trainer.consume(step) for trainer in trainers] for step in range(steps)]
    sampled.clear()
    with Serving(store, 12 << 20) as serving:
        trainers = [serving.attach("hyperbatch", rank=rank, **asked) for rank in range(ranks)]
        for trainer in trainers:
            trainer.start(0, 0)
        found = [[trainer.consume(step) for trainer in trainers] for step in range(steps)]
    assert found == expected
    assert max(Counter(sampled).values()) == 1


def test_seeds_in_order_are_looked_at_all_over_the_epoch(
    store: Path, sampled: list[tuple[int, int]]
):
    asked = ASKED | {"shuffle": False}
    with Serving(store, 12 << 20) as serving:
        trainer = serving.attach("hyperbatch", **asked)
        ahead = [step for _, step in sampled]
        assert (len(ahead), ahead[0], ahead[1] - ahead[0]) == (AHEAD, 0, STEPS // AHEAD)
        assert len(batches(trainer)) == STEPS


@pytest.mark.parametrize("mib", [10, 48, 64])
def test_what_is_kept_does_not_divide_the_free_slots(store: Path, mib: int):
    """Sessions that come later need adjacent ones."""
    with Serving(store, mib << 20) as serving:
        trainer = serving.attach("hyperbatch", **ASKED)
        broker = serving.engine.broker
        rows = broker.row_slots()
        broker.give([*range(first := broker.take_run(rows, 0.0), first + rows)])
        assert batches(trainer) == plain(store)
