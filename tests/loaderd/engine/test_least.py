"""The number that a refusal names is the number that works, and no smaller one does."""

import bisect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.errors import BudgetTooSmall
from blockstore.units import format_mem, parse_bytes
from loaderd.errors import Refused
from tests.graphs import make_csc
from tests.hopstores import make_hops, write_hop_store
from tests.loaderd.serving import Serving
from tests.stores import write_store

NODES, SEEDS, MIB = 16000, 8000, 1 << 20
REQUESTS: tuple[dict[str, Any], ...] = (
    {"batch_size": 64, "num_neighbors": (3,)},
    {"batch_size": 256, "num_neighbors": (15, 10)},
    {"batch_size": 1024, "num_neighbors": (10, 5)},
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same graph in partitions, by bytes of a block."""
    rng = np.random.default_rng(0)
    graph = make_csc(rng.integers(1, 24, NODES), 1)
    train, offsets = rng.permutation(NODES)[:SEEDS], range(0, NODES + 1, NODES // 8)
    halos = [[1]] * 8
    found = {}
    for block_bytes in (4096, 65536):
        found[block_bytes] = tmp_path_factory.mktemp("least") / "store"
        write_store(
            found[block_bytes], graph, train, block_bytes, offsets=list(offsets), halos=halos
        )
    return found


@pytest.fixture(scope="module")
def hops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("least") / "hops"
    write_hop_store(path, {"train": make_hops(20_000, 64, {"sym": 2}, 0)}, 65536)
    return path


def attempt(store: Path, mem: int, plan: str, workers: int, request: dict[str, Any]) -> str:
    """What attaching and the first batch were refused with; "": nothing."""
    try:
        serving = Serving(store, mem, workers)
    except BudgetTooSmall as error:
        return str(error)
    try:
        trainer = serving.attach(plan, **request)
        trainer.start()
        assert trainer.take(0) is not None
        trainer.release(0)
        trainer.detach()
        return ""
    except Refused as error:
        return str(error)
    finally:
        serving.close()


def named(refusal: str) -> int:
    """MiB that a refusal says would do."""
    found = re.search(r"at least --mem (\d+)M", refusal)
    assert found is not None, refusal
    return int(found[1])


def walk(store: Path, plan: str, workers: int, request: dict[str, Any]) -> None:
    """From 1 MiB to the number that the daemon names, then to the number that an attach names."""
    mem = 1
    for _ in range(3):
        refusal = attempt(store, mem * MIB, plan, workers, request)
        if not refusal:
            break
        assert "serve sessions" not in refusal, "nobody is attached"
        assert named(refusal) > mem
        mem = named(refusal)
    else:
        pytest.fail(f"--mem {mem}M was named, and is refused")
    if mem > 1:
        assert named(attempt(store, (mem - 1) * MIB, plan, workers, request)) == mem


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("plan", ["minibatch", "auto", "hyperbatch", "macrobatch"])
@pytest.mark.parametrize("block_bytes", [4096, 65536])
def test_the_memory_that_a_refusal_names_is_enough_and_no_less_is(
    stores: dict[int, Path], block_bytes: int, plan: str, workers: int, request_: dict[str, Any]
):
    walk(stores[block_bytes], plan, workers, request_)


@pytest.mark.parametrize("batch_size", [100, 5000, 20_000])
@pytest.mark.parametrize("plan", ["chunks", "rows"])
def test_the_memory_that_a_refusal_of_hops_names_is_enough_and_no_less_is(
    hops: Path, plan: str, batch_size: int
):
    walk(hops, plan, 2, {"batch_size": batch_size, "num_neighbors": ()})


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("workers", [1, 4])
def test_hyperbatches_are_refused_in_no_budget_in_which_minibatches_are_served(
    stores: dict[int, Path], workers: int, request_: dict[str, Any]
):
    """Slot by slot: what was tried for hyperbatches is given back before plain ones are built."""
    block_bytes = 65536
    store = stores[block_bytes]

    def attach(slots: int, plan: str) -> str:
        try:
            serving = Serving(store, MIB + slots * block_bytes, workers)
        except BudgetTooSmall as error:
            return str(error)
        try:
            serving.attach(plan, **request_).detach()
            return ""
        except Refused as error:
            return str(error)
        finally:
            serving.close()

    least = bisect.bisect_left(range(200), True, key=lambda n: not attach(n, "minibatch"))
    for plan in ("auto", "hyperbatch"):
        refused = {slots: attach(least + slots, plan) for slots in range(0, 24, 3)}
        assert not any(refused.values()), refused


@pytest.mark.parametrize("num_bytes", [1, MIB, 999 * MIB + 1, 1100 * MIB, (1 << 40) + 1])
def test_memory_is_named_exactly(num_bytes: int):
    assert num_bytes <= parse_bytes(format_mem(num_bytes)) < num_bytes + MIB
