"""Open streams for sessions, and divide the memory again when there are more streams."""

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from blockstore import concurrency
from blockstore.errors import StoreError
from loaderd.api.errors import Refused, ShuttingDown
from loaderd.api.protocol import ErrorReply
from loaderd.memory.slots import WAIT_S
from loaderd.sampling.failures import error_text
from loaderd.sessions.kinds import find_kind
from loaderd.sessions.stores import Stores
from loaderd.sessions.workers import SerialExecutor
from loaderd.streams.pieces import StreamShare
from loaderd.streams.registry import StreamGroup, StreamKey, StreamRegistry, StreamRequest
from loaderd.streams.stream import Cursor, Stream

SETTLE_S = 1.0  # shortest wait for a release; a batch usually takes less than half of that
FIRST_S = 10.0  # time a trainer may take for its first batch: it compiles and warms up
AGAIN_S = 0.25  # between two attempts to open a stream for which there is no room
TURN = 64  # batches that a stream serves before another one may take its memory
_POLL_S = 0.01  # between two checks of streams that are to end


class DrainDeadline:
    """How long a stream's batches are waited for before it goes on.  Seconds of any clock."""

    def __init__(self, stream: Stream, now: float, allowed_s: float) -> None:
        """`allowed_s`: estimated time between two releases by the sessions that hold batches."""
        self._begun = self._since = now
        self._held = stream.leased
        self._allowed_s = min(WAIT_S, max(SETTLE_S, allowed_s))

    def is_over(self, stream: Stream, now: float) -> bool:
        """Whether nothing has moved for too long."""
        if stream.leased != self._held:
            self._held, self._since = stream.leased, now
        waits = any(not c.held for c in stream.live)  # one cursor waits for another
        maximum = SETTLE_S if waits else self._allowed_s
        return now - self._since >= maximum or now - self._begun >= WAIT_S


def allowed_s(num_batches: int, ready_s: float) -> float:
    """Time to allow a session for one release, if it has released `num_batches` in `ready_s`."""
    return 2 * ready_s / num_batches if num_batches else FIRST_S - ready_s


class _Ended(NamedTuple):
    """A stream that has ended and is to be replaced."""

    group: StreamGroup
    order: StreamRequest  # for the stream in its place
    cursors: Sequence[Cursor]


class StreamOpener:
    """Opens streams within fair shares of the arena, one at a time: each takes memory."""

    def __init__(self, stores: Stores, registry: StreamRegistry) -> None:
        self._stores, self._registry, self._arena = stores, registry, stores.arena
        self._clock, self._pause = concurrency.monotonic, concurrency.sleep
        self.opening = concurrency.Lock()
        self.executor = SerialExecutor("streams-open")

    def want(self, cursor: Cursor, again: bool = False) -> None:
        """Get a session a stream of its own, or a place that becomes free before.

        again   shrink nobody else's stream for it: two sessions that need most of the arena
                would take it from each other for ever, and neither would get a batch
        """
        cursor.waits = True
        self.executor.put(partial(self._open_for, cursor, again))

    def open_stream(self, key: StreamKey, order: StreamRequest, shrink: bool = True) -> Stream:
        """Open a stream with a fair share of the arena; if `shrink`, shrink those that have more.

        It serves `order.epoch`, but maybe not every other epoch.  The caller holds `opening`.
        Raises Refused, StoreError.
        """
        share, alike = self._registry.fair_share(key), self._divide(key, order)
        broker, unreleased = order.engine.broker, set[Stream]()
        crowded = self._crowded(order)
        order = order._replace(alike=alike[order.kind], crowded=bool(crowded))
        self._stores.gather(order.engine, share, self._registry.is_busy)
        # slots of the graph do not count: they stay the graph's
        if shrink and share and (crowded or broker.row_slots() < share):
            unreleased = self._share_out(order, share, alike, crowded)
            self._stores.gather(order.engine, share, self._registry.is_busy)
        # a share may be less than the session's minimum: then try with all that is available
        try:
            stream = self._take(key, order, share)
        except Refused:
            if share == 0:
                raise
            if shrink:
                self._share_out(order, share, alike, every=True, tried=unreleased)
            self._stores.gather(order.engine, self._arena.num_slots, self._registry.is_busy)
            stream = self._take(key, order, 0)  # it may need more than its share
        if shrink and (crowded := self._crowded()):
            self._share_out(order, share, alike, crowded, tried=unreleased)
        return stream

    def _take(self, key: StreamKey, order: StreamRequest, share: int) -> Stream:
        engine = order.engine
        limit = engine.broker.at_most(share, of_session=True) if share else contextlib.nullcontext()
        with limit:
            session = engine.open(order.request, order.ids, order.epoch, order.alike, order.crowded)
        attached = session.describe(0)
        if attached.owners != key.owners:
            engine.close_session(session)
            raise StoreError(
                f"owners {order.request.owners!r}: another map has taken the place of the one of "
                "this session; begin a new session"
            )
        if session.holds_all or not order.again:
            share = 0  # more room would gain nothing, or it cannot be opened again
        return Stream(
            session, attached.num_steps, self._registry.send, self._registry.starved,
            StreamShare(share, order.alike), key.world,
        )  # fmt: skip

    # -- memory is shared out again ---------------------------------------------------------------

    def _share_out(
        self,
        order: StreamRequest,
        share: int,
        alike: Mapping[Hashable, int],
        crowded: Container[Stream] = (),
        every: bool = False,
        tried: Container[Stream] = (),
    ) -> set[Stream]:
        """Replace streams by smaller ones that have more than `share` slots, or keep rows for more.

        alike     of each kind, as of `_divide`
        crowded   streams that are replaced, too, as of `_crowded`
        every     also those that would have to read everything again
        tried     streams whose cursors did not release in time before

        Does nothing if that would not make room for `order`.  Returns the streams that stay
        because their leased batches were not released.
        """
        slot_bytes = self._arena.slot_bytes
        with self._registry.lock:
            held = {
                stream: stream.session.held_bytes() // slot_bytes
                for stream, group in self._registry.streams.items()
                if (every or find_kind(group.key.plan).resizable)
                and group.order.again
                and group.order.minimum <= share
                and stream not in tried
            }
            kinds = {stream: self._registry.streams[stream].order.kind for stream in held}
            crowd = {
                stream
                for stream in held
                if stream.share.alike > alike.get(kinds[stream], 1) or stream in crowded
            }
            large = {s: slots for s, slots in held.items() if slots > share or s in crowd}
            pooled = sum(engine.broker.pooled() for engine in self._stores.all())
            # how much rows take that are kept for more is not known here
            if not crowd and pooled + sum(large.values()) - share * len(large) < order.minimum:
                return set()
            for stream in large:
                stream.closing = True
        ended = list[_Ended]()

        def end(stream: Stream) -> None:
            if (one := self._end(stream)) is not None:
                order = one.order._replace(alike=alike.get(one.order.kind, 1), crowded=True)
                ended.append(one._replace(order=order))

        # the last session that shares rows gives them back: all streams end before others are
        # opened, except those whose batches are not released soon
        def replace() -> None:
            while ended:
                self._replace(ended.pop(0), share)

        unreleased = self._drain(list(large), end, replace)
        replace()
        return unreleased

    def _crowded(self, order: StreamRequest | None = None) -> set[Stream]:
        """Streams that rely on a row pool which has no room for all rows any more.

        order   a stream that is to be opened: of those of its store, which will it leave too little
                room?  One of their kind is expected to take as much as they have.
        """
        found, slot_bytes = set[Stream](), self._arena.slot_bytes
        with self._registry.lock:
            for stream, group in self._registry.streams.items():
                if order is not None and group.order.engine is not order.engine:
                    continue
                same = order is not None and group.order.kind == order.kind
                more = stream.session.held_bytes() // slot_bytes if same else 0
                if find_kind(group.key.plan).pool_optional and stream.session.crowded(more):
                    found.add(stream)
        return found

    def _divide(self, key: StreamKey, order: StreamRequest) -> Mapping[Hashable, int]:
        """Fair shares for each kind of streams: those open, those to be, and one for `order`.

        The number of all shares is a power of two.  The streams of a kind get one, too, if there
        are enough: they keep rows for those to come, which then take little more.  Streams that
        have all in memory anyway keep none, and count as a kind of their own.
        """
        with self._registry.lock:
            counts = Counter([order.kind])
            for group in self._registry.without_stream(key):
                counts[group.order.kind] += 1
            for stream, group in self._registry.streams.items():
                kind = group.order.kind
                counts[("all in memory", kind) if stream.session.holds_all else kind] += 1
        rounded = {kind: _round_up(count) for kind, count in counts.items()}
        return rounded if sum(rounded.values()) <= _round_up(counts.total()) else counts

    def _drain(
        self,
        streams: list[Stream],
        then: Callable[[Stream], None],
        meanwhile: Callable[[], None] | None = None,
    ) -> set[Stream]:
        """Wait until closing streams have no leased batches, and call `then` with each.

        meanwhile   called while the others are awaited, SETTLE_S after the last one could end

        Returns the streams whose batches were not released in time: they go on.
        """
        left, unreleased = {stream: self._deadline(stream) for stream in streams}, set()
        last = self._clock()
        while left:
            now = self._clock()
            for stream, deadline in list(left.items()):
                with self._registry.lock:
                    idle = not stream.leased
                    ended = idle or self.executor.closed or deadline.is_over(stream, now)
                    if ended and not idle:
                        self._go_on(stream)
                        unreleased.add(stream)
                if ended:
                    del left[stream]
                if idle:
                    then(stream)
                    last = now
            if left and meanwhile is not None and now - last >= SETTLE_S:
                meanwhile()
            if left:
                self._pause(_POLL_S)
        return unreleased

    def _deadline(self, stream: Stream) -> DrainDeadline:
        """Allow what a release usually takes the slowest session that holds any of its batches."""
        with self._registry.lock:
            holders = [
                cursor
                for cursor, _ in self._registry.sessions.values()
                if any(batch.stream is stream for batch in cursor.held.values())
            ]
            times = [(c.batches, c.meter.times()["ready_ns"] / 1e9) for c in holders]
            longest = max((allowed_s(*t) for t in times), default=0)
            return DrainDeadline(stream, self._clock(), longest)

    def _go_on(self, stream: Stream) -> None:
        stream.closing = False
        stream.send()
        stream.session.wake()

    def _end(self, stream: Stream) -> _Ended | None:
        """End a stream, which leaves its cursors without one; None: it has gone, or has leases."""
        with self._registry.lock:
            if stream not in self._registry.streams:
                return None
            if stream.leased:
                self._go_on(stream)
                return None
            group, cursors = self._registry.streams[stream], list(stream.cursors.values())
            self._registry.end(stream)
            epoch = min((c.epoch for c in stream.live), default=max(0, stream.epoch))
            return _Ended(group, group.order._replace(epoch=epoch), cursors)

    def _replace(self, ended: _Ended, share: int) -> None:
        """Open a smaller stream in place of one that has ended."""
        group, order, cursors = ended
        smaller = self._instead(group.key, order, share)
        with self._registry.lock:
            cursors = [c for c in cursors if self._lacks_stream(c)]
            if smaller is not None:
                self._registry.put_up(group, smaller)
                for cursor in cursors:
                    if not cursor.active and smaller.has_room(cursor.rank, cursor.number):
                        smaller.add(cursor)
                for cursor in sorted(cursors, key=lambda c: c.position):
                    if cursor.active and smaller.can_join(cursor):
                        self._registry.move(cursor, smaller)
                        smaller.join(cursor)
                    elif cursor.active and not smaller.run and smaller.can_begin(cursor):
                        self._registry.move(cursor, smaller)
                        smaller.begin(cursor)
            self._find_places([c for c in cursors if c.stream is None])
            if smaller is not None:
                self._registry.tidy(smaller)  # all may have gone while it was opened

    def _lacks_stream(self, cursor: Cursor) -> bool:
        return cursor.number in self._registry.sessions and cursor.stream is None

    def _find_places(self, cursors: list[Cursor]) -> None:
        """Find places for cursors of an ended stream that want batches, the slowest first."""
        for cursor in sorted(cursors, key=lambda c: c.position):
            if cursor.active and not self._registry.place(cursor) and not cursor.waits:
                self.want(cursor, again=True)

    def _instead(self, key: StreamKey, order: StreamRequest, share: int) -> Stream | None:
        """Open a stream with `share` slots or, if it cannot do with these, as large as before.

        None if there is not even room for that.
        """
        for maximum in (share, 0):
            try:
                return self._take(key, order, maximum)
            except Refused:
                continue
            except Exception:  # the next attempt for a session meets and reports it
                break
        return None

    # -- a stream for a session that has none -----------------------------------------------------

    def _open_for(self, cursor: Cursor, again: bool = False) -> None:
        """Open a stream for a session, in the executor's thread; `again` as for `want`."""
        try:
            with self.opening:
                # meanwhile it may have got the stream that took the place of its last one
                with self._registry.lock:
                    here = cursor.waits and cursor.number in self._registry.sessions
                    if not here or self.executor.closed or self._registry.place(cursor):
                        return
                    group = self._registry.sessions[cursor.number][1]
                order = group.order._replace(epoch=cursor.epoch)
                # readers of its job's other streams may have to wait for it, and release nothing
                shrink = not again and not (group.key.in_step and group.streams)
                stream = self.open_stream(group.key, order, shrink)
        except ShuttingDown:
            return
        except Refused:
            cursor.avoids = None
            if not (again and self._take_turn(cursor, group)):
                self.executor.put_later(partial(self._open_for, cursor, True), AGAIN_S)
            return
        except Exception as error:
            self._tell(cursor, error)
            return
        with self._registry.lock:
            cursor.avoids = None
            if not cursor.waits or cursor.number not in self._registry.sessions:
                group.order.engine.close_session(stream.session)
                return
            self._registry.put_up(group, stream)
            self._registry.move(cursor, stream)
            stream.begin(cursor)

    def _take_turn(self, cursor: Cursor, group: StreamGroup) -> bool:
        """End a stream of the session's group that has served long; its readers wait in turn.

        Returns whether one has ended: this session is the next to open one.
        """
        ended = list[Stream]()
        with self.opening:
            with self._registry.lock:
                streams = [s for s in group.streams if _may_end(s)][:1]
                for stream in streams:
                    stream.closing, stream.asked = True, stream.served
            self._drain(streams, ended.append)
            for stream in ended:
                if (one := self._end(stream)) is not None:
                    self.executor.put(partial(self._open_for, cursor, True))
                    with self._registry.lock:
                        self._find_places([c for c in one.cursors if self._lacks_stream(c)])
                    return True
        return False

    def _tell(self, cursor: Cursor, error: Exception) -> None:
        """End a session's run with an error: no stream can be opened for it."""
        with self._registry.lock:
            cursor.waits = cursor.active = False
            self._registry.send(
                cursor,
                ErrorReply(
                    error=Refused.__name__, message=error_text(error), session=cursor.number,
                    run=cursor.run, step=cursor.step // cursor.world,
                ),
            )  # fmt: skip


def _round_up(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _may_end(stream: Stream) -> bool:
    """Whether another stream of its group may take its memory, as there is none for both.

    Not if ranks read it: they may have to wait for the rank that wants it, and release nothing.
    """
    unused = not stream.live and not stream.leased
    served = not stream.job and stream.served - stream.asked >= TURN
    return not stream.closing and (unused or served)
