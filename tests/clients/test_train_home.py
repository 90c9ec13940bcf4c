"""Training with home placement over a real daemon: as one process trains, whoever owns what."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.ranks import Ranks  # noqa: E402
from clients.settings import Settings  # noqa: E402
from clients.train import train  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from tests.clients.ddp_trainer import trained, trained_until_killed  # noqa: E402
from tests.clients.small_job import (  # noqa: E402
    check_run,
    job_settings,
    seeds_of,
    serve_graph,
    whole_run,
)
from tests.daemons import until  # noqa: E402
from tests.ranks import pool  # noqa: E402

RANKS = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A small store with maps of two and four owners; of "three" the fourth has nothing."""
    maps = (("two", 2, 2), ("four", 4, 4), ("three", 4, 3))
    with serve_graph(tmp_path_factory.mktemp("home"), maps) as endpoint:
        yield endpoint


def settings(endpoint: str, owners: str = "", **options) -> dict:
    home = {"placement": "home", "owners": owners} if owners else {}
    return job_settings(endpoint, dropout="keyed", frontier="layer") | home | options


@pytest.fixture(scope="module")
def alone(served, ranks):
    """What one process trains on by step, and its weights in the end."""
    return whole_run(ranks.run(trained, settings(served), world=1))


@pytest.mark.parametrize(
    ("owners", "world", "options"),
    [
        ("two", 2, {}), ("four", 4, {}), ("three", 4, {}),
        ("two", 2, {"parts": "2", "migrate": "always"}),
        ("four", 4, {"parts": "3", "migrate": "always"}),
        ("four", 4, {"parts": "2", "merge": "model"}),
        ("three", 4, {"parts": "auto"}),
        ("two", 2, {"parts": "auto", "merge": "model", "migrate": "always", "epochs": 2}),
    ],
)  # fmt: skip
def test_ranks_train_together_as_one_process(served, ranks, alone, owners, world, options):
    check_run(ranks.run(trained, settings(served, owners, **options), world=world), alone)


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_every_model(served, ranks, kind):
    (one,) = ranks.run(trained, settings(served, model=kind, epochs=1), world=1)
    found = ranks.run(trained, settings(served, "two", model=kind, epochs=1, parts="2"), world=2)
    check_run(found, (seeds_of([one]), one[1]))


LOCAL = {"parts": "2", "merge": "model", "migrate": "always", "sync_every": 2}


@pytest.mark.parametrize("options", [{}, {"parts": "auto"}, LOCAL], ids=["home", "auto", "local"])
def test_a_checkpoint_goes_on_as_if_nothing_had_been(served, ranks, tmp_path, options):
    wanted = settings(served, "two", **options)
    whole = ranks.run(trained, wanted, world=2)
    saved = wanted | {"checkpoint": str(tmp_path / "saved")}
    before = ranks.run(trained, saved | {"max_steps": 3}, world=2)
    after = ranks.run(trained, saved, world=2)
    joined = [(a + b, weights) for (a, _), (b, weights) in zip(before, after, strict=True)]
    assert seeds_of(joined) == seeds_of(whole)
    for (_, found), (_, expected) in zip(joined, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert len(seeds_of(before)) == (4 if options is LOCAL else 3)  # at an average


def test_models_that_travel_do_not_depend_on_the_number_of_time_steps(served, ranks):
    """Each takes steps on its own seeds, wherever these are; `auto` goes by the clock."""
    first, *others = (
        ranks.run(trained, settings(served, "four", **(LOCAL | {"parts": parts})), world=4)
        for parts in ("4", "2", "auto")
    )
    for found in others:
        assert seeds_of(found) == seeds_of(first)
        for (_, weights), (_, expected) in zip(found, first, strict=True):
            np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_goes_on_with_other_ranks(served, ranks, alone, tmp_path):
    saved = {"checkpoint": str(tmp_path / "saved")}
    before = ranks.run(trained, settings(served, "two", **saved, max_steps=3), world=2)
    after = ranks.run(trained, settings(served, "four", **saved, parts="4"), world=4)
    for _, weights in after:
        np.testing.assert_allclose(weights, alone[1], rtol=1e-4, atol=1e-4)
    assert seeds_of(before) | seeds_of(after) == alone[0]


def test_the_others_stop_if_one_is_killed(served):
    wanted = settings(served, "two", parts="2", migrate="always", timeout=20)
    with pool(2) as own:
        ((done, text),) = own.outcomes([0], trained_until_killed, wanted, 1, world=2)
    assert not done
    assert re.search(r"RankLost: rank 0: rank 1 \(process \d+\) has ended", text)
    until(lambda: not ask_status(parse_either(served)).sessions, "sessions of those that ended")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"owners": ""}, "placement 'home': expected owners with either plan 'split'"),
        ({"plan": "split"}, "placement 'home': expected owners with either plan 'split'"),
        ({"placement": "away"}, "placement 'away': expected owners with either"),
        ({"placement": "", "owners": "", "parts": "2"}, "parts '2': found no placement 'home'"),
        ({"parts": "0"}, "parts '0': expected 1 to 2, the number of ranks, or 'auto'"),
        ({"parts": "3"}, "parts '3': expected 1 to 2"),
        ({"parts": "some"}, "parts 'some': expected 1 to 2"),
        ({"sync_every": 0}, "sync_every 0: expected 1 or more"),
        ({"sync_every": 2, "parts": "2"}, "merge 'server': expected merge 'model'"),
        ({"sync_every": 2, "parts": "2", "merge": "model"}, "migrate 'never': expected 'always'"),
        ({"migrate": "always"}, "migrate 'always', parts '1': expected several time steps"),
    ],
)
def test_what_does_not_go_together_is_said(served, options, said):
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        train(Settings(**(settings(served, "two") | options)), Ranks(0, 2))
    assert "\n" not in str(refused.value)


def test_what_the_daemon_refuses_is_said(served):
    for options, said in (
        ({"frontier": "new"}, "found frontier 'new', expected 'layer'"),
        ({"owners": "two"}, "the map has 2 owners, expected 1, one for each rank"),
        ({"owners": "none"}, "no owner map 'none'"),
    ):
        with pytest.raises(Refused, match=re.escape(said)):
            train(Settings(**(settings(served, "two") | options)), Ranks())
