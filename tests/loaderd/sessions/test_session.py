"""Slots of one session: what a worker has stays the worker's, what is released is free."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.plans.base import Unit
from loaderd.sampling.rows import Addressed, Pins
from loaderd.sessions.build import BatchInProgress, Placement, RowSizes, SessionState

SLOT = 4096
SIZES = RowSizes((SLOT // 8,), SLOT)


def sampled(state: SessionState, missing: int, made: list[BatchInProgress]) -> BatchInProgress:
    """The next batch, sampled: so many rows are to be copied."""
    run = state.run
    step = sum(job.run == run for job in made)
    job = state.start(run, Unit(0, step, 0, 1), SimpleNamespace())  # type: ignore[arg-type]
    made.append(job)
    job.structure, job.structure_bytes = SimpleNamespace(), SLOT  # type: ignore[assignment]
    job.num_items = missing
    job.addressed, job.busy = Addressed(Pins((), ()), missing, (missing,)), False
    return job


def place(state: SessionState, job: BatchInProgress) -> Placement:
    """Slots for its next group; a worker fills them from now on."""
    placement = state.place(job)
    assert placement is not None
    return placement


def message(group: int = 0) -> Any:
    return SimpleNamespace(group=group)


@pytest.fixture
def state() -> SessionState:
    """Nine slots, three batches in flight, in its first run."""
    state = SessionState(3, list(range(9)), SIZES)
    state.begin(1)
    return state


def test_slots_that_a_worker_fills_are_not_free_for_the_run_that_begins(state):
    made: list[BatchInProgress] = []
    job = sampled(state, 10, made)
    filling = place(state, job).slots()
    assert state.begin(2) == []  # the job is its worker's
    assert job.cancelled
    assert not state.idle
    fresh = sampled(state, 10, made)
    assert not set(place(state, fresh).slots()) & set(filling)
    state.abandon(job)
    state.filled(fresh, Placement(0, 0, 10, True, (), (), (), 0), message())
    assert state.release(2, 0, 0) is fresh
    assert state.idle


def test_slots_of_lent_batches_are_free_as_a_run_begins(state):
    made: list[BatchInProgress] = []
    job = sampled(state, 10, made)
    state.filled(job, place(state, job), message())
    assert state.begin(2) == [job]
    assert state.idle


def test_a_batch_is_done_with_the_release_of_its_last_group(state):
    job, groups = sampled(state, 5000, []), 0
    while not job.finished:
        placement = place(state, job)
        assert placement.group == groups
        assert [m.group for m in state.filled(job, placement, message(groups))] == [groups]
        assert state.release(1, 0, groups + 1) is None  # there is none
        done = state.release(1, 0, groups)
        groups += 1
        assert done is (job if placement.last else None)
        assert state.idle
    assert groups > 1
    assert not state.jobs
    assert state.release(1, 0, groups - 1) is None  # a second time
    assert state.depth >= 1


def test_groups_may_be_released_in_any_order_where_several_are_lent():
    state = SessionState(3, list(range(9)), SIZES)
    state.begin(1)
    made: list[BatchInProgress] = []
    first, second = sampled(state, 5, made), sampled(state, 5, made)
    for job in (first, second):
        state.filled(job, place(state, job), message())
    assert state.release(1, 1, 0) is second
    assert not state.idle
    assert state.release(1, 0, 0) is first
    assert state.idle
    assert not state.waits


class StateMachine(RuleBasedStateMachine):
    """Runs, batches, groups and failures in any order: each slot has one owner."""

    @initialize(slots=st.integers(5, 12), window=st.integers(1, 4))
    def begin(self, slots, window):
        self.slots = set(range(slots))
        self.state = SessionState(window, sorted(self.slots), SIZES)
        self.run, self.made = 0, list[BatchInProgress]()
        self.filling: list[tuple[BatchInProgress, Placement]] = []  # workers have these
        self.waiting: list[BatchInProgress] = []  # sampled, not wholly placed, in order
        self.lent: dict[tuple[int, int, int], tuple[BatchInProgress, list[int]]] = {}
        self.a_run_begins()

    @rule()
    def a_run_begins(self):
        self.run += 1
        ended = self.state.begin(self.run)
        busy = {id(job) for job, _ in self.filling}
        assert not {id(job) for job in ended} & busy
        self.waiting, self.lent = [], {}

    @precondition(lambda self: self.state.may_start())
    @rule(missing=st.sampled_from([0, 3, 600, 3000]))
    def a_batch_is_sampled(self, missing):
        self.waiting.append(sampled(self.state, missing, self.made))

    @precondition(lambda self: self.state.head() is not None)
    @rule()
    def a_group_is_placed(self):
        job = self.state.head()
        assert job is self.waiting[0]
        placement = self.state.place(job)
        if placement is None:
            assert not self.state.idle
            return
        self.filling.append((job, placement))
        if placement.last:
            self.waiting.pop(0)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), fails=st.booleans())
    def a_worker_is_done(self, data, fails):
        job, placement = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        if job.cancelled:
            self.state.abandon(job)
        elif fails:
            self.state.fail(job)
            self.waiting = [other for other in self.waiting if other is not job]
            self.lent = {k: v for k, v in self.lent.items() if v[0] is not job}
        else:
            self.state.filled(job, placement, message(placement.group))
            self.lent[job.run, job.unit.step, placement.group] = job, placement.slots()

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def a_group_is_released(self, data):
        key = data.draw(st.sampled_from(sorted(self.lent)))
        job, _ = self.lent[key]
        if any(other is job for other, _ in self.filling):
            return  # a client has one group of a batch at a time
        del self.lent[key]
        over = job.finished and not any(other is job for other, _ in self.lent.values())
        assert self.state.release(*key) is (job if over else None)

    @invariant()
    def each_slot_has_one_owner(self):
        if not hasattr(self, "state"):
            return
        owned = [s for _, placement in self.filling for s in placement.slots()]
        owned += [s for _, slots in self.lent.values() for s in slots]
        assert len(owned) == len(set(owned))
        assert not set(owned) & set(self.state._free)
        assert set(owned) | set(self.state._free) == self.slots
        assert self.state.idle == (not owned)


StateMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAnySequenceOfSteps = StateMachine.TestCase
