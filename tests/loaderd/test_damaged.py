"""A daemon on a store with a flipped bit serves what it would without it, or an error: no others.

BLOCKSTORE_SERVED=n flips so many bits in shards of blocks.  Other files are bound, and looked at by
each opening (tests/blockstore/test_binding.py).
"""

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockstore.errors import StoreError
from blockstore.store import open_store
from clients.hetero import HeteroDataset
from clients.hopwise.dataset import HopDataset
from clients.torch import NeighborDataset
from loaderd.errors import DaemonError
from loaderd.sessions.engine import default_settings
from loaderd.sessions.stores import Stores
from loaderd.shell.daemon import Daemon
from loaderd.streams.service import StreamService
from loaderd.wire.endpoint import Endpoint, claim
from tests.blockstore.damage import MAKERS, damaged, files_of, kind_of, random_flips

FLIPS = int(os.environ.get("BLOCKSTORE_SERVED", "4"))
MEM, WAIT_S = 24 << 20, 30


@contextmanager
def served(store: Path, folder: Path) -> Iterator[str]:
    """The endpoint of a daemon in a thread.  Raises StoreError."""
    ready, ended = threading.Event(), threading.Event()
    endpoint, loops = Endpoint(folder / "d.sock"), []
    with (
        Stores([open_store(store)], default_settings(MEM, 1, 1)) as stores,
        StreamService(stores) as e,
    ):

        async def run() -> None:
            stop, hurry = asyncio.Event(), asyncio.Event()
            loops.append((asyncio.get_running_loop(), stop))
            with claim(endpoint):
                daemon = Daemon(e, endpoint)
                ready.set()
                await stop.wait()
                await daemon.drain(hurry)
            ended.set()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            assert ready.wait(WAIT_S)
            yield str(endpoint)
        finally:
            loop, stop = loops[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join(WAIT_S)
            assert ended.is_set()


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
    with served(store, folder) as endpoint:
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
