"""Assign sessions to streams: find one for each, move it to another one, take it off."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore import concurrency
from loaderd.api.errors import Refused, SessionLost
from loaderd.api.protocol import (
    Attach,
    Attached,
    BatchReady,
    ChunkReady,
    ErrorReply,
    HomePlacement,
    LedgerEntry,
    Release,
    Resolved,
    SessionStatus,
    Start,
    StoreStatus,
)
from loaderd.memory.guarded import Guarded
from loaderd.memory.ledger import (
    elsewhere_entries,
    is_session_entry,
    requests_entry,
    session_entry_name,
)
from loaderd.monitoring.meter import Meter, add_counts
from loaderd.plans.base import EVERY_RANK
from loaderd.sessions.base import Deliver, Out
from loaderd.sessions.engine import Engine
from loaderd.sessions.stores import Stores
from loaderd.streams.stream import Cursor, Stream


class StreamKey(NamedTuple):
    """What sessions must have in common to share a stream."""

    resolved: Resolved
    rank: int  # or EVERY_RANK: a stream serves all ranks of a job
    world_size: int
    plan: str
    alone: int  # number of a session that shares with nobody, else 0
    owners: str = ""  # digest of the owner map that batches name owners by
    home: HomePlacement | None = None  # seeds by that map, instead of by ranges

    @property
    def world(self) -> int:
        return self.world_size if self.rank == EVERY_RANK else 1

    @property
    def splits(self) -> bool:
        """Whether its sessions are owners that want the same batch at the same time."""
        return self.owners != "" and self.home is None

    @property
    def in_step(self) -> bool:
        """Whether its sessions are those of one job: trainers that wait for each other's steps."""
        return self.world > 1 or self.owners != ""


class StreamRequest(NamedTuple):
    """The parameters that a group's streams are opened with."""

    engine: Engine
    request: Attach
    ids: NDArray[np.int64] | None
    minimum: int  # slots, without which none is opened
    again: bool  # whether another stream can be opened: the ids are kept
    epoch: int = 0  # one that it must serve
    alike: int = 1  # streams that keep rows for one another, as `SessionRequest` says
    crowded: bool = False  # likewise

    @property
    def kind(self) -> Hashable:
        """Key that streams share if they keep the same rows in memory."""
        request = self.request
        return self.engine, request.plan, request.rows, request.edge_features


@dataclass(slots=True)
class StreamGroup:
    """Sessions of equal parameters, and the streams that they may read."""

    key: StreamKey
    order: StreamRequest
    attached: Attached  # of the first stream; num_steps is one rank's
    streams: list[Stream] = field(default_factory=list)
    cursors: dict[int, Cursor] = field(default_factory=dict)  # of all its sessions, by number


class StreamRegistry:
    """Callers hold `lock`, that of the daemon's sessions; methods for clients take it."""

    def __init__(
        self,
        stores: Stores,
        deliver: Deliver,
        want: Callable[[Cursor], None],
        ended: Callable[[], None],
    ) -> None:
        """`deliver` sends a message to a client.

        want    has a stream opened for a session that none serves
        ended   is called when a stream has ended
        """
        self._stores, self._deliver, self._want, self._ended = stores, deliver, want, ended
        self.lock = stores.lock
        self._sessions: Guarded[dict[int, tuple[Cursor, StreamGroup]]] = Guarded({}, self.lock)
        self._groups: Guarded[dict[StreamKey, StreamGroup]] = Guarded({}, self.lock)
        self._streams: Guarded[dict[Stream, StreamGroup]] = Guarded({}, self.lock)
        self.times = Meter().times()  # of sessions that have ended
        self.left_behind = self.reloads = 0
        self.starved = concurrency.Event()  # a stream may have nothing for one of its cursors

    @property
    def sessions(self) -> dict[int, tuple[Cursor, StreamGroup]]:
        """Each session's cursor and its group, by the session's number."""
        return self._sessions()

    @property
    def groups(self) -> dict[StreamKey, StreamGroup]:
        return self._groups()

    @property
    def streams(self) -> dict[Stream, StreamGroup]:
        """All streams that have not ended, also those that nobody may join any more."""
        return self._streams()

    # -- what clients ask -------------------------------------------------------------------------

    def detach(self, session: int) -> None:
        """Close a session, and free the batches that it holds."""
        with self.lock:
            if session not in self.sessions:
                return
            cursor, group = self.sessions[session]
            cursor.meter.end()
            add_counts(self.times, cursor.meter.times())
            self.give_back(cursor)
            del self.sessions[session], group.cursors[session]
            self.move(cursor, None)
            self.forget_group(group)

    def start(self, start: Start) -> None:
        """Begin a run, and take back the session's batches.  Raises SessionLost, Refused."""
        with self.lock:
            if start.session not in self.sessions:
                raise SessionLost(f"session {start.session} is not open")
            cursor, group = self.sessions[start.session]
            if start.run <= cursor.run:
                return
            macro = group.key.resolved.macro
            if macro is not None and macro.waiting and start.stride > 1:
                raise Refused("reuse while waiting: expected no DataLoader workers beside the one")
            self.give_back(cursor)
            cursor.consecutive = cursor.run >= 0 and start.epoch == cursor.epoch + 1
            cursor.run, cursor.epoch, cursor.stride = start.run, start.epoch, start.stride
            cursor.step, cursor.active = start.step * cursor.world + cursor.rank, True
            cursor.avoids = None
            steps = group.attached.num_steps
            cursor.meter.begin(len(range(start.step, steps, start.stride)))
            self.find_place(cursor)

    def release(self, release: Release) -> None:
        with self.lock:
            cursor, _ = self.sessions.get(release.session, (None, None))
            if cursor is None or release.run != cursor.run:
                return
            batch = cursor.held.get(release.step * cursor.world + cursor.rank)
            if batch is not None:
                if batch.stream.release(cursor, batch, release.group):
                    cursor.batches += 1
                    cursor.meter.released()
                batch.stream.send()
                self.tidy(batch.stream)
                self._place_waiting(batch.stream)
            if cursor.active and cursor.stream is None and not cursor.waits:
                self.find_place(cursor)  # it fell behind, and is alive

    # -- streams ----------------------------------------------------------------------------------

    def put_up(self, group: StreamGroup, stream: Stream) -> None:
        self.streams[stream] = group
        group.streams.append(stream)
        if stream.world > 1:
            stream.job = group.cursors

    def end(self, stream: Stream) -> None:
        """End a stream that has nothing leased; its cursors have to find another one."""
        group = self.streams.pop(stream)
        if stream in group.streams:
            group.streams.remove(stream)
        for cursor in list(stream.cursors.values()):
            stream.remove(cursor)
        group.order.engine.close_session(stream.session)
        stream.ring.clear()  # batches that were begun refer to the stream
        self.forget_group(group)
        self._ended()

    def tidy(self, stream: Stream) -> None:
        """End a stream that nobody reads, once all that is leased of it has been released."""
        if stream in self.streams and not stream.cursors:
            group = self.streams[stream]
            # ranks that were moved off it come back, if there is no memory for another one
            if stream in group.streams and not stream.job:
                group.streams.remove(stream)
            if not stream.leased:
                self.end(stream)

    def forget_group(self, group: StreamGroup) -> None:
        """Drop a group that has neither sessions nor streams."""
        if not group.cursors and group not in self.streams.values():
            self.groups.pop(group.key, None)

    def fair_share(self, opening: StreamKey | None = None) -> int:
        """Slots for each stream, one to be opened included; halved when their number doubles.

        opening   of the group that gets one more stream; None: none is opened

        0: all slots.
        """
        with self.lock:
            num = len(self.streams) + len(self.without_stream(opening)) + (opening is not None)
        return 0 if num < 2 else self._stores.arena.num_slots >> (num - 1).bit_length()

    def without_stream(self, other_than: StreamKey | None = None) -> list[StreamGroup]:
        """Groups whose sessions have to get a stream, because their last one has ended."""
        return [
            group
            for key, group in self.groups.items()
            if group.cursors and not group.streams and key != other_than
        ]

    def is_busy(self, engine: Engine) -> bool:
        with self.lock:
            return any(group.order.engine is engine for group in self.groups.values())

    def unserved(self) -> int:
        """Slots needed by groups that have no stream, and will have to get one."""
        with self.lock:
            return sum(group.order.minimum for group in self.without_stream())

    # -- a session and its stream -----------------------------------------------------------------

    def admit(self, cursor: Cursor, group: StreamGroup, stream: Stream) -> None:
        """Add a new session to a stream, which may be new as well."""
        if stream not in self.streams:
            self.put_up(group, stream)
        self.sessions[cursor.number] = cursor, group
        group.cursors[cursor.number] = cursor
        stream.add(cursor)

    def find_place(self, cursor: Cursor) -> None:
        """Have a session served from its step on, by an existing stream or a new one."""
        if not self.place(cursor):
            self.move(cursor, None)
            self._want(cursor)

    def place(self, cursor: Cursor) -> bool:
        """Have a session served by an existing stream; False: none can.

        First choice is a stream that has, or soon builds, what it wants, then one that nobody
        wants more of; a rank ahead of its job waits at one that the others soon want no more of.
        """
        old = cursor.stream
        found = self._place(cursor)
        if found and old is not None and old is not cursor.stream:
            self._place_waiting(old)  # only now: they might have begun what this one was to
        return found

    def _place(self, cursor: Cursor) -> bool:
        fair, near = self.fair_share(), self._near(cursor)
        enough = [s for s in near if not s.share.slots or 0 < fair < 2 * s.share.slots]
        for stream in near:
            # an epoch begun ahead, in less memory than there is now, begins again in more
            ahead = cursor.expected is not None and len(stream.cursors) == 1
            if stream.can_join(cursor) and (stream in enough or not ahead):
                self.move(cursor, stream)
                stream.join(cursor)
                return True
        for stream in near:
            others = any(c is not cursor for c in stream.live)
            here, large = stream is cursor.stream or not others, stream in enough
            # a rank without a stream may need memory that the others hold until it has its batch
            large |= stream.world > 1 and len(self.streams[stream].streams) > 1
            if here and large and stream.can_begin(cursor):
                self.move(cursor, stream)
                self._gather(stream)
                stream.begin(cursor)
                for rank in [c for c in stream.job.values() if c.waits]:
                    self.place(rank)  # it may have asked for this run before
                self._place_waiting(stream)
                return True
        for stream in near:
            if stream.can_wait(cursor):
                self.move(cursor, stream)
                stream.drop(cursor)  # it may have been expected to come along with this run
                stream.send()
                return True
        return False

    def _place_waiting(self, stream: Stream) -> None:
        """Let ranks that wait for the next epoch begin it, if the others now leave them room."""
        for cursor in stream.waiting:
            due = stream.can_begin(cursor) or not stream.can_wait(cursor)
            if due and cursor in stream.waiting:  # one that was placed may have placed others
                self.find_place(cursor)

    def _near(self, cursor: Cursor) -> list[Stream]:
        """Streams that it may read, its own first; for a job, those that most ranks read first."""
        group = self.sessions[cursor.number][1]
        at, number = cursor.stream, cursor.number
        found = [s for s in group.streams if s is at or s.has_room(cursor.rank, number)]
        found = [s for s in found if s is not cursor.avoids and not s.closing]

        def rank(stream: Stream) -> tuple[int, bool]:
            others = len(stream.cursors.keys() - {cursor.number})
            return (-others if stream.world > 1 else 0), stream is not cursor.stream

        return sorted(found, key=rank)

    def _gather(self, stream: Stream) -> None:
        """Move idle ranks of the job to this stream, so that they join its next run."""
        for rank in [c for c in stream.job.values() if c.stream is not stream]:
            at = rank.stream
            rests = not rank.active and (at is None or not (at.closing or at.live or at.leased))
            if rests and stream.has_room(rank.rank, rank.number):
                self.move(rank, stream)

    def move(self, cursor: Cursor, stream: Stream | None) -> None:
        if (old := cursor.stream) is stream:
            return
        if old is not None:
            old.remove(cursor)
        if stream is not None:
            stream.add(cursor)
            cursor.waits = False
        if old is not None:
            old.send()
            self.tidy(old)
            if stream is None:
                self._place_waiting(old)

    def leave(self, cursor: Cursor, stream: Stream) -> None:
        """Stop waiting for a session.  If it has begun, it gets a stream when heard of again."""
        if cursor.place is None:
            stream.drop(cursor)  # it has not begun
            cursor.rests = True
        else:
            self.left_behind += 1
            self.move(cursor, None)
        stream.send()

    def give_back(self, cursor: Cursor) -> None:
        """Drop all that a session wants and holds; it stays at its stream."""
        cursor.active = False
        if cursor.stream is not None:
            cursor.stream.stop(cursor)
        for batch in list(cursor.held.values()):
            batch.stream.give_back(cursor, batch)
            if batch.stream is not cursor.stream:
                self.tidy(batch.stream)
                self._place_waiting(batch.stream)

    def send(self, cursor: Cursor, message: Out) -> None:
        if isinstance(message, BatchReady):
            edges = sum(map(sum, message.edges_per_hop))
            cursor.meter.handed(sum(message.nodes_per_hop), edges)
        elif isinstance(message, ChunkReady):
            cursor.meter.handed(message.num_rows)
        elif isinstance(message, ErrorReply):
            cursor.meter.end()
        self._deliver(cursor.number, message)

    # -- status -----------------------------------------------------------------------------------

    def status(self) -> tuple[tuple[LedgerEntry, ...], tuple[SessionStatus, ...], dict[str, int]]:
        """Ledger, sessions and counters as they are now."""
        ledger: list[LedgerEntry] = []
        counters: dict[str, int] = {}
        engines = self._stores.all()
        for engine in engines:
            entries, _, counts = engine.status()
            name = f"{self._stores.name_of(engine)}: " if len(engines) > 1 else ""
            ledger += [
                e if is_session_entry(e) else structs.replace(e, name=name + e.name)
                for e in entries
            ]
            add_counts(counters, counts)
        ledger.append(requests_entry(self._stores.settings))
        ledger += self._stores.reserve_entries()
        ledger += elsewhere_entries(self._stores.settings)
        with self.lock:
            times = dict(self.times)
            for session, _ in self.sessions.values():
                add_counts(times, session.meter.times())
            counters |= times
            counters["streams"] = len(self.streams)
            counters["sessions_left_behind"] = self.left_behind
            counters["reloads"] = self.reloads
            names = {
                session_entry_name([stream.session.number]): session_entry_name(
                    sorted(stream.cursors)
                )
                for stream in self.streams
            }
            named = tuple(structs.replace(e, name=names.get(e.name, e.name)) for e in ledger)
            statuses = tuple(self._session_status(*s) for s in self.sessions.values())
        return named, statuses, counters

    def stores(self) -> tuple[StoreStatus, ...]:
        """Stores that are served, and retired ones that sessions still use."""
        with self.lock:
            used = [group.order.engine for _, group in self.sessions.values()]
        retired = self._stores.retired
        return tuple(
            StoreStatus(
                name=self._stores.name_of(e), path=utf8_text(e.store.where),
                fingerprint=e.store.manifest.fingerprint, io_mode=e.reader.mode,
                sessions=used.count(e), retired=e in retired,
            )
            for e in self._stores.all()
        )  # fmt: skip

    def _session_status(self, cursor: Cursor, group: StreamGroup) -> SessionStatus:
        attached, stream, times = group.attached, cursor.stream, cursor.meter.times()
        held = 0 if stream is None else stream.session.held_bytes() // len(stream.cursors)
        return SessionStatus(
            session=cursor.number,
            plan=attached.plan if stream is None else stream.session.plan,
            seeds=attached.resolved.seeds,
            epoch=cursor.epoch,
            step=min(cursor.step // cursor.world, attached.num_steps),
            num_steps=attached.num_steps,
            in_flight=len(cursor.held),
            window=cursor.window,
            batches=cursor.batches,
            rows=cursor.meter.rows,
            edges=cursor.meter.edges,
            held_bytes=held,
            store=self._stores.name_of(group.order.engine),
            ready_ns=times["ready_ns"],
            starved_ns=times["starved_ns"],
        )


def utf8_text(text: str) -> str:
    """Text that can be encoded: file names may hold bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
