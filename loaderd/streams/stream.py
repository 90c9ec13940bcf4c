"""A shared stream: one producer, a ring of batches, and a cursor for each session that reads it.

The producer is a session of the engine.  It asks the stream which batch is wanted next, and the
stream asks its cursors: the earliest position that one of them wants and that is not in the ring.
So each batch is built once, and stays until every cursor that wants it has released it.

A stream may serve every rank of a job, and the workers of a DataLoader.  It then counts positions,
`step * world + rank`, and a cursor goes from one position of its rank to the next.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from blockstore import concurrency
from loaderd.api.protocol import ErrorReply, Release, Skipped
from loaderd.monitoring.meter import Meter
from loaderd.plans.base import Wanted
from loaderd.sessions.base import EngineSession, Out
from loaderd.streams.pieces import ANY_SHARE, CursorPosition, Piece, StreamShare, is_last, numbered

AGAIN = 2  # batches built again for a late cursor: at most so many times its depth


@dataclass(slots=True, eq=False)
class RingBatch:
    """A batch in the ring of a stream: it is being built, or has been delivered."""

    stream: "Stream"
    run: int
    step: int
    wanted: set[int]  # numbers of the cursors that want it, or have not released it yet
    pieces: list[Piece] = field(default_factory=list)  # by row group
    left: list[set[int]] = field(default_factory=list)  # cursors that need each; empty: it is free
    whole: bool = False  # its last row group is there
    sent: list["Cursor"] = field(default_factory=list)  # cursors it was sent to

    @property
    def is_held(self) -> bool:
        return any(cursor.held.get(self.step) is self for cursor in self.sent)


@dataclass(slots=True, eq=False)
class Cursor:
    """One session as its client knows it: what it wants, and what it was sent."""

    number: int
    rank: int  # among those that its stream serves
    window: int  # batches that it may hold, at most
    world: int = 1  # ranks that a stream serves
    stream: "Stream | None" = None  # None: it has to find one
    run: int = -1  # the client's number of it
    epoch: int = 0
    step: int = 0  # position that it wants next
    stride: int = 1  # between two steps
    consecutive: bool = False  # its run is of the epoch after that of its last run
    active: bool = False  # its run has batches to come
    place: CursorPosition | None = None  # in its stream, while it has asked for more
    expected: CursorPosition | None = None  # in a newer run that it has not asked for yet
    rests: bool = False  # it did not come in time: it is not expected before it joins
    held: dict[int, RingBatch] = field(default_factory=dict)  # by position: sent, not released
    waits: bool = False  # a stream is to be opened for it
    avoids: "Stream | None" = None  # stream that had nothing for it, while another is opened
    batches: int = 0
    meter: Meter = field(default_factory=Meter)

    @property
    def places(self) -> list[CursorPosition]:
        return [place for place in (self.place, self.expected) if place is not None]

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and position that it wants next, or will want when it begins another run."""
        if self.active:
            return self.epoch, self.step
        return (self.epoch + 1, 0) if self.run >= 0 else (-1, 0)


class Stream:
    """The consumer of its engine session.  Called under the lock of the daemon's sessions."""

    def __init__(
        self,
        session: EngineSession,
        num_steps: int,
        send: Callable[[Cursor, Out], None],
        starved: concurrency.Event,
        share: StreamShare = ANY_SHARE,
        world: int = 1,
    ) -> None:
        """`num_steps`: of an epoch, in positions.

        send    sends a message to the client of a cursor
        starved set when one of its cursors waits for more
        share   of the arena, that it was opened with
        world   ranks that it serves
        """
        self.session, self.num_steps, self.share, self.world = session, num_steps, share, world
        self._send_to, self._starved = send, starved
        self.run, self.epoch = 0, -1  # the newest run
        self.first = self.front = 0  # its first position; the front is after the last requested one
        self.error: ErrorReply | None = None
        self.served = self.asked = 0  # batches of its run; their number when last ended for others
        self.closing = False  # nothing more is sent: it ends when nothing is leased
        self.stuck = False  # cursors that have left it hold all that it can lease
        self.in_parts = False  # one of its batches did not fit as a whole
        self.leased = 0  # batches that cursors hold, counted for each cursor
        self.releases = 0  # received from cursors so far, one for each row group
        self.cursors: dict[int, Cursor] = {}  # by number
        self.job: dict[int, Cursor] = {}  # all sessions of a job whose ranks read this, by number
        self.ring: dict[tuple[int, int], RingBatch] = {}
        self._skips: dict[tuple[int, int], Skipped] = {}

    # -- what its session asks --------------------------------------------------------------------

    def next(self) -> Wanted | None:
        """The earliest position that a cursor wants, and that is not in the ring."""
        if self.closing or self.error is not None:
            return None
        # `ask` only moves over batches whose `wanted` has this cursor, so that the search begins
        # where it ended; `ask_again` moves it back
        found: list[tuple[int, int]] = []
        for cursor, place in self._places():
            # batches built ahead for a cursor that has not come must leave room for the others
            built = sum(cursor.number in batch.wanted for batch in self.ring.values())
            if place is cursor.expected and len(self.cursors) > 1 and built >= self._credit():
                continue
            batch = self.ring.get((place.run, place.ask))
            while batch is not None and cursor.number in batch.wanted:
                place.ask += place.stride
                batch = self.ring.get((place.run, place.ask))
            # a batch whose `wanted` lacks the cursor has to go before it is built again
            if batch is None and place.ask < self.num_steps:
                found.append((place.run, place.ask))
        if not found:
            return self.next() if self._begin_ahead() else None
        run, step = min(found)
        wanted = {c.number for c in self.cursors.values() if self._wants(c, run, step)}
        self.ring[run, step] = RingBatch(self, run, step, wanted)
        if run == self.run:
            self.front = max(self.front, step + 1)
        epochs = (c.epoch for c in self.live if c.place is not None and c.place.run == run)
        return Wanted(run, self.epoch if run == self.run else next(epochs), step)

    def _begin_ahead(self) -> bool:
        """Begin the next epoch if the only cursor has come for this one, and asked for all of it.

        So the first batches are there when it comes again, maybe after a validation; they are
        dropped if it begins another epoch instead.  Ranks of a job begin epochs together.
        """
        if self.world > 1 or len(self.cursors) != 1 or not self.session.serves(self.epoch + 1):
            return False
        [cursor] = self.cursors.values()
        asked = cursor.step if cursor.place is None else cursor.place.ask
        here = cursor.epoch == self.epoch and not cursor.rests and cursor not in self.waiting
        if not (here and cursor.consecutive and asked >= self.num_steps) or cursor.expected:
            return False
        self._begin_run(self.epoch + 1, 0, cursor.stride)
        return True

    def put_back(self, wanted: Wanted) -> None:
        self.ask_again(self.ring.pop((wanted.run, wanted.step)))

    def ask_again(self, batch: RingBatch) -> None:
        """Have a batch built, again or at last, for the cursors that want it."""
        for cursor, place in self._places():
            if cursor.number in batch.wanted and place.wants(batch.run, batch.step):
                place.ask = min(place.ask, batch.step)

    def deliver(self, message: Out) -> None:
        """Take what the session delivers: a row group, steps left out, or its last error."""
        if isinstance(message, Skipped):
            self._skip(message)
        elif isinstance(message, ErrorReply):
            self.error = message
        else:
            self._arrive(message)
        self.send()

    def _arrive(self, piece: Piece) -> None:
        batch = self.ring.get((piece.run, piece.step))
        if batch is None:
            return
        batch.pieces.append(piece)
        batch.left.append(set(batch.wanted))
        batch.whole = is_last(piece)
        self.in_parts |= not batch.whole
        self.served += batch.whole
        if not batch.wanted:
            self._free(batch, len(batch.left) - 1)
            return
        if len(batch.pieces) > 1:
            for cursor in [c for c in batch.sent if c.held.get(batch.step) is batch]:
                self._send_to(cursor, numbered(piece, cursor.number, cursor.run, self.world))

    def _skip(self, message: Skipped) -> None:
        """Leave out steps.  The stream has one cursor: such streams are not shared."""
        self.ring.pop((message.run, message.step), None)
        self._skips[message.run, message.step] = message
        for _, place in self._places():
            if place.run == message.run:
                place.ask = message.to

    # -- who reads it -----------------------------------------------------------------------------

    @property
    def live(self) -> list[Cursor]:
        """Cursors that have asked for batches that they were not sent yet."""
        return [c for c in self.cursors.values() if c.place is not None]

    @property
    def depth(self) -> int:
        return max(1, self.session.depth)

    def has_room(self, rank: int = 0, number: int = 0) -> bool:
        """Whether one more cursor can read it: of a rank, maybe of a session that comes back.

        Not if batches come in parts: a cursor that still holds the first part of one keeps the next
        from all others, and they cannot begin that batch again elsewhere.  Each rank of a job has
        another batch: with fewer at a time than ranks, they would wait for each other.
        """
        ranks = {rank, *(c.rank for c in self.cursors.values())}
        minimum = 1 if number in self.job else len(ranks)
        several = len(ranks) == 1 or self.depth > minimum
        return several and not self.closing and not self.stuck and not self.in_parts

    def can_join(self, cursor: Cursor) -> bool:
        """Whether the batches that a cursor wants next are in the ring, or soon will be.

        Batches that have left the ring are built again, if few others are being built.
        """
        if not self._goes_on or cursor.epoch != self.epoch or self._would_wait(cursor):
            return False
        place, depth = self._position(cursor.step, cursor.stride), self.depth
        found = [b for b in self.ring.values() if place.wants(b.run, b.step)]
        is_free = not all(all(b.left) for b in found)  # a row group was freed
        if is_free or cursor.step > self.front + depth * place.stride:
            return False
        if self.world > 1 and not self._is_shared(cursor):
            return True  # nobody had what it lacks: it is built for the first time
        missing = len(range(cursor.step, self.front, place.stride)) - len(found)
        begun = 0 if self.world > 1 else sum(not b.pieces for b in self.ring.values())
        return missing <= 0 or (missing <= AGAIN * depth and begun <= depth)

    def _is_shared(self, cursor: Cursor) -> bool:
        """Whether another job reads it: some session wants batches that this one wants.

        Workers of a loader share none: they take the steps of a rank in turn.
        """
        stride = cursor.stride * self.world
        others = (c.place for c in self.live if c is not cursor)
        return any((p.next - cursor.step) % math.gcd(p.stride, stride) == 0 for p in others if p)

    @property
    def _goes_on(self) -> bool:
        """Whether it still builds batches for its cursors."""
        return not self.closing and not self.stuck and self.error is None

    def _would_wait(self, cursor: Cursor) -> bool:
        """Whether ranks ahead of a rank of another stream may hold the memory that it needs."""
        if self.world == 1 or cursor.stream in (None, self):
            return False
        return any(b.is_held and b.step > cursor.step for b in self.ring.values())

    def join(self, cursor: Cursor) -> None:
        """Let a cursor read on in the newest run; the caller has checked `can_join`."""
        place, ahead = self._position(cursor.step, cursor.stride), cursor.expected
        if ahead is not None and replace(ahead, ask=place.ask) == place:
            place = ahead  # steps that were left out are not asked for again
        cursor.place, cursor.expected, cursor.rests = place, None, False
        for batch in list(self.ring.values()):
            if cursor.place.wants(batch.run, batch.step):
                batch.wanted.add(cursor.number)
                for left in batch.left:
                    left.add(cursor.number)
            else:
                self.forget(cursor, batch)
        self._settle(cursor)
        self.send()
        self.session.wake()

    def can_begin(self, cursor: Cursor) -> bool:
        """Whether a cursor can begin another run: nobody else asks for more of this one."""
        is_free = not self.leased and not any(c is not cursor for c in self.live)
        return self.session.serves(cursor.epoch) and (is_free or self._can_follow(cursor))

    def _can_follow(self, cursor: Cursor) -> bool:
        """Whether the ring has all that others still want of this run, and nothing unwanted."""
        if not self.run or not self._goes_on:
            return False
        if self.world > 1 and len(self.ring) >= self.depth:
            return False  # it would wait for ranks that wait for it, in the step that they are at
        over = all(
            (place.run, step) in self.ring
            for place in [c.place for c in self.live if c is not cursor and c.place is not None]
            for step in range(max(place.next, place.ask), self.num_steps, place.stride)
        )
        return over and all(b.pieces or b.wanted - {cursor.number} for b in self.ring.values())

    def begin(self, cursor: Cursor) -> None:
        """Begin a run at a cursor's position; the other cursors are expected to come along."""
        fresh = not self._can_follow(cursor)
        if fresh:
            self.ring.clear()
            self._skips.clear()
            self.error = None
        self._begin_run(cursor.epoch, cursor.step // self.world * self.world, cursor.stride)
        cursor.place, cursor.expected = self._position(cursor.step, cursor.stride), None
        self._settle(cursor)
        # last, as the session asks for the next batch when one has gone: forget batches that
        # cursors were expected to want, in a run that they have not come along with
        for batch in list(self.ring.values()):
            for other in list(self.cursors.values()):
                if not self._wants(other, batch.run, batch.step):
                    self.forget(other, batch)
        if fresh:
            self.session.start(self.run, self)
        else:
            self.session.wake()
        self.send()

    def _begin_run(self, epoch: int, first: int, stride: int) -> None:
        """Number a run, and expect all cursors to come along with it."""
        self.run += 1
        self.stuck, self.asked, self.served = False, 0, 0
        self.epoch, self.first, self.front = epoch, first, first
        for cursor in self.cursors.values():
            if cursor not in self.waiting and not cursor.rests:
                cursor.expected = self._position(first + cursor.rank, stride)

    def add(self, cursor: Cursor) -> None:
        """Add a session that has not begun; it is expected to come along with the others."""
        cursor.stream = self
        self.cursors[cursor.number] = cursor
        if self.live and not cursor.rests:
            late = self.front - self.first > self.depth * self.world
            at = self.front if late else self.first
            at += (cursor.rank - at) % self.world
            cursor.expected = self._position(at, 1)

    def drop(self, cursor: Cursor) -> None:
        """Forget all that a cursor wants, except for what it was sent."""
        cursor.expected = None
        self.stop(cursor)

    def stop(self, cursor: Cursor) -> None:
        """End a cursor's run; it still wants what it is expected to ask for next."""
        cursor.place = None
        for batch in list(self.ring.values()):
            if not self._wants(cursor, batch.run, batch.step):
                self.forget(cursor, batch)

    def remove(self, cursor: Cursor) -> None:
        """Remove a cursor; what it was sent stays leased."""
        self.drop(cursor)
        del self.cursors[cursor.number]
        cursor.stream = None

    # -- who is behind ----------------------------------------------------------------------------

    @property
    def idle_cursors(self) -> list[Cursor]:
        """Cursors that have released all that they were sent, and wait for more."""
        if self.error is not None or self.closing:
            return []
        return [c for c in [*self.live, *self.waiting] if not c.held]

    @property
    def waiting(self) -> list[Cursor]:
        """Ranks that want a later epoch: the others of their job are not done with this one."""
        return [c for c in self.cursors.values() if c.active and c.place is None]

    def can_wait(self, cursor: Cursor) -> bool:
        """Whether a rank should wait for its turn here, not take memory for another stream."""
        others = bool(self.leased) or any(c is not cursor for c in self.live)
        later = self.world > 1 and others and cursor.epoch > self.epoch
        return later and self._goes_on and not self._is_shared(cursor)

    # -- batches ----------------------------------------------------------------------------------

    def send(self) -> None:
        if self.closing:
            return
        for cursor in self.live:
            self._send(cursor)
        for cursor in self.waiting if self.error is not None else []:
            self._fail(cursor)  # cursors it waits for may not move again
        if self.idle_cursors:
            self._starved.set()

    def _credit(self) -> int:
        num = len(self.job or self.cursors)
        return max(1, self.depth // (num + 1)) if num > 1 else self.depth

    def ready(self, cursor: Cursor) -> RingBatch | None:
        assert cursor.place is not None
        batch = self.ring.get((cursor.place.run, cursor.place.next))
        # parts of a dropped batch may be there until its last part has come
        mine = batch is not None and batch.pieces and cursor.number in batch.wanted
        return batch if mine else None

    def _send(self, cursor: Cursor) -> None:
        maximum = min(self._credit(), cursor.window)
        while (place := cursor.place) is not None and len(cursor.held) < maximum:
            if (skip := self._skips.pop((place.run, place.next), None)) is not None:
                place.next = skip.to
                self._send_to(cursor, numbered(skip, cursor.number, cursor.run, self.world))
                self._settle(cursor)
                continue
            batch, whole = self.ready(cursor), all(b.whole for b in cursor.held.values())
            if batch is None or not whole or self._is_kept_back(batch, cursor):
                break
            cursor.held[place.next] = batch
            batch.sent.append(cursor)
            self.leased += 1
            place.next += place.stride
            self._settle(cursor)
            for piece in batch.pieces:
                self._send_to(cursor, numbered(piece, cursor.number, cursor.run, self.world))
        if cursor.place is not None and self.error is not None and self.ready(cursor) is None:
            self._fail(cursor)

    def _fail(self, cursor: Cursor) -> None:
        assert self.error is not None
        self.drop(cursor)
        cursor.active = False
        self._send_to(cursor, numbered(self.error, cursor.number, cursor.run, self.world))

    def _is_kept_back(self, batch: RingBatch, cursor: Cursor) -> bool:
        """Whether a batch would take the last place, kept for one of its job that may still come.

        That one is behind: those ahead may wait for it in a step, and release nothing.
        """
        is_last = not batch.is_held and self.leased >= max(1, self.depth - 1)
        here = (c for c in self.job.values() if c.stream in (None, self))
        return is_last and any(c.position < cursor.position for c in here)

    def _settle(self, cursor: Cursor) -> None:
        """Note a cursor's next position; one that was sent its last batch wants nothing more."""
        place = cursor.place
        assert place is not None
        place.ask = max(place.ask, place.next)
        cursor.step = place.next
        if place.next >= self.num_steps:
            cursor.place, cursor.active = None, False

    def release(self, cursor: Cursor, batch: RingBatch, group: int) -> bool:
        """Release a cursor's row group; returns whether it is done with the whole batch."""
        number = cursor.number
        if not 0 <= group < len(batch.left) or number not in batch.left[group]:
            return False
        batch.left[group].remove(number)
        self.releases += 1
        done = batch.whole and not any(number in left for left in batch.left)
        if done:
            del cursor.held[batch.step]
            batch.wanted.discard(number)
            self.leased -= 1
        if not batch.left[group]:
            self._free(batch, group)
        return done

    def give_back(self, cursor: Cursor, batch: RingBatch) -> None:
        """Take back a batch that a cursor was sent and needs no more."""
        del cursor.held[batch.step]
        self.leased -= 1
        self.forget(cursor, batch)

    def forget(self, cursor: Cursor, batch: RingBatch) -> None:
        """Note that a cursor does not want a batch, unless it was sent it."""
        if cursor.held.get(batch.step) is batch:
            return
        batch.wanted.discard(cursor.number)
        for group, left in enumerate(batch.left):
            if cursor.number in left:
                left.remove(cursor.number)
                if not left:
                    self._free(batch, group)

    def _free(self, batch: RingBatch, group: int) -> None:
        gone = batch.whole and not any(batch.left)
        if gone:
            self.ring.pop((batch.run, batch.step), None)
        self.session.release(
            Release(session=self.session.number, run=batch.run, step=batch.step, group=group)
        )
        # A cursor that came late wants this batch again.  `next` could not build it while the ring
        # had it, and said that nothing was wanted: the session does not ask again by itself.
        if gone and any((p.run, p.ask) == (batch.run, batch.step) for _, p in self._places()):
            self.session.wake()

    def _position(self, step: int, stride: int) -> CursorPosition:
        """In the newest run, with nothing asked for yet; `stride`: in steps of a rank."""
        return CursorPosition(self.run, step, stride * self.world, step)

    def _places(self) -> list[tuple[Cursor, CursorPosition]]:
        return [(cursor, p) for cursor in self.cursors.values() for p in cursor.places]

    def _wants(self, cursor: Cursor, run: int, step: int) -> bool:
        return step % self.world == cursor.rank and any(p.wants(run, step) for p in cursor.places)
