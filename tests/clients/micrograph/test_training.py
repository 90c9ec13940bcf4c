"""Home batches give the gradient of data parallelism, however models visit them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clients.ranks import Ranks  # noqa: E402
from tests.clients.micrograph.home_trainer import (  # noqa: E402
    HomeCase,
    as_one,
    at_home,
    averaged,
)

RANKS = 4
CLOSE = {"float64": 1e-10, "float32": 1e-5}


def check(ranks, case: HomeCase) -> None:
    expected = as_one(Ranks(), case)
    for found in ranks.run(at_home, case, world=case.ranks):
        close = {"rtol": CLOSE[case.dtype], "atol": CLOSE[case.dtype]}
        np.testing.assert_allclose(found.gradients, expected.gradients, **close)
        np.testing.assert_allclose(found.losses, expected.losses, **close)
        assert found.counts == expected.counts
        if case.dtype == "float64":
            np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-7, atol=1e-7)


EVERY = [
    HomeCase(ranks=n, time_steps=t, merge=merge, migrate=migrate)
    for n in (2, 4)
    for t in range(1, n + 1)
    for merge in ("server", "model")
    for migrate in (False, True)
]


@pytest.mark.parametrize("case", EVERY, ids=lambda c: "-".join(map(str, c[2:6])))
def test_every_number_of_time_steps_gives_one_gradient(ranks, case):
    check(ranks, case)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
@pytest.mark.parametrize(
    "case",
    [
        HomeCase(), HomeCase(time_steps=4, migrate=True),
        HomeCase(ranks=2, time_steps=2, merge="model"),
        HomeCase(time_steps=3, merge="model", migrate=True),
    ],
    ids=lambda c: "-".join(map(str, c[2:6])),
)  # fmt: skip
def test_every_model_and_dtype(ranks, case, kind, dtype):
    check(ranks, case._replace(kind=kind, dtype=dtype))


@pytest.mark.parametrize("time_steps", [1, 2, 4])
def test_a_rank_that_owns_nothing_takes_part(ranks, time_steps):
    check(ranks, HomeCase(time_steps=time_steps, migrate=True, used=2))


@pytest.mark.parametrize(("world", "time_steps"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("sync_every", [2, 3, 5])
@pytest.mark.parametrize("kind", ["sage", pytest.param("gcn", marks=pytest.mark.long), "gat"])
def test_models_that_travel_are_trainers_that_are_averaged(
    ranks, kind, sync_every, world, time_steps
):
    case = HomeCase(kind, ranks=world, time_steps=time_steps, merge="model", migrate=True, steps=7)
    case = case._replace(sync_every=sync_every)
    expected = averaged(Ranks(), case)
    found = ranks.run(at_home, case, world=case.ranks)
    for one in found:
        np.testing.assert_allclose(one.weights, expected, rtol=1e-9, atol=1e-9)
        counted = np.cumsum(as_one(Ranks(), case).counts)
        tells = [s for s in range(7) if s == 6 or (s + 1) % sync_every == 0]
        assert np.cumsum(one.counts)[tells].tolist() == counted[tells].tolist()
