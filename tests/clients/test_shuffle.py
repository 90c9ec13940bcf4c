"""Split batches on 2 to 8 ranks compute what one process does; lost ranks are named."""

import signal

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.models import LAYERS  # noqa: E402
from tests.clients.split_trainer import (  # noqa: E402
    Case,
    Trained,
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
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module")
def ranks():
    with pool(8) as opened:
        yield opened


def run(ranks: Pool, case: Case, task=together):
    return ranks.run(task, case, world=case.owners * case.shares)


def check(found: list[Trained], expected: Trained, tolerance: float) -> None:
    """All seeds once, and on each rank the losses, gradients and weights of one process."""
    places = np.concatenate([np.array(one.places, int) for one in found])
    logits = np.concatenate([one.logits for one in found])
    assert sorted(places) == expected.places
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(logits, expected.logits[places], **close)
    for one in found:
        np.testing.assert_array_equal(one.weights, found[0].weights)
        for name in ("losses", "gradients", "weights"):
            np.testing.assert_allclose(getattr(one, name), getattr(expected, name), **close)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_of_all_ranks_is_that_of_one_process(ranks, kind, name):
    owners, used, shares = CASES[name]
    for frontier in ("new", "layer"):
        for dtype, tolerance in TOLERANCE.items():
            # one step of Adam makes the sign of a gradient of 1e-9 a step of its whole length
            case = Case(kind, frontier, dtype, owners, used, shares, learning_rate=1e-6)
            check(run(ranks, case), alone(case), tolerance)


@pytest.mark.parametrize("frontier", ["new", "layer"])
@pytest.mark.parametrize("kind", LAYERS)
def test_fifty_steps_end_in_the_same_weights_and_again_bit_for_bit(ranks, kind, frontier):
    case = Case(kind, frontier, "float64", owners=4, steps=50)
    found, again = run(ranks, case), run(ranks, case)
    check(found, alone(case), 1e-4)
    for one, other in zip(found, again, strict=True):
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


@pytest.mark.parametrize(
    ("how", "timeout_s", "said"),
    [(signal.SIGKILL, 60.0, "has ended"), (signal.SIGSTOP, 1.0, "is stopped")],
)
def test_who_is_left_names_the_rank_that_is_lost(how, timeout_s, said):
    with pool(4) as opened:
        lost = opened.processes[2]
        case, left = Case(owners=4, steps=1000), (0, 1, 3)
        found = opened.outcomes(left, until_lost, case, 2, how, world=4, timeout_s=timeout_s)
        for rank, (done, text) in zip(left, found, strict=True):
            assert not done
            error = text.splitlines()[-1]
            assert error.startswith("clients.ranks.RankLost: ")
            assert f"rank {rank}: rank 2 (process {lost.pid}) {said}, expected all 4 " in error
