"""Batches sampled together, block by block, against plain Python: each as if it were alone."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from loaderd.memory.ledger import edge_record
from loaderd.plans.base import EVERY_RANK, Part
from loaderd.plans.minibatch import GraphBounds, MinibatchPlan
from loaderd.sampling.hyperbatch.areas import Sampled, StructureArea
from loaderd.sampling.hyperbatch.single import SessionWorkers, Workspaces
from loaderd.sampling.hyperbatch.together import BatchRules, BlockSampler
from loaderd.sampling.hyperbatch.unfinished import SamplingMemory
from tests.loaderd.memory.test_slots import Watched
from tests.loaderd.sampling.sampling import (
    BATCH,
    CASES,
    NODES,
    TRAIN,
    Found,
    Parts,
    make,
    parts_of,
    same,
)

STEPS = TRAIN // BATCH


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("together"))


def found_of(sampled: Sampled) -> Found:
    nodes, counts, local, edge_ids, _, _, trees, _ = sampled.arrays
    whole = [np.concatenate(nodes).astype(np.int64)]
    for array in (counts, local, edge_ids, trees):
        values = np.empty(array.size, array.dtype)
        array.write(0, values)
        whole.append(values.astype(np.int64))
    return Found(sampled.structure, *whole)


def test_who_waits_for_a_workspace_does_not_have_the_turn(made):
    """Batches that are handed out have all of them, and a client may wait for another session."""
    with parts_of(made, "new", 9, 3) as parts, ThreadPoolExecutor(2) as threads:
        workspaces, changed = Workspaces(), Watched()
        workspaces.add(parts.workspace())
        workers = SessionWorkers(workspaces, threads.submit, lambda: None)
        begin: Any = lambda units, _held: [parts.roots(unit) for unit in units]  # noqa: E731
        record = edge_record(parts.made.store.manifest, parts.plan.resolved)
        rules, lock = BatchRules(parts.plan, begin, record), threading.Lock()
        memory = SamplingMemory(room(1 << 21))
        sampler = BlockSampler(rules, parts.topology, workers, memory, lock)
        handed_out = workspaces.take()
        workspaces._changed = changed
        units = [parts.plan.unit(1, step) for step in range(STEPS)]
        with ThreadPoolExecutor(1) as session:
            coming = session.submit(sampler.sample, units, 0, room(1 << 20), lambda: False)
            try:
                assert changed.waiting.wait(10)
                assert lock.acquire(timeout=10)
                lock.release()
            finally:
                workspaces.give(handed_out)
            for sampled in coming.result(60):  # may compile kernels
                same(parts, sampled.unit, found_of(sampled))
        assert workspaces.all_home


@contextmanager
def sampler_of(parts: Parts, memory: SamplingMemory) -> Iterator[BlockSampler]:
    workspaces = Workspaces()
    for _ in range(3):
        workspaces.add(parts.workspace())
    with ThreadPoolExecutor(2) as threads:
        workers = SessionWorkers(workspaces, lambda step: threads.submit(step), lambda: None)
        begin: Any = lambda units, _held: [parts.roots(unit) for unit in units]  # noqa: E731
        record = edge_record(parts.made.store.manifest, parts.plan.resolved)
        rules = BatchRules(parts.plan, begin, record)
        yield BlockSampler(rules, parts.topology, workers, memory, threading.Lock())
        assert workspaces.all_home


def room(num_bytes: int) -> StructureArea:
    return StructureArea(np.zeros(num_bytes, np.uint8))


def sample(parts: Parts, area_bytes: int, scratch_bytes: int) -> list[Sampled]:
    """The batches of an epoch that an area holds."""
    with sampler_of(parts, SamplingMemory(room(scratch_bytes))) as sampler:
        units, area = [parts.plan.unit(1, step) for step in range(STEPS)], room(area_bytes)
        found = sampler.sample(units, 40, area, lambda: False)
        taken = sum(sampled.num_bytes for sampled in found)
        assert taken == area.used if len(found) == STEPS else taken <= area.used
        return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("slots", "share"), [(3, 1), (9, 3)])
def test_batches_are_the_references(made, case, slots, share):
    """`share`: blocks of a group; two groups have room beside the worker's reserve."""
    with parts_of(made, case, slots, slots - 2 * share) as parts:
        assert parts.residency.shared_room() == 2 * share
        found = sample(parts, 1 << 20, 1 << 21)
        assert [s.batch for s in found] == list(range(40, 40 + STEPS))
        for sampled in found:
            same(parts, sampled.unit, found_of(sampled))


@pytest.mark.parametrize("case", ["new", "layer", "up to a time"])
def test_where_room_ends_the_first_batches_are_whole(made, case):
    """Of the structures, or of what is drawn meanwhile."""
    counts = set()
    with parts_of(made, case, 5, 1) as parts:
        for area, scratch in ((4 << 10, 1 << 20), (8 << 10, 1 << 20), (12 << 10, 1 << 20),
                              (1 << 20, 30 << 10), (1 << 20, 60 << 10)):  # fmt: skip
            found = sample(parts, area, scratch)
            counts.add(len(found))
            assert [s.batch for s in found] == list(range(40, 40 + len(found)))
            for sampled in found:
                same(parts, sampled.unit, found_of(sampled))
    assert counts & {1, 2}


def test_batches_without_room_for_their_draws_are_left_out_of_this_hop(made):
    """The others are drawn again; the hops before it are not."""
    with (
        parts_of(made, "new", 5, 1) as parts,
        sampler_of(parts, SamplingMemory(room(10 << 10))) as s,
    ):
        drawn, draw_all = list[tuple[int, bool]](), s._draw_all

        def noted(batches: Any, ahead: Any) -> float:
            part = draw_all(batches, ahead)
            drawn.append((len(batches), part == 1))
            return part

        s._draw_all = noted  # type: ignore[method-assign]
        units = [parts.plan.unit(1, step) for step in range(STEPS)]
        found = s.sample(units, 0, room(1 << 20), lambda: False)
        assert drawn == [(3, True), (3, True), (3, False), (2, True)]
        assert [sampled.unit for sampled in found] == units[:2]
        for sampled in found:
            same(parts, sampled.unit, found_of(sampled))


def early(case: str, num_bytes: int, scratch_bytes: int = 1 << 21) -> SamplingMemory:
    hops = len(CASES[case]["fanouts"])
    return SamplingMemory.carve(
        np.zeros(scratch_bytes + (hops - 1) * num_bytes, np.uint8), hops - 1, num_bytes
    )


def batches_of_passes(
    parts: Parts,
    case: str,
    asked: list[tuple[int, list[int]]],
    memory: SamplingMemory | None = None,
) -> list[list[int]]:
    """How many batches each pass serves as these steps of epochs are asked for, in turn."""
    taken: list[list[int]] = []
    with sampler_of(parts, memory or early(case, 1 << 20)) as s:
        hop = s._hop

        def counted(batches: Any, ahead: Any) -> None:
            taken[-1].append(len(batches))
            hop(batches, ahead)

        s._hop = counted  # type: ignore[method-assign]
        for epoch, steps in asked:
            taken.append([])
            units = [parts.plan.unit(epoch, step) for step in steps]
            found = s.sample(units, 40, room(1 << 20), lambda: False)
            assert [(f.batch, f.unit) for f in found] == list(enumerate(units, 40))
            for one in found:
                same(parts, one.unit, found_of(one))
    return taken


@pytest.mark.parametrize("case", CASES)
def test_a_pass_serves_every_hop_of_batches_that_follow_one_another(made, case):
    """The first batch takes a pass for each hop, every other one that of its last hop alone."""
    hops = len(CASES[case]["fanouts"])
    with parts_of(made, case, 9, 3) as parts:  # over the end of an epoch
        asked = [(number // STEPS, [number % STEPS]) for number in range(2 * STEPS)]
        first, *others = batches_of_passes(parts, case, asked)
    assert (first, others) == ([*range(1, hops + 1)], [[hops]] * len(others))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("begins", [True, False])
def test_another_sampler_goes_on_with_what_is_begun(made, case, begins):
    """Its first hyperbatch takes a pass for its last hop alone, too."""
    hops = len(CASES[case]["fanouts"])
    with parts_of(made, case, 9, 3) as parts:
        memory, units = early(case, 1 << 20), [parts.plan.unit(0, step) for step in range(STEPS)]
        if begins:
            with sampler_of(parts, memory) as s:
                memory = s.begin(units[:1], 1)
            assert [begun.batches[0].unit for begun in memory.begun] == units[1:hops]
        asked = [(0, [step]) for step in range(1, STEPS)]
        first, *others = batches_of_passes(parts, case, asked, memory)
    assert first == ([hops] if begins else [*range(1, hops + 1)])
    assert others == [[hops]] * len(others)


def test_nothing_is_begun_where_there_is_no_room(made):
    with parts_of(made, "new", 9, 3) as parts, sampler_of(parts, early("new", 1 << 9)) as s:
        memory = s.begin([parts.plan.unit(0, 0)], STEPS)
        assert memory.begun == []
        assert len(memory.areas) == len(CASES["new"]["fanouts"]) - 1


def test_what_is_begun_ends_with_its_epoch(made):
    """The last hyperbatch of an epoch is smaller; the next one begins at the next step 0."""
    with parts_of(made, "new", 9, 3) as parts:
        asked = [(epoch, steps) for epoch in range(3) for steps in ([0, 1], [2])]
        first, *others = batches_of_passes(parts, "new", asked)
    assert (len(first), [len(passes) for passes in others]) == (3, [1] * 5)


def test_nothing_is_begun_for_who_skips_steps_again_and_again(made):
    with parts_of(made, "new", 9, 3) as parts:
        skips = [(epoch, [1]) for epoch in range(4)]
        goes_on = [(3, [2]), (4, [0]), (4, [1])]
        taken = batches_of_passes(parts, "new", [*skips, *goes_on])
    # one that goes on again has something begun from then on
    assert taken == [*[[1, 2, 3]] * 2, *[[1, 1, 1]] * 2, [1, 2, 3], [3], [3]]


def test_what_follows_is_of_the_ranks_that_ask(made):
    """Others of the job may be served by another daemon; positions are step * world + rank."""
    with parts_of(made, "new", 9, 3) as parts:
        bounds = GraphBounds(NODES, (made.graph.indices.size,))
        every = MinibatchPlan(parts.plan.resolved, Part(EVERY_RANK, 4), bounds)
        parts = parts._replace(plan=every)
        with sampler_of(parts, early("new", 1 << 20)) as s:
            asked, passes = [[1, 2], [5, 6], [9, 10]], list[int]()
            hop = s._hop
            s._hop = lambda *given: passes.append(0) or hop(*given)  # type: ignore
            for epoch in range(2):
                for positions in asked:
                    units = [every.unit(epoch, at) for at in positions]
                    found = s.sample(units, 0, room(1 << 20), lambda: False)
                    assert [f.unit for f in found] == units
    assert len(passes) == 3 + 5


LITTLE, MUCH = 40 << 10, 1 << 21  # of scratch


@pytest.mark.parametrize(
    ("case", "num_bytes", "scratch"),
    [
        pytest.param(
            case, num_bytes, scratch,
            marks=() if (i + j + (scratch == MUCH)) % 2 == 0 else pytest.mark.long,
        )
        for i, case in enumerate(("new", "layer", "up to a time"))
        for j, num_bytes in enumerate((1 << 9, 3 << 9, 3 << 10, 1 << 20))
        for scratch in (LITTLE, MUCH)
    ],
)  # fmt: skip
def test_what_is_begun_in_vain_changes_no_batch(made, case, num_bytes, scratch):
    """Other batches are asked for than those that follow, or more, or there is little room."""
    asked = [[0], [2], [0, 1, 2], [1], [0, 1], [2, 0], [1, 2], [0], [1], [2]]
    cancelled = iter([False] * 7 + [True] + [False] * 1000)
    with (
        parts_of(made, case, 9, 3) as parts,
        sampler_of(parts, early(case, num_bytes, scratch)) as s,
    ):
        for steps in asked:
            units = [parts.plan.unit(3, step) for step in steps]
            found = s.sample(units, 7, room(1 << 20), lambda: next(cancelled))
            assert [f.unit for f in found] == units[: len(found)]
            for one in found:
                same(parts, one.unit, found_of(one))
