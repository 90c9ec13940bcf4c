"""Who gets which batch of a stream that several sessions share: pure bookkeeping.

A stream is a session of the engine; it builds each batch once.  Its subscribers are the sessions
that clients know.  A batch stays where it is until every subscriber that wants it has released it.

A stream may serve every rank of a job.  What is a step here is then a position,
`step * world + rank` (`loaderd.plans.base.Positions`): a subscriber goes from one position of its
rank to the next.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from msgspec import structs

from loaderd.plans.base import Positions
from loaderd.protocol import BatchReady, ChunkReady, ErrorReply, RowGroup, Skipped, Start

Piece = BatchReady | ChunkReady | RowGroup
TURN = 64  # batches of a stream, before another one may have its memory


class Lease(NamedTuple):
    """A row group of a batch of a stream."""

    run: int  # of the stream
    step: int
    group: int


@dataclass(slots=True)
class _Product:
    """A batch that the stream has delivered."""

    pieces: list[Piece] = field(default_factory=list)  # by group
    left: list[set[int] | None] = field(default_factory=list)  # who needs the group; None: gone
    whole: bool = False  # its last group is there

    @property
    def untouched(self) -> bool:
        """Whether no group of it has gone."""
        return bool(self.pieces) and None not in self.left


@dataclass(slots=True)
class Subscriber:
    """One session at a stream."""

    number: int
    window: int  # batches that it may hold, at most
    rank: int = 0  # of those that the stream serves
    run: int = -1  # the client's
    stream_run: int = -1  # the newest of the stream's that it follows, or has followed
    next: int = 0  # step that it is sent next
    stride: int = 1  # to the one after it
    active: bool = False  # it wants batches
    expected: bool = False  # it does not yet, and will from the stream's first step on
    held: dict[int, int] = field(
        default_factory=dict
    )  # step -> the stream's run, of what it was sent


class Sent(NamedTuple):
    """A message for a session, in its own numbers."""

    session: int
    message: Piece | Skipped | ErrorReply


class Stream:
    """What a stream has delivered, and to whom it goes.  Its owner calls it under a lock."""

    def __init__(
        self, number: int, num_steps: int, depth: int, share: int = 0, world: int = 1
    ) -> None:
        """`number`: of the engine's session.  `depth`: batches that can be leased at a time.

        share   slots that it was opened with, at most; 0: as many as there were
        world   ranks that it serves
        """
        self.world = world
        self.number, self.num_steps, self.depth, self.share = number, num_steps, depth, share
        self.run, self.epoch, self.order = 0, -1, Positions(1, world)
        self.first = self.front = num_steps  # of the run: its first step, the next to be delivered
        self.error: ErrorReply | None = None
        self.served = 0  # batches of its run that it has delivered
        self.closing = False  # nothing more is sent: another stream goes on in its place
        self.stuck = False  # those who have left it hold all that it can lend
        self.in_parts = False  # a batch of it did not fit whole
        self.asked = 0  # batches that it had delivered when it was last to end for others
        self.subscribers: dict[int, Subscriber] = {}
        self._products: dict[tuple[int, int], _Product] = {}
        self._skips: dict[tuple[int, int], Skipped] = {}  # of the run, by where they begin

    # -- where it stands --------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Whether all of its run has been delivered, the last batch with all its row groups."""
        if self.error is not None or self.front < self.num_steps:
            return False
        return all(p.whole for (run, _), p in self._products.items() if run == self.run)

    @property
    def live(self) -> list[Subscriber]:
        """Those who want batches."""
        return [f for f in self.subscribers.values() if f.active]

    @property
    def leased(self) -> bool:
        """Whether a subscriber holds anything."""
        return any(f.held for f in self.subscribers.values())

    def begin(self, run: int, epoch: int, step: int, order: Positions) -> None:
        """The stream has been told to deliver from here on."""
        self.run, self.epoch, self.order, self.error = run, epoch, order, None
        self.stuck, self.asked, self.served = False, 0, 0
        self._skips.clear()
        self.first = self.front = step

    def can_join(self, epoch: int, step: int, stride: int) -> bool:
        """Whether a subscriber could be served from there on: nothing of it has gone."""
        ends = self.closing or self.stuck or self.error is not None
        if ends or (epoch, stride) != (self.epoch, self.order.stride):
            return False
        rank, every = step % self.world, stride * self.world
        off = (step // self.world - self.first // self.world) % stride
        if rank not in self.order.ranks or off or not self.first <= step < self.front + every:
            return False
        ahead = range(step, min(self.front, self.num_steps), every)
        found = (self._products.get((self.run, s)) for s in ahead)
        return all(p is not None and p.untouched for p in found)

    def has_room(self, rank: int = 0) -> bool:
        """Whether one more can follow.

        Not where batches come in parts: who holds the first part of one that it is not done with
        keeps the next from everybody, who cannot begin that batch anew elsewhere.  Each rank of a
        job has another batch: with fewer at a time than ranks, they would wait for each other.
        """
        ranks = {rank, *(f.rank for f in self.subscribers.values())}
        several = len(ranks) == 1 or self.depth > len(ranks)
        return several and not self.closing and not self.stuck and not self.in_parts

    @property
    def may_end(self) -> bool:
        """Whether another one of its kind may have its memory, where there is none for both."""
        unused = not self.live and not self.leased
        return not self.closing and (unused or self.served - self.asked >= TURN)

    def credit(self) -> int:
        """Batches that each subscriber may hold."""
        if len(self.subscribers) < 2:
            return self.depth
        return max(1, self.depth // (len(self.subscribers) + 1))

    def narrow(self) -> tuple[int, ...]:
        """Whose batches are built from now on, if nobody wants those of other ranks; (): no change.

        What is on its way for these still comes.
        """
        along = {f.rank for f in self.subscribers.values() if f.active or f.expected}
        ranks = tuple(rank for rank in self.order.ranks if rank in along)
        if not ranks or ranks == self.order.ranks:
            return ()
        self.order = self.order._replace(ranks=ranks)
        self.front = self.order.from_here(self.front)
        return ranks

    # -- subscribers ------------------------------------------------------------------------------

    def add(self, number: int, window: int, rank: int = 0) -> None:
        """A session that has not begun; what it will want is kept where that can be."""
        subscriber = self.subscribers[number] = Subscriber(number, window, rank)
        first = self.first // self.world * self.world + rank
        subscriber.expected = self.run == 0 or self.can_join(self.epoch, first, self.order.stride)

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """Whose batches a run of one of its subscribers is to have: of all that are to go along."""
        along = [f for f in self.subscribers.values() if f.active or f.expected]
        return tuple(sorted({f.rank for f in [*along, self.subscribers[number]]}))

    def subscribe(self, number: int, run: int, step: int, stride: int) -> list[Lease]:
        """A subscriber begins at a step that `can_join` has found; returns what nobody wants now.

        run   the client's
        """
        subscriber = self.subscribers[number]
        assert not subscriber.held
        subscriber.run, subscriber.stream_run, subscriber.next = run, self.run, step
        subscriber.stride, subscriber.active, subscriber.expected = stride * self.world, True, False
        for (stream_run, at), product in self._products.items():
            if stream_run == self.run and at >= step and (at - step) % self.world == 0:
                for left in product.left:
                    if left is not None:
                        left.add(number)
        return self._forget(number, lambda key: key[0] != self.run or key[1] < step)

    def drop(self, number: int) -> list[Lease]:
        """A subscriber wants nothing and holds nothing any more, but stays."""
        subscriber = self.subscribers[number]
        subscriber.active = subscriber.expected = False
        subscriber.held.clear()
        return self._forget(number, lambda _key: True)

    def expect(self, number: int) -> None:
        """It will follow the next run from its first step on."""
        self.subscribers[number].expected = True

    def remove(self, number: int) -> list[Lease]:
        """A subscriber has gone."""
        freed = self.drop(number)
        del self.subscribers[number]
        return freed

    def last(self) -> Subscriber | None:
        """Who is furthest behind of those who want more than the stream has delivered so far.

        None where nobody is behind another one.
        """

        def place(f: Subscriber) -> tuple[int, int]:
            return (f.stream_run, f.next - f.stride * len(f.held)) if f.active else (-1, -1)

        waiting = [f for f in self.subscribers.values() if f.active or f.expected]
        if len(waiting) < 2:
            return None
        slowest = min(waiting, key=place)
        return slowest if place(slowest) < max(map(place, waiting)) else None

    @property
    def starved(self) -> bool:
        """Whether one has released all that the stream has delivered, and waits for more."""
        return bool(self.hungry)

    @property
    def hungry(self) -> list[Subscriber]:
        """Those who have released all that the stream has delivered, and wait for more."""
        if self.front >= self.num_steps or self.error is not None:
            return []
        return [f for f in self.live if self._is_hungry(f)]

    def _is_hungry(self, f: Subscriber) -> bool:
        return f.stream_run == self.run and f.next >= self.front and not f.held

    @property
    def blocked(self) -> bool:
        """Whether some who have left it still hold what they were sent."""
        return any(f.held and not f.active for f in self.subscribers.values())

    def leave(self, number: int) -> list[Lease]:
        """One that is too far behind wants nothing more of it, and keeps what it was sent."""
        subscriber = self.subscribers[number]
        subscriber.active = subscriber.expected = False
        held = {(stream_run, step) for step, stream_run in subscriber.held.items()}
        return self._forget(number, lambda key: key not in held)

    # -- batches ----------------------------------------------------------------------------------

    def arrive(self, piece: Piece) -> tuple[list[Sent], list[Lease]]:
        """The stream has delivered a row group; returns what is sent, and what nobody wants."""
        key = piece.run, piece.step
        further = isinstance(piece, RowGroup)
        product = self._products.setdefault(key, _Product())
        if further:
            wanted = {n for n, f in self.subscribers.items() if f.held.get(piece.step) == piece.run}
        else:
            wanted = {n for n, f in self.subscribers.items() if self._wants(f, *key)}
            if piece.run == self.run:  # not one that was on its way when another run began
                self.front = max(self.front, self.order.after(piece.step))
                self.served += 1
        product.pieces.append(piece)
        product.left.append(set(wanted))
        product.whole = _last(piece)
        self.in_parts |= not product.whole
        if not wanted:  # where nobody wants anything it stays: the stream comes to a stop by itself
            heard = any(f.active or f.expected for f in self.subscribers.values())
            return [], self._free(key, len(product.left) - 1) if heard else []
        if further:
            return [self._to(self.subscribers[n], piece) for n in sorted(wanted)], []
        return self.due(), []

    def skip(self, message: Skipped) -> list[Sent]:
        """The stream leaves out steps; subscribers are told where they come to them."""
        self.front = max(self.front, message.to)
        self._skips[message.run, message.step] = message
        return self.due()

    def fail(self, message: ErrorReply) -> list[Sent]:
        """Nothing more comes of the run; subscribers are told after what has been delivered."""
        self.error = message
        return self.due()

    def take_over(self, old: "Stream", run: int) -> Start | None:
        """Go on in the place of a stream of which nothing is leased; where from, if that is wanted.

        run   of the command that follows

        Subscribers that still want batches of an earlier run stay behind: this stream does not have
        them, and begins in another epoch.
        """
        self.subscribers = {
            n: f for n, f in old.subscribers.items() if not f.active or f.stream_run == old.run
        }
        for f in self.subscribers.values():
            f.stream_run = run if f.active else -1
        if not (live := self.live):
            return None
        ranks = tuple(sorted({f.rank for f in self.subscribers.values()}))
        self.begin(run, old.epoch, min(f.next for f in live), old.order._replace(ranks=ranks))
        return Start(
            session=self.number, run=run, epoch=self.epoch, step=self.first,
            stride=self.order.stride,
        )  # fmt: skip

    def due(self) -> list[Sent]:
        """All that can be sent now."""
        if self.closing:
            return []
        credit = self.credit()
        return [sent for f in self.live for sent in self._send(f, credit)]

    def _send(self, f: Subscriber, credit: int) -> Iterator[Sent]:
        while f.active and len(f.held) < min(credit, f.window):
            if (skip := self._skips.get((f.stream_run, f.next))) is not None:
                f.next = skip.to
                yield Sent(f.number, _numbered(skip, f, self.world))
                continue
            product = self._products.get((f.stream_run, f.next))
            if product is None:
                break
            f.held[f.next] = f.stream_run
            f.next += f.stride
            for piece in product.pieces:
                yield self._to(f, piece)
        behind = f.stream_run == self.run and f.next < self.front
        if f.active and self.error is not None and f.stream_run == self.run and not behind:
            f.active = False
            yield Sent(f.number, _numbered(self.error, f, self.world))
        elif f.active and f.next >= self.num_steps:
            f.active = False
            f.expected = True

    def release(self, number: int, run: int, step: int, group: int) -> tuple[bool, list[Lease]]:
        """A subscriber is done with a row group; whether with the whole batch, and what is free."""
        f = self.subscribers[number]
        stream_run = f.held.get(step)
        if stream_run is None or run != f.run:
            return False, []
        key = stream_run, step
        product = self._products[key]
        left = product.left[group] if 0 <= group < len(product.left) else None
        if left is None or number not in left:
            return False, []
        left.remove(number)
        whole = product.whole and not any(number in still for still in product.left if still)
        if whole:
            del f.held[step]
        return whole, [] if left else self._free(key, group)

    def holds(self, number: int, step: int) -> bool:
        """Whether a subscriber was sent a batch that it has not released."""
        return number in self.subscribers and step in self.subscribers[number].held

    def _wants(self, f: Subscriber, run: int, step: int) -> bool:
        if step % self.world != f.rank:
            return False
        if f.expected or (self.world > 1 and f.active and f.stream_run < self.run):
            return (
                run == self.run > f.stream_run
            )  # it follows as soon as it is through with the last
        ahead = f.active and run == f.stream_run and step >= f.next
        return ahead and (step - f.next) % f.stride == 0

    def _forget(self, number: int, which: Callable[[tuple[int, int]], bool]) -> list[Lease]:
        """A subscriber needs no more of these batches; returns what nobody needs now."""
        freed = []
        for key in [key for key in self._products if which(key)]:
            for group, left in enumerate(self._products[key].left):
                if left is not None:
                    left.discard(number)
                    if not left:
                        freed += self._free(key, group)
        return freed

    def _free(self, key: tuple[int, int], group: int) -> list[Lease]:
        product = self._products[key]
        product.left[group] = None
        if product.whole and all(left is None for left in product.left):
            del self._products[key]
        return [Lease(*key, group)]

    def _to(self, f: Subscriber, piece: Piece) -> Sent:
        return Sent(f.number, _numbered(piece, f, self.world))


def _last(piece: Piece) -> bool:
    if isinstance(piece, BatchReady):
        return piece.rows.last
    return not isinstance(piece, RowGroup) or piece.last


Numbered = TypeVar("Numbered", bound=BatchReady | ChunkReady | RowGroup | Skipped | ErrorReply)


def _numbered(message: Numbered, f: Subscriber, world: int) -> Numbered:
    """The same for a session: with its number, that of its run, and its step for a position."""
    own = {"session": f.number, "run": f.run, "step": message.step // world}
    if isinstance(message, BatchReady):
        return structs.replace(message, **own, rows=structs.replace(message.rows, **own))
    return structs.replace(message, **own)
