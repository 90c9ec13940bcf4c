"""Owner maps of sessions: each node of a batch has its owner, however the batch is built."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.owners import write_owners
from blockstore.store import open_store
from tests.graphs import make_csc
from tests.loaderd.serving import Serving
from tests.stores import write_store

NODES, BATCH, ROOM, TIGHT = 12_000, 60, 32 << 20, 1600 << 10
OWNER = np.random.default_rng(3).integers(0, 5, NODES)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store ids are those of the source; 170,000 edges."""
    path = tmp_path_factory.mktemp("owners") / "store"
    graph = make_csc(np.random.default_rng(1).integers(0, 30, NODES), 2)
    write_store(path, graph, range(0, NODES, 20))
    write_owners(open_store(path), "five", OWNER, 5, {})
    return path


def graph_in_memory(serving: Serving) -> bool:
    budget = serving.engine.resources.budget
    return budget.graph_slots >= budget.graph_blocks


def epoch_of(store: Path, mem: int, whole: bool, **fields: Any) -> list[dict[str, np.ndarray]]:
    """By step: the structure of the batch."""
    serving = Serving(store, mem, 2)
    assert graph_in_memory(serving) == whole
    trainer = serving.attach("hyperbatch", batch_size=BATCH, owners="five", **fields)
    trainer.start()
    found = []
    for step in range(NODES // 20 // BATCH):
        batch = trainer.take(step)
        assert batch is not None
        arrays = batch.structure.arrays
        raw = serving.bytes_of(batch.structure)
        found.append({a.name: np.frombuffer(r, a.dtype) for a, r in zip(arrays, raw, strict=True)})
        trainer.release(step)
    basis = " ".join(entry.basis for entry in serving.service.status()[0])
    assert ("0 of scratch" in basis.split(", ")) == whole  # not whole: sampled block by block
    trainer.detach()
    serving.close()
    return found


@pytest.mark.parametrize("frontier", ["new", "layer"])
def test_batches_of_a_graph_out_of_memory_name_the_owners_too(store: Path, frontier: str):
    """These are sampled block by block, and kept in less room until their turn comes."""
    inside, outside = (
        epoch_of(store, mem, mem == ROOM, frontier=frontier) for mem in (ROOM, TIGHT)
    )
    for one, other in zip(inside, outside, strict=True):
        assert one.keys() == other.keys() >= {"n_id", "owner", "src"}
        for name, values in one.items():
            assert np.array_equal(values, other[name]), name
        assert np.array_equal(one["owner"], OWNER[one["n_id"]])
