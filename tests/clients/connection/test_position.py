"""Positions: steps dealt to workers, epochs that end, states that do not fit."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.connection.position import (
    Position,
    StateMismatch,
    check_resolved,
    dump_state,
    parse_state,
)
from loaderd.api.protocol import Resolved

RESOLVED = Resolved(
    family="neighbor", fingerprint="f00d", sampler=1, seeds="split:train", seed_type="node",
    num_seeds=10, fanouts=((5,), (-1,)), frontier="new", replace=False, weighted=False,
    batch_size=4, shuffle=True,
    seed=7, edge_ids=False,
)  # fmt: skip


def steps(position, worker, stride, num_steps):
    return list(range(position.first_step(worker, stride), num_steps, stride))


@given(consumed=st.integers(-1, 30), stride=st.integers(1, 5), num_steps=st.integers(1, 30))
def test_workers_share_what_is_left_in_turn(consumed, stride, num_steps):
    """Read in turn, as DataLoader does, they give the order of a single reader."""
    shares = [steps(Position(0, consumed), w, stride, num_steps) for w in range(stride)]
    taken = [s[i] for i in range(num_steps) for s in shares if i < len(s)]
    assert taken == list(range(consumed + 1, num_steps))


@given(stride=st.integers(2, 5), data=st.data())
def test_a_worker_goes_on_where_it_stood(stride, data):
    worker = data.draw(st.integers(0, stride - 1))
    step = data.draw(st.integers(0, 20)) * stride + worker
    assert Position(0, step, worker, stride).first_step(worker, stride) == step + stride


@pytest.mark.parametrize(("worker", "stride"), [(0, 2), (1, 3), (0, 1)])
def test_a_worker_state_fits_that_worker_only(worker, stride):
    with pytest.raises(StateMismatch, match="saved in worker 1 of 2"):
        Position(0, 3, 1, 2).first_step(worker, stride)


def test_the_end_of_an_epoch_is_the_start_of_the_next():
    assert Position(2, 3).normalized(5) == Position(2, 3)
    assert Position(2, 4).normalized(5) == Position(3)
    assert Position(2, 3, 1, 2).normalized(5) == Position(2, 3, 1, 2)  # others go on
    assert Position(2).normalized(5) == Position(2)


def test_states_survive_json():
    state = json.loads(json.dumps(dump_state(RESOLVED, Position(3, 7, 1, 2))))
    assert parse_state(state) == (RESOLVED, Position(3, 7, 1, 2))
    assert state["epoch"] == 3
    assert state["step"] == 7
    assert state["resolved"]["fingerprint"] == "f00d"


@pytest.mark.parametrize(
    "spoil", [{"resolved": None}, {"epoch": "x"}, {"resolved": {"family": 3}}, {"step": None}]
)
def test_something_else_is_no_state(spoil):
    with pytest.raises(StateMismatch, match="expected what a dataset"):
        parse_state(dump_state(RESOLVED, Position()) | spoil)
    with pytest.raises(StateMismatch):
        parse_state({})


def test_every_difference_is_named():
    other = msgspec.structs.replace(RESOLVED, seed=8, fingerprint="beef")
    check_resolved(RESOLVED, RESOLVED)
    with pytest.raises(StateMismatch, match=r"fingerprint 'f00d' \(now 'beef'\), seed 7 \(now 8\)"):
        check_resolved(RESOLVED, other)
