"""Historical embeddings: exact tables give exact logits; ranks, stops and refusals."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from clients.cut import cut_batch  # noqa: E402
from clients.large.batch import PLACE, FirstLayerRows, fused_batches  # noqa: E402
from clients.large.dataset import LargeDataset  # noqa: E402
from clients.large.history import HistoricalEmbeddings, HistoryTables, TableSpec  # noqa: E402
from clients.models import LAYERS, Layered  # noqa: E402
from clients.ranks import Ranks  # noqa: E402
from clients.settings import Settings  # noqa: E402
from clients.train import train  # noqa: E402
from preprocess.ingest.ingest import ingest  # noqa: E402
from preprocess.ingest.options import IngestOptions  # noqa: E402
from preprocess.partition.partition import PartitionOptions  # noqa: E402
from preprocess.sources.generate import GraphRecipe, generate  # noqa: E402
from preprocess.sources.plain import PlainSource  # noqa: E402
from tests.clients.ddp_trainer import trained, trained_until_killed  # noqa: E402
from tests.daemons import daemon  # noqa: E402
from tests.effort import tries  # noqa: E402
from tests.preprocess.quiet import QUIET  # noqa: E402
from tests.ranks import pool  # noqa: E402

PARTS, NODES, WIDTH, HIDDEN = 8, 600, 8, 16
ALL = {"num_neighbors": (-1, -1, -1), "frontier": "layer", "batch_size": 30, "seed": 3}
PBS = ALL | {"draws": "partitions", "macro_partitions": 2}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    generate(folder / "graph", GraphRecipe(NODES, 6, WIDTH, 4, 0.5, 0.1, 0.1, seed=2), QUIET)
    options = IngestOptions(partition=PartitionOptions(PARTS))
    ingest(PlainSource(folder / "graph"), folder / "store", options, QUIET)
    with daemon(folder / "store", "64M", 2) as endpoint:
        yield SimpleNamespace(endpoint=endpoint, graph=folder / "graph")


@pytest.fixture(scope="module")
def ranks():
    with pool(tries(4, 8)) as opened:
        yield opened


def spec(endpoint: str, dtype: str = "float32") -> TableSpec:
    data = LargeDataset(endpoint, **PBS)
    fingerprint = data.attached().resolved.fingerprint
    data.close()
    return TableSpec(fingerprint, "sage", 2, NODES, HIDDEN, dtype)


def model_of(kind: str) -> Layered:
    torch.manual_seed(1)
    return Layered(LAYERS[kind], WIDTH, HIDDEN, 4, 3, dropout=0.0)


def whole_graph(served, model: Layered) -> list[torch.Tensor]:
    """What each layer gives for all nodes, by original id."""
    data = LargeDataset(served.endpoint, **(ALL | {"split": "all", "batch_size": NODES}))
    (batch,) = data
    data.close()
    one_hop = batch.edge_index[:, : batch.num_sampled_edges[0]]
    x = torch.empty(NODES, WIDTH)
    x[batch.n_id] = batch.x
    edges, found = batch.n_id[one_hop], [x]
    for layer in model.layers:
        found.append(layer(found[-1], found[-1], edges))
        if layer is not model.layers[-1]:
            found[-1] = functional.relu(found[-1])
    return found


def logits_of(model: Layered, batch, history: HistoricalEmbeddings, exchange=None):
    def activations(h, layer):
        return history(h, layer, batch.features[PLACE])

    counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
    return model(batch.x, batch.edge_index, *counts, "layer", exchange, None, activations)


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("fused", [False, True])
def test_exact_tables_give_the_logits_of_the_whole_graph(served, tmp_path, kind, fused):
    model, seen = model_of(kind), 0
    with torch.no_grad():
        exact = whole_graph(served, model)
        tables = HistoryTables(str(tmp_path / "tables"), spec(served.endpoint), Ranks())
        data = LargeDataset(served.endpoint, **PBS)
        history, pulled = HistoricalEmbeddings(tables, Ranks()), 0
        for read in data.ahead():
            if read.batch is None:
                continue
            for table, rows in enumerate(exact[1:3]):
                tables.rows[table][read.batch.store_id] = rows[read.batch.whole.n_id]
            history.begin(read.batch)
            for batch in fused_batches(read.batch) if fused else read.batch.batches():
                exchange = FirstLayerRows(batch) if fused else None
                logits = logits_of(model, batch, history, exchange)
                expected = exact[3][batch.n_id[: batch.batch_size]]
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
                seen += batch.batch_size
            history.end()
            pulled += sum(places.numel() for places in read.batch.pull)
        assert seen == data.attached().resolved.num_seeds
        assert pulled > 0
        data.close()
        tables.close()


def test_tables_of_zeros_do_not(served, tmp_path):
    model = model_of("sage")
    with torch.no_grad():
        exact = whole_graph(served, model)[3]
        tables = HistoryTables(str(tmp_path / "tables"), spec(served.endpoint), Ranks())
        data, history = LargeDataset(served.endpoint, **PBS), HistoricalEmbeddings(tables, Ranks())
        large = data.first_large_batch()
        history.begin(large)
        batch = next(large.batches())
        found = logits_of(model, batch, history)
        assert (found - exact[batch.n_id[: batch.batch_size]]).abs().max() > 1e-3
        data.close()
        tables.close()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_inner_node_that_is_computed_overwrites_its_row(served, tmp_path, dtype):
    model = model_of("sage")
    tables = HistoryTables(str(tmp_path / "tables"), spec(served.endpoint, dtype), Ranks())
    tables.rows[:] = 7
    data, history = LargeDataset(served.endpoint, **PBS), HistoricalEmbeddings(tables, Ranks())
    large = data.first_large_batch()
    expected = tables.rows.clone()
    history.begin(large)
    for batch in large.batches():
        given = []

        def activations(h, layer, batch=batch, given=given):
            given.append(history(h, layer, batch.features[PLACE]))
            return given[-1]

        counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
        model(batch.x, batch.edge_index, *counts, "layer", None, None, activations)
        places = batch.features[PLACE] - 1
        for table, h in enumerate(given):
            own = places[: h.size(0)]
            inner = large.inner[own]
            expected[table][large.store_id[own[inner]]] = h[inner].detach().to(expected.dtype)
            pulled = np.isin(own, large.pull[table])
            assert bool((h[torch.from_numpy(pulled)] == 7).all())
    assert bool((tables.rows == 7).all())  # until the large batch has ended
    history.end()
    assert torch.equal(tables.rows, expected)
    assert not bool((tables.rows == 7).all())
    data.close()
    tables.close()


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_all_partitions_gradients_are_those_of_shared_draws(served, tmp_path, kind, dtype):
    options = {"num_neighbors": (4, 3, 3), "macro_partitions": PARTS}
    model = model_of(kind).to(dtype)
    tables = HistoryTables(str(tmp_path / "tables"), spec(served.endpoint), Ranks())
    data, history = (
        LargeDataset(served.endpoint, **(PBS | options)),
        HistoricalEmbeddings(tables, Ranks()),
    )
    shared = {"draws": "shared", "macro_partitions": 0, "large_batches": 99}
    other = LargeDataset(served.endpoint, **(PBS | options | shared))
    large, whole = data.first_large_batch(), other.first_large_batch().whole
    assert [places.numel() for places in large.pull] == [0, 0]
    places = torch.argsort(whole.input_id)
    history.begin(large)
    for step in large.batches():
        expected = cut_batch(whole, places[step.input_id])
        gradients = []
        for batch, activations in ((step, True), (expected, False)):
            batch.x = batch.x.to(dtype)
            model.zero_grad()
            if activations:
                logits = logits_of(model, batch, history)
            else:
                counts = (batch.num_sampled_nodes, batch.num_sampled_edges)
                logits = model(batch.x, batch.edge_index, *counts, "layer")
            functional.cross_entropy(logits, batch.y[: batch.batch_size]).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-10
        torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)
    for one in (data, other):
        one.close()
    tables.close()


# -- training --------------------------------------------------------------------------------------


def settings(served, tmp_path, **options) -> dict:
    return {
        "endpoint": served.endpoint, "epochs": 2, "num_neighbors": (4, 3, 3), "batch_size": 30,
        "hidden": HIDDEN, "learning_rate": 0.01, "seed": 5, "device": "cpu", "frontier": "layer",
        "plan": "large", "draws": "partitions", "macro_partitions": 2,
        "history": str(tmp_path / "tables"), **options,
    }  # fmt: skip


def tables_of(given: dict) -> bytes:
    return Path(given["history"]).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_two_runs_of_two_ranks_give_the_same_tables(served, ranks, tmp_path, dtype):
    given = settings(served, tmp_path, history_dtype=dtype)
    first = ranks.run(trained, given, world=2)
    before = tables_of(given)
    second = ranks.run(trained, given, world=2)
    assert first == second
    assert first[0][1] == first[1][1]
    assert tables_of(given) == before
    rows = np.frombuffer(before, dtype, offset=4096).reshape(2, NODES, HIDDEN)
    assert rows.any(axis=(1, 2)).all()


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights_and_tables(
    served, ranks, tmp_path, world
):
    given = settings(served, tmp_path)
    whole = ranks.run(trained, given, world=world)
    tables = tables_of(given)
    saved = given | {"checkpoint": str(tmp_path / "saved")}
    before = ranks.run(trained, saved | {"max_steps": 2}, world=world)
    assert len(before[0][0]) < len(whole[0][0])
    after = ranks.run(trained, saved, world=world)
    for (seen, weights), (start, _), (rest, found) in zip(whole, before, after, strict=True):
        assert (start + rest, found) == (seen, weights)
    assert tables_of(given) == tables


@pytest.mark.parametrize("world", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 8))])
def test_after_a_rank_was_killed_all_go_on_to_the_same_weights_and_tables(
    served, ranks, tmp_path, world
):
    given = settings(served, tmp_path, timeout=20.0)
    saved = given | {"checkpoint": str(tmp_path / "saved"), "save_every": 1}
    whole = ranks.run(trained, given, world=world)
    tables = tables_of(given)
    left = [rank for rank in range(world) if rank != 1]
    with pool(world) as others:
        for rank, (done, text) in zip(
            left, others.outcomes(left, trained_until_killed, saved, 1, 1, world=world), strict=True
        ):
            assert not done
            assert re.search(rf"RankLost: rank {rank}: rank 1 \(process \d+\) has ended", text)
    after = ranks.run(trained, saved, world=world)
    for (seen, weights), (rest, found) in zip(whole, after, strict=True):
        assert len(rest) == len(seen) // 2
        assert (seen[len(seen) - len(rest) :], found) == (rest, weights)
    assert tables_of(given) == tables


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"history": ""}, "history '': found draws 'partitions', expected a file"),
        ({"draws": "shared", "macro_partitions": 0}, "found draws 'shared', expected a file"),
        ({"plan": "auto"}, "found plan 'auto', expected 'large'"),
        ({"history_dtype": "int8"}, "history_dtype 'int8': expected float32 or float16"),
        ({"compile": True}, "compile: found draws 'partitions'"),
        ({"history": "/nowhere/tables"}, "history /nowhere/tables: No such file or directory"),
    ],
)
def test_options_that_do_not_go_together_are_refused(served, tmp_path, wrong, text):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        train(Settings(**settings(served, tmp_path, **wrong)), Ranks())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "found"), [({"hidden": 8}, '"width": 16'), ({"model": "gcn"}, '"model": "sage"')]
)
def test_tables_of_something_else_are_refused(served, ranks, tmp_path, wrong, found):
    given = settings(served, tmp_path, max_steps=1)
    HistoryTables(given["history"], spec(served.endpoint), Ranks()).close()
    before = tables_of(given)
    for done, text in ranks.outcomes([0, 1], trained, given | wrong, world=2):
        assert not done
        assert "ValueError: history " in text
        assert found in text.splitlines()[-1]
    assert tables_of(given) == before


def test_tables_of_another_store_are_refused(served, tmp_path):
    given = settings(served, tmp_path, max_steps=1)
    other = spec(served.endpoint)._replace(store="another")
    HistoryTables(given["history"], other, Ranks()).close()
    before = tables_of(given)
    with pytest.raises(ValueError, match=r'found .*"store": "another".*') as caught:
        train(Settings(**given), Ranks())
    assert "\n" not in str(caught.value)
    assert tables_of(given) == before


def open_on(ranks: Ranks, path: str, own: TableSpec) -> None:
    with patch("clients.large.history.socket.gethostname", lambda: f"host{ranks.rank}"):
        HistoryTables(path, own, ranks)


def test_ranks_of_several_hosts_are_refused(served, ranks, tmp_path):
    path, own = str(tmp_path / "tables"), spec(served.endpoint)
    for done, text in ranks.outcomes([0, 1], open_on, path, own, world=2):
        assert not done
        assert "mapped by ranks of several hosts: found host0 on rank 0 and host1 on ra" in text


def test_a_file_of_something_else_stays_as_it_is(served, tmp_path):
    given = settings(served, tmp_path)
    (tmp_path / "tables").write_bytes(b"mine")
    with pytest.raises(ValueError, match="found 'mine', expected tables of"):
        train(Settings(**given), Ranks())
    assert tables_of(given) == b"mine"


def test_tables_are_of_one_run_at_a_time(served, tmp_path):
    held = HistoryTables(str(tmp_path / "tables"), spec(served.endpoint), Ranks())
    with pytest.raises(ValueError, match="found that another run has it, expected to have it"):
        HistoryTables(str(tmp_path / "tables"), spec(served.endpoint), Ranks())
    held.close()
    HistoryTables(str(tmp_path / "tables"), spec(served.endpoint), Ranks()).close()


def test_checkpoints_without_tables_or_with_others_are_refused(served, tmp_path):
    own = settings(served, tmp_path, draws="shared", macro_partitions=0, history="", max_steps=1)
    given = settings(served, tmp_path, max_steps=1)
    saved = {"checkpoint": str(tmp_path / "saved")}
    train(Settings(**own, **saved), Ranks())
    with pytest.raises(ValueError, match="found no historical embeddings, expected those of"):
        train(Settings(**given, **saved), Ranks())
    (tmp_path / "saved").unlink()
    train(Settings(**given, **saved), Ranks())
    (tmp_path / "tables").unlink()
    wrong = given | saved | {"hidden": 8}
    with pytest.raises(ValueError, match=r"the checkpoint has tables of .*'width': 16"):
        train(Settings(**wrong), Ranks())
