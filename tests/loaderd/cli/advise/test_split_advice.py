"""What `advise --owners` counts, against the reference of batches, owner by owner."""

import itertools
from dataclasses import asdict

import numpy as np
import pytest
from msgspec import structs
from typer.testing import CliRunner

from blockstore.owners import write_owners
from blockstore.store import Store, open_store
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach
from loaderd.cli.advise.owners import OwnersQuestion, advise_split
from loaderd.cli.commands import app
from loaderd.memory.ledger import EngineSettings
from tests import reference
from tests.graphs import make_csc
from tests.stores import write_store

GRAPH = make_csc([i % 7 for i in range(150)], 4)
OWNERS, BATCH, FANOUTS, ROW_BYTES, HIDDEN = 3, 18, (3, 2, 2), 8, 5
OWNER = np.random.default_rng(2).integers(0, OWNERS, GRAPH.num_nodes)
SETTINGS = EngineSettings(32 << 20, 2, 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("advice") / "store"
    write_store(path, GRAPH, range(0, 150, 2))
    made = open_store(path)
    write_owners(made, "three", OWNER, OWNERS, {})
    write_owners(made, "one", np.zeros_like(OWNER), 1, {})
    return made


def asked(frontier: str = "new") -> Attach:
    return Attach(token=0, request=0, num_neighbors=FANOUTS, batch_size=BATCH, frontier=frontier)


def batches(frontier: str, step: int, parts: int) -> list:
    """A step's batch, or the shares of so many ranks."""
    key = reference.make_epoch_key(0, 0)
    seeds = [2 * reference.permute(i, 75, key) for i in range(75)][BATCH * step :][:BATCH]
    cuts = [len(seeds) * part // parts for part in range(parts + 1)]
    return [
        reference.sample_batch(
            GRAPH.indptr, GRAPH.indices, seeds[low:high], FANOUTS, 0, 0, step, frontier
        )
        for low, high in itertools.pairwise(cuts)
    ]


def ends_of(batch, hop: int) -> list[tuple[int, int]]:
    """Source and target of each edge of a hop."""
    found = zip(batch.src_local[hop], batch.dst_local[hop], strict=True)
    return [(batch.n_id[src], batch.n_id[dst]) for src, dst in found]


def exchanged(batch, frontier: str) -> int:
    """Bytes, owner by owner and layer by layer."""
    total = 0
    for hop in range(len(FANOUTS)):
        used = range(hop, hop + 1) if frontier == "layer" else range(hop + 1)
        pairs = {(src, OWNER[dst]) for h in used for src, dst in ends_of(batch, h)}
        rows = sum(OWNER[node] != owner for node, owner in pairs)
        total += rows * (ROW_BYTES if hop == len(FANOUTS) - 1 else 2 * 4 * HIDDEN)
    return total


@pytest.mark.parametrize("frontier", ["new", "layer"])
def test_both_ways_are_counted(store: Store, frontier: str):
    found = advise_split(store, SETTINGS, asked(frontier), OwnersQuestion("three", HIDDEN))
    assert (found.steps, found.owners, found.row_bytes) == (4, OWNERS, ROW_BYTES)
    shares = [batches(frontier, step, OWNERS) for step in range(4)]
    rows = [[len(b.n_id) for b in each] for each in shares]
    edges = [[sum(map(len, b.edges)) for b in each] for each in shares]
    assert asdict(found.data_parallel) == pytest.approx(
        {
            "rows": np.sum(rows) / 4, "most_rows": np.max(rows, 1).mean(),
            "edges": np.sum(edges) / 4, "most_edges": np.max(edges, 1).mean(),
            "exchanged_bytes": 0,
        }
    )  # fmt: skip
    whole = [batches(frontier, step, 1)[0] for step in range(4)]
    rows = [np.bincount(OWNER[b.n_id], minlength=OWNERS) for b in whole]
    targets = [[dst for hop in range(3) for _, dst in ends_of(b, hop)] for b in whole]
    edges = [np.bincount(OWNER[each], minlength=OWNERS) for each in targets]
    assert asdict(found.split) == pytest.approx(
        {
            "rows": np.sum(rows) / 4, "most_rows": np.max(rows, 1).mean(),
            "edges": np.sum(edges) / 4, "most_edges": np.max(edges, 1).mean(),
            "exchanged_bytes": sum(exchanged(b, frontier) for b in whole) / 4,
        }
    )  # fmt: skip


def test_one_owner_gains_nothing(store: Store):
    found = advise_split(store, SETTINGS, asked(), OwnersQuestion("one", HIDDEN))
    assert found.split == found.data_parallel
    assert "advice for split batches: no: no byte less is gathered, 0B" in found.text


def test_the_command_says_both(store: Store):
    words = [str(store.path), "--mem", "32M", "--num-neighbors", "3,2,2", "--batch-size", "18"]
    words = ["advise", *words, "--seconds", "0.1", "--owners"]
    made = CliRunner().invoke(app, [*words, "three"])
    assert made.exit_code == 0, made.output
    rows = [line.split("  ")[0] for line in made.output.splitlines()]
    assert {"data parallel", "split"} <= {*rows}
    assert "advice for split batches: " in made.output
    made = CliRunner().invoke(app, [*words, "four"])
    assert made.exit_code == 2
    assert "no owner map 'four', expected one of: one, three" in made.output
    assert made.output.count("\n") == 1


def test_what_cannot_be_split_is_refused(store: Store):
    wrong = structs.replace(asked(), return_e_id=True)
    with pytest.raises(Refused, match="owners 'three': found return_e_id, expected"):
        advise_split(store, SETTINGS, wrong, OwnersQuestion("three", HIDDEN))
