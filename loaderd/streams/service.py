"""Sessions of clients, and the streams of the engine that they share.

Sessions of equal parameters read one stream, which builds each batch once.  A session that falls so
far behind that the stream has to wait for it leaves, and gets its own stream from its step on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore import concurrency
from blockstore.closing import Closing
from blockstore.errors import StoreError
from blockstore.store import Store
from loaderd.api.errors import DaemonError, Refused
from loaderd.api.protocol import (
    Attach,
    Attached,
    LedgerEntry,
    Resolved,
    SessionStatus,
    StoreStatus,
)
from loaderd.memory.ledger import MIN_SESSION, request_bytes
from loaderd.memory.slots import RequestArea, SlotBroker
from loaderd.plans.base import EVERY_RANK
from loaderd.sampling.failures import error_text
from loaderd.sessions.base import Deliver
from loaderd.sessions.kinds import find_kind
from loaderd.sessions.stores import Stores
from loaderd.streams.opener import AGAIN_S, StreamOpener
from loaderd.streams.registry import StreamGroup, StreamKey, StreamRegistry, StreamRequest
from loaderd.streams.stream import Cursor, RingBatch, Stream

_MORE = 2  # more batches in flight, for each session that joins a stream
_KEPT = 2  # 1/_KEPT of the memory for requests may retain ids: they are needed to open another
# stream

POLL_S = 0.01  # between two checks of a stream that has nothing for one of its cursors
STRAGGLER_WAIT_S = 0.25  # how long a stream waits for its slowest cursor before that leaves
LAST_S = 2.0  # the same if that one holds the only batch that can be leased: then all leave
# The same for a rank of a job, or an owner of its nodes.  These train in step: the first to get its
# batch waits for the others in the step, and another stream takes memory from all.  First steps
# differ by seconds.
RANK_WAIT_S = 10.0


class StreamService(Closing):
    """Sessions of clients, which share the streams of some stores."""

    def __init__(self, stores: Stores, reopen: Callable[[], Sequence[Store]] | None = None) -> None:
        """`reopen`: opens the stores that are to be served, at each reload."""
        self._stores, self._reopen = stores, reopen
        self.settings, self.arena = stores.settings, stores.arena
        self.deliver: Deliver = lambda _session, _message: None
        self.reload_error = ""  # of the newest reload
        self._next = 1
        self._sweeps_later = False
        self._registry = StreamRegistry(
            stores,
            lambda session, message: self.deliver(session, message),
            lambda cursor: self._opener.want(cursor),
            lambda: self._opener.executor.put(self._sweep),
        )
        self._opener = StreamOpener(stores, self._registry)
        self._watch = StragglerWatch(self._registry, self._opener)
        # what clients ask of open sessions
        self.start, self.release = self._registry.start, self._registry.release
        self.detach = self._registry.detach

    def close(self) -> None:
        self._watch.close()
        self._opener.executor.close()

    @property
    def broker(self) -> SlotBroker:
        """The broker of slots for what goes to other hosts: that of any store."""
        return next(iter(self._stores.engines.values())).broker

    @contextmanager
    def at_most(self, share_bytes: int) -> Iterator[None]:
        """In this context the thread takes at most `share_bytes` of each store's arena slots."""
        with ExitStack() as stack:
            for engine in self._stores.all():
                stack.enter_context(engine.broker.at_most(share_bytes // self.arena.slot_bytes))
            yield

    # -- sessions ---------------------------------------------------------------------------------

    def attach(self, request: Attach, seeds: NDArray[np.int64] | None) -> Attached:
        """Open a session, at an existing stream or at one of its own.

        Raises Refused, StoreError.
        """
        attached = self._attach(request, seeds)
        if not request.classes:
            return attached
        try:
            counts = self._stores.find(request.store).classes
            return structs.replace(attached, type_info=counts.fill(request, attached.type_info))
        except BaseException:
            self.detach(attached.session)
            raise

    def _attach(self, request: Attach, seeds: NDArray[np.int64] | None) -> Attached:
        engine = self._stores.find(request.store)
        owners, resolved = engine.owners_digest(request), engine.identify(request, seeds)
        kept = seeds is None or self._keeps(resolved, seeds)
        timed = resolved.macro is not None and resolved.macro.waiting
        with self._registry.lock:
            number, self._next = self._next, self._next + 1
        alone = number if timed or not kept else 0
        kind, rank = find_kind(request.plan), 0
        if kind.every_rank and request.world_size > 1:
            request, rank = structs.replace(request, rank=EVERY_RANK), request.rank
        key = StreamKey(
            resolved, request.rank, request.world_size, request.plan, alone, owners, request.home
        )
        with self._opener.opening:
            # rather another stream than to join one of depth 1 that cannot be widened
            if (attached := self._join(number, key, rank, request, 2 - kind.resizable)) is not None:
                return attached
            slot_bytes = self.arena.slot_bytes
            minimum = kind.min_slots(engine.store.manifest, request, resolved, slot_bytes)
            order = StreamRequest(engine, request, seeds, minimum, kept)
            with self._registry.lock:
                # one that finds no room must not end the stream that others of its job read: they
                # train in step, and would wait for each other
                shrink = not key.in_step or key not in self._registry.groups
            try:
                stream = self._opener.open_stream(key, order, shrink)
            except Refused:
                if (joined := self._join(number, key, rank, request, 1)) is None:
                    raise
                return joined
            attached = stream.session.describe(request.request)
            attached = structs.replace(attached, num_steps=attached.num_steps // key.world)
            with self._registry.lock:
                ids = seeds.copy() if seeds is not None and kept else None
                order = order._replace(ids=ids)
                group = self._registry.groups.setdefault(key, StreamGroup(key, order, attached))
                cursor = Cursor(number, rank, attached.window, key.world)
                self._registry.admit(cursor, group, stream)
        return structs.replace(attached, session=number)

    def _keeps(self, resolved: Resolved, seeds: NDArray[np.int64]) -> bool:
        """Whether to keep a session's ids: those of its group are kept, or there is room."""
        with self._registry.lock:
            groups = self._registry.groups
            known = any(k.resolved == resolved and not k.alone for k in groups)
            held = sum(g.order.ids.nbytes for g in groups.values() if g.order.ids is not None)
            room = request_bytes(self.settings.mem_bytes) // _KEPT
            return known or held + seeds.nbytes <= room

    def check(self, request: Attach) -> None:
        """Raises Refused: the request can never be served, even if all others leave."""
        engine, others = self._stores.find(request.store), self._stores.all()
        engine.owners_digest(request)
        maximum = sum(other.broker.num_slots - other.min_slots for other in others)
        find_kind(request.plan).check(
            engine.store.manifest, request, self.settings, engine.budget, maximum + MIN_SESSION
        )

    def borrow(self, request: Attach) -> RequestArea:
        """Take room for the numbers of a request until it has been served.  Raises Refused."""
        engine = self._stores.find(request.store)
        with self._opener.opening:
            wanted = -(-8 * request.ids // self.arena.slot_bytes)
            self._stores.gather(engine, wanted, self._registry.is_busy)
            return engine.borrow(request)

    def _join(
        self, number: int, key: StreamKey, rank: int, request: Attach, minimum: int
    ) -> Attached | None:
        """Join a stream that can lease at least `minimum` batches; None: there is none."""
        with self._registry.lock:
            group = self._registry.groups.get(key)
            for stream in [] if group is None else list(group.streams):
                assert group is not None
                if not key.splits:
                    stream.session.widen(_MORE)
                if stream.has_room(rank) and stream.depth >= minimum:
                    window = request.window or group.attached.window
                    self._registry.admit(Cursor(number, rank, window, key.world), group, stream)
                    return structs.replace(
                        group.attached, request=request.request, session=number, window=window
                    )
        return None

    def parts(self) -> list[Store]:
        """Stores that are served now and are parts."""
        engines = list(self._stores.engines.values())
        return [engine.store for engine in engines if engine.store.part is not None]

    def stores(self) -> tuple[StoreStatus, ...]:
        return self._registry.stores()

    # -- all of it --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Start nothing more; returns when workers are idle.  Leased batches stay leased."""
        for engine in self._stores.all():
            engine.drain()

    def reload(self) -> list[str]:
        """Reopen the stores without disturbing sessions; returns what has changed.

        Raises Refused, StoreError, OSError, ValueError, and changes nothing then.
        """
        try:
            with self._opener.opening:
                if self._reopen is None:
                    raise Refused("this daemon has no list of stores to read again")
                stores = self._reopen()
                self._check_waiting(stores)
                said = self._stores.reload(stores, self._registry.is_busy, self._registry.unserved)
                self._stores.sweep(self._registry.is_busy)
            self._opener.executor.put(self._sweep)  # what could not be closed now
        except (StoreError, DaemonError, OSError, ValueError) as error:
            self.reload_error = error_text(error)
            raise
        finally:
            self._registry.reloads += 1
        self.reload_error = ""
        return said

    def _check_waiting(self, stores: Sequence[Store]) -> None:
        """Raises Refused: another store would take memory that sessions wait for.

        A session whose stream has ended, or that fell behind, holds nothing until it gets another.
        """
        with self._registry.lock:
            waiting = sum(cursor.waits for cursor, _ in self._registry.sessions.values())
        if waiting and self._stores.fresh(stores):
            raise Refused(
                f"{waiting} sessions wait for memory that another store would take: try again "
                "when they are served"
            )

    def _sweep(self, again: bool = False) -> None:
        """Close retired stores, in the executor's thread, or try again later.

        again   this is the later attempt; at most one is due at a time
        """
        self._sweeps_later = self._sweeps_later and not again
        if self._stores.retired and self._opener.opening.acquire(blocking=False):
            try:
                self._stores.sweep(self._registry.is_busy)
            finally:
                self._opener.opening.release()
        executor = self._opener.executor
        if self._stores.retired and not (executor.closed or self._sweeps_later):
            self._sweeps_later = True
            executor.put_later(partial(self._sweep, again=True), AGAIN_S)

    def status(self) -> tuple[tuple[LedgerEntry, ...], tuple[SessionStatus, ...], dict[str, int]]:
        return self._registry.status()


class StragglerWatch:
    """A thread that checks streams while one of their cursors has no batch."""

    def __init__(self, registry: StreamRegistry, opener: StreamOpener) -> None:
        self._registry, self._opener = registry, opener
        self._starved, self._closed = registry.starved, False
        self._thread = concurrency.Thread(target=self._watch, name="streams-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: it moves no more cursors."""
        self._closed = True
        self._starved.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = concurrency.Event()
        while self._starved.wait():
            self._starved.clear()
            if self._closed:  # checked only now: `clear` must not undo the `set` of `close`
                return
            since: dict[Stream, tuple[int, float]] = {}  # number and time of its newest release
            while streams := self._held_up():
                pause.wait(POLL_S)
                for stream in streams:
                    self._check(stream, since)

    def _held_up(self) -> list[Stream]:
        """Streams that have nothing for one cursor, because another one holds something up."""
        with self._registry.lock:
            return [
                stream
                for stream in self._registry.streams
                if not self._closed
                and stream.idle_cursors
                and (_is_blocked(stream) or early(stream) or _slowest(stream) is not None)
            ]

    def _check(self, stream: Stream, since: dict[Stream, tuple[int, float]]) -> None:
        """Separate cursors that hold a stream up from those that have waited long enough."""
        with self._registry.lock:
            here = stream in self._registry.streams and stream.idle_cursors and _is_held_up(stream)
            if not here:
                since.pop(stream, None)
                return
            if early(stream):
                drop_early(stream)
                return
            now = concurrency.monotonic()
            wait_s = STRAGGLER_WAIT_S if stream.depth > 1 else LAST_S
            if self._registry.streams[stream].key.in_step:
                wait_s = RANK_WAIT_S
            # it may go on between two checks, even if it is found waiting each time
            releases, begun = since.get(stream, (-1, now))
            if releases != stream.releases:
                since[stream] = stream.releases, now
                return
            if now - begun < wait_s:
                return
            idle, slowest = stream.idle_cursors, _slowest(stream)
            if slowest is not None and slowest not in idle:
                self._registry.leave(slowest, stream)
                return
            # cursors that have left it, or are ahead, hold all that it can lease; a rank comes
            # back if there is no memory for another stream
            stream.stuck = slowest is None and not stream.job
            for cursor in idle if slowest is None else [slowest]:
                self._registry.move(cursor, None)
                cursor.avoids = stream
                self._opener.want(cursor)


def early(stream: Stream) -> list[RingBatch]:
    """Batches that nobody holds, later than the first one that an idle cursor waits for."""
    waiting = [
        (c.place.run, c.place.next) for c in stream.idle_cursors if c.place and not stream.ready(c)
    ]
    later = [batch for at, batch in stream.ring.items() if waiting and at > min(waiting)]
    return [b for b in later if b.pieces and b.wanted and not b.is_held]


def drop_early(stream: Stream) -> None:
    """Make room for what idle cursors want first; the dropped batches are built again.

    A late cursor may find all memory taken by batches of later positions.
    """
    for batch in early(stream):
        stream.ask_again(batch)
        for cursor in list(stream.cursors.values()):
            stream.forget(cursor, batch)
    stream.session.wake()


def _is_held_up(stream: Stream) -> bool:
    """Whether cursors without a batch get none before others release what they hold."""
    return stream.session.waits() or (bool(stream.waiting) and all(c.held for c in stream.live))


def _is_blocked(stream: Stream) -> bool:
    """Whether cursors that want nothing of it now still hold batches of it."""
    return stream.leased > sum(b.stream is stream for c in stream.live for b in c.held.values())


def _slowest(stream: Stream) -> Cursor | None:
    """The cursor that is furthest behind; None: none is behind another one."""

    def place(c: Cursor) -> tuple[int, int]:
        if c.place is None:
            return (stream.run + 1, 0) if c.active else (-1, -1)
        return c.place.run, c.place.next - c.place.stride * len(c.held)

    wanting = [c for c in stream.cursors.values() if c.place or c.expected or c.active]
    if len(wanting) < 2:
        return None
    found = min(wanting, key=place)
    return found if place(found) < max(map(place, wanting)) else None
