"""Sessions of clients, and the lines of the engine that they share.

Sessions of equal parameters follow one line, which builds each batch once.  One that falls so far
behind that the line has to wait for it leaves, and gets a line of its own from its step on.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore.errors import StoreError
from blockstore.store import open_store
from loaderd.engine import Engine
from loaderd.errors import DaemonError, Refused, SessionLost, ShuttingDown
from loaderd.failures import error_text
from loaderd.linebook import Book, Group, Key, Seat
from loaderd.meter import add_counts
from loaderd.plans.chunks import METHOD_OF
from loaderd.production import Deliver, Out
from loaderd.protocol import (
    Attach,
    Attached,
    BatchReady,
    ChunkReady,
    ErrorReply,
    LedgerEntry,
    Release,
    SessionStatus,
    Skipped,
    Start,
    StoreStatus,
)
from loaderd.sharing import Lease, Line, Sent
from loaderd.slots import WAIT_S, SlotBroker
from loaderd.stores import Stores

_MORE = 2  # batches on their way, for each session that joins a line
_LOOK_S = 0.01  # between two looks at a line that has nothing for one of its followers
_PATIENCE_S = 0.25  # that a line waits for the slowest of its followers, before that one leaves
_AGAIN_S = 0.25  # between two tries to open a line there was no room for
_SETTLE_S = 1.0  # that one follower waits for others to release, before a line gets smaller
_KEPT_IDS = 1 << 17  # seeds by id, of one session, that are kept to open another line with: 1 MiB


class Exchange:
    """What the daemon's shell asks of an engine, for sessions that share lines of it."""

    def __init__(self, stores: Stores, paths: Callable[[], Sequence[Path]] | None = None) -> None:
        """Everything that the stores' engines deliver comes here from now on.

        paths   which stores are to be served, asked at each reload
        """
        self._stores, self._paths = stores, paths
        self.settings, self.arena = stores.settings, stores.arena
        self.deliver: Deliver = lambda _session, _message: None
        self._book = Book(stores, lambda: self._errands.put(self._sweep))
        self._opening = threading.Lock()  # one line at a time: each takes memory
        self.reload_error = ""  # of the newest reload
        self._next = 1
        self._starved, self._closed = threading.Event(), False
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._openings: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        stores.deliver = self._arrived
        self._threads = [
            threading.Thread(target=loop, name=name, daemon=True)
            for name, loop in (
                ("share-errands", lambda: _serve(self._errands)),
                ("share-open", lambda: _serve(self._openings)),
                ("share-watch", self._watch),
            )
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._errands.put(None)
        self._openings.put(None)
        self._starved.set()
        for thread in self._threads:
            thread.join()

    @property
    def broker(self) -> SlotBroker:
        """Of slots for what goes to other hosts: any store's."""
        return next(iter(self._stores.engines.values())).broker

    @contextmanager
    def at_most(self, share_bytes: int) -> Iterator[None]:
        """Inside, this thread takes no more of the arena, of any store."""
        with ExitStack() as stack:
            for engine in self._stores.all():
                stack.enter_context(engine.broker.at_most(share_bytes // self.arena.slot_bytes))
            yield

    # -- sessions ---------------------------------------------------------------------------------

    def attach(self, request: Attach, seeds: NDArray[np.int64] | None) -> Attached:
        """Open a session: at a line that is there, or at one of its own.  Raises Refused."""
        engine = self._stores.find(request.store)
        resolved = engine.identify(request, seeds)
        kept = seeds is None or seeds.size <= _KEPT_IDS
        timed = resolved.macro is not None and resolved.macro.waiting
        with self._book.lock:
            number, self._next = self._next, self._next + 1
        alone = number if timed or not kept else 0
        key = Key(resolved, request.rank, request.world_size, request.plan, alone)
        with self._opening:
            if (attached := self._join(number, key, request)) is not None:
                return attached
            attached, line = self._open_line(engine, request, seeds)
            with self._book.lock:
                ids = seeds.copy() if seeds is not None and kept else None
                group = self._book.groups.setdefault(key, Group(engine, request, ids, attached))
                self._seat(number, key, group, line, attached.window)
        return structs.replace(attached, session=number)

    def _join(self, number: int, key: Key, request: Attach) -> Attached | None:
        """Take a place at a line that is there; None where there is none."""
        with self._book.lock:
            group = self._book.groups.get(key)
            lines = [] if group is None else list(group.lines)
        for line in lines:
            assert group is not None
            group.engine.widen(line.number, _MORE)
            depth = group.engine.depth(line.number)
            with self._book.lock:
                line.depth = max(1, depth)
                if line.number in self._book.lines and line.has_room():
                    window = request.window or group.attached.window
                    self._seat(number, key, group, line, window)
                    return structs.replace(
                        group.attached, request=request.request, session=number, window=window
                    )
        return None

    def _seat(self, number: int, key: Key, group: Group, line: Line, window: int) -> None:
        if line.number not in self._book.lines:
            self._book.put_up(group, line)
        line.add(number, window)
        self._book.sessions[number] = Seat(number, key, window, line)

    def detach(self, session: int) -> None:
        """Close a session; what it was lent is free."""
        with self._book.lock:
            gone = self._book.sessions.pop(session, None)
            if gone is None:
                return
            gone.meter.end()
            add_counts(self._book.times, gone.meter.times())
            todo = self._book.vacate(gone)
            self._book.forget_group(gone.key)
        _do(todo)

    def start(self, start: Start) -> None:
        """Begin a run: what the session was lent is taken back.  Raises SessionLost, Refused."""
        with self._book.lock:
            session = self._book.sessions.get(start.session)
            if session is None:
                raise SessionLost(f"session {start.session} is not open")
            if start.run <= session.run:
                return
            if min(start.epoch, start.step, start.stride - 1) < 0:
                raise Refused(
                    f"epoch {start.epoch}, step {start.step}, stride {start.stride}: "
                    "expected 0 or more, 0 or more, 1 or more"
                )
            macro = session.key.resolved.macro
            if macro is not None and macro.waiting and start.stride > 1:
                raise Refused("reuse while waiting: expected no DataLoader workers beside the one")
            session.run, session.epoch, session.stride = start.run, start.epoch, start.stride
            session.step = start.step
            steps = self._book.groups[session.key].attached.num_steps
            session.meter.begin(len(range(start.step, steps, start.stride)))
            todo = self._book.give_back(session)
            todo += self._find_place(session)
        _do(todo)

    def _find_place(self, session: Seat) -> list[Callable[[], None]]:
        """Have a session served from its step on: by a line that is there, or a new one."""
        if (todo := self._place(session)) is not None:
            return todo
        session.wants = True
        todo = self._move(session, None)
        self._openings.put(lambda: self._open_for(session))
        return todo

    def _place(self, session: Seat) -> list[Callable[[], None]] | None:
        """Have a session served by a line that is there; None where none can."""
        if (line := self._joinable(session)) is not None:
            return self._move(session, line) + self._follow(session, line)
        lines = self._lines_near(session)
        fair = self._fair_share(len(self._book.lines))
        lines = [line for line in lines if not line.share or 0 < fair < 2 * line.share]
        for line in lines:
            others = [f for f in line.live if f.number != session.number]
            here = line is session.line
            if not (here or (line.has_room() and not others)):
                continue
            if line.exhausted and line.run > 0:
                return self._move(session, line) + self._begin(session, line, fresh=False)
            if not others and not line.lent:
                return self._move(session, line) + self._begin(session, line, fresh=True)
        return None

    def _lines_near(self, session: Seat) -> list[Line]:
        """Lines that it may be at, the one where it is first."""
        lines = self._book.groups[session.key].lines
        found = [line for line in lines if line not in session.left and not line.closing]
        return sorted(found, key=lambda line: line is not session.line)

    def _joinable(self, session: Seat) -> Line | None:
        """A line that has, or will deliver, all from its step on."""
        for line in self._lines_near(session):
            room = line is session.line or line.has_room()
            if room and line.can_join(session.epoch, session.step, session.stride):
                return line
        return None

    def _move(self, session: Seat, line: Line | None) -> list[Callable[[], None]]:
        """Leave the line where a session is, for another one."""
        old, session.line = session.line, line
        if old is line:
            return []
        if line is not None:
            line.add(session.number, session.window)
        if old is None:
            return []
        todo = self._book.releases(old, old.remove(session.number))
        return todo + self._book.close_if_empty(session.key, old)

    def _follow(self, session: Seat, line: Line) -> list[Callable[[], None]]:
        session.wants = False
        freed = line.follow(session.number, session.run, session.step, session.stride)
        self._send(line.due())
        self._starved.set()
        return self._book.releases(line, freed)

    def _begin(self, session: Seat, line: Line, fresh: bool) -> list[Callable[[], None]]:
        """Have the line deliver what the session wants.

        fresh   nobody holds anything of it
        """
        todo = []
        for f in line.followers.values() if fresh else ():
            todo += self._book.releases(line, line.drop(f.number))
        start = Start(
            session=line.number, run=line.run + 1, epoch=session.epoch, step=session.step,
            stride=session.stride,
        )  # fmt: skip
        line.begin(start.run, start.epoch, start.step, start.stride)
        todo += self._follow(session, line)
        for f in line.followers.values():
            if fresh and not f.active:
                line.expect(f.number)
        engine = self._book.at[line.number]
        command = engine.start if fresh else engine.proceed
        return [*todo, lambda: self._command(command, start)]

    def _command(self, command: Callable[[Start], None], start: Start) -> None:
        """A line that ends meanwhile has nobody who could miss it."""
        try:
            command(start)
        except SessionLost:
            with self._book.lock:
                if start.session in self._book.lines:
                    raise

    # -- lines ------------------------------------------------------------------------------------

    def _open_line(
        self, engine: Engine, request: Attach, ids: NDArray[np.int64] | None, cut: bool = True
    ) -> tuple[Attached, Line]:
        """A line with a fair share of the arena; lines that have more go on with less, if `cut`.

        Raises Refused, StoreError.  One at a time: `_opening` is held.
        """
        share = self._fair_share(len(self._book.lines) + 1)
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
        self._stores.gather(engine, self.arena.num_slots, self._book.is_busy)
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

    def _fair_share(self, lines: int) -> int:
        """Slots of each of so many lines; halved when their number doubles.  0: all there are."""
        return 0 if lines < 2 else self.arena.num_slots >> (lines - 1).bit_length()

    def _cut_down(self, share: int, sparing: Container[str] = ()) -> None:
        """Lines with more than `share` slots end, and others go on in their place.

        sparing   plans whose lines stay as they are
        """
        statuses = [line for engine in self._stores.all() for line in engine.status()[1]]
        held = {line.session: line.held_bytes for line in statuses}
        most = share * self.arena.slot_bytes
        with self._book.lock:
            spared = {
                line.number
                for key, group in self._book.groups.items()
                if key.plan in sparing
                for line in group.lines
            }
            large = [
                line
                for n, line in self._book.lines.items()
                if held.get(n, 0) > most and n not in spared
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
                self._send(line.due())
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
            self._command(group.engine.start, start)

    def _rehouse(self, sessions: list[Seat], line: Line) -> None:
        """Each looks for a line by itself."""
        with self._book.lock:
            for session in sessions:
                follower = line.followers[session.number]
                if follower.active and not session.wants and session.line is None:
                    session.step, session.wants = follower.next, True
                    self._openings.put(partial(self._open_for, session))

    def _open_for(self, session: Seat, again: bool = False) -> None:
        """In a thread of its own: open a line for a session that has none.

        again   there was no room before: nobody else's line is cut down once more
        """
        with self._book.lock:
            if not session.wants or self._closed or session.number not in self._book.sessions:
                return
            group = self._book.groups[session.key]
            todo = self._place(session)  # at a line that has been opened, or become free, meanwhile
        if todo is not None:
            _do(todo)
            return
        try:
            with self._opening:
                _, line = self._open_line(group.engine, group.request, group.ids, not again)
        except ShuttingDown:
            return
        except Refused:
            retry = partial(self._open_for, session, again=True)
            timer = threading.Timer(_AGAIN_S, self._openings.put, [retry])
            timer.daemon = True
            timer.start()
            return
        except Exception as error:
            self._tell(session, error)
            return
        self._seat_at(session, line, group.engine)

    def _seat_at(self, session: Seat, line: Line, engine: Engine) -> None:
        with self._book.lock:
            if not session.wants or session.number not in self._book.sessions:
                todo: list[Callable[[], None]] = [lambda: engine.detach(line.number)]
            else:
                group = self._book.groups[session.key]
                self._book.put_up(group, line)
                line.add(session.number, session.window)
                session.line = line
                todo = self._begin(session, line, fresh=True)
        _do(todo)

    def _tell(self, session: Seat, error: Exception) -> None:
        """No line can be opened for a session: its run ends."""
        with self._book.lock:
            session.wants = False
            session.meter.end()
            self.deliver(
                session.number,
                ErrorReply(
                    error=Refused.__name__, message=error_text(error), session=session.number,
                    run=session.run, step=session.step,
                ),
            )  # fmt: skip

    def release(self, release: Release) -> None:
        """A client is done with a row group."""
        with self._book.lock:
            session = self._book.sessions.get(release.session)
            if session is None:
                return
            todo: list[Callable[[], None]] = []
            for line in (session.line, *session.left):
                if line is not None and line.holds(session.number, release.step):
                    todo += self._release(session, line, release)
                    break
            if session.line is None and not session.wants and self._unfinished(session):
                todo += self._find_place(session)  # it fell behind, and is alive
        _do(todo)

    def _unfinished(self, session: Seat) -> bool:
        return session.step < self._book.groups[session.key].attached.num_steps and session.run >= 0

    def _release(self, session: Seat, line: Line, release: Release) -> list[Callable[[], None]]:
        whole, freed = line.release(session.number, release.run, release.step, release.group)
        if whole:
            session.batches += 1
            session.meter.released()
        todo = self._book.releases(line, freed)
        if line is session.line:
            self._send(line.due())
        elif not line.followers[session.number].held:
            session.left.remove(line)
            todo += self._book.releases(line, line.remove(session.number))
            todo += self._book.close_if_empty(session.key, line)
        if line.starved:
            self._starved.set()
        return todo

    def _arrived(self, number: int, message: Out) -> None:
        """From the engine, with its locks held: what is asked of it in turn is an errand."""
        with self._book.lock:
            line = self._book.lines.get(number)
            if line is None:
                return
            leases: list[Lease] = []
            if isinstance(message, Skipped):
                sent = line.skip(message)
            elif isinstance(message, ErrorReply):
                sent = line.fail(message)
            else:
                sent, leases = line.arrive(message)
            self._send(sent)
            if line.starved:
                self._starved.set()
            for errand in self._book.releases(line, leases):
                self._errands.put(errand)

    def _send(self, sent: Iterable[Sent]) -> None:
        for number, message in sent:
            session = self._book.sessions[number]
            if isinstance(message, BatchReady):
                edges = sum(map(sum, message.edges_per_hop))
                session.meter.handed(sum(message.nodes_per_hop), edges)
            elif isinstance(message, ChunkReady):
                session.meter.handed(message.num_rows)
            elif isinstance(message, ErrorReply):
                session.meter.end()
            self.deliver(number, message)

    # -- followers that fall behind ---------------------------------------------------------------

    def _watch(self) -> None:
        """In a thread of its own: a line that waits for its slowest follower loses it."""
        pause = threading.Event()
        while self._starved.wait():
            self._starved.clear()
            if self._closed:  # only now: an end that comes before must not be cleared away
                return
            since: dict[int, float] = {}  # that each line has waited for releases
            while lines := self._held_up():
                pause.wait(_LOOK_S)
                for line in lines:
                    with self._book.lock:
                        engine = self._book.at.get(line.number)
                    if engine is None or not engine.waits(line.number):
                        since.pop(line.number, None)
                        continue
                    now = time.monotonic()
                    if now - since.setdefault(line.number, now) >= _PATIENCE_S:
                        self._part(line, engine.depth(line.number), engine.waits(line.number))

    def _held_up(self) -> list[Line]:
        """Lines that have nothing for one follower, and something that another one holds up."""
        with self._book.lock:
            return [
                line
                for line in self._book.lines.values()
                if not self._closed and line.starved and (line.blocked or line.last() is not None)
            ]

    def _part(self, line: Line, depth: int, waits: bool) -> None:
        with self._book.lock:
            line.depth = max(1, depth)
            if not waits or not line.starved or line.number not in self._book.lines:
                return
            slowest = line.last()
            if slowest is not None:
                session = self._book.sessions[slowest.number]
                todo = self._leave(session, line, slowest.active, slowest.next)
            else:
                todo = self._desert(line) if line.blocked else []
        _do(todo)

    def _desert(self, line: Line) -> list[Callable[[], None]]:
        """Those who have left it hold all that a line can lend: the others go on elsewhere."""
        line.stuck = True
        todo: list[Callable[[], None]] = []
        for follower in line.hungry:
            session = self._book.sessions[follower.number]
            session.step, session.wants = follower.next, True
            todo += self._move(session, None)
            self._openings.put(partial(self._open_for, session))
        return todo

    def _leave(
        self, session: Seat, line: Line, active: bool, step: int
    ) -> list[Callable[[], None]]:
        """A session falls behind.  One that has begun gets another line when it is heard of."""
        todo = self._book.releases(line, line.leave(session.number))
        if active:
            self._book.left_behind += 1
            session.line, session.step = None, step
            if line.followers[session.number].held:
                session.left.append(line)
            else:
                todo += self._book.releases(line, line.remove(session.number))
        self._send(line.due())
        return todo

    def stores(self) -> tuple[StoreStatus, ...]:
        """Those that are served, and those that still are."""
        return self._book.stores()

    # -- all of it --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Start nothing more; returns when workers are idle.  What is lent stays so."""
        for engine in self._stores.all():
            engine.drain()

    def reload(self) -> list[str]:
        """Open stores anew, sessions at work undisturbed; returns what has changed.

        Raises Refused, StoreError, OSError, ValueError, and leaves all as it was.
        """
        try:
            with self._opening:
                if self._paths is None:
                    raise Refused("this daemon has no list of stores to read again")
                stores = [open_store(path) for path in self._paths()]
                said = self._stores.reload(stores, self._book.is_busy)
                self._stores.sweep(self._book.is_busy)
        except (StoreError, DaemonError, OSError, ValueError) as error:
            self.reload_error = error_text(error)
            raise
        finally:
            self._book.reloads += 1
        self.reload_error = ""
        return said

    def _sweep(self) -> None:
        if self._stores.retired and self._opening.acquire(blocking=False):
            try:
                self._stores.sweep(self._book.is_busy)
            finally:
                self._opening.release()
        if self._stores.retired and not self._closed:
            timer = threading.Timer(_AGAIN_S, self._errands.put, [self._sweep])
            timer.daemon = True
            timer.start()

    def status(self) -> tuple[tuple[LedgerEntry, ...], tuple[SessionStatus, ...], dict[str, int]]:
        """Ledger, sessions and counters as they are now."""
        return self._book.status()


def _do(todo: Iterable[Callable[[], None]]) -> None:
    """With no lock held."""
    for step in todo:
        step()


def _serve(steps: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (step := steps.get()) is not None:
        step()
