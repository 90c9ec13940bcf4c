"""Bounds on what clients may ask for."""

import pytest

from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, SeedEdges, Start, Temporal
from loaderd.api.requests import check_attach, check_start


def attach(**fields) -> Attach:
    return Attach(**{"token": 1, "request": 1, "num_neighbors": (5,)} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected 1 to 16777216"),
        ({"batch_size": 2**24 + 1}, "batch_size is 16777217"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": -1}, "rank is -1, expected 0 to 0"),
        ({"rank": 4, "world_size": 4}, "rank is 4, expected 0 to 3"),
        ({"window": -1}, "window is -1, expected 0 to 1024"),
        ({"window": 1025}, "window is 1025"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808, expected 0 to 9223372036854775807"),
        ({"split": "x" * 257}, "split has 257 characters"),
        ({"plan": "x" * 257}, "plan has 257 characters"),
        ({"split": ""}, "neither a split nor ids"),
    ],
)
def test_an_attach_out_of_bounds_is_refused(fields, message):
    with pytest.raises(Refused, match=message):
        check_attach(attach(**fields))


def test_bounds_are_inclusive():
    widest = {"batch_size": 2**24, "world_size": 2**16, "rank": 2**16 - 1, "window": 1024}
    check_attach(attach(**widest, seed=2**63 - 1))
    check_attach(attach(batch_size=1, window=0, seed=0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "train", "ids": 2}, "split 'train' and ids were both given"),
        ({"split": "", "ids": -1}, "number of ids is -1"),
        ({"split": "", "ids": 2**24 + 1}, "number of ids is 16777217"),
        (
            {"split": "", "ids": 3, "temporal": Temporal()},
            "3 in all, expected 2 a seed: ids, times",
        ),
        ({"split": "", "ids": 3, "edges": SeedEdges()}, "expected 2 a seed: sources, targets"),
    ],
)
def test_odd_numbers_of_ids_are_refused(fields, message):
    with pytest.raises(Refused, match=message):
        check_attach(attach(**fields))
    check_attach(attach(**{**fields, "split": "", "ids": 6}))


@pytest.mark.parametrize("field", ["epoch", "step", "run", "stride"])
@pytest.mark.parametrize("value", [-1, 2**62 + 1, 2**64 - 1])
def test_a_start_out_of_bounds_is_refused(field, value):
    good = {"session": 1, "run": 1, "epoch": 0, "step": 0, "stride": 1}
    check_start(Start(**good))
    with pytest.raises(Refused, match=f"{field} is {value}"):
        check_start(Start(**good | {field: value}))
