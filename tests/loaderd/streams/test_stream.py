"""Who gets which batch of a shared stream: examples, then any sequence against what was sent."""

import threading
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.api.protocol import BatchReady, Blob, ErrorReply, Release, RowGroup, Skipped
from loaderd.plans.base import Wanted
from loaderd.streams.service import drop_early, early
from loaderd.streams.stream import Cursor, Stream
from tests.effort import tries

BLOB = Blob((), ())


def piece(wanted: Wanted, group: int = 0, last: bool = True) -> BatchReady | RowGroup:
    run, epoch, step = wanted
    rows = RowGroup(session=0, run=run, step=step, group=group, last=last, num_rows=1, blob=BLOB)
    if group:
        return rows
    return BatchReady(
        session=0, run=run, epoch=epoch, step=step, num_seeds=1, nodes_per_hop=(1,),
        edges_per_hop=((1,),), structure=BLOB, rows=rows,
    )  # fmt: skip


class Producer:
    """A session of the engine that builds when it is told to."""

    number = 9

    def __init__(self, depth: int) -> None:
        self.depth, self.run, self.consumer = depth, 0, None
        self.epochs = 1 << 62  # that it serves, from 0 on
        self.asleep = False  # it was told that nothing is wanted, and nobody has woken it since
        self.leased: set[tuple[int, int, int]] = set()  # run, step, group

    def start(self, run: int, consumer: Any) -> None:
        self.run, self.consumer, self.asleep = run, consumer, False
        self.leased.clear()

    def serves(self, epoch: int) -> bool:
        return epoch < self.epochs

    def wake(self) -> None:
        self.asleep = False

    def ask(self) -> Wanted | None:
        """Ask as hyperbatches do: after a None not again before it is woken."""
        wanted = None if self.asleep else self.consumer.next()
        self.asleep = wanted is None
        return wanted

    def release(self, release: Release) -> None:
        self.leased.remove((release.run, release.step, release.group))  # once, and of this run


class Parts:
    """A stream, its producer and what each client was sent."""

    def __init__(self, steps: int, depth: int, world: int = 1) -> None:
        self.producer, self.sent = Producer(depth), list[tuple[int, Any]]()
        session: Any = self.producer
        self.stream = Stream(
            session, steps * world, lambda c, m: self.sent.append((c.number, m)),
            threading.Event(), world=world,
        )  # fmt: skip

    def add(self, number: int, window: int = 4, rank: int = 0) -> Cursor:
        cursor = Cursor(number, rank, window, self.stream.world)
        self.stream.add(cursor)
        return cursor

    def start(self, cursor: Cursor, epoch: int = 0, step: int = 0, stride: int = 1) -> bool:
        """As a client does; False: the stream cannot serve it."""
        cursor.consecutive = cursor.run >= 0 and epoch == cursor.epoch + 1
        cursor.run, cursor.epoch, cursor.stride, cursor.active = cursor.run + 1, epoch, stride, True
        cursor.step = step * self.stream.world + cursor.rank
        if self.stream.can_join(cursor):
            self.stream.join(cursor)
        elif self.stream.can_begin(cursor):
            self.stream.begin(cursor)
        else:
            return False
        return True

    def build(self, count: int = 1, parts: int = 1) -> list[int]:
        """The next batches, the first part of each; returns their positions."""
        found = []
        for _ in range(count):
            wanted = self.producer.ask()
            assert wanted is not None
            self.producer.leased.add((wanted.run, wanted.step, 0))
            self.stream.deliver(piece(wanted, last=parts == 1))
            found.append(wanted.step)
        return found

    def consume(self, cursor: Cursor, count: int) -> None:
        """The first batches of a cursor's run: each is built, and released."""
        for step in range(count):
            self.build()
            self.stream.release(cursor, cursor.held[step], 0)

    def steps(self, number: int) -> list[int]:
        found = [m.step for to, m in self.sent if to == number]
        self.sent = [(to, m) for to, m in self.sent if to != number]
        return found


def test_an_epoch_that_the_session_does_not_serve_is_begun_elsewhere():
    parts = Parts(3, 4)
    parts.producer.epochs = 2
    cursor = parts.add(7)
    assert parts.start(cursor, epoch=1)
    parts.consume(cursor, 3)
    assert not parts.start(cursor, epoch=2)
    assert parts.start(cursor, epoch=0)


def test_a_batch_is_built_once_and_stays_until_all_have_released_it():
    parts = Parts(5, 4)
    one, two = parts.add(7), parts.add(8)
    parts.start(one)
    assert parts.start(two)
    assert parts.build(2) == [0, 1]
    assert (parts.steps(7), parts.steps(8)) == ([0], [0])  # a batch is always on its way
    assert parts.stream.release(one, one.held[0], 0)
    assert (1, 0, 0) in parts.producer.leased
    assert parts.stream.release(two, two.held[0], 0)
    assert (1, 0, 0) not in parts.producer.leased


def test_one_that_comes_late_is_served_what_has_gone_and_then_with_the_others():
    parts = Parts(30, 4)
    one = parts.add(7)
    parts.start(one)
    parts.consume(one, 3)
    late = parts.add(8)
    assert parts.start(late)
    assert parts.build(4) == [0, 1, 2, 3]
    assert parts.steps(7) == [0, 1, 2, 3]
    assert parts.steps(8) == [0]
    for step in range(3, 20):
        assert late.held or step > 3
        for cursor in (one, late):
            for batch in list(cursor.held.values()):
                parts.stream.release(cursor, batch, 0)
            parts.stream.send()
        if step > 3:
            parts.build()


def test_what_was_built_before_its_turn_makes_room_and_is_built_again():
    """It may fill all memory, and what comes before it waits for that."""
    parts = Parts(30, 4)
    one = parts.add(7)
    parts.start(one)
    parts.consume(one, 5)
    late = parts.add(8)
    assert parts.build() == [5]
    assert parts.start(late)
    parts.stream.release(one, one.held[5], 0)
    assert parts.stream.next() == Wanted(1, 0, 0)
    assert [batch.step for batch in early(parts.stream)] == [5]
    assert (1, 5, 0) in parts.producer.leased
    drop_early(parts.stream)
    assert not parts.producer.leased
    assert early(parts.stream) == []
    parts.stream.deliver(piece(Wanted(1, 0, 0)))
    assert parts.build(5) == [1, 2, 3, 4, 5]
    assert parts.steps(8) == [0]


def test_what_was_built_for_another_rank_makes_room_too():
    """All that the session may have on its way was built before this rank came."""
    parts = Parts(9, 3, world=2)
    one, late = parts.add(7), parts.add(8, rank=1)
    parts.start(one)
    parts.stream.drop(late)  # it is not expected with the other one
    assert parts.build(3) == [0, 2, 4]
    assert parts.start(late)
    drop_early(parts.stream)
    assert parts.producer.leased == {(1, 0, 0)}  # which is held
    assert parts.build(5) == [1, 2, 3, 4, 5]
    assert (parts.steps(7), parts.steps(8)) == ([0], [0])


def test_what_one_holds_is_sent_to_another_though_the_last_place_is_kept():
    """It takes no other place; and its next part comes only after all have released the first."""
    parts = Parts(steps=4, depth=1, world=2)
    first, second, late = parts.add(1), parts.add(2), Cursor(3, rank=1, window=4, world=2)
    late.active = True  # in epoch 0, behind both
    parts.stream.job = {c.number: c for c in (first, second, late)}
    assert parts.start(first, epoch=1)
    assert parts.build(parts=2) == [0]
    assert parts.start(second, epoch=1)
    assert (parts.steps(1), parts.steps(2)) == ([0], [0])
    for cursor in (first, second):
        parts.stream.release(cursor, cursor.held[0], 0)
    assert not parts.producer.leased


def test_what_somebody_holds_is_not_dropped_for_those_who_come_to_it_later():
    parts = Parts(9, 4)
    one = parts.add(7)
    parts.start(one)
    parts.consume(one, 4)
    parts.build()
    late = parts.add(8)
    parts.start(late, step=3)
    drop_early(parts.stream)
    assert parts.build() == [3]
    parts.stream.release(late, late.held[3], 0)
    parts.stream.send()
    parts.stream.release(one, one.held[4], 0)
    assert late.held[4].step == 4
    assert (1, 4, 0) in parts.producer.leased


def test_no_part_is_sent_of_a_batch_that_was_dropped():
    """Its last part comes after that; then it is built again."""
    parts = Parts(9, 4)
    one, late = parts.add(7, window=1), parts.add(8)
    parts.start(one)
    parts.stream.drop(late)
    parts.consume(one, 2)
    assert parts.build() == [2]
    begun = parts.producer.ask()
    assert begun == Wanted(1, 0, 3)
    assert parts.start(late, step=1)
    parts.producer.leased.add((1, 3, 0))
    parts.stream.deliver(piece(begun, last=False))
    drop_early(parts.stream)
    assert (1, 3, 0) not in parts.producer.leased
    assert parts.build() == [1]
    for step in (1, 2):
        parts.stream.release(late, late.held[step], 0)
        parts.stream.send()
    assert not late.held
    parts.producer.leased.add((1, 3, 1))
    parts.stream.deliver(piece(begun, 1))
    assert (1, 3, 1) not in parts.producer.leased
    assert parts.build() == [3]
    assert late.held[3].step == 3


def test_a_batch_is_built_again_when_the_one_who_held_it_has_released_it():
    """The producer was told that nothing is wanted while the ring had the batch: it is woken."""
    parts = Parts(3, 4)
    one = parts.add(7, window=1)
    parts.start(one)
    parts.build(3)
    parts.add(8)  # expected to begin with the first one, too
    assert parts.producer.ask() is None
    parts.stream.release(one, one.held[0], 0)
    assert parts.producer.ask() == Wanted(1, 0, 0)


def test_nobody_joins_beyond_the_window_nor_in_another_epoch():
    parts = Parts(60, 2)
    one = parts.add(7)
    parts.start(one)
    parts.consume(one, 9)
    late = parts.add(8)
    assert not parts.start(late)
    assert not parts.start(late, epoch=1)
    assert parts.start(late, step=8)
    parts.stream.closing = True
    assert not parts.start(late, step=9)


def test_nobody_joins_where_a_part_of_a_batch_has_gone():
    parts = Parts(5, 4)
    one = parts.add(7)
    parts.start(one)
    parts.build(parts=2)
    parts.stream.release(one, one.held[0], 0)
    assert not parts.stream.has_room()
    other = parts.add(8)
    assert not parts.start(other)
    assert parts.start(other, step=1)


def test_a_part_stays_until_all_are_done_with_it():
    parts = Parts(6, 4)
    one, two = parts.add(1), parts.add(2)
    parts.start(one)
    parts.start(two)
    parts.build(parts=2)
    assert not parts.stream.release(one, one.held[0], 0)
    assert (1, 0, 0) in parts.producer.leased
    assert not parts.stream.release(two, two.held[0], 0)
    assert not parts.producer.leased
    parts.producer.leased.add((1, 0, 1))
    parts.stream.deliver(piece(Wanted(1, 0, 0), 1))
    assert [to for to, m in parts.sent if isinstance(m, RowGroup)] == [1, 2]
    assert parts.stream.release(one, one.held[0], 1)
    assert parts.stream.release(two, two.held[0], 1)
    assert not parts.producer.leased


def test_ranks_of_a_job_and_workers_of_a_loader_take_positions_in_turn():
    parts = Parts(4, 9, world=2)
    ranks = [parts.add(1, rank=0), parts.add(2, rank=1)]
    assert all(parts.start(rank) for rank in ranks)
    assert parts.build(6) == [0, 1, 2, 3, 4, 5]
    assert (parts.steps(1), parts.steps(2)) == ([0, 1, 2], [0, 1, 2])
    parts = Parts(6, 9)
    workers = [parts.add(1), parts.add(2)]
    assert all(parts.start(c, step=i, stride=2) for i, c in enumerate(workers))
    assert parts.build(6) == [0, 1, 2, 3, 4, 5]
    assert (parts.steps(1), parts.steps(2)) == ([0, 2, 4], [1, 3, 5])


def test_what_cannot_begin_yet_comes_after_what_one_that_is_late_wants():
    parts = Parts(30, 4)
    one = parts.add(7)
    parts.start(one)
    parts.consume(one, 5)
    wanted = parts.producer.ask()
    assert wanted == Wanted(1, 0, 5)
    parts.stream.put_back(wanted)
    late = parts.add(8)
    assert parts.start(late, step=4)
    assert parts.build(2) == [4, 5]
    assert (parts.steps(7)[-1], parts.steps(8)) == (5, [4])


def test_a_run_goes_on_with_another_epoch_while_the_last_is_leased():
    parts = Parts(2, 4)
    one = parts.add(7)
    parts.start(one)
    parts.build(2)
    one.window = 9
    assert not one.active
    held = dict(one.held)
    one.held.clear()  # those of another session, which still reads them
    assert parts.start(one, epoch=1)
    assert parts.stream.next() == Wanted(2, 1, 0)
    assert held


def test_a_run_that_begins_drops_what_was_built_for_those_who_did_not_come_along():
    """The session asks for more at each release: it is not told of the run before."""
    parts = Parts(4, 6)
    slow, quick = parts.add(7, window=1), parts.add(8, window=9)
    parts.start(slow)
    parts.start(quick)
    parts.build(4)
    for _ in range(4):
        parts.stream.release(quick, next(iter(quick.held.values())), 0)
        parts.stream.send()
    assert parts.start(quick, epoch=1)
    parts.build(4)
    for _ in range(4):
        parts.stream.release(quick, next(iter(quick.held.values())), 0)
        parts.stream.send()
    late = parts.add(9)
    found = list[Wanted | None]()
    parts.producer.release = lambda _: found.append(parts.stream.next())
    assert parts.start(quick, epoch=0)
    assert late.expected is not None
    assert {(w.run, w.epoch) for w in found if w is not None} == {(3, 0)}


def test_steps_that_are_left_out_are_told_in_order():
    parts = Parts(6, 2)
    one = parts.add(1, window=2)
    parts.start(one)
    parts.build(3)
    assert parts.steps(1) == [0, 1]
    assert parts.stream.next() == Wanted(1, 0, 3)
    parts.stream.deliver(Skipped(session=7, run=1, step=3, to=5))
    assert not parts.stream.release(one, one.held[0], -1)  # no such group
    assert parts.stream.release(one, one.held[0], 0)
    parts.stream.send()
    assert parts.steps(1) == [2]
    parts.stream.release(one, one.held[1], 0)
    parts.stream.send()
    assert [m for _, m in parts.sent] == [Skipped(session=1, run=one.run, step=3, to=5)]
    parts.sent.clear()
    assert parts.build() == [5]
    assert parts.steps(1) == [5]


def test_an_error_comes_after_what_was_built_and_the_next_run_begins_from_scratch():
    parts = Parts(6, 4)
    one = parts.add(1)
    parts.start(one)
    parts.build(2)
    parts.stream.deliver(ErrorReply(error="BatchFailed", message="x", run=1, step=2))
    assert [type(m) for _, m in parts.sent] == [BatchReady, BatchReady, ErrorReply]
    assert parts.stream.next() is None
    for batch in list(one.held.values()):
        parts.stream.give_back(one, batch)
    assert parts.start(one)
    assert parts.producer.run == 2
    assert parts.build() == [0]


def test_a_rank_that_waits_for_the_next_epoch_is_told_of_an_error():
    """Those that it waits for may do nothing any more after it."""
    parts = Parts(6, 6, world=2)
    slow, quick = parts.add(1), parts.add(2, rank=1)
    assert parts.start(slow)
    assert not parts.start(quick, epoch=1)
    assert parts.stream.can_wait(quick)
    parts.stream.drop(quick)
    parts.stream.deliver(ErrorReply(error="BatchFailed", message="x", run=1, step=0))
    assert [to for to, m in parts.sent if isinstance(m, ErrorReply)] == [1, 2]
    assert not quick.active
    assert parts.start(quick, epoch=1)


def test_nothing_is_built_ahead_for_a_rank_that_waits_for_a_later_epoch():
    parts = Parts(6, 6, world=2)
    slow, quick = parts.add(1), parts.add(2, rank=1)
    assert parts.start(slow)
    assert not parts.start(quick, epoch=2)
    parts.stream.drop(quick)
    assert parts.start(slow, epoch=1)
    assert quick.expected is None
    assert parts.build(2) == [0, 2]


def in_second_epoch(steps: int = 4, window: int = 4) -> tuple[Parts, Cursor]:
    """A cursor that has gone on to epoch 1, and was sent all of it."""
    parts = Parts(steps, 4)
    cursor = parts.add(7, window)
    for epoch in (0, 1):
        assert parts.start(cursor, epoch)
        parts.consume(cursor, steps)
        parts.steps(7)
    return parts, cursor


def test_the_next_epoch_is_begun_for_one_that_has_gone_on_to_this_one():
    parts, cursor = in_second_epoch()
    assert [parts.producer.ask() for _ in range(2)] == [Wanted(3, 2, 0), Wanted(3, 2, 1)]
    for step in (0, 1):
        parts.producer.leased.add((3, step, 0))
        parts.stream.deliver(piece(Wanted(3, 2, step)))
    assert parts.steps(7) == []  # nobody has asked for them
    assert parts.start(cursor, 2)
    assert parts.steps(7) == [0, 1]
    assert parts.build(2) == [2, 3]
    assert parts.producer.run == 1  # its producer goes on as it was


def test_the_next_epoch_is_begun_while_the_last_batches_are_held():
    parts = Parts(3, 3)
    cursor = parts.add(7)
    parts.start(cursor)
    parts.consume(cursor, 3)
    parts.start(cursor, 1)
    assert parts.build(3) == [0, 1, 2]
    assert parts.producer.ask() == Wanted(3, 2, 0)


def test_an_epoch_ahead_is_dropped_for_another_one():
    parts, cursor = in_second_epoch()
    parts.build(2)
    assert len(parts.producer.leased) == 2
    assert parts.start(cursor, epoch=5)
    assert not parts.producer.leased
    assert parts.producer.ask() == Wanted(4, 5, 0)


def test_no_epoch_is_begun_ahead_of_one_who_may_not_come():
    """After a first epoch, in the middle of one, or where others read along."""
    once = Parts(3, 3)
    cursor = once.add(7)
    once.start(cursor)
    once.consume(cursor, 3)
    assert once.producer.ask() is None
    again = Parts(3, 3)
    cursor = again.add(7)
    for _ in range(2):
        again.start(cursor)
        again.consume(cursor, 3)
    assert again.producer.ask() is None
    parts, cursor = in_second_epoch()
    parts.producer.epochs = 2
    assert parts.producer.ask() is None
    parts, cursor = in_second_epoch()
    parts.add(8)
    assert parts.producer.ask() is None
    job = Parts(2, 4, world=2)
    ranks = [job.add(rank, rank=rank) for rank in (0, 1)]
    for epoch in (0, 1):
        for cursor in ranks:
            assert job.start(cursor, epoch)
        job.build(4)
        for cursor in ranks:
            for batch in list(cursor.held.values()):
                job.stream.release(cursor, batch, 0)
    job.stream.remove(ranks[1])
    assert job.producer.ask() is None


def test_only_one_epoch_is_begun_ahead():
    parts, _ = in_second_epoch(steps=2)
    assert parts.build(2) == [0, 1]
    assert parts.producer.ask() is None


def test_steps_that_are_left_out_ahead_are_not_built():
    parts, cursor = in_second_epoch(steps=6, window=2)
    assert parts.build(2) == [0, 1]
    parts.stream.deliver(Skipped(session=9, run=3, step=2, to=5))
    assert parts.build() == [5]
    assert parts.start(cursor, 2)
    assert parts.steps(7) == [0, 1]
    assert parts.producer.ask() == Wanted(4, 3, 0)
    for step in (0, 1):
        parts.stream.release(cursor, cursor.held[step], 0)
    parts.stream.send()
    assert parts.steps(7) == [2, 5]  # 2 says that steps were left out
    parts.stream.release(cursor, cursor.held[5], 0)
    assert not parts.producer.leased


class Model(RuleBasedStateMachine):
    """A stream of batches, whole or in two parts, and up to three sessions at places of their own.

    It serves one rank, or both of a job.  As the engine does it, a further part comes when nobody
    has the one before any more.  Whatever happens, each session is sent its steps in order, once,
    and what it holds is leased.
    """

    @initialize(
        depth=st.integers(1, 6), steps=st.integers(1, 7), parts=st.integers(1, 2),
        world=st.integers(1, 2),
    )  # fmt: skip
    def open(self, depth, steps, parts, world):
        self.parts, self.steps = Parts(steps, depth, world), steps
        self.stream, self.num_parts = self.parts.stream, parts
        self.cursors: dict[int, Cursor] = {}
        self.coming: list[tuple[Wanted, int]] = []  # parts that the engine has begun
        self.held: dict[int, set[tuple[int, int]]] = {}  # session -> (step, group)
        self.next: dict[int, int] = {}  # session -> step that must come next
        self.left: set[int] = set()

    def take(self):
        for session, message in self.parts.sent:
            key = message.step, message.group if isinstance(message, RowGroup) else 0
            cursor = self.cursors[session]
            assert (message.session, message.run) == (session, cursor.run)
            if key[1] == 0:
                assert key[0] == self.next[session], "a step is left out, or comes twice"
                self.next[session] += cursor.stride
            assert key not in self.held[session]
            self.held[session].add(key)
        self.parts.sent.clear()

    @precondition(lambda self: len(self.cursors) < 3)
    @rule(window=st.integers(1, 4), rank=st.integers(0, 1))
    def add(self, window, rank):
        number, rank = max(self.held, default=0) + 1, rank % self.stream.world
        if self.stream.has_room(rank):
            self.cursors[number] = self.parts.add(number, window, rank)
            self.held[number] = set()

    @precondition(lambda self: self.cursors)
    @rule(epoch=st.integers(0, 2), step=st.integers(0, 6), stride=st.integers(1, 2), data=st.data())
    def start(self, epoch, step, stride, data):
        number = data.draw(st.sampled_from(sorted(self.cursors)))
        cursor, run = self.cursors[number], self.parts.producer.run
        self.give_back(cursor)
        if number in self.left:
            if not self.stream.has_room(cursor.rank):
                return
            self.stream.add(cursor)
            self.left.discard(number)
        self.next[number] = min(step, self.steps)
        if not self.parts.start(cursor, epoch, min(step, self.steps), stride):
            cursor.active = False
        if self.parts.producer.run != run:
            self.coming.clear()
        self.take()

    def give_back(self, cursor):
        if cursor.stream is not None:
            self.stream.stop(cursor)
        for batch in list(cursor.held.values()):
            self.stream.give_back(cursor, batch)
        self.held[cursor.number].clear()

    @precondition(lambda self: len(self.parts.producer.leased) < self.stream.depth)
    @rule(begins=st.sampled_from([True, True, False]))
    def ask(self, begins):
        leased = {(run, step) for run, step, _ in self.parts.producer.leased}
        if len(leased) + len(self.coming) >= self.stream.depth:
            return
        wanted = self.parts.producer.ask() if self.parts.producer.consumer else None
        if wanted is None:
            return
        assert wanted[::2] not in leased
        assert wanted not in {w for w, _ in self.coming}
        if begins:
            self.coming.append((wanted, 0))
        else:
            self.stream.put_back(wanted)

    @precondition(lambda self: self.coming)
    @rule()
    def arrive(self):
        wanted, group = self.coming[0]
        leased = self.parts.producer.leased
        if group and (wanted.run, wanted.step, group - 1) in leased:
            return
        del self.coming[0]
        last = group == self.num_parts - 1
        if not last:
            self.coming.insert(0, (wanted, group + 1))
        leased.add((wanted.run, wanted.step, group))
        self.stream.deliver(piece(wanted, group, last))
        self.take()

    @rule()
    def make_room(self):
        drop_early(self.stream)
        self.take()

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def release(self, data):
        number = data.draw(st.sampled_from(sorted(s for s, h in self.held.items() if h)))
        step, group = data.draw(st.sampled_from(sorted(self.held[number])))
        cursor = self.cursors[number]
        self.held[number].remove((step, group))
        batch = cursor.held[step * self.stream.world + cursor.rank]
        self.stream.release(cursor, batch, group)
        self.stream.send()
        self.take()

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def leave(self, data):
        """One is too slow: it keeps what it was sent."""
        number = data.draw(st.sampled_from(sorted(self.cursors)))
        if number not in self.left:
            self.stream.remove(self.cursors[number])
            self.left.add(number)
            self.stream.send()
            self.take()

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def detach(self, data):
        self.detach_one(data.draw(st.sampled_from(sorted(self.cursors))))

    def detach_one(self, number):
        cursor = self.cursors.pop(number)
        self.give_back(cursor)
        if number not in self.left:
            self.stream.remove(cursor)
        self.left.discard(number)
        del self.held[number]
        self.stream.send()
        self.take()

    @invariant()
    def what_sessions_hold_is_leased(self):
        for number, held in getattr(self, "held", {}).items():
            cursor = self.cursors[number]
            for step, group in held:
                batch = cursor.held[step * self.stream.world + cursor.rank]
                lease = batch.run, batch.step, group
                assert lease in self.parts.producer.leased, "it was given back meanwhile"
            assert len(cursor.held) <= max(cursor.window, 0)

    @invariant()
    def who_waits_is_built_for(self):
        """A session that was told that nothing is wanted is woken when something is."""
        if not hasattr(self, "parts") or not self.parts.producer.asleep:
            return
        for cursor in self.stream.idle_cursors:
            assert cursor.place is not None
            at = cursor.place.run, cursor.place.next
            assert at in self.stream.ring, f"nobody builds {at} for {cursor.number}"

    def teardown(self):
        """When all have gone nothing is leased."""
        for number in list(getattr(self, "cursors", {})):
            self.detach_one(number)
        while getattr(self, "coming", []):
            self.arrive()
        if hasattr(self, "parts"):
            assert not self.parts.producer.leased
            assert not self.stream.leased


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=tries(60, 300), stateful_step_count=30, deadline=None)
