"""Lines are opened, made smaller for others, and opened anew in the place of those that end."""

import contextlib
from collections.abc import Callable, Container
from functools import partial

from blockstore import concurrency
from loaderd.batch.failures import error_text
from loaderd.errors import Refused, ShuttingDown
from loaderd.memory.slots import WAIT_S
from loaderd.plans.base import EVERY_RANK
from loaderd.protocol import Attached, ErrorReply
from loaderd.sessions.base import Deliver
from loaderd.sessions.engine import Engine
from loaderd.sessions.kinds import find_kind
from loaderd.sessions.stores import Stores
from loaderd.streams.executor import SerialExecutor, do_all
from loaderd.streams.registry import Group, StreamKey, StreamRegistry, StreamRequest, Subscription
from loaderd.streams.stream import Stream
from loaderd.streams.subscriptions import Subscriptions, Todo

SETTLE_S = 1.0  # without a release, where batches usually take less than half of that
FIRST_S = 10.0  # that a trainer may take for its first batch: it compiles, and warms up
AGAIN_S = 0.25  # between two tries to open a stream there was no room for
_LOOK_S = 0.01  # between two looks at streams that are to end


class DrainDeadline:
    """Of one stream, from now on.  Times in seconds, of any clock."""

    def __init__(self, stream: Stream, now: float, allowed_s: float) -> None:
        """`allowed_s`: from one release to the next, as far as is known of those who hold any."""
        self._begun = self._since = now
        self._held = _num_held(stream)
        self._allowed_s = min(WAIT_S, max(SETTLE_S, allowed_s))

    def is_over(self, stream: Stream, now: float) -> bool:
        """Whether nothing has moved for too long."""
        if (held := _num_held(stream)) != self._held:
            self._held, self._since = held, now
        waits = any(not f.held for f in stream.live)  # one for another one
        most = SETTLE_S if waits else self._allowed_s
        return now - self._since >= most or now - self._begun >= WAIT_S


def allowed_s(num_batches: int, ready_s: float) -> float:
    """Time for a release, of who has had batches for `ready_s` and released so many of them."""
    return 2 * ready_s / num_batches if num_batches else FIRST_S - ready_s


def _num_held(stream: Stream) -> int:
    return sum(len(f.held) for f in stream.subscribers.values())


class StreamOpener:
    """Opens streams for sessions, within fair shares of the arena."""

    def __init__(
        self,
        stores: Stores,
        registry: StreamRegistry,
        subscriptions: Subscriptions,
        deliver: Deliver,
    ) -> None:
        """`deliver`: to a session, in its own numbers."""
        self._stores, self._registry, self._subscriptions = stores, registry, subscriptions
        self._clock, self._pause = concurrency.monotonic, concurrency.sleep
        self._arena, self._deliver = stores.arena, deliver
        self.opening = concurrency.Lock()  # one stream at a time: each takes memory
        self._openings = SerialExecutor("share-open")

    def close(self) -> None:
        """No stream is opened any more."""
        self._openings.close()

    def find_place(self, session: Subscription) -> Todo:
        """Have a session served from its step on: by a stream that is there, or a new one."""
        if (todo := self._subscriptions.place(session)) is not None:
            return todo
        todo = self._subscriptions.move(session, None)
        self.want(session)
        return todo

    def want(self, session: Subscription, again: bool = False) -> None:
        """A session is to get a stream of its own, or a place that becomes free before.

        again   as for `_open_for`
        """
        session.wants = True
        self._openings.put(partial(self._open_for, session, again))

    def open_stream(
        self, key: StreamKey, order: StreamRequest, cut: bool = True
    ) -> tuple[Attached, Stream]:
        """A stream with a fair share of the arena; those that have more go on with less, if `cut`.

        Raises Refused, StoreError.  One at a time: `opening` is held.
        """
        share, broker = self._registry.fair_share(key), order.engine.broker
        self._stores.gather(order.engine, share, self._registry.is_busy)
        stubborn: set[int] = set()
        if cut and share and broker.available() < share:
            stubborn = self._cut_down(order, share)
            self._stores.gather(order.engine, share, self._registry.is_busy)
        try:
            return self._take_stream(order, share)
        except Refused:
            if share == 0:
                raise
        if cut:
            self._cut_down(order, share, True, stubborn)
        self._stores.gather(order.engine, self._arena.num_slots, self._registry.is_busy)
        return self._take_stream(order, 0)  # it may need more than its share

    def _take_stream(self, order: StreamRequest, share: int) -> tuple[Attached, Stream]:
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
        return attached, Stream(attached.session, attached.num_steps, depth, share, world)

    def _cut_down(
        self, order: StreamRequest, share: int, every: bool = False, tried: Container[int] = ()
    ) -> set[int]:
        """Lines with more than `share` slots end, and others go on in their place.

        every     also those that would have to read all again
        tried     streams whose subscribers have not released in time before

        Nothing is done if that makes no room for what is asked for.  Returns the streams that stay,
        as their subscribers do not release what they hold.
        """
        statuses = [stream for engine in self._stores.all() for stream in engine.status()[1]]
        held = {stream.session: stream.held_bytes // self._arena.slot_bytes for stream in statuses}
        with self._registry.lock:
            ranks = self._registry.num_ranks()
            large = [
                stream
                for key, group in self._registry.groups.items()
                if (every or find_kind(key.plan).resizable)
                and group.order.again
                and group.order.least <= share
                for stream in group.streams
                if held.get(stream.number, 0) * ranks[stream.number] > share
                if stream.number not in tried
            ]
            pooled = sum(engine.broker.pooled() for engine in self._stores.all())
            gain = sum(held[stream.number] - share // ranks[stream.number] for stream in large)
            if pooled + gain < order.least:
                return set()
            for stream in large:
                stream.closing = True
        return self._settle(large, partial(self._replace, share=share))

    def _settle(self, streams: list[Stream], then: Callable[[Stream], None]) -> set[int]:
        """Wait until nothing is leased of streams that are closing, and do something with each.

        Returns those whose subscribers stopped releasing: they go on.
        """
        left, stubborn = {stream: self._deadline(stream) for stream in streams}, set()
        while left:
            now = self._clock()
            for stream, wait in list(left.items()):
                with self._registry.lock:
                    idle = not stream.leased
                    ended = idle or self._openings.closed or wait.is_over(stream, now)
                    if ended and not idle:
                        stream.closing = False
                        self._subscriptions.send(stream.due())
                if idle:
                    then(stream)
                elif ended:
                    stubborn.add(stream.number)
                if ended:
                    del left[stream]
            if left:
                self._pause(_LOOK_S)
        return stubborn

    def _deadline(self, stream: Stream) -> DrainDeadline:
        """As long as a release usually takes the slowest of those who hold any."""
        with self._registry.lock:
            holders = [
                self._registry.sessions[f.number] for f in stream.subscribers.values() if f.held
            ]
            times = [(s.batches, s.meter.times()["ready_ns"] / 1e9) for s in holders]
            longest = max((allowed_s(*t) for t in times), default=0)
            return DrainDeadline(stream, self._clock(), longest)

    def _replace(self, stream: Stream, share: int) -> None:
        """A smaller stream in the place of a larger one, unless a subscriber still holds some."""
        ended = self._end(stream)
        if ended is None:
            return
        group, orphans = ended
        smaller = self._stream_instead(group.order, share)
        if smaller is None:
            self._rehouse(orphans, stream)
            return
        with self._registry.lock:
            start = smaller.take_over(stream, stream.run + 1)
            self._registry.put_up(group, smaller)
            for session in orphans:
                here = self._registry.sessions.get(session.number) is session and not session.wants
                if here and session.stream is None and session.number in smaller.subscribers:
                    session.stream = smaller
            there = {s.number for s in orphans if s.stream is smaller}
            for number in set(smaller.subscribers) - there:
                smaller.remove(number)
            self._rehouse(orphans, stream)  # those who were left behind
            gone = not smaller.subscribers  # all of them, while it was opened
            if gone:
                end = self._registry.take_down(group, smaller)
                self._registry.forget_group(group.key)
        if gone:
            end()
        elif start is not None:
            self._subscriptions.command(group.engine.start, start, smaller.order.ranks)

    def _stream_instead(self, order: StreamRequest, share: int) -> Stream | None:
        """A stream with `share` slots.  If it cannot do with these, it gets back what it had.

        None if there is not even that.
        """
        for most in (share, 0):
            try:
                return self._take_stream(order, most)[1]
            except Refused:
                continue
            except Exception:  # whoever opens a stream for a subscriber meets and reports it
                break
        return None

    def _end(self, stream: Stream) -> tuple[Group, list[Subscription]] | None:
        """A stream ends, its subscribers have none; None: it has gone, or something is leased."""
        with self._registry.lock:
            stream.closing = False
            if stream.number not in self._registry.streams:
                return None
            if stream.leased:
                self._subscriptions.send(stream.due())
                return None
            group = next(g for g in self._registry.groups.values() if stream in g.streams)
            end = self._registry.take_down(group, stream)
            orphans = [s for s in self._registry.sessions.values() if s.stream is stream]
            for session in orphans:
                subscriber = stream.subscribers[session.number]
                session.stream = None
                # who is not active wants nothing before the next start
                session.step = subscriber.next if subscriber.active else stream.num_steps
        end()
        return group, orphans

    def _rehouse(self, sessions: list[Subscription], stream: Stream) -> None:
        """Each looks for a stream by itself.

        They do not have other streams cut down: two sessions that need most of the arena would take
        the stream from each other for ever, and neither would get a batch.
        """
        with self._registry.lock:
            for session in sessions:
                subscriber = stream.subscribers[session.number]
                if subscriber.active and not session.wants and session.stream is None:
                    self.want(session, again=True)

    def _open_for(self, session: Subscription, again: bool = False) -> None:
        """In a thread of its own: open a stream for a session that has none.

        again   there was no room before: nobody else's stream is cut down once more
        """
        with self._registry.lock:
            here = session.wants and session.number in self._registry.sessions
            if not here or self._openings.closed:
                return
            group = self._registry.groups[session.key]
            todo = self._subscriptions.place(session)  # one may have been opened, or become free
        if todo is not None:
            do_all(todo)
            return
        try:
            with self.opening:
                _, stream = self.open_stream(session.key, group.order, not again)
        except ShuttingDown:
            return
        except Refused:
            if not (again and self._take_turn(session)):
                self._openings.put_later(partial(self._open_for, session, again=True), AGAIN_S)
            return
        except Exception as error:
            self._tell(session, error)
            return
        self._place_at(session, stream, group.engine)

    def _take_turn(self, session: Subscription) -> bool:
        """A stream of the session's kind that has served long ends; its subscribers wait in turn.

        Whether one has: the session is the next to open one.
        """
        ended: list[Stream] = []
        with self.opening:
            with self._registry.lock:
                if (group := self._registry.groups.get(session.key)) is None:
                    return False
                streams = [x for x in group.streams if x.may_end and x not in session.left][:1]
                for stream in streams:
                    stream.closing, stream.asked = True, stream.served
            self._settle(streams, ended.append)
            for stream in ended:
                if (found := self._end(stream)) is not None:
                    self._openings.put(partial(self._open_for, session, again=True))
                    self._rehouse(found[1], stream)
                    return True
        return False

    def _place_at(self, session: Subscription, stream: Stream, engine: Engine) -> None:
        with self._registry.lock:
            if not session.wants or session.number not in self._registry.sessions:
                todo: Todo = [lambda: engine.detach(stream.number)]
            else:
                group = self._registry.groups[session.key]
                self._registry.put_up(group, stream)
                stream.add(session.number, session.window, session.rank)
                session.stream = stream
                todo = self._subscriptions.begin(session, stream, fresh=True)
        do_all(todo)

    def _tell(self, session: Subscription, error: Exception) -> None:
        """No stream can be opened for a session: its run ends."""
        with self._registry.lock:
            session.wants = False
            session.meter.end()
            self._deliver(
                session.number,
                ErrorReply(
                    error=Refused.__name__, message=error_text(error), session=session.number,
                    run=session.run, step=session.step // session.key.world,
                ),
            )  # fmt: skip
