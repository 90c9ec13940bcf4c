"""Credits, order and slots of a session: any sequence of workers, clients, errors and new runs."""

from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.plans.base import Unit
from loaderd.sessions.build import BatchInProgress, Placement, RowSizes, SessionState

SIZES = RowSizes((4, 2), 64)  # rows a slot of two arrays, bytes of a slot


class Model(RuleBasedStateMachine):
    """Workers hold jobs and placements; a client holds row groups; slots are of one of them."""

    @initialize(window=st.integers(1, 3), slots=st.integers(6, 30), steps=st.integers(1, 8))
    def open(self, window, slots, steps):
        self.all = list(range(100, 100 + slots))
        self.state, self.steps = SessionState(window, list(self.all), SIZES), steps
        self.run, self.failed = 0, False
        self.sampling: list[BatchInProgress] = []
        self.filling: list[tuple[BatchInProgress, Placement]] = []
        self.client: dict[tuple[int, int], list[int]] = {}  # step, group -> slots
        self.sent: list[tuple[int, int]] = []
        self.stale: list[
            tuple[BatchInProgress, Placement | None]
        ] = []  # workers' of runs that have ended
        self.begin(0, 1)

    @rule(step=st.integers(0, 8), stride=st.integers(1, 3), seldom=st.integers(0, 3))
    def new_run(self, step, stride, seldom):
        if not seldom:
            self.begin(step, stride)

    def begin(self, step, stride):
        self.run += 1
        busy = [*((job, None) for job in self.sampling), *self.filling]
        ended = self.state.begin(self.run)
        assert not any(job.busy for job in ended)
        assert not {id(job) for job in ended} & {id(job) for job, _ in busy}
        self.stale += busy
        self.sampling, self.filling, self.failed = [], [], False
        self.client, self.sent = {}, []
        self.expected = list(range(step, self.steps, stride))
        self.coming = list(self.expected)
        self.groups: dict[int, list[bool]] = {}  # of each step: whether each group is the last

    def may_start(self):
        return bool(self.coming) and self.state.may_start()

    @precondition(lambda self: self.may_start())
    @rule()
    def start(self):
        step = self.coming.pop(0)
        self.sampling.append(self.state.start(self.run, Unit(self.run, step, 0, 1), None))  # type: ignore[arg-type]

    @precondition(lambda self: self.sampling)
    @rule(data=st.data(), items=st.integers(1, 8), missing=st.tuples(*[st.integers(0, 8)] * 2))
    def sampled(self, data, items, missing):
        job = self.sampling.pop(data.draw(st.integers(0, len(self.sampling) - 1)))
        rows = tuple(min(n, items) for n in missing)
        job.structure = SimpleNamespace()  # type: ignore[assignment]
        job.addressed = SimpleNamespace(num_missing=max(rows), missing_rows=rows)  # type: ignore[assignment]
        job.structure_bytes, job.num_items = 60, items
        job.busy = False
        self.place()

    def place(self) -> None:
        """As `Production.pump` does."""
        while (job := self.state.head()) is not None:
            placement = self.state.place(job)
            if placement is None:
                return
            self.filling.append((job, placement))

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def filled(self, data):
        job, placement = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        message: Any = (job.unit.step, placement)
        for step, sent in self.state.filled(job, placement, message):  # type: ignore[misc]
            assert sent.group == len(self.groups.setdefault(step, []))
            self.groups[step].append(sent.last)
            self.sent.append((step, sent.group))
            self.client[step, sent.group] = sent.slots()
        self.place()

    @precondition(lambda self: self.client)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data, twice):
        step, group = data.draw(st.sampled_from(sorted(self.client)))
        freed, before = self.client.pop((step, group)), len(self.state._free)
        done = self.state.release(self.run, step, group)
        assert len(self.state._free) == before + len(freed)
        last = self.groups[step][-1]
        held = any(s == step for s, _ in self.client)
        assert (done is not None) == (last and not held)
        if twice:
            assert self.state.release(self.run, step, group) is None
            assert len(self.state._free) == before + len(freed)
        self.place()

    @rule(run=st.integers(-1, 1), step=st.integers(0, 8), group=st.integers(0, 2))
    def release_of_nothing(self, run, step, group):
        if run or (step, group) not in self.client:
            before = len(self.state._free)
            assert self.state.release(self.run + (run or 5), step, group) is None
            assert len(self.state._free) == before

    @precondition(lambda self: self.sampling or self.filling)
    @rule(data=st.data(), seldom=st.integers(0, 3))
    def fail(self, data, seldom):
        if seldom:
            return
        busy = [*((job, None) for job in self.sampling), *self.filling]
        job, placement = data.draw(st.sampled_from(busy))
        if placement is None:
            self.sampling.remove(job)
        else:
            self.filling.remove((job, placement))
        self.state.fail(job)
        self.failed = True
        assert not self.state.may_start()

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def abandoned(self, data):
        job, _ = self.stale.pop(data.draw(st.integers(0, len(self.stale) - 1)))
        assert job.cancelled
        self.state.abandon(job)
        self.place()

    @invariant()
    def slots_are_of_one_holder(self):
        held = [slot for slots in self.client.values() for slot in slots]
        held += [slot for _, placement in self.filling for slot in placement.slots()]
        held += [slot for _, placement in self.stale if placement for slot in placement.slots()]
        lent = set(self.state._free) | set(held)
        assert len(self.state._free) + len(held) >= len(lent), "a slot has two holders"
        assert not set(self.state._free) & set(held), "a slot that is in use is free"
        assert len(held) == len(set(held)), "a slot has two holders"
        if not self.failed and not any(placement is None for _, placement in self.stale):
            built = [
                slot for job in self.state.jobs.values() for s in job.leases.values() for slot in s
            ]
            stale = [s for job, _ in self.stale for each in job.leases.values() for s in each]
            assert sorted([*self.state._free, *built, *stale]) == self.all

    @invariant()
    def the_window_holds_and_steps_come_in_order(self):
        assert len(self.state.jobs) <= self.state.window
        assert 1 <= self.state.depth <= self.state.window
        steps = list(dict.fromkeys(step for step, _ in self.sent))
        # behind one that failed the others of the run may still come: the client has been told
        assert self.failed or steps == self.expected[: len(steps)]
        assert set(steps) <= set(self.expected)
        assert self.sent == sorted(self.sent)

    def teardown(self):
        """Whatever happened: all that is left of the run comes, and every slot goes home."""
        if not hasattr(self, "state"):
            return
        while self.stale:
            self.state.abandon(self.stale.pop()[0])
        self.place()
        while not self.failed and (self.may_start() or self.sampling or self.filling
                                   or self.client):  # fmt: skip
            if self.may_start():
                self.start()
            for job in self.sampling:
                job.structure = SimpleNamespace()  # type: ignore[assignment]
                job.addressed = SimpleNamespace(num_missing=2, missing_rows=(2, 1))  # type: ignore[assignment]
                job.structure_bytes, job.num_items, job.busy = 60, 3, False
            self.sampling = []
            self.place()
            for job, placement in self.filling:
                for step, sent in self.state.filled(job, placement, (job.unit.step, placement)):  # type: ignore[misc, arg-type]
                    self.sent.append((step, sent.group))
                    self.client[step, sent.group] = sent.slots()
            self.filling = []
            for step, group in list(self.client):
                del self.client[step, group]
                self.state.release(self.run, step, group)
            self.place()
        if not self.failed:
            assert list(dict.fromkeys(s for s, _ in self.sent)) == self.expected
            assert self.state.idle
            assert sorted(self.state._free) == self.all


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def job_of(state: SessionState, items: int, missing: int) -> BatchInProgress:
    """The next batch, sampled."""
    job = state.start(1, Unit(0, len(state.jobs), 0, 1), None)  # type: ignore[arg-type]
    job.structure = SimpleNamespace()  # type: ignore[assignment]
    job.addressed = SimpleNamespace(num_missing=missing, missing_rows=(missing, missing))  # type: ignore[assignment]
    job.structure_bytes, job.num_items, job.busy = 60, items, False
    return job


def test_a_batch_that_fits_goes_whole_and_the_next_waits_for_its_slots():
    state = SessionState(2, list(range(9)), SIZES)
    state.begin(1)
    first, second = job_of(state, 6, 4), job_of(state, 6, 4)
    placement = state.place(first)
    assert placement is not None
    assert (placement.last, len(placement.slots())) == (True, 1 + 2 + 1 + 2)
    assert state.head() is second
    assert state.place(second) is None
    state.filled(first, placement, "first")  # type: ignore[arg-type]
    assert state.waits
    assert state.release(1, 0, 0) is first
    assert state.place(second) is not None


def test_batches_are_sent_in_order_whoever_is_done_first():
    state = SessionState(3, list(range(30)), SIZES)
    state.begin(1)
    jobs = [job_of(state, 3, 2) for _ in range(3)]
    placed = [state.place(job) for job in jobs]
    sent = [
        state.filled(jobs[i], placed[i], i)  # type: ignore[arg-type]
        for i in (2, 0, 1)
    ]
    assert sent == [[], [0], [1, 2]]


def test_a_batch_too_large_comes_in_parts_each_when_all_slots_are_back():
    state = SessionState(2, list(range(7)), SIZES)
    state.begin(1)
    job = job_of(state, 8, 8)
    rows, group = 0, 0
    while rows < 8:
        placement = state.place(job)
        assert placement is not None
        assert (placement.group, placement.low) == (group, rows)
        rows, group = placement.high, group + 1
        assert placement.last == (rows == 8)
        assert state.filled(job, placement, "part") == ["part"]  # type: ignore[arg-type]
        assert rows == 8 or state.place(job) is None
        assert (state.release(1, 0, placement.group) is job) == placement.last
    assert group > 1
    assert state.idle
