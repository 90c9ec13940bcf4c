"""Sessions of clients, and the lines of the engine that they share.

Sessions of equal parameters follow one line, which builds each batch once.  One that falls so far
behind that the line has to wait for it leaves, and gets a line of its own from its step on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore.errors import StoreError
from blockstore.store import Store, open_store
from loaderd.batch.failures import error_text
from loaderd.errors import DaemonError, Refused, SessionLost
from loaderd.memory.ledger import request_bytes
from loaderd.memory.slots import RequestArea, SlotBroker
from loaderd.meter import add_counts
from loaderd.plans.base import EVERY_RANK
from loaderd.protocol import (
    Attach,
    Attached,
    ErrorReply,
    LedgerEntry,
    Release,
    Resolved,
    SessionStatus,
    Skipped,
    Start,
    StoreStatus,
)
from loaderd.sessions.base import Deliver, Out
from loaderd.sessions.kinds import find_kind
from loaderd.sessions.stores import Stores
from loaderd.sharing.errands import Errands, do_all
from loaderd.sharing.line import Lease, Line
from loaderd.sharing.linebook import Book, Group, Key, Order, Seat
from loaderd.sharing.linemaking import AGAIN_S, LineMaker
from loaderd.sharing.linewatch import LineWatch
from loaderd.sharing.seating import Seating, Todo

_MORE = 2  # batches on their way, for each session that joins a line
_KEPT = 2  # of the memory for requests one in so many bytes is for ids that are kept: with them
# another line is opened


class Exchange:
    """What the daemon's shell asks of an engine, for sessions that share lines of it."""

    def __init__(self, stores: Stores, paths: Callable[[], Sequence[Path]] | None = None) -> None:
        """Everything that the stores' engines deliver comes here from now on.

        paths   which stores are to be served, asked at each reload
        """
        self._stores, self._paths = stores, paths
        self.settings, self.arena = stores.settings, stores.arena
        self.deliver: Deliver = lambda _session, _message: None
        self.reload_error = ""  # of the newest reload
        self._next = 1
        self._errands = Errands("share-errands")
        self._sweeps_later = False
        self._book = Book(stores, lambda: self._errands.put(self._sweep))
        self._seating = Seating(self._book, self._hand_over)
        self._maker = LineMaker(stores, self._book, self._seating, self._hand_over)
        self._watch = LineWatch(self._book, self._seating, self._maker)
        stores.deliver = self._arrived

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.close()
        self._maker.close()
        self._errands.close()

    def _hand_over(self, session: int, message: Out) -> None:
        self.deliver(session, message)

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
        kept = seeds is None or self._keeps(resolved, seeds)
        timed = resolved.macro is not None and resolved.macro.waiting
        with self._book.lock:
            number, self._next = self._next, self._next + 1
        alone = number if timed or not kept else 0
        kind, rank = find_kind(request.plan), 0  # of lines that do not get wider another one first
        if kind.every_rank and request.world_size > 1:
            request, rank = structs.replace(request, rank=EVERY_RANK), request.rank
        key = Key(resolved, request.rank, request.world_size, request.plan, alone)
        with self._maker.opening:
            if (attached := self._join(number, key, rank, request, 2 - kind.resizable)) is not None:
                return attached
            slot_bytes = self.arena.slot_bytes
            least = kind.least_slots(engine.store.manifest, request, resolved, slot_bytes)
            order = Order(engine, request, seeds, least, kept)
            try:
                attached, line = self._maker.open_line(key, order)
                attached = structs.replace(attached, num_steps=attached.num_steps // key.world)
            except Refused:
                if (joined := self._join(number, key, rank, request, 1)) is None:
                    raise
                return joined
            with self._book.lock:
                ids = seeds.copy() if seeds is not None and kept else None
                order = order._replace(ids=ids)
                group = self._book.groups.setdefault(key, Group(key, order, attached))
                seat = Seat(number, key, rank, attached.window, line)
                self._seating.seat(seat, group, line)
        return structs.replace(attached, session=number)

    def _keeps(self, resolved: Resolved, seeds: NDArray[np.int64]) -> bool:
        """Whether the ids of a session are kept: those of its group are, or there is room."""
        with self._book.lock:
            groups = self._book.groups
            known = any(k.resolved == resolved and not k.alone for k in groups)
            held = sum(g.order.ids.nbytes for g in groups.values() if g.order.ids is not None)
            room = request_bytes(self.settings.mem_bytes) // _KEPT
            return known or held + seeds.nbytes <= room

    def borrow(self, request: Attach) -> RequestArea:
        """Room for the numbers of a request, until it has been served.  Raises Refused."""
        engine = self._stores.find(request.store)
        with self._maker.opening:
            wanted = -(-8 * request.ids // self.arena.slot_bytes)
            self._stores.gather(engine, wanted, self._book.is_busy)
            return engine.borrow(request)

    def _join(
        self, number: int, key: Key, rank: int, request: Attach, least: int
    ) -> Attached | None:
        """Take a place at a line that lends so many batches, at least; None where there is none."""
        with self._book.lock:
            group = self._book.groups.get(key)
            lines = [] if group is None else list(group.lines)
        for line in lines:
            assert group is not None
            group.engine.widen(line.number, _MORE)
            depth = group.engine.depth(line.number)
            with self._book.lock:
                line.depth = max(1, depth)
                here = line.number in self._book.lines
                if here and line.has_room(rank) and line.depth >= least:
                    window = request.window or group.attached.window
                    self._seating.seat(Seat(number, key, rank, window, line), group, line)
                    return structs.replace(
                        group.attached, request=request.request, session=number, window=window
                    )
        return None

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
        do_all(todo)

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
            session.step = start.step * session.key.world + session.rank
            steps = self._book.groups[session.key].attached.num_steps
            session.meter.begin(len(range(start.step, steps, start.stride)))
            todo = self._book.give_back(session)
            todo += self._maker.find_place(session)
        do_all(todo)

    def release(self, release: Release) -> None:
        """A client is done with a row group."""
        with self._book.lock:
            session = self._book.sessions.get(release.session)
            if session is None:
                return
            todo: Todo = []
            step = release.step * session.key.world + session.rank
            for line in (session.line, *session.left):
                if line is not None and line.holds(session.number, step):
                    todo += self._release(session, line, structs.replace(release, step=step))
                    break
            if session.line is None and not session.wants and self._book.unfinished(session):
                todo += self._maker.find_place(session)  # it fell behind, and is alive
        do_all(todo)

    def _release(self, session: Seat, line: Line, release: Release) -> Todo:
        whole, freed = line.release(session.number, release.run, release.step, release.group)
        if whole:
            session.batches += 1
            session.meter.released()
        todo = self._book.releases(line, freed)
        if line is session.line:
            self._seating.send(line.due())
        elif not line.followers[session.number].held:
            session.left.remove(line)
            todo += self._book.releases(line, line.remove(session.number))
            todo += self._book.close_if_empty(session.key, line)
        if line.starved:
            self._seating.starved.set()
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
            self._seating.send(sent)
            if line.starved:
                self._seating.starved.set()
            for errand in self._book.releases(line, leases):
                self._errands.put(errand)

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
            with self._maker.opening:
                if self._paths is None:
                    raise Refused("this daemon has no list of stores to read again")
                stores = [open_store(path) for path in self._paths()]
                self._check_waiting(stores)
                said = self._stores.reload(stores, self._book.is_busy, self._book.unserved)
                self._stores.sweep(self._book.is_busy)
            self._errands.put(self._sweep)  # what could not be closed now
        except (StoreError, DaemonError, OSError, ValueError) as error:
            self.reload_error = error_text(error)
            raise
        finally:
            self._book.reloads += 1
        self.reload_error = ""
        return said

    def _check_waiting(self, stores: Sequence[Store]) -> None:
        """Raises Refused: another store would take what sessions at work wait for.

        A session that has been cut down, or fell behind, holds nothing until it gets a line again.
        """
        with self._book.lock:
            waiting = sum(session.wants for session in self._book.sessions.values())
        if waiting and self._stores.fresh(stores):
            raise Refused(
                f"{waiting} sessions wait for memory that another store would take: try again "
                "when they are served, or give more --mem"
            )

    def _sweep(self, again: bool = False) -> None:
        """One of the errands: close retired stores, or try again later.

        again   this is the later try: there is one of them at a time
        """
        self._sweeps_later = self._sweeps_later and not again
        if self._stores.retired and self._maker.opening.acquire(blocking=False):
            try:
                self._stores.sweep(self._book.is_busy)
            finally:
                self._maker.opening.release()
        if self._stores.retired and not (self._errands.closed or self._sweeps_later):
            self._sweeps_later = True
            self._errands.put_later(partial(self._sweep, again=True), AGAIN_S)

    def status(self) -> tuple[tuple[LedgerEntry, ...], tuple[SessionStatus, ...], dict[str, int]]:
        """Ledger, sessions and counters as they are now."""
        return self._book.status()
