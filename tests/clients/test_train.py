"""Models against plain sums; the training command, alone and under torchrun."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from clients import train_hops  # noqa: E402
from clients.connection.position import StateMismatch  # noqa: E402
from clients.models import LAYERS, GatLayer, GcnLayer  # noqa: E402
from clients.ranks import FlatGradients, Ranks  # noqa: E402
from clients.settings import Settings, parse_fanouts  # noqa: E402
from clients.train import sum_of_losses, train  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.daemons import ROOT, daemon  # noqa: E402
from tests.heterostores import random_hetero, write_hetero_store  # noqa: E402

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
WRITTEN = ("paper", "written_by", "author")


def random_edges(num_sources: int, num_targets: int, count: int):
    torch.manual_seed(0)
    dst = torch.randint(0, num_targets, (count,)).sort().values
    return torch.stack([torch.randint(0, num_sources, (count,)), dst])


def test_gcn_is_a_mean_with_the_node_itself():
    h, edges, layer = torch.randn(9, 4), random_edges(9, 5, 12), GcnLayer(4, 3)
    out = layer(h, h[:5], edges)
    for v in range(5):
        rows = torch.cat([h[edges[0][edges[1] == v]], h[v : v + 1]])
        torch.testing.assert_close(out[v], layer.linear(rows.mean(dim=0)))


@pytest.mark.parametrize("heads", [1, 2])
def test_gat_is_a_softmax_over_neighbors_and_the_node_itself(heads):
    h, edges, layer = torch.randn(9, 4), random_edges(9, 5, 12), GatLayer(4, 6, heads)
    out = layer(h, h[:5], edges)
    z = layer.linear(h).view(9, heads, -1)
    for v in range(5):
        sources = torch.cat([edges[0][edges[1] == v], torch.tensor([v])])
        scores = (z[sources] * layer.from_source).sum(-1) + (z[v] * layer.from_target).sum(-1)
        shares = torch.softmax(torch.nn.functional.leaky_relu(scores, 0.2), dim=0)
        mixed = (shares[..., None] * z[sources]).sum(dim=0).flatten()
        torch.testing.assert_close(out[v], mixed + layer.bias)


def test_gradients_are_those_of_the_mean_over_labelled_seeds():
    """A step without labels, and a parameter without use, have gradients of zeros."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)])
    gradients, x = FlatGradients(model, Ranks()), torch.randn(5, 3)
    labels = torch.tensor([1, -1, 0, 3, -1])
    for y in (labels, torch.full_like(labels, -1)):
        loss, labelled = gradients.of_mean(*sum_of_losses(model[0](x), y))
        rows = x[y >= 0], y[y >= 0]
        mean = torch.nn.functional.cross_entropy(model[0](rows[0]), rows[1], reduction="sum")
        mean = mean / max(labelled, 1)
        assert (loss, labelled) == (pytest.approx(mean.item() * labelled), len(rows[1]))
        (expected,) = torch.autograd.grad(mean, [model[0].weight])
        torch.testing.assert_close(model[0].weight.grad, expected)
        assert not model[1].weight.grad.any()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A graph of two types whose papers' labels stand in their features."""
    rng = np.random.default_rng(3)
    graph = random_hetero(
        rng, {"author": 60, "paper": 200}, (CITES, WRITES, WRITTEN), 6, {"paper": 4}, "paper"
    )
    labels = np.arange(200) % 4
    graph = graph._replace(labels={"paper": labels}, x_of={"paper": np.eye(4, dtype="f4")[labels]})
    store = tmp_path_factory.mktemp("train") / "store"
    splits = dict.fromkeys(("valid", "test"), graph.train["paper"])
    write_hetero_store(store, graph, splits={"paper": splits})
    with daemon(store, "32M", 2) as endpoint:
        yield endpoint


def settings(endpoint: str, **options) -> dict:
    wanted = {
        "model": "sage", "epochs": 2, "num_neighbors": [4, 3], "batch_size": 24, "hidden": 16,
        "input_type": "paper", "learning_rate": 0.03, "seed": 5,
    }  # fmt: skip
    return {"endpoint": endpoint, **wanted, **options}


def test_two_processes_share_batches_and_go_on_mid_epoch(served, tmp_path):
    """Equal counts, disjoint seeds, each once an epoch; a stopped run ends in the same weights."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "tests/clients/ddp_trainer.py", json.dumps(settings(served)), str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    (mine, weights), (theirs, their_weights) = (rank["whole"] for rank in ranks)
    assert [place[:2] for place in mine] == [place[:2] for place in theirs]
    for epoch in range(2):
        one, two = ([i for e, _, ids in rank if e == epoch for i in ids] for rank in (mine, theirs))
        assert not set(one) & set(two)
        assert sorted(one + two) == list(range(100))
    assert weights == their_weights
    for rank in ranks:
        assert rank["before"] == 3 < len(mine) / 2  # stopped inside the first epoch
        assert rank["stopped"] == rank["whole"]


@pytest.mark.parametrize("model", LAYERS)
def test_models_learn_over_several_types(served, model, capsys):
    wanted = settings(served, model=model, epochs=6, num_neighbors=(4, 3))
    trainer = train(Settings(**wanted), Ranks())
    *epochs, last = capsys.readouterr().out.splitlines()
    assert len(epochs) == 6
    assert all(" s, " in line and "waiting for data" in line for line in epochs)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in epochs]
    assert losses[-1] < losses[0]
    assert float(last.split()[-1]) > 0.5  # of 4 classes
    assert trainer.accuracy("test") == pytest.approx(float(last.split()[-1]), abs=1e-4)


def test_a_checkpoint_of_another_run_is_refused(served, tmp_path, capsys):
    wanted = settings(served, checkpoint=str(tmp_path / "saved"), max_steps=1, num_neighbors=(3,))
    train(Settings(**wanted), Ranks())
    assert f"stopped after 1 steps in all, saved to {tmp_path}/saved" in capsys.readouterr().out
    with pytest.raises(StateMismatch, match=r"seed 5 \(now 6\)"):
        train(Settings(**(wanted | {"seed": 6})), Ranks())


def test_the_store_that_is_named_is_the_one_that_is_trained_on(served):
    wanted = settings(served, max_steps=1, num_neighbors=(3,))
    assert train(Settings(**wanted, store="store"), Ranks())
    with pytest.raises(
        Refused, match=r"store 'other' is not served: expected one of store: .*--st"
    ):
        train(Settings(**wanted, store="other"), Ranks())
    with pytest.raises(Refused, match="store 'other' is not served"):
        train_hops.train(train_hops.HopSettings(served, store="other"))


def test_what_cannot_be_is_said_before_anything_is_trained(served, tmp_path, capsys):
    for wrong, said in (
        ({"device": "nowhere"}, "device 'nowhere': .*, expected one that this torch can use"),
        ({"checkpoint": f"{tmp_path}/none/saved"}, "checkpoint .*: .*/none is no folder"),
    ):
        with pytest.raises(ValueError, match=said):
            train(Settings(**settings(served, **wrong)), Ranks())
    with pytest.raises(ValueError, match="device 'nowhere'"):
        train_hops.train(train_hops.HopSettings(served, device="nowhere"))
    assert not capsys.readouterr().out


def test_fanouts_of_a_command_line():
    assert parse_fanouts(["15", "10"]) == parse_fanouts(["15,10"]) == parse_fanouts((15, 10))
    with pytest.raises(ValueError, match="--num-neighbors 'x': expected numbers such as 15 10"):
        parse_fanouts(["x"])


def test_what_has_no_labels_cannot_be_trained_on(served):
    with pytest.raises(Refused, match="split 'train'"):
        train(Settings(**settings(served, input_type="author")), Ranks())
