"""A thread of a session that ends by a defect: its client is told, and is served again."""

import logging
from typing import Any

import numpy as np
import pytest

from loaderd.sampling.hyperbatch.session import Hyper
from loaderd.sessions.macrobatch import MacrobatchSession
from loaderd.sessions.propagated import PropagatedSession
from tests.graphs import make_csc
from tests.hopstores import make_hops, write_hop_store
from tests.loaderd.opened import PLANS
from tests.loaderd.serving import WAIT_S, Serving
from tests.stores import write_store

NODES, BATCH = 400, 40


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The next call of a method raises."""
    real, left = getattr(owner, name), [ArithmeticError("a defect")]

    def call(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return real(*arguments)

    monkeypatch.setattr(owner, name, call)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    graph = make_csc(np.random.default_rng(5).integers(1, 12, NODES), 5)
    folder = tmp_path_factory.mktemp("defects")
    write_store(folder / "graph", graph, np.arange(NODES), offsets=(0, NODES // 2, NODES))
    write_hop_store(folder / "hops", {"train": make_hops(NODES, 8, {"sym": 2}, 4)})
    return folder


CASES = {
    "sampling": ("graph", "hyperbatch", Hyper, "_ask"),
    "bringing in": ("graph", "hyperbatch", Hyper, "_group_size"),
    "reading partitions": ("graph", "macrobatch", MacrobatchSession, "macro_read"),
    "handing over": ("hops", "rows", PropagatedSession, "_message"),
    "asking": ("hops", "rows", PropagatedSession, "_begin"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_next_run_gets_all_batches(case, stores, monkeypatch, caplog):
    store, plan, owner, name = CASES[case]
    serving = Serving(stores / store, 16 << 20)
    trainer = serving.attach(plan, batch_size=BATCH, **(PLANS[plan] | {"window": 2}))
    fail_once(monkeypatch, owner, name)
    with caplog.at_level(logging.ERROR):
        trainer.start()
        with serving.came:
            assert serving.came.wait_for(lambda: serving.errors, WAIT_S)
            (error,) = serving.errors
            serving.errors.clear()
    assert (error.session, error.run) == (trainer.session, 1)
    assert "ArithmeticError: a defect" in error.message
    assert [record.exc_info is not None for record in caplog.records] == [True]
    trainer.start()
    for step in range(NODES // BATCH):
        batch = trainer.take(step)
        assert batch is not None
        trainer.release(step)
    trainer.detach()
    serving.close()
