"""Which line serves a session: places at lines are found, taken and left, and what is due is sent.

All of it under the lock of the book.  What is to be asked of an engine is returned: it is done with
the lock free.
"""

from collections.abc import Callable, Iterable

from blockstore import concurrency
from loaderd.errors import SessionLost
from loaderd.plans.base import Positions
from loaderd.protocol import BatchReady, ChunkReady, ErrorReply, Start
from loaderd.sessions.base import Deliver
from loaderd.sharing.line import Line, Sent
from loaderd.sharing.linebook import Book, Group, Seat

Todo = list[Callable[[], None]]


class Seating:
    """Moves sessions between the lines that there are."""

    def __init__(self, book: Book, deliver: Deliver) -> None:
        """`deliver`: to a session, in its own numbers."""
        self._book, self._deliver = book, deliver
        self.starved = concurrency.Event()  # a line may have nothing for one of its followers

    def seat(self, session: Seat, group: Group, line: Line) -> None:
        """A session that is new gets a place at a line, which may be new as well."""
        if line.number not in self._book.lines:
            self._book.put_up(group, line)
        line.add(session.number, session.window, session.rank)
        self._book.sessions[session.number] = session

    def place(self, session: Seat) -> Todo | None:
        """Have a session served by a line that is there; None where none can."""
        if (line := self._joinable(session)) is not None:
            return self.move(session, line) + self._follow(session, line)
        lines = self._lines_near(session)
        fair = self._book.fair_share()
        lines = [line for line in lines if not line.share or 0 < fair < 2 * line.share]
        for line in lines:
            others = [f for f in line.live if f.number != session.number]
            here = line is session.line
            if not (here or (line.has_room(session.rank) and not others)):
                continue
            fresh = not (line.exhausted and line.run > 0)
            if not fresh or (not others and not line.lent):
                todo = self.move(session, line) + self._gather(session, line)
                return todo + self.begin(session, line, fresh)
        return None

    def _gather(self, session: Seat, line: Line) -> Todo:
        """Other ranks of the job that rest at lines of their own go along in the next run."""
        todo: Todo = []
        group = self._book.groups[session.key]
        for other in [x for x in group.lines if x is not line and session.key.world > 1]:
            if other.closing or other.live or other.lent:
                continue
            for rank in [s for s in self._book.sessions.values() if s.line is other]:
                if line.has_room(rank.rank):
                    todo += self.move(rank, line)
        return todo

    def _lines_near(self, session: Seat) -> list[Line]:
        """Lines that it may be at, the one where it is first."""
        lines = self._book.groups[session.key].lines
        found = [line for line in lines if line not in session.left and not line.closing]

        def place(line: Line) -> tuple[int, bool]:
            """Of a job's lines the one with most of its ranks first."""
            others = len(line.followers.keys() - {session.number})
            return (-others if line.world > 1 else 0), line is not session.line

        return sorted(found, key=place)

    def _joinable(self, session: Seat) -> Line | None:
        """A line that has, or will deliver, all from its step on."""
        for line in self._lines_near(session):
            room = line is session.line or line.has_room(session.rank)
            if room and line.can_join(session.epoch, session.step, session.stride):
                return line
        return None

    def move(self, session: Seat, line: Line | None) -> Todo:
        """Leave the line where a session is, for another one."""
        old, session.line = session.line, line
        if old is line:
            return []
        if line is not None:
            line.add(session.number, session.window, session.rank)
        if old is None:
            return []
        todo = self._book.releases(old, old.remove(session.number)) + self._book.narrow(old)
        return todo + self._book.close_if_empty(session.key, old)

    def _follow(self, session: Seat, line: Line) -> Todo:
        session.wants = False
        freed = line.follow(session.number, session.run, session.step, session.stride)
        self.send(line.due())
        self.starved.set()
        return self._book.releases(line, freed)

    def begin(self, session: Seat, line: Line, fresh: bool) -> Todo:
        """Have the line deliver what the session wants.

        fresh   nobody holds anything of it
        """
        todo = []
        for f in line.followers.values() if fresh else ():
            todo += self._book.releases(line, line.drop(f.number))
        for f in line.followers.values():
            if fresh and f.number != session.number:
                line.expect(f.number)
        order = Positions(session.stride, line.world, line.ranks_of(session.number))
        first = order.first(session.step // line.world)
        start = Start(
            session=line.number, run=line.run + 1, epoch=session.epoch, step=first,
            stride=session.stride,
        )  # fmt: skip
        line.begin(start.run, start.epoch, start.step, order)
        todo += self._follow(session, line)
        engine = self._book.at[line.number]
        command = engine.start if fresh else engine.proceed
        return [*todo, lambda: self.command(command, start, order.ranks)]

    def command(
        self,
        command: Callable[[Start, tuple[int, ...]], None],
        start: Start,
        ranks: tuple[int, ...],
    ) -> None:
        """With the lock free.  A line that ends meanwhile has nobody who could miss it."""
        try:
            command(start, ranks)
        except SessionLost:
            with self._book.lock:
                if start.session in self._book.lines:
                    raise

    def leave(self, session: Seat, line: Line) -> Todo:
        """A session falls behind.  One that has begun gets another line when it is heard of."""
        follower = line.followers[session.number]
        active, step = follower.active, follower.next
        todo = self._book.releases(line, line.leave(session.number)) + self._book.narrow(line)
        if active:
            self._book.left_behind += 1
            session.line, session.step = None, step
            if follower.held:
                session.left.append(line)
            else:
                todo += self._book.releases(line, line.remove(session.number))
        self.send(line.due())
        return todo

    def send(self, sent: Iterable[Sent]) -> None:
        """Hand over what a line says is due."""
        for number, message in sent:
            session = self._book.sessions[number]
            if isinstance(message, BatchReady):
                edges = sum(map(sum, message.edges_per_hop))
                session.meter.handed(sum(message.nodes_per_hop), edges)
            elif isinstance(message, ChunkReady):
                session.meter.handed(message.num_rows)
            elif isinstance(message, ErrorReply):
                session.meter.end()
            self._deliver(number, message)
