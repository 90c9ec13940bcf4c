"""Plans that give equal batches, end to end: hyperbatches of any size and budget."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clients.models import GraphSage
from clients.torch import NeighborDataset
from preprocess.ingest.ingest import ingest
from preprocess.ingest.options import IngestOptions
from preprocess.pipeline.progress import Progress
from preprocess.sources.generate import GraphRecipe, generate
from preprocess.sources.plain import PlainSource
from tests.daemons import ROOT, daemon

FANOUTS, BATCH, STEPS = (6, 4, 3), 100, 12
SMALL, WHOLE = "24M", "96M"  # of the graph below: a tenth of its blocks in memory, or all


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A graph of 20 MB with features of 32 bytes, in blocks of 16 KiB."""
    folder = tmp_path_factory.mktemp("plans")
    with (folder / "progress.txt").open("w") as stream:
        recipe = GraphRecipe(50_000, 40, 8, 8, 0.024, 0.05, 0.1, 0, 1.0)
        generate(folder / "graph", recipe, Progress(stream))
        options = IngestOptions(block_bytes=16 << 10, edge_ids=True)
        ingest(PlainSource(folder / "graph"), folder / "store", options, Progress(stream))
    return folder / "store"


def dataset(endpoint: str, **options) -> NeighborDataset:
    """The same batches, whatever the physical options."""
    return NeighborDataset(
        endpoint, num_neighbors=FANOUTS, batch_size=BATCH, seed=5, return_e_id=True, **options
    )


def digest(batch) -> str:
    """sha256 of everything in a batch."""
    found = hashlib.sha256(repr((batch.num_sampled_nodes, batch.num_sampled_edges)).encode())
    for name in ("x", "y", "edge_index", "n_id", "e_id", "input_id"):
        found.update(getattr(batch, name).numpy().tobytes())
    return found.hexdigest()


def epoch(endpoint: str, **options) -> tuple[str, list[str]]:
    """The plan that served an epoch, and the digests of its batches."""
    data = dataset(endpoint, **options)
    digests = [digest(batch) for batch in data]
    plan = data._connect().session.attached.plan
    data.close()
    return plan, digests


@pytest.fixture(scope="module")
def served(store: Path) -> Iterator[dict[str, str]]:
    """Endpoints of two daemons by their memory, of two workers each, for all that fits them."""
    with daemon(store, SMALL, 2) as small, daemon(store, WHOLE, 2) as whole:
        yield {SMALL: small, WHOLE: whole}


@pytest.fixture(scope="module")
def expected(served: dict[str, str]) -> list[str]:
    """Of plan `minibatch` with everything in memory."""
    plan, digests = epoch(served[WHOLE], plan="minibatch")
    assert (plan, len(digests)) == ("minibatch", STEPS)
    return digests


# sizes of 1 and 8 with two workers are in the test of what is read
@pytest.mark.parametrize(
    ("mem", "workers", "sizes"),
    [
        (SMALL, 1, (64,)),
        (SMALL, 3, (4, 0)),
        (WHOLE, 3, (64,)),
        pytest.param(SMALL, 1, (1, 4, 0), marks=pytest.mark.long),
        pytest.param("40M", 2, (0,), marks=pytest.mark.long),
    ],
)
def test_hyperbatches_of_any_size_give_the_same_epoch(store, expected, mem, workers, sizes):
    with daemon(store, mem, workers) as endpoint:
        for size in sizes:
            plan, digests = epoch(endpoint, plan="hyperbatch", hyperbatch=size)
            assert plan == "hyperbatch"
            assert digests == expected, f"hyperbatch {size}"


def test_auto_takes_hyperbatches_where_not_everything_is_in_memory(served, expected):
    for mem, plan in ((SMALL, "hyperbatch"), (WHOLE, "minibatch")):
        assert epoch(served[mem]) == (plan, expected)


@pytest.mark.parametrize("mem", ["4M", pytest.param("12M", marks=pytest.mark.long)])
def test_rows_pass_through_where_no_cache_has_room(store, expected, mem):
    with daemon(store, mem, 2) as endpoint:
        data = dataset(endpoint, plan="hyperbatch")
        digests = [digest(batch) for batch in itertools.islice(data, 3)]
        basis = next(
            line["basis"] for line in status(endpoint)["ledger"] if "session" in line["name"][:8]
        )
        assert ", 0 slots for 0 rows that pass" in basis
        data.close()
    assert digests == expected[:3]


@pytest.mark.parametrize("mem", [SMALL, WHOLE])
def test_runs_may_be_left_and_begun_anywhere(served, expected, mem):
    data = dataset(served[mem], plan="hyperbatch", hyperbatch=4)
    for batches in (1, 5, 0, 9):
        data.set_epoch(0)
        taken = [digest(b) for b in itertools.islice(iter(data), batches)]
        assert taken == expected[:batches]
    state = None
    data.set_epoch(0)
    for _ in zip(range(7), data, strict=False):
        state = data.state_dict()
    other = dataset(served[mem], plan="hyperbatch")
    other.load_state_dict(state)
    assert [digest(batch) for batch in other] == expected[7:]
    data.close()
    other.close()


def test_sessions_of_all_plans_share_a_daemon_and_give_everything_back(store, expected):
    with daemon(store, "80M", 3) as endpoint:
        before = ledger(endpoint)
        datasets = [
            dataset(endpoint, plan="hyperbatch", hyperbatch=2),
            dataset(endpoint, plan="minibatch"),
            dataset(endpoint, plan="hyperbatch"),
        ]
        for found in zip(*datasets, expected, strict=True):
            assert {digest(batch) for batch in found[:-1]} == {found[-1]}
        assert len(ledger(endpoint)) > len(before)
        for data in datasets:
            data.close()
        for _ in range(100):
            if ledger(endpoint) == before:
                break
        assert ledger(endpoint) == before


def test_reads_are_those_of_the_hyperbatch_and_nothing_is_written(served, expected):
    reads = {}
    for size in (1, 8):
        before = status(served[SMALL])["counters"]
        assert epoch(served[SMALL], plan="hyperbatch", hyperbatch=size) == ("hyperbatch", expected)
        counters = status(served[SMALL])["counters"]
        reads[size] = counters["blocks_read"] - before["blocks_read"]
        assert counters["bytes_written"] == 0
        assert counters["hyper_sampled"] - before.get("hyper_sampled", 0) >= STEPS
    # a pass over the graph serves several hyperbatches also if each is one batch
    assert reads[8] * 2 < reads[1]


def test_losses_are_bitwise_equal(served):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    losses = {}
    try:
        for mem, plan in ((SMALL, "hyperbatch"), (WHOLE, "minibatch")):
            torch.manual_seed(0)
            model = GraphSage(8, 16, 8, num_layers=3)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            losses[plan] = []
            data = dataset(served[mem], plan=plan)
            for batch in itertools.islice(data, 8):
                optimizer.zero_grad()
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
                loss.backward()
                optimizer.step()
                losses[plan].append(loss.item())
            data.close()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert losses["hyperbatch"] == losses["minibatch"]


def status(endpoint: str) -> dict:
    """As `loaderd status --json` says."""
    command = [sys.executable, "-m", "loaderd", "status", "--endpoint", endpoint, "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)


def ledger(endpoint: str) -> list[str]:
    """Names of the lines of the budget."""
    return [line["name"] for line in status(endpoint)["ledger"]]
