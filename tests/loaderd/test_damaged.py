"""A daemon on a store with a flipped bit serves what it would without it, or an error: no others.

BLOCKSTORE_SERVED=n flips so many bits in shards of blocks.  Other files are bound, and looked at by
each opening (tests/blockstore/test_binding.py).
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockstore.errors import StoreError
from clients.hopwise.dataset import HopDataset
from clients.torch import HeteroDataset, NeighborDataset
from loaderd.api.errors import DaemonError
from loaderd.api.protocol import Attach
from tests.blockstore.damage import MAKERS, damaged, files_of, kind_of, random_flips
from tests.graphs import Csc
from tests.loaderd.serving import Serving, Trainer
from tests.loaderd.threaded import serving
from tests.stores import write_store

FLIPS = int(os.environ.get("BLOCKSTORE_SERVED", "4"))
MEM, WAIT_S = 24 << 20, 30


def absorb(total: Any, value: Any) -> None:
    """Names and bytes of everything in a batch."""
    if isinstance(value, torch.Tensor):
        total.update(f"{value.dtype} {tuple(value.shape)}".encode())
        total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            absorb(total, repr(key))
            absorb(total, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            absorb(total, item)
    elif hasattr(value, "__dict__"):
        absorb(total, vars(value))
    elif hasattr(value, "__slots__"):
        absorb(total, {name: getattr(value, name) for name in value.__slots__})
    else:
        total.update(repr(value).encode())


def datasets(kind: str, endpoint: str) -> Iterator[Any]:
    """One of each plan."""
    usual: dict[str, Any] = {"num_neighbors": (4, 3), "batch_size": 25, "reconnect_s": 0}
    if kind == "many":
        for plan in ("minibatch", "hyperbatch"):
            yield HeteroDataset(
                endpoint, plan=plan, input_type="a", return_e_id=True, weighted=True, **usual
            )
        return
    for plan in ("minibatch", "hyperbatch", "macrobatch"):
        edges = plan == "minibatch"
        yield NeighborDataset(
            endpoint,
            plan=plan,
            return_e_id=not edges,
            weighted=not edges,
            edge_features=edges,
            **usual,
        )
    yield HopDataset(endpoint, "train", batch_size=30, reconnect_s=0)


def digests(kind: str, store: Path, folder: Path) -> list[str]:
    """Of an epoch of each plan; where it ended with an error, that.  Raises StoreError."""
    found = []
    with serving(store, folder, MEM, 1) as (endpoint, _):
        makers = datasets(kind, endpoint)
        while True:
            total = hashlib.sha256()
            try:
                data = next(makers)
                try:
                    for batch in data:
                        absorb(total, batch)
                finally:
                    data.close()
            except StopIteration:
                return found
            except DaemonError as error:
                found.append(f"refused: {error}")
            else:
                found.append(total.hexdigest())


def test_a_session_that_meets_hostile_content_leaves_others_at_work(tmp_path: Path):
    """A block with right checksums that names sources beyond the last node."""
    nodes, degree = 4000, 8
    rng = np.random.default_rng(0)
    half = nodes // 2  # of one half no path leads to the other
    indices = rng.integers(0, half, nodes * degree) + half * np.repeat([0, 1], half * degree)
    indices[: half * degree // 2 : 100] = nodes + 7  # in no block that both halves share
    indptr = np.arange(nodes + 1) * degree
    graph = Csc(indptr, indices, np.arange(indices.size))
    write_store(tmp_path / "store", graph, np.arange(nodes))
    serving = Serving(tmp_path / "store", 400 << 10)
    assert serving.engine.broker.graph_preferred < serving.engine.budget.graph_blocks

    def attach(ids: Any) -> Trainer:
        asked = Attach(
            token=0, request=1, split="", ids=ids.size, plan="minibatch", num_neighbors=(5, 5),
            batch_size=20,
        )  # fmt: skip
        trainer = Trainer(serving, serving.service.attach(asked, ids).session)
        trainer.start()
        return trainer

    good = attach(np.arange(half, nodes))
    before = [good.consume(step) for step in range(3)]
    bad = attach(np.arange(half))
    with serving.came:
        assert serving.came.wait_for(lambda: bool(serving.errors), WAIT_S)
        (error,) = serving.errors
        serving.errors.clear()
    assert (error.session, error.error) == (bad.session, "BatchFailed")
    assert "source" in error.message
    for step in range(3, half // 20):
        good.consume(step)
    good.start()
    assert [good.consume(step) for step in range(3)] == before
    bad.detach()
    good.detach()
    serving.close()


def is_refused(said: str) -> bool:
    """Whether an epoch ended with an error."""
    return said.startswith("refused")


@pytest.mark.parametrize("kind", MAKERS)
def test_no_batch_of_a_damaged_store_is_wrong(kind: str, tmp_path: Path, record_property: Any):
    store = tmp_path / "store"
    MAKERS[kind](store)
    whole, same, refused = files_of(store), 0, 0
    expected = digests(kind, store, tmp_path)
    assert not [said for said in expected if is_refused(said)]
    shards = {name: raw for name, raw in whole.items() if kind_of(name).endswith("shard")}
    for damage in random_flips(np.random.default_rng(3), shards, FLIPS):
        with damaged(store, damage, whole), suppress(StoreError):
            found = digests(kind, store, tmp_path)
            for said, usual in zip(found, expected, strict=True):
                assert is_refused(said) or said == usual, f"{damage}: other batches"
                assert not is_refused(said) or str(store / damage.name) in said, said
            refused += sum(map(is_refused, found))
            same += len(found) - sum(map(is_refused, found))
    record_property("epochs", {"refused": refused, "same": same})
    assert refused > 0
