"""Attaching beside sessions at work, where the graph pool has fewer slots than the graph blocks."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from loaderd.api.errors import Refused
from tests.effort import tries
from tests.graphs import make_csc
from tests.loaderd.harness import WAIT_S
from tests.loaderd.opened import held, serve, sessions_of, wait_held
from tests.stores import write_store

NODES, STEPS = 6000, 8


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A graph of some 140 blocks."""
    graph = make_csc(np.random.default_rng(3).integers(0, 30, NODES), 3)
    path = tmp_path_factory.mktemp("attach") / "store"
    write_store(path, graph, np.arange(NODES))
    return path


def shrink(engine, slots):
    """Have the graph pool keep so many slots, as after sessions have taken the others."""
    broker = engine.broker
    taken = broker.take(broker.available())
    graph = [slot for slot in taken if slot < engine.budget.graph_slots]
    back = slots - broker._graph.num_owned
    broker.give([slot for slot in taken if slot not in graph] + graph[len(graph) - back :])
    assert broker._graph.num_owned == slots
    return graph[: len(graph) - back]


def test_an_attach_that_loads_the_graph_leaves_workers_their_share(store, monkeypatch):
    """Whoever attaches stands still with what it has pinned while another session is served."""
    calm: list[str] = []
    with sessions_of(store, 16 << 20) as other:
        assert serve(other.attach("minibatch"), 1, STEPS, calm) is None
    with sessions_of(store, 16 << 20) as sessions:
        engine, seen = sessions.engine, list[str]()
        before = held(engine)
        assert engine.broker.graph_preferred == engine.budget.graph_blocks > 100
        first = sessions.attach("minibatch")
        taken = shrink(engine, engine.budget.graph_min)
        gate, stopped, drop = threading.Event(), threading.Event(), engine.graph.drop

        def drop_at_the_gate(pinned):
            if threading.current_thread().name.startswith("attach"):
                stopped.set()
                assert gate.wait(WAIT_S)
            drop(pinned)

        monkeypatch.setattr(engine.graph, "drop", drop_at_the_gate)
        with ThreadPoolExecutor(1, "attach") as attaching:
            coming = attaching.submit(sessions.attach, "minibatch", seed=1)
            coming.add_done_callback(lambda _: stopped.set())  # it pinned nothing
            assert stopped.wait(WAIT_S)
            try:
                error = serve(first, 1, STEPS, seen)
            finally:
                gate.set()
            second = coming.result(WAIT_S)
        assert error is None
        assert seen == calm
        assert serve(second, 1, STEPS) is None
        engine.detach(first.session)
        engine.detach(second.session)
        engine.broker.give(taken)
        wait_held(engine, before)


def test_sessions_come_and_go_beside_one_at_work_at_budgets_below_the_data(store):
    """The same digests, whoever attaches meanwhile and however small the graph pool is."""
    calm: list[str] = []
    with sessions_of(store, 16 << 20) as other:
        assert serve(other.attach("hyperbatch"), 1, STEPS, calm) is None
    for mem in (700 << 10, 3 << 19):  # the last has room for the graph alone
        with sessions_of(store, mem, workers=2) as sessions:
            engine, before = sessions.engine, held(sessions.engine)
            first = sessions.attach("hyperbatch")
            with ThreadPoolExecutor(1) as working:

                def work(first=first):
                    for run in range(1, tries(3, 4)):
                        seen: list[str] = []
                        assert serve(first, run, STEPS, seen) is None
                        assert seen == calm

                done = working.submit(work)
                number = 0
                while not done.done() or number < 4:
                    plan, number = ("minibatch", "hyperbatch")[number % 2], number + 1
                    try:
                        guest = sessions.attach(plan, seed=number, batch_size=8)
                    except Refused:  # there is no room for two just now
                        continue
                    assert serve(guest, 1, 2) is None
                    engine.detach(guest.session)
                done.result(WAIT_S)
            engine.detach(first.session)
            wait_held(engine, before)


def test_an_attach_does_not_wait_for_workers_who_have_batches_to_build(store):
    """What is sampled to know what batches take is sampled by who attaches: others wait for it."""
    with sessions_of(store, 1 << 20) as sessions:
        engine, gate = sessions.engine, threading.Event()
        assert engine.broker.graph_preferred < engine.budget.graph_blocks
        for _ in range(engine.settings.workers):
            engine.resources.workers.soon(0, lambda: gate.wait(2 * WAIT_S) and None)
        with ThreadPoolExecutor(1) as pool:
            try:
                attaching = pool.submit(sessions.attach, "hyperbatch")
                assert attaching.result(WAIT_S) is not None
            finally:
                gate.set()


def test_macro_batches_are_served_though_free_slots_lie_too_far_apart_for_two(tmp_path):
    """Another store may have the slots between them: one macro-batch in memory is enough."""
    store = tmp_path / "partitioned"
    write_store(store, make_csc([30] * NODES, 1), np.arange(NODES), offsets=[0, 3000, NODES])
    calm, seen = list[str](), list[str]()
    with sessions_of(store, 16 << 20) as other:
        assert serve(other.attach("macrobatch"), 1, STEPS, calm) is None
    with sessions_of(store, 16 << 20) as sessions:
        engine, before = sessions.engine, held(sessions.engine)
        opened = sessions.attach("macrobatch")
        basis = next(e.basis for e in engine.status()[0] if "macro-batches" in e.basis)
        count, size = map(int, re.findall(r"macro-batches: (\d+) x (\d+) slots", basis)[0])
        assert count == 2
        engine.detach(opened.session)
        wait_held(engine, before)
        taken = sorted(engine.broker.take(engine.broker.available()))
        # every other run is shorter than a macro-batch, and the first than two of them
        keep = taken[2 * size - 1 :: size]
        engine.broker.give(sorted(set(taken) - set(keep)))
        opened = sessions.attach("macrobatch")
        assert any("macro-batches: 1 x" in e.basis for e in engine.status()[0])
        assert serve(opened, 1, STEPS, seen) is None
        assert seen == calm
        engine.detach(opened.session)
        engine.broker.give(keep)
        wait_held(engine, before)
