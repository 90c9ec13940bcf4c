"""Which stream serves a session: it is found, joined and left, and what is due is sent.

All of it under the lock of the registry.  What is to be asked of an engine is returned: it is done
with the lock free.
"""

from collections.abc import Callable, Iterable

from blockstore import concurrency
from loaderd.errors import SessionLost
from loaderd.plans.base import Positions
from loaderd.protocol import BatchReady, ChunkReady, ErrorReply, Start
from loaderd.sessions.base import Deliver
from loaderd.streams.registry import Group, StreamRegistry, Subscription
from loaderd.streams.stream import Sent, Stream

Todo = list[Callable[[], None]]


class Subscriptions:
    """Moves sessions between the streams that there are."""

    def __init__(self, registry: StreamRegistry, deliver: Deliver) -> None:
        """`deliver`: to a session, in its own numbers."""
        self._registry, self._deliver = registry, deliver
        self.starved = concurrency.Event()  # a stream may have nothing for one of its subscribers

    def admit(self, session: Subscription, group: Group, stream: Stream) -> None:
        """A session that is new gets a place at a stream, which may be new as well."""
        if stream.number not in self._registry.streams:
            self._registry.put_up(group, stream)
        stream.add(session.number, session.window, session.rank)
        self._registry.sessions[session.number] = session

    def place(self, session: Subscription) -> Todo | None:
        """Have a session served by a stream that is there; None where none can."""
        if (stream := self._joinable(session)) is not None:
            return self.move(session, stream) + self._subscribe(session, stream)
        streams = self._streams_near(session)
        fair = self._registry.fair_share()
        streams = [stream for stream in streams if not stream.share or 0 < fair < 2 * stream.share]
        for stream in streams:
            others = [f for f in stream.live if f.number != session.number]
            here = stream is session.stream
            if not (here or (stream.has_room(session.rank) and not others)):
                continue
            fresh = not (stream.exhausted and stream.run > 0)
            if not fresh or (not others and not stream.leased):
                todo = self.move(session, stream) + self._gather(session, stream)
                return todo + self.begin(session, stream, fresh)
        return None

    def _gather(self, session: Subscription, stream: Stream) -> Todo:
        """Other ranks of the job that rest at streams of their own go along in the next run."""
        todo: Todo = []
        group = self._registry.groups[session.key]
        for other in [x for x in group.streams if x is not stream and session.key.world > 1]:
            if other.closing or other.live or other.leased:
                continue
            for rank in [s for s in self._registry.sessions.values() if s.stream is other]:
                if stream.has_room(rank.rank):
                    todo += self.move(rank, stream)
        return todo

    def _streams_near(self, session: Subscription) -> list[Stream]:
        """Lines that it may be at, the one where it is first."""
        streams = self._registry.groups[session.key].streams
        found = [stream for stream in streams if stream not in session.left and not stream.closing]

        def place(stream: Stream) -> tuple[int, bool]:
            """Of a job's streams the one with most of its ranks first."""
            others = len(stream.subscribers.keys() - {session.number})
            return (-others if stream.world > 1 else 0), stream is not session.stream

        return sorted(found, key=place)

    def _joinable(self, session: Subscription) -> Stream | None:
        """A stream that has, or will deliver, all from its step on."""
        for stream in self._streams_near(session):
            room = stream is session.stream or stream.has_room(session.rank)
            if room and stream.can_join(session.epoch, session.step, session.stride):
                return stream
        return None

    def move(self, session: Subscription, stream: Stream | None) -> Todo:
        """Leave the stream where a session is, for another one."""
        old, session.stream = session.stream, stream
        if old is stream:
            return []
        if stream is not None:
            stream.add(session.number, session.window, session.rank)
        if old is None:
            return []
        todo = self._registry.releases(old, old.remove(session.number)) + self._registry.narrow(old)
        return todo + self._registry.close_if_empty(session.key, old)

    def _subscribe(self, session: Subscription, stream: Stream) -> Todo:
        session.wants = False
        freed = stream.subscribe(session.number, session.run, session.step, session.stride)
        self.send(stream.due())
        self.starved.set()
        return self._registry.releases(stream, freed)

    def begin(self, session: Subscription, stream: Stream, fresh: bool) -> Todo:
        """Have the stream deliver what the session wants.

        fresh   nobody holds anything of it
        """
        todo = []
        for f in stream.subscribers.values() if fresh else ():
            todo += self._registry.releases(stream, stream.drop(f.number))
        for f in stream.subscribers.values():
            if fresh and f.number != session.number:
                stream.expect(f.number)
        order = Positions(session.stride, stream.world, stream.ranks_of(session.number))
        first = order.first(session.step // stream.world)
        start = Start(
            session=stream.number, run=stream.run + 1, epoch=session.epoch, step=first,
            stride=session.stride,
        )  # fmt: skip
        stream.begin(start.run, start.epoch, start.step, order)
        todo += self._subscribe(session, stream)
        engine = self._registry.at[stream.number]
        command = engine.start if fresh else engine.proceed
        return [*todo, lambda: self.command(command, start, order.ranks)]

    def command(
        self,
        command: Callable[[Start, tuple[int, ...]], None],
        start: Start,
        ranks: tuple[int, ...],
    ) -> None:
        """With the lock free.  A stream that ends meanwhile has nobody who could miss it."""
        try:
            command(start, ranks)
        except SessionLost:
            with self._registry.lock:
                if start.session in self._registry.streams:
                    raise

    def leave(self, session: Subscription, stream: Stream) -> Todo:
        """A session falls behind.  One that has begun gets another stream when it is heard of."""
        subscriber = stream.subscribers[session.number]
        active, step = subscriber.active, subscriber.next
        todo = self._registry.releases(
            stream, stream.leave(session.number)
        ) + self._registry.narrow(stream)
        if active:
            self._registry.left_behind += 1
            session.stream, session.step = None, step
            if subscriber.held:
                session.left.append(stream)
            else:
                todo += self._registry.releases(stream, stream.remove(session.number))
        self.send(stream.due())
        return todo

    def send(self, sent: Iterable[Sent]) -> None:
        """Hand over what a stream says is due."""
        for number, message in sent:
            session = self._registry.sessions[number]
            if isinstance(message, BatchReady):
                edges = sum(map(sum, message.edges_per_hop))
                session.meter.handed(sum(message.nodes_per_hop), edges)
            elif isinstance(message, ChunkReady):
                session.meter.handed(message.num_rows)
            elif isinstance(message, ErrorReply):
                session.meter.end()
            self._deliver(number, message)
