"""Training by the commands on a GPU: the weights of the CPU, and of steps that are not replayed."""

import pytest
import torch

import clients.large.padding
import clients.models
from clients import train_hops
from clients.ranks import Ranks
from tests.clients.ddp_trainer import trained
from tests.clients.small_job import job_settings, serve_graph
from tests.daemons import daemon
from tests.hopstores import make_hops, write_hop_store

SHARED = {"plan": "large", "frontier": "layer", "draws": "shared", "large_batches": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_graph(tmp_path_factory.mktemp("train"), train=0.5) as endpoint:
        yield endpoint


def assert_near(found: list[float], expected: list[float]) -> None:
    """Equal up to rounding, of whose signs Adam makes steps where a gradient is next to nothing."""
    apart = (torch.tensor(found) - torch.tensor(expected)).abs()
    assert float(apart.mean()) < 1e-3
    assert float(apart.max()) < 0.05


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("options", [{}, SHARED], ids=str)
def test_a_gpu_trains_what_the_cpu_trains(served, model, options):
    given = job_settings(served, batch_size=40, model=model, dropout="keyed", **options)
    seen, expected = trained(Ranks(), given | {"device": "cpu"})
    again, found = trained(Ranks(), given | {"device": "cuda"})
    assert again == seen
    assert_near(found, expected)


def test_an_order_is_measured_on_a_gpu(served):
    given = job_settings(served, batch_size=40, dropout="keyed", plan="large", device="cuda")
    _, expected = trained(Ranks(), given)
    _, found = trained(Ranks(), given | {"order": "measured"})
    assert_near(found, expected)


def test_steps_are_recorded_while_batches_are_read_ahead(served, monkeypatch):
    """And replayed with the masks that the same steps have eagerly."""
    replays = []
    plain = clients.large.padding.record

    def counted(*arguments):
        replay = plain(*arguments)
        return lambda: replays.append(replay())

    monkeypatch.setattr(clients.large.padding, "record", counted)
    given = job_settings(served, batch_size=40, device="cuda", plan="large") | {"epochs": 6}
    seen, found = trained(Ranks(), given | {"cuda_graph": True})
    assert len(replays) > len(seen) // 2
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", lambda function, **_: function)
        patched.setattr(clients.models.SageLayer, "kernel", "index_add")
        again, expected = trained(Ranks(), given | {"compile": True})
    assert again == seen
    assert_near(found, expected)


def test_propagated_features(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_hops, "seed_classes", lambda _: 4)  # the nodes have no labels
    splits = {}
    for seed, split in enumerate(("train", "valid", "test")):
        hops = make_hops(4000, 16, {"sym": 2}, seed)
        signs = hops.x["sym", 0][:, :2] > 0
        splits[split] = hops._replace(y=2 * signs[:, 0] + signs[:, 1])
    write_hop_store(tmp_path / "store", splits)
    with daemon(tmp_path / "store", "64M") as endpoint:
        valid, test = train_hops.train(
            train_hops.HopSettings(endpoint, epochs=15, batch_size=200, hidden=32, device="cuda")
        )
    assert min(valid, test) > 0.8  # of four classes
    assert "test accuracy" in capsys.readouterr().out
