"""Sessions of other seeds where all rows have room: none takes it from the others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.graphs import make_csc
from tests.loaderd.serving import Serving, Trainer
from tests.stores import write_store

NODES, BATCH = 20_000, 10
SEEDS = np.arange(0, NODES, 100)
STEPS = SEEDS.size // BATCH
ASKED: dict[str, Any] = {"num_neighbors": (3,), "batch_size": BATCH}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 MB, most of which are rows."""
    graph = make_csc(np.random.default_rng(3).integers(0, 30, NODES), 3)
    path = tmp_path_factory.mktemp("in-memory") / "store"
    write_store(path, graph, SEEDS, width=128)
    return path


def read(trainers: list[Trainer]) -> list[list[list[bytes]]]:
    """What they get in an epoch, step by step in turn."""
    for trainer in trainers:
        trainer.start()
    steps = [[trainer.consume(step) for trainer in trainers] for step in range(STEPS)]
    return [list(own) for own in zip(*steps, strict=True)]


@pytest.fixture(scope="module")
def alone(store: Path) -> list[list[list[bytes]]]:
    """What trainers of four seeds get."""
    found = []
    for seed in range(4):
        with Serving(store, 32 << 20) as serving:
            found += read([serving.attach("auto", seed=seed, **ASKED)])
    return found


def plans(serving: Serving) -> list[str]:
    return [session.plan for session in serving.engine.status()[1]]


@pytest.mark.parametrize("mib", [14, 15, 16, 24])
def test_four_sessions_read_each_row_once(store, alone, mib):
    """A share of the arena is less than the rows take, but all share the row pool."""
    with Serving(store, mib << 20) as serving:
        trainers = [serving.attach("auto", seed=seed, **ASKED) for seed in range(4)]
        assert plans(serving) == ["minibatch"] * 4
        assert read(trainers) == alone
        budget, counters = serving.engine.resources.budget, serving.service.status()[2]
        assert counters["blocks_read"] <= budget.graph_blocks + budget.row_blocks


def test_those_that_read_the_row_pool_are_opened_again_before_it_is_too_small(store, alone):
    """From memory in which one has room for all rows, up to the least in which two have."""
    for kib in range(12_960, 13_100, 4):
        with Serving(store, kib << 10) as serving:
            trainers = [serving.attach("auto", seed=seed, **ASKED) for seed in range(2)]
            two, opened = plans(serving), serving.note_opened()
            trainers.append(serving.attach("auto", seed=2, **ASKED))
            assert plans(serving) == ["hyperbatch"] * 3
            if two == ["minibatch"] * 2:
                # they do not read while the third one is opened
                assert sorted(seed for seed, _ in opened[:2]) == [0, 1]
                assert read(trainers) == alone[:3]
                assert serving.service.status()[2]["row_blocks_missed"] == 0
                return
    pytest.fail("two never had room for all rows")


def test_a_session_of_another_kind_may_leave_the_row_pool_too_small(store, alone):
    with Serving(store, 14 << 20) as serving:
        trainers = [serving.attach("auto", seed=0, **ASKED)]
        assert plans(serving) == ["minibatch"]
        trainers.append(serving.attach("hyperbatch", seed=1, **ASKED))
        assert plans(serving) == ["hyperbatch"] * 2
        assert read(trainers) == alone[:2]


def test_one_that_asked_for_plain_minibatches_keeps_them(store, alone):
    with Serving(store, 14 << 20) as serving:
        trainers = [serving.attach("minibatch", seed=0, **ASKED)]
        trainers.append(serving.attach("hyperbatch", seed=1, **ASKED))
        assert sorted(plans(serving)) == ["hyperbatch", "minibatch"]
        assert read(trainers) == alone[:2]
