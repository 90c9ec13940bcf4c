"""Large batches of an engine in which idle workers share each frontier: the same bytes."""

import hashlib

import numpy as np
import pytest

from loaderd.sessions.workers import WorkerPool
from tests.graphs import OFFSETS, spread_csc
from tests.loaderd.serving import Serving
from tests.stores import write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    graph, _ = spread_csc(np.random.default_rng(1))
    path = tmp_path_factory.mktemp("shared") / "store"
    write_store(path, graph, range(0, 400, 3), offsets=OFFSETS)
    return path


@pytest.mark.parametrize("plan", ["minibatch", "partitions"])
def test_threads_that_share_a_batch_change_no_byte(store, plan, monkeypatch):
    monkeypatch.setattr("loaderd.sampling.topology._PIECE", 8)
    pieces, share = list[int](), WorkerPool.share

    def noted(pool, count, do, then):
        pieces.append(count)
        share(pool, count, do, then)

    monkeypatch.setattr(WorkerPool, "share", noted)
    found = []
    for workers in (1, 2, 8):
        pieces.clear()
        digest = hashlib.sha256()
        with Serving(store, 32 << 20, workers) as serving:
            options = {"macro_partitions": 2} if plan == "partitions" else {"batch_size": 60}
            trainer = serving.attach(plan, frontier="layer", window=1, **options)
            trainer.start()
            for step in range(3):
                for array in trainer.consume(step):
                    digest.update(array)
            trainer.detach()
        found.append(digest.hexdigest())
        assert (max(pieces) > 1) == (workers > 1)  # of one worker nobody is idle
    assert len(set(found)) == 1
