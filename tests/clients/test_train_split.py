"""Training by plan "split" over a real daemon: as one process trains, whoever owns what."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.ranks import Ranks  # noqa: E402
from clients.settings import Settings  # noqa: E402
from clients.train import train  # noqa: E402
from loaderd.api.errors import Refused  # noqa: E402
from loaderd.server.transport import ask_status, parse_either  # noqa: E402
from tests.clients.ddp_trainer import trained, trained_until_killed, trained_with_losses  # noqa: E402
from tests.clients.small_job import (  # noqa: E402
    check_run,
    job_settings,
    serve_graph,
    whole_run,
)
from tests.daemons import until  # noqa: E402
from tests.ranks import pool  # noqa: E402

RANKS = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A small store with maps of one, two and four owners; of "three" the fourth has nothing."""
    maps = (("one", 1, 1), ("two", 2, 2), ("four", 4, 4), ("three", 4, 3))
    with serve_graph(tmp_path_factory.mktemp("split"), maps) as endpoint:
        yield endpoint


def settings(endpoint: str, owners: str = "", **options) -> dict:
    split = {"plan": "split", "owners": owners} if owners else {}
    return job_settings(endpoint, dropout="keyed") | split | options


@pytest.fixture(scope="module")
def alone(served, ranks):
    """What one process trains on by step, and its weights in the end."""
    return whole_run(ranks.run(trained, settings(served), world=1))


@pytest.mark.parametrize(
    ("owners", "world", "options"),
    [
        ("one", 1, {}), ("two", 2, {}), ("four", 4, {}), ("four", 4, {"mixed_rows": True}),
        ("three", 4, {}),
    ],
)  # fmt: skip
def test_owners_train_together_as_one_process(served, ranks, alone, owners, world, options):
    found = ranks.run(trained, settings(served, owners, **options), world=world)
    check_run(found, alone)


def test_a_checkpoint_goes_on_with_other_owners(served, ranks, alone, tmp_path):
    """On four ranks, then two, then one: each step once, with the losses of one process."""
    ((_, _, losses),) = ranks.run(trained_with_losses, settings(served), world=1)
    saved = {"checkpoint": str(tmp_path / "saved"), "save_every": 1}
    runs = [
        ranks.run(trained_with_losses, settings(served, "four", max_steps=2, **saved), world=4),
        ranks.run(trained_with_losses, settings(served, "two", max_steps=5, **saved), world=2),
        ranks.run(trained_with_losses, settings(served, **saved), world=1),
    ]
    before = [one for found in runs[:2] for early, *_ in found for one in early]
    ((batches, weights, _),) = runs[2]
    check_run([(before + batches, weights)], alone)
    found = [loss for run in runs for loss in run[0][2]]
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_shares_of_batches_are_split_too(served, ranks):
    """Two shares of two owners against two processes, each with its share."""
    shared = ranks.run(trained, settings(served), world=2)
    found = ranks.run(trained, settings(served, "two"), world=4)
    for share in (0, 1):
        own = {(epoch, step): sorted(ids) for epoch, step, ids in shared[share][0]}
        check_run(found[2 * share : 2 * share + 2], (own, shared[share][1]))


def test_if_a_rank_is_killed_the_others_name_it_and_the_daemon_is_as_before(served):
    before = ask_status(parse_either(served)).ledger
    with pool(2) as opened:
        wanted, lost = settings(served, "two"), opened.processes[1]
        ((done, text),) = opened.outcomes([0], trained_until_killed, wanted, 1, world=2)
        assert not done
        assert f"RankLost: rank 0: rank 1 (process {lost.pid}) has ended" in text.splitlines()[-1]
    until(lambda: ask_status(parse_either(served)).ledger == before, "the ledger does not shrink")


def test_what_cannot_be_split_is_said(served, ranks):
    for wrong, said in (
        ({"owners": "two"}, "plan 'auto', owners 'two', placement '': expected owners with"),
        ({"plan": "split"}, "plan 'split', owners '', placement '': expected owners with"),
        ({"mixed_rows": True}, "mixed_rows: found plan 'auto'"),
        ({"plan": "split", "owners": "two", "input_type": "paper"}, "input_type 'paper': found"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            train(Settings(**(settings(served) | wrong)), Ranks())
    with pytest.raises(Refused, match="owner map 'none'"):
        train(Settings(**settings(served, "none")), Ranks())
    outcomes = ranks.outcomes(range(3), trained, settings(served, "two"), world=3)
    assert all(
        "ValueError: 3 ranks: expected 2, one for each owner" in text for _, text in outcomes
    )
    outcomes = ranks.outcomes(range(2), _refuse, world=2)
    assert all("owner map 'a': found 0 on rank 0 and 1 on rank 1" in text for _, text in outcomes)


def _refuse(ranks: Ranks) -> None:
    ranks.refuse_different("owner map 'a'", str(ranks.rank))
