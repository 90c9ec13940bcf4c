"""Batches sampled from blocks that pass through few slots, against plain Python."""

import threading
from contextlib import closing

import numpy as np
import pytest

from loaderd.memory.workspace import Workspace, WorkspaceFull
from loaderd.plans.base import Unit
from loaderd.sessions.workers import WorkerPool
from tests.loaderd.sampling.sampling import (
    BATCH,
    CASES,
    TRAIN,
    Found,
    Parts,
    make,
    parts_of,
    same,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("topology"))


def check(parts: Parts, unit: Unit, work: Workspace) -> None:
    """A batch is the reference's."""
    got = parts.topology.sample(parts.plan, unit, work, parts.roots(unit))
    nodes, edges = got.num_nodes, got.num_edges
    found = Found(
        got, work.n_id[:nodes], work.counts, work.local[:edges], work.records[:edges, 0],
        work.trees[:nodes],
    )  # fmt: skip
    same(parts, unit, found)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("slots", "share"), [(3, 1), (5, 3), (60, 60)])
def test_batches_are_the_references(made, case, slots, share):
    """With room for every block, too, where the whole relation is held at once."""
    with parts_of(made, case, slots, share) as parts:
        if slots == 60:
            parts.topology.load()
            assert parts.residency.pool.complete(0)
        work = parts.workspace()
        for epoch in (0, 1):
            for step in range(TRAIN // BATCH):
                check(parts, parts.plan.unit(epoch, step), work)


class Helped:
    """Workers, and a caller who begins with a second piece only when one of them has some."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers, self.pieces, self.shared = workers, 0, 0

    @property
    def idle(self) -> int:
        while self._workers.idle < 1:  # all go back to their queue
            pass
        return self._workers.idle

    def share(self, count, do, then):
        caller, begun = threading.get_ident(), threading.Event()

        def noted(i: int) -> None:
            if threading.get_ident() != caller:
                begun.set()
            elif count > 1:
                assert begun.wait(30)
            do(i)

        self.pieces, self.shared = self.pieces + count, self.shared + (count > 1)
        self._workers.share(count, noted, then)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_frontiers_that_workers_share_give_the_references_batches(made, case, threads, monkeypatch):
    monkeypatch.setattr("loaderd.sampling.topology._PIECE", 3)
    workers = WorkerPool(threads)
    with closing(workers), parts_of(made, case, 60, 60) as parts:
        parts.topology.load()
        parts.topology.helpers = helpers = Helped(workers)
        work = parts.workspace()
        for step in range(TRAIN // BATCH):
            check(parts, parts.plan.unit(0, step), work)
    assert helpers.pieces > 2 * helpers.shared > 0


def test_a_batch_that_has_no_room_leaves_the_workspace_as_it_was(made):
    with parts_of(made, "new", 5, 3) as parts:
        work = parts.workspace()
        unit = parts.plan.unit(0, 0)
        whole = parts.topology.sample(parts.plan, unit, work, parts.roots(unit))
        n_id = work.n_id[: whole.num_nodes].copy()
        maximum, work.n_id = work.n_id, work.n_id[: whole.num_nodes - 1]
        with pytest.raises(WorkspaceFull):
            parts.topology.sample(parts.plan, unit, work, parts.roots(unit))
        work.n_id = maximum
        again = parts.topology.sample(parts.plan, unit, work, parts.roots(unit))
        assert again == whole
        assert work.n_id[: again.num_nodes].tolist() == n_id.tolist()


def test_ends_of_edges_are_found_by_their_places(made):
    """However few blocks are held at a time, and whatever the order of the places."""
    graph = made.graph
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    places = np.random.default_rng(1).permutation(graph.indices.size)[:500]
    for slots, share in ((3, 1), (60, 60)):
        with parts_of(made, "new", slots, share) as parts:
            (relation,) = made.store.manifest.relations
            index = places.astype(np.int64)
            src, dst, times = parts.topology.find_edges(
                0, made.store.first_edge(relation), index, timed=True
            )
            assert src.tolist() == graph.indices[places].tolist()
            assert dst.tolist() == targets[places].tolist()
            assert times.tolist() == made.times[places].tolist()
            assert index.tolist() == places.tolist()  # edge ids of `write_store` are places
