"""Batches sampled together, block by block, against plain Python: each as if it were alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from loaderd.memory.ledger import edge_record
from loaderd.sampling.hyperbatch.session import Sampled, StructureArea
from loaderd.sampling.hyperbatch.single import SessionWorkers, Workspaces
from loaderd.sampling.hyperbatch.together import BatchRules, BlockSampler
from tests.loaderd.sampling.sampling import BATCH, CASES, TRAIN, Found, Parts, make, parts_of, same

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


def sample(parts: Parts, area_bytes: int, scratch_bytes: int) -> list[Sampled]:
    """The batches of an epoch that an area holds."""
    workspaces = Workspaces()
    for _ in range(3):
        workspaces.add(parts.workspace())
    with ThreadPoolExecutor(2) as threads:
        crew = SessionWorkers(workspaces, lambda step: threads.submit(step), lambda: None)
        begin: Any = lambda units, _held: [parts.roots(unit) for unit in units]  # noqa: E731
        scratch = StructureArea(np.zeros(scratch_bytes, np.uint8))
        record = edge_record(parts.made.store.manifest, parts.plan.resolved)
        rules = BatchRules(parts.plan, begin, record)
        sampler = BlockSampler(rules, parts.topology, crew, scratch, threading.Lock())
        units = [parts.plan.unit(1, step) for step in range(STEPS)]
        area = StructureArea(np.zeros(area_bytes, np.uint8))
        found = sampler.sample(units, 40, area, lambda: False)
        assert workspaces.all_home
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
