"""The number that a refusal names is the number that works, and no smaller one does."""

import bisect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockstore.errors import BudgetTooSmall
from blockstore.owners import write_owners
from blockstore.store import Store, open_store
from blockstore.units import format_mem, parse_bytes
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, HomePlacement, SeedEdges
from loaderd.memory.ledger import SessionNeed, make_budget
from loaderd.sessions.engine import default_settings
from loaderd.sessions.sizing import SessionSizing, check_possible, size_minibatches
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
HOME: dict[str, Any] = {  # of four ranks, one of which owns everything
    "batch_size": 1024, "num_neighbors": (10, 5), "frontier": "layer", "owners": "one",
    "home": HomePlacement(), "world_size": 4,
}  # fmt: skip


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
        write_owners(open_store(found[block_bytes]), "one", np.zeros(NODES, np.int64), 4, {})
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
    found = re.search(r"at least --mem (\d+[MGT])", refusal)
    assert found is not None, refusal
    return parse_bytes(found[1]) // MIB


def checked(store: Store, mem: int, plan: str, workers: int, request: dict[str, Any]) -> str:
    """What is refused before anything is read or taken; "": nothing."""
    settings = default_settings(mem, workers, 2)
    try:
        budget = make_budget(store.manifest, settings)
        asked = Attach(token=0, request=1, plan=plan, **request)
        maximum = budget.num_slots - budget.graph_min
        check_possible(store.manifest, asked, settings, budget, maximum)
    except (BudgetTooSmall, Refused) as error:
        return str(error)
    return ""


def walk(attempt: Callable[[int], str]) -> int:
    """MiB from which on nothing is refused: from 1 to the number that the daemon names, then to the
    number that an attach names; with one MiB less that number is named."""
    mem = 1
    for _ in range(3):
        refusal = attempt(mem * MIB)
        if not refusal:
            break
        assert "sessions hold" not in refusal, "nobody is attached"
        assert named(refusal) > mem
        mem = named(refusal)
    else:
        pytest.fail(f"--mem {mem}M was named, and is refused")
    if mem > 1:
        assert named(attempt((mem - 1) * MIB)) == mem
    return mem


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("plan", ["minibatch", "auto", "hyperbatch"])
@pytest.mark.parametrize("block_bytes", [4096, 65536])
def test_the_memory_that_a_refusal_names_passes_the_check_and_no_less_does(
    stores: dict[int, Path], block_bytes: int, plan: str, workers: int, request_: dict[str, Any]
):
    store = open_store(stores[block_bytes])
    walk(lambda mem: checked(store, mem, plan, workers, request_))


@pytest.mark.parametrize(
    ("plan", "block_bytes", "workers", "request_"),
    [
        ("minibatch", 4096, 4, REQUESTS[1]),
        pytest.param("minibatch", 65536, 1, REQUESTS[2], marks=pytest.mark.long),
        pytest.param("auto", 65536, 4, REQUESTS[1], marks=pytest.mark.long),
        ("hyperbatch", 65536, 1, REQUESTS[2]),
        ("hyperbatch", 4096, 4, REQUESTS[0]),
        pytest.param("minibatch", 4096, 1, HOME, marks=pytest.mark.long),
        ("hyperbatch", 65536, 2, HOME),
    ],
)
def test_a_session_is_served_from_the_memory_on_that_passes_the_check(
    stores: dict[int, Path], plan: str, block_bytes: int, workers: int, request_: dict[str, Any]
):
    store = open_store(stores[block_bytes])
    mem = walk(lambda mem: checked(store, mem, plan, workers, request_))
    assert not attempt(store.path, mem * MIB, plan, workers, request_)
    refusal = attempt(store.path, (mem - 1) * MIB, plan, workers, request_)
    assert refusal == checked(store, (mem - 1) * MIB, plan, workers, request_)
    assert named(refusal) == mem


@pytest.mark.parametrize(
    ("block_bytes", "workers"), [pytest.param(4096, 1, marks=pytest.mark.long), (65536, 4)]
)
def test_the_memory_that_a_refusal_of_macrobatches_names_is_enough_and_no_less_is(
    stores: dict[int, Path], block_bytes: int, workers: int
):
    """They need more than what is checked before."""
    store = stores[block_bytes]
    walk(lambda mem: attempt(store, mem, "macrobatch", workers, REQUESTS[1]))


@pytest.mark.parametrize(
    ("plan", "batch_size"), [("chunks", 5000), ("rows", 100), ("rows", 20_000)]
)
def test_the_memory_that_a_refusal_of_hops_names_is_enough_and_no_less_is(
    hops: Path, plan: str, batch_size: int
):
    request = {"batch_size": batch_size, "num_neighbors": ()}
    walk(lambda mem: attempt(hops, mem, plan, 2, request))


@pytest.mark.parametrize(
    ("workers", "request_"),
    [pytest.param(1, REQUESTS[1], marks=pytest.mark.long), (4, REQUESTS[2])],
)
def test_hyperbatches_are_refused_in_no_budget_in_which_minibatches_are_served(
    stores: dict[int, Path], workers: int, request_: dict[str, Any]
):
    """Slot by slot: what was tried for hyperbatches is given back before plain ones are built."""
    block_bytes = 65536
    store = open_store(stores[block_bytes])

    def mem(slots: int) -> int:
        return MIB + slots * block_bytes

    def refused(slots: int) -> bool:
        return bool(checked(store, mem(slots), "minibatch", workers, request_))

    minimum = bisect.bisect_left(range(200), True, key=lambda slots: not refused(slots))
    assert attempt(store.path, mem(minimum - 1), "minibatch", workers, request_)
    for more in range(0, 24, 4):
        plan = ("auto", "hyperbatch")[more // 4 % 2]
        assert not attempt(store.path, mem(minimum + more), plan, workers, request_), (plan, more)


def test_numbers_of_seeds_are_refused_before_they_are_sent_with_what_would_do(
    stores: dict[int, Path],
):
    """For every count up to the most there may be, for nodes, edges and times."""
    store = open_store(stores[4096])
    for parts, fields in ((1, {}), (2, {"edges": SeedEdges()})):
        for count in (1, 1 << 16, 1 << 22, 1 << 24):
            request = {
                "split": "", "ids": parts * count, "num_neighbors": (5, 5), "batch_size": 64,
                **fields,
            }  # fmt: skip
            mem = walk(lambda mem, r=request: checked(store, mem, "auto", 2, r))  # type: ignore[misc]
            assert mem * MIB > 8 * parts * count


def test_a_fanout_beyond_the_graph_needs_no_more_than_the_graph(stores: dict[int, Path]):
    """Seeds of a batch may be equal, what is found of them is not."""
    store = open_store(stores[4096])

    def minimum(hops: int, **fields: Any) -> int:
        request = {"num_neighbors": (1 << 16,) * hops, "batch_size": 64} | fields
        return walk(lambda mem: checked(store, mem, "auto", 2, request))

    edges = sum(relation.num_edges for relation in store.manifest.relations)
    assert minimum(16) - minimum(1) < 15 * 24 * edges / MIB + 15 * 24 * NODES / MIB
    assert minimum(2, edges=SeedEdges(), split="all") < 100


@pytest.mark.parametrize("num_bytes", [1, MIB, 999 * MIB + 1, 1100 * MIB])
def test_memory_is_named_exactly(num_bytes: int):
    assert num_bytes <= parse_bytes(format_mem(num_bytes)) < num_bytes + MIB


def test_large_memory_is_named_in_units_that_can_be_read():
    assert format_mem(99_999 * MIB) == "99999M"
    assert format_mem(99_999 * MIB + 1) == "98G"
    assert format_mem((1 << 47) + 1) == "129T"


def test_rows_stay_in_a_row_pool_that_is_larger_than_a_sessions_share():
    need, settings = SessionNeed(3, 1, 1, 2, 2, 9, 1), default_settings(1 << 30, workers=2)
    whole = SessionSizing(workers=2, transit=2, quota=17, window=4)
    slots = whole.slots(need)

    def sizing(available: int, pooled: int) -> SessionSizing:
        return size_minibatches(need, available, pooled, 100, settings, 4)

    assert sizing(slots, slots + 100) == sizing(1000, slots + 100) == whole
    assert sizing(slots - 1, 1000) != whole  # not in its share
    assert sizing(slots, slots + 99) != whole  # the last block would have no room
