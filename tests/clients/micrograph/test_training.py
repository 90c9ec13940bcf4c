"""Home batches give the gradient of data parallelism, however models visit them."""

from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.ranks import Ranks  # noqa: E402
from tests.clients.micrograph.home_trainer import (  # noqa: E402
    HomeCase,
    Trained,
    as_one,
    at_home,
    averaged,
)

RANKS = 4
CLOSE = {"float64": 1e-10, "float32": 1e-5}


@cache
def trained_as_one(kind: str, dtype: str, steps: int) -> Trained:
    """What one process trains does not depend on who owns or visits what."""
    return as_one(Ranks(), HomeCase(kind, dtype, steps=steps))


def check(ranks, case: HomeCase) -> None:
    expected = trained_as_one(case.kind, case.dtype, case.steps)
    for found in ranks.run(at_home, case, world=case.ranks):
        close = {"rtol": CLOSE[case.dtype], "atol": CLOSE[case.dtype]}
        np.testing.assert_allclose(found.gradients, expected.gradients, **close)
        np.testing.assert_allclose(found.losses, expected.losses, **close)
        assert found.counts == expected.counts
        if case.dtype == "float64":
            np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-7, atol=1e-7)


EVERY = [  # each two of time steps, merge and migrate together; all three with --long
    pytest.param(
        HomeCase(ranks=n, time_steps=t, merge=merge, migrate=migrate),
        marks=() if (t + (merge == "model") + migrate) % 2 else pytest.mark.long,
    )
    for n in (2, 4)
    for t in range(1, n + 1)
    for merge in ("server", "model")
    for migrate in (False, True)
]


@pytest.mark.parametrize("case", EVERY, ids=lambda c: "-".join(map(str, c[2:6])))
def test_every_number_of_time_steps_gives_one_gradient(ranks, case):
    check(ranks, case)


CASES = [
    HomeCase(), HomeCase(time_steps=4, migrate=True),
    HomeCase(ranks=2, time_steps=2, merge="model"),
    HomeCase(time_steps=3, merge="model", migrate=True),
]  # fmt: skip
MODELS = [  # each model in each case, each case in each dtype; all three with --long
    pytest.param(
        case._replace(kind=kind, dtype=dtype),
        marks=() if (i + j + k) % 2 else pytest.mark.long,
    )
    for i, case in enumerate(CASES)
    for j, kind in enumerate(("sage", "gcn", "gat"))
    for k, dtype in enumerate(CLOSE)
]


@pytest.mark.parametrize("case", MODELS, ids=lambda c: "-".join(map(str, c[:6])))
def test_every_model_and_dtype(ranks, case):
    check(ranks, case)


@pytest.mark.parametrize("time_steps", [1, 2, 4])
def test_a_rank_that_owns_nothing_takes_part(ranks, time_steps):
    check(ranks, HomeCase(time_steps=time_steps, migrate=True, used=2))


TRAVELS = [  # each two of the numbers, with one of the models; with all three if --long
    pytest.param(
        kind, sync_every, world, time_steps,
        marks=() if kind == ("sage", "gat")[(i + j) % 2] else pytest.mark.long,
    )
    for i, (world, time_steps) in enumerate([(2, 2), (4, 2), (4, 4)])
    for j, sync_every in enumerate((2, 3, 5))
    for kind in ("sage", "gcn", "gat")
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sync_every", "world", "time_steps"), TRAVELS)
def test_models_that_travel_are_trainers_that_are_averaged(
    ranks, kind, sync_every, world, time_steps
):
    case = HomeCase(kind, ranks=world, time_steps=time_steps, merge="model", migrate=True, steps=7)
    case = case._replace(sync_every=sync_every)
    expected = averaged(Ranks(), case)
    found = ranks.run(at_home, case, world=case.ranks)
    counted = np.cumsum(trained_as_one(case.kind, case.dtype, case.steps).counts)
    for one in found:
        np.testing.assert_allclose(one.weights, expected, rtol=1e-9, atol=1e-9)
        tells = [s for s in range(7) if s == 6 or (s + 1) % sync_every == 0]
        assert np.cumsum(one.counts)[tells].tolist() == counted[tells].tolist()
