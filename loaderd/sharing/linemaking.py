"""Lines are opened, made smaller for others, and opened anew in the place of those that end."""

import contextlib
from collections.abc import Callable, Container
from functools import partial

from blockstore import concurrency
from loaderd.batch.failures import error_text
from loaderd.errors import Refused, ShuttingDown
from loaderd.plans.base import EVERY_RANK
from loaderd.protocol import Attached, ErrorReply
from loaderd.sessions.base import Deliver
from loaderd.sessions.engine import Engine
from loaderd.sessions.kinds import find_kind
from loaderd.sessions.stores import Stores
from loaderd.sharing.errands import Errands, do_all
from loaderd.sharing.line import Line
from loaderd.sharing.linebook import Book, Group, Key, Order, Seat
from loaderd.sharing.patience import Patience, allowed_s
from loaderd.sharing.seating import Seating, Todo

AGAIN_S = 0.25  # between two tries to open a line there was no room for
_LOOK_S = 0.01  # between two looks at lines that are to end


class LineMaker:
    """Opens lines for sessions, within fair shares of the arena."""

    def __init__(
        self,
        stores: Stores,
        book: Book,
        seating: Seating,
        deliver: Deliver,
    ) -> None:
        """`deliver`: to a session, in its own numbers."""
        self._stores, self._book, self._seating = stores, book, seating
        self._clock, self._pause = concurrency.monotonic, concurrency.sleep
        self._arena, self._deliver = stores.arena, deliver
        self.opening = concurrency.Lock()  # one line at a time: each takes memory
        self._openings = Errands("share-open")

    def close(self) -> None:
        """No line is opened any more."""
        self._openings.close()

    def find_place(self, session: Seat) -> Todo:
        """Have a session served from its step on: by a line that is there, or a new one."""
        if (todo := self._seating.place(session)) is not None:
            return todo
        todo = self._seating.move(session, None)
        self.want(session)
        return todo

    def want(self, session: Seat, again: bool = False) -> None:
        """A session is to get a line of its own, or a place that becomes free before.

        again   as for `_open_for`
        """
        session.wants = True
        self._openings.put(partial(self._open_for, session, again))

    def open_line(self, key: Key, order: Order, cut: bool = True) -> tuple[Attached, Line]:
        """A line with a fair share of the arena; lines that have more go on with less, if `cut`.

        Raises Refused, StoreError.  One at a time: `opening` is held.
        """
        share, broker = self._book.fair_share(key), order.engine.broker
        self._stores.gather(order.engine, share, self._book.is_busy)
        stubborn: set[int] = set()
        if cut and share and broker.available() < share:
            stubborn = self._cut_down(order, share)
            self._stores.gather(order.engine, share, self._book.is_busy)
        try:
            return self._take_line(order, share)
        except Refused:
            if share == 0:
                raise
        if cut:
            self._cut_down(order, share, True, stubborn)
        self._stores.gather(order.engine, self._arena.num_slots, self._book.is_busy)
        return self._take_line(order, 0)  # it may need more than its share

    def _take_line(self, order: Order, share: int) -> tuple[Attached, Line]:
        engine = order.engine
        limit = engine.broker.at_most(share) if share else contextlib.nullcontext()
        with limit:
            attached = engine.attach(order.request, order.ids)
        depth = engine.depth(attached.session)
        if engine.holds_all(attached.session) or not order.again:
            share = (
                0  # nothing is gained by opening it anew when there is room for more, or it cannot
            )
        every = order.request.rank == EVERY_RANK
        world = order.request.world_size if every else 1
        return attached, Line(attached.session, attached.num_steps, depth, share, world)

    def _cut_down(
        self, order: Order, share: int, every: bool = False, tried: Container[int] = ()
    ) -> set[int]:
        """Lines with more than `share` slots end, and others go on in their place.

        every     also those that would have to read all again
        tried     lines whose followers have not released in time before

        Nothing is done where that makes no room for what is ordered.  Returns the lines that stay,
        as their followers do not release what they hold.
        """
        statuses = [line for engine in self._stores.all() for line in engine.status()[1]]
        held = {line.session: line.held_bytes // self._arena.slot_bytes for line in statuses}
        with self._book.lock:
            ranks = self._book.num_ranks()
            large = [
                line
                for key, group in self._book.groups.items()
                if (every or find_kind(key.plan).resizable)
                and group.order.again
                and group.order.least <= share
                for line in group.lines
                if held.get(line.number, 0) * ranks[line.number] > share
                if line.number not in tried
            ]
            pooled = sum(engine.broker.pooled() for engine in self._stores.all())
            gain = sum(held[line.number] - share // ranks[line.number] for line in large)
            if pooled + gain < order.least:
                return set()
            for line in large:
                line.closing = True
        return self._settle(large, partial(self._replace, share=share))

    def _settle(self, lines: list[Line], then: Callable[[Line], None]) -> set[int]:
        """Wait until nothing is lent of lines that are closing, and do something with each.

        Returns those whose followers stopped releasing: they go on.
        """
        left, stubborn = {line: self._patience(line) for line in lines}, set()
        while left:
            now = self._clock()
            for line, wait in list(left.items()):
                with self._book.lock:
                    idle = not line.lent
                    ended = idle or self._openings.closed or wait.is_over(line, now)
                    if ended and not idle:
                        line.closing = False
                        self._seating.send(line.due())
                if idle:
                    then(line)
                elif ended:
                    stubborn.add(line.number)
                if ended:
                    del left[line]
            if left:
                self._pause(_LOOK_S)
        return stubborn

    def _patience(self, line: Line) -> Patience:
        """As long as a release usually takes the slowest of those who hold any."""
        with self._book.lock:
            holders = [self._book.sessions[f.number] for f in line.followers.values() if f.held]
            times = [(s.batches, s.meter.times()["ready_ns"] / 1e9) for s in holders]
            longest = max((allowed_s(*t) for t in times), default=0)
            return Patience(line, self._clock(), longest)

    def _replace(self, line: Line, share: int) -> None:
        """A smaller line in the place of a larger one; not where a follower still holds some."""
        ended = self._end(line)
        if ended is None:
            return
        group, orphans = ended
        smaller = self._line_instead(group.order, share)
        if smaller is None:
            self._rehouse(orphans, line)
            return
        with self._book.lock:
            start = smaller.take_over(line, line.run + 1)
            self._book.put_up(group, smaller)
            for session in orphans:
                here = self._book.sessions.get(session.number) is session and not session.wants
                if here and session.line is None and session.number in smaller.followers:
                    session.line = smaller
            there = {s.number for s in orphans if s.line is smaller}
            for number in set(smaller.followers) - there:
                smaller.remove(number)
            self._rehouse(orphans, line)  # those who were left behind
            gone = not smaller.followers  # all of them, while it was opened
            if gone:
                end = self._book.take_down(group, smaller)
                self._book.forget_group(group.key)
        if gone:
            end()
        elif start is not None:
            self._seating.command(group.engine.start, start, smaller.order.ranks)

    def _line_instead(self, order: Order, share: int) -> Line | None:
        """A line with `share` slots.  If it cannot do with these, it gets back what it had.

        None if there is not even that.
        """
        for most in (share, 0):
            try:
                return self._take_line(order, most)[1]
            except Refused:
                continue
            except Exception:  # whoever opens a line for a follower meets and reports it
                break
        return None

    def _end(self, line: Line) -> tuple[Group, list[Seat]] | None:
        """A line ends, and who was there has none; None where it has gone, or something is lent."""
        with self._book.lock:
            line.closing = False
            if line.number not in self._book.lines:
                return None
            if line.lent:
                self._seating.send(line.due())
                return None
            group = next(g for g in self._book.groups.values() if line in g.lines)
            end = self._book.take_down(group, line)
            orphans = [s for s in self._book.sessions.values() if s.line is line]
            for session in orphans:
                follower = line.followers[session.number]
                session.line = None
                # who is not active wants nothing before the next start
                session.step = follower.next if follower.active else line.num_steps
        end()
        return group, orphans

    def _rehouse(self, sessions: list[Seat], line: Line) -> None:
        """Each looks for a line by itself.

        They do not have other lines cut down: two sessions that need most of the arena would take
        the line from each other for ever, and neither would get a batch.
        """
        with self._book.lock:
            for session in sessions:
                follower = line.followers[session.number]
                if follower.active and not session.wants and session.line is None:
                    self.want(session, again=True)

    def _open_for(self, session: Seat, again: bool = False) -> None:
        """In a thread of its own: open a line for a session that has none.

        again   there was no room before: nobody else's line is cut down once more
        """
        with self._book.lock:
            here = session.wants and session.number in self._book.sessions
            if not here or self._openings.closed:
                return
            group = self._book.groups[session.key]
            todo = self._seating.place(session)  # one may have been opened, or become free
        if todo is not None:
            do_all(todo)
            return
        try:
            with self.opening:
                _, line = self.open_line(session.key, group.order, not again)
        except ShuttingDown:
            return
        except Refused:
            if not (again and self._take_turn(session)):
                self._openings.put_later(partial(self._open_for, session, again=True), AGAIN_S)
            return
        except Exception as error:
            self._tell(session, error)
            return
        self._seat_at(session, line, group.engine)

    def _take_turn(self, session: Seat) -> bool:
        """A line of the session's own kind that has served long ends; who was there waits in turn.

        Whether one has: the session is the next to open one.
        """
        ended: list[Line] = []
        with self.opening:
            with self._book.lock:
                if (group := self._book.groups.get(session.key)) is None:
                    return False
                lines = [x for x in group.lines if x.may_end and x not in session.left][:1]
                for line in lines:
                    line.closing, line.asked = True, line.served
            self._settle(lines, ended.append)
            for line in ended:
                if (found := self._end(line)) is not None:
                    self._openings.put(partial(self._open_for, session, again=True))
                    self._rehouse(found[1], line)
                    return True
        return False

    def _seat_at(self, session: Seat, line: Line, engine: Engine) -> None:
        with self._book.lock:
            if not session.wants or session.number not in self._book.sessions:
                todo: Todo = [lambda: engine.detach(line.number)]
            else:
                group = self._book.groups[session.key]
                self._book.put_up(group, line)
                line.add(session.number, session.window, session.rank)
                session.line = line
                todo = self._seating.begin(session, line, fresh=True)
        do_all(todo)

    def _tell(self, session: Seat, error: Exception) -> None:
        """No line can be opened for a session: its run ends."""
        with self._book.lock:
            session.wants = False
            session.meter.end()
            self._deliver(
                session.number,
                ErrorReply(
                    error=Refused.__name__, message=error_text(error), session=session.number,
                    run=session.run, step=session.step // session.key.world,
                ),
            )  # fmt: skip
