"""Counts of presampling against plain Python; runs that end anywhere; what is refused."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from blockstore.errors import CorruptBlock, StoreExists
from blockstore.expansions import read_expansions
from blockstore.store import Store, open_store
from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, Labor, Temporal
from loaderd.cli.commands import app
from loaderd.cli.flags import Presampling
from loaderd.cli.presample import presample
from loaderd.memory.ledger import EngineSettings
from tests import reference
from tests.graphs import Csc, make_csc
from tests.heterostores import random_hetero, write_hetero_store
from tests.stores import write_store

GRAPH = make_csc([i % 7 for i in range(120)], 4)
TRAIN = [*range(0, 100, 2), 4, 8]  # two twice
ASKED = Presampling(Path(), "3,2,-1", 16, 2, seed=9)
SETTINGS = EngineSettings(32 << 20, 2, 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("presample") / "store"
    write_store(path, GRAPH, TRAIN)
    return open_store(path)


def counted(graph: Csc, frontier: str, epochs: int) -> tuple[np.ndarray, int]:
    """(counts, steps) of `ASKED`, by the reference of batches."""
    found, steps = np.zeros((4, graph.num_nodes), int), 0
    for epoch in range(epochs):
        key = reference.make_epoch_key(9, epoch)
        seeds = [TRAIN[reference.permute(i, len(TRAIN), key)] for i in range(len(TRAIN))]
        for step in range(-(-len(seeds) // 16)):
            own = seeds[16 * step : 16 * step + 16]
            batch = reference.sample_batch(
                graph.indptr, graph.indices, own, (3, 2, -1), 9, epoch, step, frontier
            )
            ends = np.cumsum(batch.nodes_per_hop)
            for hop in range(3):
                low = 0 if frontier == "layer" or hop == 0 else ends[hop - 1]
                for node in batch.n_id[low : ends[hop]]:
                    found[hop, node] += 1
            for node in batch.n_id:
                found[3, node] += 1
            steps += 1
    return found, steps


@pytest.mark.parametrize("frontier", ["new", "layer"])
def test_counts_are_those_of_the_plan(store: Store, tmp_path: Path, frontier: str):
    request = replace(ASKED, frontier=frontier).request()
    made = presample(store, request, 2, SETTINGS, tmp_path / "counts", lambda _: None)
    found, counts = read_expansions(tmp_path / "counts")
    expected, steps = counted(GRAPH, frontier, 2)
    assert np.array_equal(counts, expected)
    assert msgspec.structs.replace(found, digest="") == made
    assert (found.steps, found.epochs, found.fanouts) == (steps, 2, (3, 2, -1))
    assert [found.layers(hop) for hop in range(3)] == ([3, 2, 1] if frontier == "new" else [1] * 3)
    assert [p.name for p in tmp_path.iterdir()] == ["counts"]


def test_a_run_that_was_stopped_goes_on(store: Store, tmp_path: Path):
    request, told = ASKED.request(), list[str]()

    def stop(line: str) -> None:
        raise KeyboardInterrupt(line)

    out = tmp_path / "counts"
    with pytest.raises(KeyboardInterrupt, match="epoch 1 of 3"):
        presample(store, request, 3, SETTINGS, out, stop)
    assert [p.name for p in tmp_path.iterdir()] == [".counts.partial"]
    presample(store, request, 3, SETTINGS, out, told.append)
    assert [line.split(":")[0] for line in told] == ["epoch 2 of 3", "epoch 3 of 3"]
    whole = tmp_path / "whole"
    presample(store, request, 3, SETTINGS, whole, lambda _: None)
    assert out.read_bytes() == whole.read_bytes()
    with pytest.raises(StoreExists, match="counts: exists already"):
        presample(store, request, 3, SETTINGS, out, lambda _: None)


def test_counts_of_another_request_are_not_taken_over(store: Store, tmp_path: Path):
    told = list[str]()
    presample(store, ASKED.request(), 1, SETTINGS, tmp_path / "counts", told.append)
    (tmp_path / "counts").rename(tmp_path / ".other.partial")
    request = replace(ASKED, seed=10).request()
    presample(store, request, 1, SETTINGS, tmp_path / "other", told.append)
    assert len(told) == 2
    assert read_expansions(tmp_path / "other")[0].seed == 10


def test_damage_is_found(store: Store, tmp_path: Path):
    out = tmp_path / "counts"
    presample(store, ASKED.request(), 1, SETTINGS, out, lambda _: None)
    whole = out.read_bytes()
    for at in (1, len(whole) - 5):
        out.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with pytest.raises(CorruptBlock, match=r"counts: .*make it again"):
            read_expansions(out)
    out.write_bytes(whole[:-1])
    with pytest.raises(CorruptBlock, match=r"counts: .*make it again"):
        read_expansions(out)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("weighted", True, "found weighted sampling"),
        ("temporal", Temporal(), "found sampling up to a time"),
        ("labor", Labor(), "found LABOR sampling"),
        ("replace", True, "found draws with replacement"),
    ],
)
def test_other_samplers_are_refused(
    store: Store, tmp_path: Path, field: str, value: object, match: str
):
    request: Attach = msgspec.structs.replace(ASKED.request(), **{field: value})
    with pytest.raises(Refused, match=match):
        presample(store, request, 1, SETTINGS, tmp_path / "counts", lambda _: None)


def test_several_types_are_refused(tmp_path: Path):
    graph = random_hetero(
        np.random.default_rng(1), {"a": 4, "b": 3}, [("a", "to", "b")], 2, {"a": 1}, "a"
    )
    write_hetero_store(tmp_path / "store", graph)
    with pytest.raises(Refused, match="several node types"):
        presample(
            open_store(tmp_path / "store"), ASKED.request(), 1, SETTINGS, tmp_path / "counts", print
        )


def test_the_command(store: Store, tmp_path: Path):
    out = str(tmp_path / "counts")
    words = ["presample", str(store.path), "--num-neighbors", "3,2,-1", "--batch-size", "16"]
    words += ["--epochs", "2", "--seed", "9", "--out", out, "--mem", "32M"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"{out}: 8 batches of 2 epochs"
    assert np.array_equal(read_expansions(Path(out))[1], counted(GRAPH, "new", 2)[0])
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert "exists already" in again.stderr
