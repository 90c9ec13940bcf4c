"""Training by plan "large": the weights of minibatches with draws of their own, and after stops."""

import re

import pytest

torch = pytest.importorskip("torch")

import clients.large.padding  # noqa: E402
import clients.models  # noqa: E402
import clients.train  # noqa: E402
from clients.large.order import Order  # noqa: E402
from clients.ranks import Ranks  # noqa: E402
from clients.settings import Settings  # noqa: E402
from clients.train import train  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from tests.clients.ddp_trainer import trained  # noqa: E402
from tests.clients.small_job import job_settings, serve_graph  # noqa: E402
from tests.differences import flat  # noqa: E402
from tests.processes import run_main  # noqa: E402

RANKS = 2
SHARED = {"frontier": "layer", "draws": "shared", "large_batches": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_graph(tmp_path_factory.mktemp("large"), train=0.5) as endpoint:
        yield endpoint


def settings(endpoint: str, **options) -> dict:
    return job_settings(endpoint, batch_size=40, device="cpu", **options)


@pytest.mark.parametrize("frontier", ["new", "layer"])
@pytest.mark.parametrize("world", [1, 2])
def test_own_draws_train_what_minibatches_train(served, ranks, frontier, world):
    given = settings(served, frontier=frontier)
    expected = ranks.run(trained, given, world=world)
    found = ranks.run(trained, given | {"plan": "large", "large_batches": 3}, world=world)
    assert found == expected


def test_ranks_of_shared_draws_share_the_seeds_of_each_step(served, ranks):
    given = settings(served, dropout="keyed", **SHARED) | {"plan": "large"}
    ((alone, weights),) = ranks.run(trained, given, world=1)
    together = ranks.run(trained, given, world=2)
    for step, *parts in zip(alone, *(seen for seen, _ in together), strict=True):
        assert [part[:2] for part in parts] == [step[:2]] * 2
        assert flat(part[2] for part in parts) == step[2]
    for _, found in together:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, SHARED, SHARED | {"second_fanout": (2, 2)}])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(served, tmp_path, options):
    given = settings(served, plan="large", **({"large_batches": 3} | options))
    whole, weights = trained(Ranks(), given)
    saved = given | {"checkpoint": str(tmp_path / "saved")}
    before, _ = trained(Ranks(), saved | {"max_steps": 4})
    after, found = trained(Ranks(), saved)
    assert (before + after, found) == (whole, weights)


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_ranks_compute_layers_in_the_order_that_the_first_measures(served, ranks, kind):
    given = settings(served, dropout="keyed", model=kind, plan="large", large_batches=3)
    usual, measured = (
        ranks.run(trained, given | {"order": order}, world=2) for order in ("widths", "measured")
    )
    for (seen, weights), (other, found) in zip(usual, measured, strict=True):
        assert seen == other
        # logits and gradients agree to 1e-5 (test_fused.py); a step of Adam has the sign of what is
        # left of a gradient that is 0, and which order is the fastest is not the same each time
        torch.testing.assert_close(torch.tensor(found), torch.tensor(weights), atol=1e-3, rtol=1e-3)
    assert measured[0][1] == measured[1][1]


def test_a_checkpoint_has_the_order_that_was_measured(served, tmp_path, monkeypatch):
    saved = settings(served, plan="large", order="measured", checkpoint=str(tmp_path / "saved"))
    measured = Order(True, (False, True), ("csr", "index_add"))
    monkeypatch.setattr(clients.train, "measure_order", lambda *_: measured)
    train(Settings(**saved | {"max_steps": 1}), Ranks())
    monkeypatch.setattr(clients.train, "measure_order", None)
    trainer = train(Settings(**saved), Ranks())
    assert Order.of(trainer.model.net, True) == measured


def test_epochs_after_the_first_are_compiled_and_go_on_after_a_stop(
    served, tmp_path, monkeypatch, capsys
):
    compile_as_it_is, called = torch.compile, []

    def compiled(function, **options):
        run = compile_as_it_is(function, backend="aot_eager", **options)
        return lambda *arguments: called.append(len(arguments)) or run(*arguments)

    monkeypatch.setattr(torch, "compile", compiled)
    given = settings(served, plan="large", epochs=3, compile=True)
    seen, found = trained(Ranks(), given)
    larger = int(re.search(r"(\d+) batches were too large", capsys.readouterr().out)[1])
    assert len(called) == len(seen) * 2 // 3 - larger > 0
    saved = given | {"checkpoint": str(tmp_path / "saved")}
    trained(Ranks(), saved | {"max_steps": len(seen) // 3 + 2})
    after, weights = trained(Ranks(), saved)
    assert (seen[-len(after) :], weights) == (after, found)


def test_replayed_steps_train_what_steps_of_padded_batches_train(served, monkeypatch):
    """The same kernels and masks: what a graph records is run as it is, as there is no GPU."""
    recorded, replayed = [], []

    def run_again(run, warm_up, device):
        recorded.append(device)
        with torch.random.fork_rng():
            warm_up()
        return lambda: replayed.append(run())

    monkeypatch.setattr(clients.large.padding, "record", run_again)
    given = settings(served, plan="large", epochs=3)
    with monkeypatch.context() as patched:
        patched.setattr(clients.train, "check_recordable", lambda *_: None)
        seen, found = trained(Ranks(), given | {"cuda_graph": True})
    assert len(recorded) == 1
    assert len(seen) // 3 < len(replayed) <= len(seen) * 2 // 3
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", lambda function, **_: function)
        patched.setattr(clients.models.SageLayer, "kernel", "index_add")
        padded, weights = trained(Ranks(), given | {"compile": True})
    assert padded == seen
    torch.testing.assert_close(torch.tensor(found), torch.tensor(weights), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"draws": "shared"}, "found plan 'auto', expected 'large'"),
        ({"plan": "large", "draws": "shared"}, "draws 'shared': found frontier 'new'"),
        ({"compile": True}, "found plan 'auto', expected 'large'"),
        (
            {"plan": "large", "compile": True, "order": "measured"},
            "compile: found order 'measured'",
        ),
        ({"plan": "large", "compile": True, "dropout": "keyed"}, "compile: found dropout 'keyed'"),
        ({"plan": "large", "cuda_graph": True}, "cuda_graph: found device 'cpu' and 1 ranks"),
        ({"cuda_graph": True}, "found plan 'auto', expected 'large'"),
        ({"plan": "large", "cuda_graph": True, "compile": True}, "compile with cuda_graph"),
        ({"order": "measured"}, "found plan 'auto', expected 'large'"),
        ({"plan": "minibatch", "second_fanout": (2, 2)}, "found plan 'minibatch', expected"),
    ],
)
def test_options_that_do_not_go_together_are_refused(served, wrong, text):
    with pytest.raises((ValueError, Refused)) as caught:
        train(Settings(**settings(served, **wrong)), Ranks())
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_trains(served, capsys):
    command = ["clients.train", served, "--plan", "large", "--epochs", "1"]
    options = "--frontier layer --draws shared --large-batches 4 --num-neighbors 4 3"
    words = [*options.split(), "--second-fanout", "3,2", "--device", "cpu", "--batch-size", "40"]
    code, (out, errors) = run_main(*command, *words), capsys.readouterr()
    assert code == 0, errors
    assert "test accuracy" in out
