"""Home batches of ranks that each read from a daemon with their own part of the store."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")

from blockstore.part import split_arrays
from blockstore.store import open_store
from clients.micrograph.dataset import HomeDataset
from loaderd.plans.hyperbatch import HyperbatchSize
from loaderd.sampling.hyperbatch import sizing
from loaderd.sampling.hyperbatch.regions import CacheShare
from loaderd.sampling.hyperbatch.sizing import share_rows
from tests.loaderd.parts import (
    AMPLE,
    NODES,
    WIDTH,
    make_parts,
    partition_owners,
    serving_parts,
    write_whole,
)
from tests.loaderd.threaded import serving
from tools.faults.trainers import digest

OPTIONS: dict[str, Any] = {
    "num_neighbors": (5, 4), "batch_size": 50, "seed": 3, "frontier": "layer", "owners": "m",
    "plan": "hyperbatch", "world_size": 2, "reconnect_s": 0,
}  # fmt: skip


def read_epochs(endpoints: list[str]) -> list[tuple[list[str], set[int], set[int]]]:
    """Of each rank at its own daemon: digests of two epochs, nodes of these, of the first batch."""

    def read(rank: int) -> tuple[list[str], set[int], set[int]]:
        data, nodes = HomeDataset(endpoints[rank], rank=rank, **OPTIONS), set[int]()
        digests, first = list[str](), set[int]()
        for _ in range(2):
            for batch in data:
                digests.append(digest(batch))
                nodes.update(batch.n_id.tolist())
                first = first or set(nodes)
        data.close()
        return digests, nodes, first

    with ThreadPoolExecutor(len(endpoints)) as pool:
        return list(pool.map(read, range(len(endpoints))))


class Job(NamedTuple):
    """A store that two ranks divide, and what they get of the whole one."""

    path: Path
    owner: np.ndarray
    parts: list[Path]
    expected: list[tuple[list[str], set[int], set[int]]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("home")
    path = write_whole(folder / "store")
    owner = partition_owners(open_store(path), 2)
    parts = make_parts(path, folder / "m", owner, 2)
    with serving(path, folder, AMPLE) as (endpoint, _):
        return Job(path, owner, parts, read_epochs([endpoint] * 2))


@pytest.mark.parametrize("stay", [False, True], ids=["rows pass", "regions stay"])
def test_home_batches_ask_peers_for_each_remote_row_once(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stay: bool
):
    """Rows that may pass are those that batches want; regions that stay are brought whole.

    Of the first batch some rows come before their region does.
    """
    if not stay:
        pass_all(monkeypatch)
    store, owner, expected = open_store(job.path), job.owner, job.expected
    with serving_parts(job.parts, tmp_path, AMPLE) as (endpoints, services, _, _):
        found = read_epochs(endpoints)
        asked = [service.status()[2] for service in services]
    per_block = store.rows(split_arrays(store.manifest)[0][1]).geometry.rows_per_block
    for rank, (digests, nodes, first) in enumerate(found):
        assert digests == expected[rank][0]
        here = {int(node) // per_block for node in np.flatnonzero(owner == rank)}
        wanted = range(NODES) if stay else sorted(nodes)
        remote = sum(node // per_block not in here for node in wanted)
        assert 0 < remote < len(wanted)
        early = sum(node // per_block not in here for node in first) if stay else 0
        assert remote <= asked[rank]["peer_rows_asked"] <= remote + early
        assert asked[rank]["peer_bytes_asked"] == asked[rank]["peer_rows_asked"] * 4 * WIDTH
        assert asked[rank]["peer_retries"] == 0


def pass_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of row caches no region stays: all their memory is of rows that may leave."""

    def share(
        types: Any, slot: int, chosen: HyperbatchSize, *others: Any
    ) -> tuple[list[CacheShare], int]:
        return share_rows(types, slot, chosen._replace(stay=chosen.stay[:0]), *others)

    monkeypatch.setattr(sizing, "share_rows", share)
