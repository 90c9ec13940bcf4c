"""Lines are opened, made smaller for others, and opened anew in the place of those that end."""

import contextlib
import threading
import time
from collections.abc import Container
from functools import partial

import numpy as np
from numpy.typing import NDArray

from loaderd.engine import Engine
from loaderd.errands import Errands, do_all
from loaderd.errors import Refused, ShuttingDown
from loaderd.failures import error_text
from loaderd.linebook import Book, Key, Seat
from loaderd.plans.chunks import METHOD_OF
from loaderd.production import Deliver
from loaderd.protocol import Attach, Attached, ErrorReply
from loaderd.seating import Seating, Todo
from loaderd.sharing import Line
from loaderd.slots import WAIT_S
from loaderd.stores import Stores

AGAIN_S = 0.25  # between two tries to open a line there was no room for
_LOOK_S = 0.01  # between two looks at lines that are to end
_SETTLE_S = 1.0  # that one follower waits for others to release, before a line gets smaller


class LineMaker:
    """Opens lines for sessions, within fair shares of the arena."""

    def __init__(self, stores: Stores, book: Book, seating: Seating, deliver: Deliver) -> None:
        """`deliver`: to a session, in its own numbers."""
        self._stores, self._book, self._seating = stores, book, seating
        self._arena, self._deliver = stores.arena, deliver
        self.opening = threading.Lock()  # one line at a time: each takes memory
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

    def want(self, session: Seat) -> None:
        """A session is to get a line of its own, or a place that becomes free before."""
        session.wants = True
        self._openings.put(partial(self._open_for, session))

    def open_line(
        self,
        key: Key,
        engine: Engine,
        request: Attach,
        ids: NDArray[np.int64] | None,
        cut: bool = True,
    ) -> tuple[Attached, Line]:
        """A line with a fair share of the arena; lines that have more go on with less, if `cut`.

        Raises Refused, StoreError.  One at a time: `opening` is held.
        """
        share = self._book.fair_share(key)
        self._stores.gather(engine, share, self._book.is_busy)
        if cut and share and engine.broker.available() < share:
            self._cut_down(share, sparing=METHOD_OF)  # what they hold would be read again
            self._stores.gather(engine, share, self._book.is_busy)
        try:
            return self._take_line(engine, request, ids, share)
        except Refused:
            if share == 0 or not cut:
                raise
        self._cut_down(share)
        self._stores.gather(engine, self._arena.num_slots, self._book.is_busy)
        return self._take_line(engine, request, ids, 0)  # it may need more than its share

    def _take_line(
        self, engine: Engine, request: Attach, ids: NDArray[np.int64] | None, share: int
    ) -> tuple[Attached, Line]:
        limit = engine.broker.at_most(share) if share else contextlib.nullcontext()
        with limit:
            attached = engine.attach(request, ids)
        depth = engine.depth(attached.session)
        if engine.holds_all(attached.session):
            share = 0  # nothing is gained by opening it anew when there is room for more
        return attached, Line(attached.session, attached.num_steps, depth, share)

    def _cut_down(self, share: int, sparing: Container[str] = ()) -> None:
        """Lines with more than `share` slots end, and others go on in their place.

        sparing   plans whose lines stay as they are
        """
        statuses = [line for engine in self._stores.all() for line in engine.status()[1]]
        held = {line.session: line.held_bytes for line in statuses}
        most = share * self._arena.slot_bytes
        with self._book.lock:
            spared = {
                line.number
                for key, group in self._book.groups.items()
                if key.plan in sparing
                for line in group.lines
            }
            ranks = self._book.num_ranks()
            large = [
                line
                for n, line in self._book.lines.items()
                if held.get(n, 0) * ranks[n] > most and n not in spared
            ]
            for line in large:
                line.closing = True
        end = time.monotonic() + WAIT_S
        since: dict[int, float] = {}  # that one waits while another one holds something
        while large and time.monotonic() < end:
            for line in list(large):
                with self._book.lock:
                    waits = any(not f.held for f in line.live)
                begun = since.setdefault(line.number, time.monotonic()) if waits else None
                if not line.lent or (begun and time.monotonic() > begun + _SETTLE_S):
                    self._replace(line, share)
                    large.remove(line)
            time.sleep(_LOOK_S)
        for line in large:
            self._replace(line, share)

    def _replace(self, line: Line, share: int) -> None:
        """A smaller line in the place of a larger one; not where a follower still holds some."""
        with self._book.lock:
            line.closing = False
            if line.number not in self._book.lines:
                return
            if line.lent:
                self._seating.send(line.due())
                return
            key, group = next((k, g) for k, g in self._book.groups.items() if line in g.lines)
            end = self._book.take_down(group, line)
            orphans = [s for s in self._book.sessions.values() if s.line is line]
            for session in orphans:
                session.line = None
                if not line.followers[session.number].active:
                    session.step = line.num_steps  # nothing is wanted before the next start
        end()
        try:
            _, smaller = self._take_line(group.engine, group.request, group.ids, share)
        except Exception:
            self._rehouse(orphans, line)
            return
        with self._book.lock:
            start = smaller.take_over(line, line.run + 1)
            self._book.put_up(group, smaller)
            for session in orphans:
                if self._book.sessions.get(session.number) is session and not session.wants:
                    session.line = smaller
            for number in set(smaller.followers) - {s.number for s in orphans if s.line}:
                smaller.remove(number)
            gone = not smaller.followers  # all of them, while it was opened
            if gone:
                end = self._book.take_down(group, smaller)
                self._book.forget_group(key)
        if gone:
            end()
        elif start is not None:
            self._seating.command(group.engine.start, start)

    def _rehouse(self, sessions: list[Seat], line: Line) -> None:
        """Each looks for a line by itself."""
        with self._book.lock:
            for session in sessions:
                follower = line.followers[session.number]
                if follower.active and not session.wants and session.line is None:
                    session.step = follower.next
                    self.want(session)

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
                _, line = self.open_line(
                    session.key, group.engine, group.request, group.ids, not again
                )
        except ShuttingDown:
            return
        except Refused:
            retry = partial(self._open_for, session, again=True)
            self._openings.put_later(retry, AGAIN_S)
            return
        except Exception as error:
            self._tell(session, error)
            return
        self._seat_at(session, line, group.engine)

    def _seat_at(self, session: Seat, line: Line, engine: Engine) -> None:
        with self._book.lock:
            if not session.wants or session.number not in self._book.sessions:
                todo: Todo = [lambda: engine.detach(line.number)]
            else:
                group = self._book.groups[session.key]
                self._book.put_up(group, line)
                line.add(session.number, session.window)
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
                    run=session.run, step=session.step,
                ),
            )  # fmt: skip
