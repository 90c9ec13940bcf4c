"""Who gets which batch of a shared stream: examples, then any sequence against what was sent."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.plans.base import Positions
from loaderd.protocol import BatchReady, Blob, RowGroup
from loaderd.streams.stream import Lease, Sent, Stream

BLOB = Blob((), ())


def piece(run: int, step: int, group: int = 0, last: bool = True) -> BatchReady | RowGroup:
    rows = RowGroup(session=0, run=run, step=step, group=group, last=last, num_rows=1, blob=BLOB)
    if group:
        return rows
    return BatchReady(
        session=0, run=run, epoch=0, step=step, num_seeds=1, nodes_per_hop=(1,),
        edges_per_hop=((1,),), structure=BLOB, rows=rows,
    )  # fmt: skip


def steps_of(sent: list[Sent], session: int) -> list[int]:
    return [s.message.step for s in sent if s.session == session]


def test_a_batch_stays_until_all_who_were_sent_it_have_released_it():
    stream = Stream(1, 5, 4)
    stream.add(7, 4)
    stream.add(8, 4)
    stream.begin(1, 0, 0, Positions())
    stream.subscribe(7, 1, 0, 1)
    stream.subscribe(8, 1, 0, 1)
    sent, freed = stream.arrive(piece(1, 0))
    assert (steps_of(sent, 7), steps_of(sent, 8), freed) == ([0], [0], [])
    assert stream.release(7, 1, 0, 0) == (True, [])
    assert stream.release(7, 1, 0, 0) == (False, [])
    assert stream.release(8, 1, 0, 0) == (True, [Lease(1, 0, 0)])


def test_who_joins_is_sent_what_is_there_and_keeps_it_from_leaving():
    stream = Stream(1, 5, 6)
    stream.add(7, 6)
    stream.begin(1, 0, 0, Positions())
    stream.subscribe(7, 1, 0, 1)
    for step in range(2):
        stream.arrive(piece(1, step))
    stream.add(8, 6)
    assert stream.can_join(0, 0, 1)
    assert stream.subscribe(8, 1, 0, 1) == []
    assert stream.release(7, 1, 0, 0) == (True, [])
    assert steps_of(stream.due(), 8) == [0, 1]
    assert stream.release(8, 1, 0, 0) == (True, [Lease(1, 0, 0)])


def test_nobody_joins_where_a_part_of_a_batch_has_gone():
    stream = Stream(1, 5, 4)
    stream.add(7, 4)
    stream.begin(1, 0, 0, Positions())
    stream.subscribe(7, 1, 0, 1)
    stream.arrive(piece(1, 0, last=False))
    assert stream.can_join(0, 0, 1)
    assert stream.release(7, 1, 0, 0) == (False, [Lease(1, 0, 0)])
    stream.add(8, 4)
    assert not stream.can_join(0, 0, 1)
    assert stream.can_join(0, 1, 1)
    assert not stream.has_room()


def test_nobody_joins_another_epoch_stride_or_between_two_steps():
    stream = Stream(1, 9, 4)
    stream.begin(1, 2, 1, Positions(2))
    assert stream.can_join(2, 1, 2)
    assert not stream.can_join(1, 1, 2)
    assert not stream.can_join(2, 1, 1)
    assert not stream.can_join(2, 2, 2)
    assert not stream.can_join(2, 3, 2)  # it has not come there
    stream.closing = True
    assert not stream.can_join(2, 1, 2)


def test_a_run_is_not_over_before_the_last_row_group_of_its_last_batch():
    """No other run may go on behind it: the engine still has to place row groups."""
    stream = Stream(1, 1, 4)
    stream.add(7, 4)
    stream.begin(1, 0, 0, Positions())
    stream.subscribe(7, 1, 0, 1)
    stream.arrive(piece(1, 0, last=False))
    stream.release(7, 1, 0, 0)
    assert not stream.exhausted
    stream.arrive(piece(1, 0, group=1))
    assert stream.exhausted


def test_a_line_in_the_place_of_another_takes_no_follower_of_an_earlier_run():
    """It begins in the epoch of the newest run; who still is in the one before would get that."""
    stream = Stream(1, 3, 4)
    for session, window in ((7, 4), (8, 1)):
        stream.add(session, window)
    stream.begin(1, 0, 0, Positions())
    for session in (7, 8):
        stream.subscribe(session, 1, 0, 1)
    for step in range(3):
        stream.arrive(piece(1, step))
        stream.release(7, 1, step, 0)
    stream.begin(2, 1, 0, Positions())  # the run goes on in epoch 1
    stream.subscribe(7, 2, 0, 1)
    stream.closing = True
    stream.release(8, 1, 0, 0)
    assert not stream.leased
    smaller = Stream(2, 3, 1)
    start = smaller.take_over(stream, 3)
    assert start is not None
    assert (start.epoch, start.step) == (1, 0)
    assert list(smaller.subscribers) == [7]


class Model(RuleBasedStateMachine):
    """A stream of batches, whole or in two parts, and up to three sessions at places of their own.

    It serves one rank, or both of a job.  As the engine does it, a further part comes when nobody
    has the one before any more.
    """

    @initialize(
        depth=st.integers(1, 6), steps=st.integers(1, 7), parts=st.integers(1, 2),
        world=st.integers(1, 2),
    )  # fmt: skip
    def open(self, depth, steps, parts, world):
        self.parts, self.world = parts, world
        self.stream = Stream(1, steps * world, depth, world=world)
        self.rank: dict[int, int] = {}
        self.steps, self.run = steps, 0
        self.leased: set[Lease] = set()  # of the engine, not yet given back
        self.arriving: list[tuple[int, int]] = []  # parts that the engine still brings
        self.held: dict[int, dict[tuple[int, int], int]] = {}  # session -> (step, group) -> run
        self.next: dict[int, int] = {}  # session -> step that must come next
        self.runs: dict[int, int] = {}
        self.whole: dict[tuple[int, int], bool] = {}

    def at(self, session, step):
        return step * self.world + self.rank[session]

    @rule()
    def due(self):
        self.take(self.stream.due())

    def freed(self, leases):
        for lease in leases:
            assert lease in self.leased, f"{lease} is given back twice, or was never leased"
            self.leased.remove(lease)

    def take(self, sent):
        for session, message in sent:
            key = message.step, message.group if isinstance(message, RowGroup) else 0
            assert message.session == session
            assert message.run == self.runs[session]
            if key[1] == 0:
                assert key[0] == self.next[session], "a step is left out, or comes twice"
                self.next[session] += 1
            assert key not in self.held[session]
            self.held[session][key] = self.stream.subscribers[session].stream_run

    @precondition(lambda self: len(self.held) < 3)
    @rule(window=st.integers(1, 4), rank=st.integers(0, 1))
    def add(self, window, rank):
        session, rank = max(self.held, default=0) + 1, rank % self.world
        if not self.stream.has_room(rank):
            return
        self.stream.add(session, window, rank)
        self.rank[session] = rank
        self.held[session], self.runs[session] = {}, 0

    def ready(self):
        return [s for s in self.held if not self.held[s] and not self.stream.subscribers[s].active]

    @precondition(lambda self: self.ready() and not self.stream.leased)
    @rule(step=st.integers(0, 6), along=st.booleans(), data=st.data())
    def begin(self, step, along, data):
        session = data.draw(st.sampled_from(self.ready()))
        if any(f.active for f in self.stream.subscribers.values()):
            return
        for number in self.held:
            self.freed(self.stream.drop(number))
        self.freed(list(self.leased))  # the engine takes back what an earlier run was leased
        self.run += 1
        for number in self.held:
            if along and number != session:
                self.stream.expect(number)
        order, step = Positions(1, self.world, self.stream.ranks_of(session)), min(step, self.steps)
        assert self.rank[session] in order.ranks
        position, self.arriving = order.first(step), []
        self.stream.begin(self.run, self.run, position, order)
        while position < self.steps * self.world:
            self.arriving += [(position, g) for g in range(self.parts)]
            position = order.after(position)
        self.stream._products.clear()
        self.subscribe(session, step)

    def subscribe(self, session, step):
        self.runs[session] += 1
        self.next[session] = step
        self.freed(self.stream.subscribe(session, self.runs[session], self.at(session, step), 1))
        self.take(self.stream.due())

    @precondition(lambda self: self.run and self.ready())
    @rule(step=st.integers(0, 6), data=st.data())
    def join(self, step, data):
        session = data.draw(st.sampled_from(self.ready()))
        if self.stream.can_join(self.run, self.at(session, step), 1) and step <= self.steps:
            self.subscribe(session, step)

    @precondition(lambda self: self.arriving)
    @rule()
    def arrive(self):
        step, group = self.arriving[0]
        if group and Lease(self.run, step, 0) in self.leased:
            return
        del self.arriving[0]
        self.leased.add(Lease(self.run, step, group))
        sent, freed = self.stream.arrive(piece(self.run, step, group, last=group == self.parts - 1))
        self.take(sent)
        self.freed(freed)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def release(self, data):
        session = data.draw(st.sampled_from(sorted(s for s, h in self.held.items() if h)))
        step, group = data.draw(st.sampled_from(sorted(self.held[session])))
        stream_run = self.held[session].pop((step, group))
        lease = Lease(stream_run, self.at(session, step), group)
        others = any(
            h.get((step, group)) == stream_run
            for s, h in self.held.items()
            if s != session and self.rank[s] == self.rank[session]
        )
        at = self.at(session, step)
        _, freed = self.stream.release(session, self.runs[session], at, group)
        assert not (others and freed), "another session still reads it"
        assert all(each == lease for each in freed)
        self.freed(freed)
        self.take(self.stream.due())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data):
        session = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[session]
        self.freed(self.stream.remove(session))
        self.take(self.stream.due())

    @precondition(lambda self: self.held and self.run)
    @rule(data=st.data(), more=st.integers(0, 2))
    def leave(self, data, more):
        """One wants no more; batches of its rank end, but for those that are on their way."""
        session = data.draw(st.sampled_from(sorted(self.held)))
        self.freed(self.stream.leave(session))
        if ranks := self.stream.narrow():
            assert all(f.rank in ranks for f in self.stream.live)
            self.arriving = [
                (at, group)
                for number, (at, group) in enumerate(self.arriving)
                if at % self.world in ranks or group > number or number // self.parts < more
            ]
        if not self.arriving:
            assert self.stream.front >= self.steps * self.world or not self.stream.order.ranks
        self.take(self.stream.due())

    @invariant()
    def what_sessions_hold_is_lent(self):
        for session, held in getattr(self, "held", {}).items():
            for (step, group), stream_run in held.items():
                lease = Lease(stream_run, self.at(session, step), group)
                assert lease in self.leased, "it was given back meanwhile"
            window = min(self.stream.subscribers[session].window, self.stream.depth)
            assert len({step for step, _ in held}) <= window


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
