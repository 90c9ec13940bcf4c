"""Batches sampled on workers, several at a time: order, errors, and workspaces that come back."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from blockstore.kernels.records import EdgeRecord
from loaderd.memory.workspace import (
    Carver,
    RowName,
    Sizes,
    TableKind,
    Workspace,
    WorkspaceFull,
    carve_workspace,
)
from loaderd.plans.base import Shape, Unit
from loaderd.sampling.hyperbatch.areas import StructureArea
from loaderd.sampling.hyperbatch.single import (
    BatchSampler,
    SessionWorkers,
    Workspaces,
    usual_shape,
)
from loaderd.sampling.structure import Structure

STRUCTURE = Structure((2, 3), ((4,),), 5, 4, (2,), 2)


def make_work(nodes: int, small: bool = False, trees: bool = False) -> Workspace:
    sizes = Sizes(
        50, "uint32", EdgeRecord(ids=1), (RowName(0, "x"),), 9, 9, TableKind.HASHED, trees
    )
    shape = Shape(2, (2,), ((9,),), nodes, 3)
    counted = Carver(None)
    carve_workspace(counted, shape, sizes)
    work = carve_workspace(Carver(np.zeros(counted.used, np.uint8)), shape, sizes)
    work.small = small
    return work


@pytest.fixture
def workers():
    """Three large workspaces and one small one, and two threads."""
    workspaces = Workspaces()
    for small in (False, False, False, True):
        workspaces.add(make_work(4 if small else 20, small))
    with ThreadPoolExecutor(2) as threads:
        yield (
            workspaces,
            SessionWorkers(workspaces, lambda step: threads.submit(step), lambda: None),
        )


@pytest.mark.parametrize(("fanouts", "edges"), [(((3,), (9,)), (30, 189)), (None, (21, 101))])
def test_a_small_workspace_holds_a_quarter_more_than_was_seen(fanouts, edges):
    """Draws have room for as many as there may be, if they are made in it."""
    seen = [Structure((8, 16, n), ((16,), (80,)), 24 + n, 96, (8, 16), 8) for n in (40, 80)]
    worst = Shape(10, (10, 30), ((30,), (200,)), 500)
    assert usual_shape(seen, worst, fanouts) == Shape(
        10, (10, 21), tuple((count,) for count in edges), 131
    )


def test_steps_are_done_once_and_in_order(workers):
    workspaces, team = workers
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    team.run(20, lambda i, _work: done.put(i) is None)
    assert sorted(done.get() for _ in range(20)) == list(range(20))
    assert done.empty()
    assert workspaces.all_home
    team.run(0, lambda _i, _work: pytest.fail("there is nothing to do"))


def test_where_nothing_is_handed_out_every_workspace_is_worked_in():
    workspaces, both = Workspaces(), threading.Barrier(2)
    for _ in range(2):
        workspaces.add(make_work(20))
    with ThreadPoolExecutor(2) as threads:
        team = SessionWorkers(workspaces, threads.submit, lambda: None)
        team.run(2, lambda _i, _work: both.wait(10) >= 0)
    assert workspaces.all_home


def test_the_first_error_is_raised_and_workspaces_are_back(workers):
    workspaces, team = workers
    begun: list[int] = []

    def step(i: int, _work: Workspace) -> bool:
        begun.append(i)
        if i == 3:
            raise OSError("cannot read")
        return True

    for _ in range(3):
        begun.clear()
        with pytest.raises(OSError, match="cannot read"):
            team.run(1000, step)
        assert workspaces.all_home
        assert len(begun) < 1000


def test_no_step_begins_after_one_that_was_the_last(workers):
    workspaces, team = workers
    begun: list[int] = []

    def step(i: int, _work: Workspace) -> bool:
        begun.append(i)
        return i < 5

    team.run(1000, step)
    assert set(range(6)) <= set(begun)
    assert len(begun) < 20
    assert workspaces.all_home


def test_what_is_too_large_for_a_small_workspace_gets_a_large_one(workers):
    workspaces, team = workers

    def build(work: Workspace) -> str:
        if work.small:
            raise WorkspaceFull
        return "built"

    small = workspaces.try_take()
    assert small is not None
    assert small.small
    with team.large_enough(small, build) as (built, work):
        assert (built, work.small) == ("built", False)
        assert not workspaces.all_home
    workspaces.give(small)
    assert workspaces.all_home
    large = workspaces.take(large=True)
    with pytest.raises(WorkspaceFull), team.large_enough(large, fail):
        pass
    workspaces.give(large)
    assert workspaces.all_home
    assert workspaces.try_take(STRUCTURE) is not None  # the small one has four nodes


def fail(_work: Workspace) -> str:
    raise WorkspaceFull


def test_the_only_worker_waits_for_no_workspace_that_is_handed_out():
    """A batch that is handed out has the large one until that worker has done its next step."""
    workspaces = Workspaces()
    for small in (False, True):
        workspaces.add(make_work(4 if small else 20, small))
    handed_out = workspaces.try_take_large()
    assert handed_out is not None
    left = [handed_out]

    def give_back() -> None:
        while left:
            workspaces.give(left.pop())

    def build(unit: Unit, work: Workspace) -> Structure:
        if work.small:
            worker.submit(give_back)
            raise WorkspaceFull
        work.n_id[:5], work.local[:4] = unit.step, [2, 3, 0, 4]
        return STRUCTURE

    area = StructureArea(np.zeros(1 << 12, np.uint8))
    with ThreadPoolExecutor(1) as worker, ThreadPoolExecutor(1) as session:
        workers = SessionWorkers(workspaces, lambda step: worker.submit(step), lambda: None)
        sampler: Any = BatchSampler(build, workers)
        coming = session.submit(sampler.sample, [Unit(0, 3, 0, 2)], 7, area, lambda: False)
        try:
            found = coming.result(timeout=10)
        finally:
            give_back()  # in a test that fails the worker would wait for ever
    assert [(s.batch, s.unit.step) for s in found] == [(7, 3)]
    assert workspaces.all_home


@pytest.mark.parametrize("late", [False, True])
def test_batches_up_to_the_first_without_room_are_sampled(workers, late):
    """If the first one comes last, those after it have taken all the room."""
    workspaces, team = workers
    others = threading.Event()

    def build(unit: Unit, work: Workspace) -> Structure:
        if late and unit.step == 0:
            others.wait(0.1)
        if unit.step == 7:
            others.set()
        work.n_id[:5], work.local[:4] = unit.step, [2, 3, 0, 4]
        return STRUCTURE

    sampler: Any = BatchSampler(build, team)
    units = [Unit(0, step, 0, 2) for step in range(12)]
    area = StructureArea(np.zeros(6 * 6 * 64, np.uint8))
    found = sampler.sample(units, 40, area, lambda: False)
    assert 1 <= len(found) < 12
    assert [(s.batch, s.unit.step) for s in found] == [(40 + i, i) for i in range(len(found))]
    assert [set(s.arrays.nodes[0].tolist()) for s in found] == [{i} for i in range(len(found))]
    assert workspaces.all_home
    cancelled = threading.Event()
    cancelled.set()
    wide = StructureArea(np.zeros(1 << 16, np.uint8))
    assert len(sampler.sample(units, 0, wide, cancelled.is_set)) < 12
