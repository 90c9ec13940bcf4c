"""Split batches on 2 to 8 ranks compute what one process does; lost ranks are named."""

import signal

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.models import LAYERS  # noqa: E402
from tests.clients.split_trainer import (  # noqa: E402
    Case,
    alone,
    exchanged,
    piece_of,
    sources,
    together,
    until_lost,
)
from tests.ranks import Pool, pool  # noqa: E402

CASES = {  # owners, owners that own anything, shares
    "two": (2, 0, 1),
    "four": (4, 0, 1),
    "one without anything": (4, 3, 1),
    "all with one": (3, 1, 1),
    "eight": (8, 0, 1),
    "two shares": (2, 0, 2),
}
RANKS = 8
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def run(ranks: Pool, case: Case, task=together):
    return ranks.run(task, case, world=case.owners * case.shares)


def check(ranks: Pool, case: Case, tolerance: float) -> None:
    """All seeds once, and on each rank the losses, gradients and weights of one process."""
    (expected,), found = ranks.run(alone, case, world=1), run(ranks, case)
    places = np.concatenate([np.array(one.places, int) for one in found])
    logits = np.concatenate([one.logits for one in found])
    assert sorted(places) == expected.places
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(logits, expected.logits[places], **close)
    for one in found:
        np.testing.assert_array_equal(one.weights, found[0].weights)
        for name in ("losses", "gradients", "weights"):
            np.testing.assert_allclose(getattr(one, name), getattr(expected, name), **close)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in LAYERS for name in ("two", "two shares")]
    + [pytest.param(kind, "four", marks=pytest.mark.long) for kind in LAYERS]
    + [("gcn", "one without anything"), ("gat", "all with one"), ("sage", "eight")],
)
def test_a_step_of_all_ranks_is_that_of_one_process(ranks, kind, name):
    owners, used, shares = CASES[name]
    for frontier in ("new", "layer"):
        for dtype, tolerance in TOLERANCE.items():
            # one step of Adam makes the sign of a gradient of 1e-9 a step of its whole length
            case = Case(kind, frontier, dtype, owners, used, shares, learning_rate=1e-6)
            check(ranks, case, tolerance)


@pytest.mark.parametrize(
    ("kind", "frontier"),
    [("sage", "new"), ("gcn", "layer"), ("gat", "new")]
    + [
        pytest.param(kind, frontier, marks=pytest.mark.long)
        for kind, frontier in (("sage", "layer"), ("gcn", "new"), ("gat", "layer"))
    ],
)
def test_fifty_steps_end_in_the_same_weights_and_runs_are_alike_bit_for_bit(ranks, kind, frontier):
    case = Case(kind, frontier, "float64", owners=4 if frontier == "new" else 2, steps=50)
    check(ranks, case, 1e-4)
    for one, other in zip(*(run(ranks, case._replace(steps=3)) for _ in range(2)), strict=True):
        for values, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(values, same)


@pytest.mark.parametrize("frontier", ["new", "layer"])
def test_rows_that_travel_are_those_of_the_counts(ranks, frontier):
    """Forward before each of three layers; gradients return before the second and the third."""
    case = Case(frontier=frontier, owners=4)
    for rank, calls in enumerate(run(ranks, case, exchanged)):
        exchanges = piece_of(case, 0, rank).exchanges
        counts = [(e.send_counts, e.recv_counts) for e in exchanges]
        expected = []
        for hop in (2, 1, 0):
            used = counts[hop : hop + 1] if frontier == "layer" else counts[: hop + 1]
            sides = zip(*used, strict=True)
            expected.append(tuple([sum(n) for n in zip(*side, strict=True)] for side in sides))
        back = [(received, sent) for sent, received in reversed(expected[1:])]
        assert calls == expected + back


@pytest.mark.parametrize("frontier", ["new", "layer"])
def test_gathered_rows_are_those_that_travel(ranks, frontier):
    for (shuffled, targets), (mixed, same) in run(
        ranks, Case(frontier=frontier, owners=4), sources
    ):
        assert shuffled.shape == mixed.shape
        np.testing.assert_array_equal(targets, same)
        np.testing.assert_array_equal(shuffled, mixed)


def test_who_is_left_names_the_rank_that_is_lost():
    """Of four ranks the last is killed; then, of those that are left, the last is stopped."""
    with pool(4) as opened:
        for how, world, timeout_s, said in (
            (signal.SIGKILL, 4, 60.0, "has ended"),
            (signal.SIGSTOP, 3, 1.0, "is stopped"),
        ):
            lost, case = world - 1, Case(owners=world, steps=1000)
            found = opened.outcomes(
                range(lost), until_lost, case, lost, how, world=world, timeout_s=timeout_s
            )
            process = f"rank {lost} (process {opened.processes[lost].pid})"
            for rank, (done, text) in enumerate(found):
                assert not done
                error = text.splitlines()[-1]
                assert error.startswith("clients.ranks.RankLost: ")
                assert f"rank {rank}: {process} {said}, expected all {world} ranks" in error
