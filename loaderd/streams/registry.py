"""Which session is at which stream: bookkeeping of the exchange, under one lock."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore import concurrency
from loaderd.guarded import Guarded
from loaderd.memory.ledger import is_session_entry, requests_entry, session_entry_name
from loaderd.meter import Meter, add_counts
from loaderd.plans.base import EVERY_RANK
from loaderd.protocol import (
    Attach,
    Attached,
    LedgerEntry,
    Release,
    Resolved,
    SessionStatus,
    StoreStatus,
)
from loaderd.sessions.engine import Engine
from loaderd.sessions.stores import Stores
from loaderd.streams.stream import Lease, Stream


class StreamKey(NamedTuple):
    """What sessions must have in common to share a stream."""

    resolved: Resolved
    rank: int  # or EVERY_RANK: a stream serves all ranks of a job
    world_size: int
    plan: str
    alone: int  # number of a session that shares with nobody, else 0

    @property
    def world(self) -> int:
        """Ranks that a stream serves."""
        return self.world_size if self.rank == EVERY_RANK else 1

    @property
    def job(self) -> "StreamKey":
        """What those have in common who share memory: macro-batches are the same for all ranks."""
        return self if self.resolved.macro is None else self._replace(rank=0)


class StreamRequest(NamedTuple):
    """What streams of a group are opened with."""

    engine: Engine
    request: Attach
    ids: NDArray[np.int64] | None
    least: int  # slots: with fewer of them none is opened
    again: bool  # whether the ids are kept, so that another one can be opened


@dataclass(slots=True)
class Group:
    """Sessions of equal parameters, and their streams."""

    key: StreamKey
    order: StreamRequest
    attached: Attached  # of the first stream, in steps
    streams: list[Stream] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        """Where the streams are."""
        return self.order.engine


@dataclass(slots=True, eq=False)
class Subscription:
    """One session as its client knows it."""

    number: int
    key: StreamKey
    rank: int  # of those that its stream serves
    window: int  # batches that it may hold, at most
    stream: Stream | None = None  # None: it has to find one
    left: list[Stream] = field(default_factory=list)  # where it still holds something
    run: int = -1
    epoch: int = 0
    step: int = 0  # that it wants next, where it has no stream; as its stream counts
    stride: int = 1
    wants: bool = False  # a stream, as soon as there is one
    batches: int = 0
    meter: Meter = field(default_factory=Meter)


class StreamRegistry:
    """Sessions, groups of equal parameters, their streams, and the engines that these are at.

    What is to be asked of an engine is returned: it is done with the lock free.
    """

    def __init__(self, stores: Stores, ended: Callable[[], None]) -> None:
        """`ended`: told when a stream has ended."""
        self._stores, self._ended = stores, ended
        self.lock = concurrency.RLock()
        self._sessions: Guarded[dict[int, Subscription]] = Guarded({}, self.lock)
        self._groups: Guarded[dict[StreamKey, Group]] = Guarded({}, self.lock)
        self._lines: Guarded[dict[int, Stream]] = Guarded({}, self.lock)
        self._at: Guarded[dict[int, Engine]] = Guarded({}, self.lock)  # streams -> where they are
        self.times: dict[str, int] = {}  # of sessions that have ended
        self.left_behind = self.reloads = 0

    @property
    def sessions(self) -> dict[int, Subscription]:
        """By number; like the other tables for whoever has the lock."""
        return self._sessions()

    @property
    def groups(self) -> dict[StreamKey, Group]:
        return self._groups()

    @property
    def streams(self) -> dict[int, Stream]:
        return self._lines()

    @property
    def at(self) -> dict[int, Engine]:
        """The engine of each stream."""
        return self._at()

    def fair_share(self, more: StreamKey | None = None) -> int:
        """Slots of each of the streams, and of one `more`; halved when their number doubles.

        Lines of a job's ranks that share macro-batches have one share together.  0: all of them.
        """
        with self.lock:
            streams = Counter(key for key, group in self.groups.items() for _ in group.streams)
        if more is not None:
            streams[more] += 1
        jobs: dict[StreamKey, int] = {}
        for key, count in streams.items():
            jobs[key.job] = max(count, jobs.get(key.job, 0))
        num = sum(jobs.values())
        return 0 if num < 2 else self._stores.arena.num_slots >> (num - 1).bit_length()

    def num_ranks(self) -> dict[int, int]:
        """Of each stream, how many ranks share its memory."""
        keys = [key for key, group in self.groups.items() if group.streams]
        ranks = Counter(key.job for key in keys)
        return {
            stream.number: ranks[key.job] for key in keys for stream in self.groups[key].streams
        }

    def unfinished(self, session: Subscription) -> bool:
        """Whether the run of a session that has no stream has steps to come."""
        steps = self.groups[session.key].attached.num_steps * session.key.world
        return session.step < steps and session.run >= 0

    def put_up(self, group: Group, stream: Stream) -> None:
        self.streams[stream.number], self.at[stream.number] = stream, group.engine
        group.streams.append(stream)

    def take_down(self, group: Group, stream: Stream) -> Callable[[], None]:
        """A stream ends; returns what is to be asked of the engine."""
        group.streams.remove(stream)
        del self.streams[stream.number], self.at[stream.number]
        engine, number = group.engine, stream.number

        def end() -> None:
            engine.detach(number)
            self._ended()

        return end

    def vacate(self, session: Subscription) -> list[Callable[[], None]]:
        """Give up all of a session's places; returns what is to be asked of the engine."""
        todo: list[Callable[[], None]] = []
        for stream in (*session.left, *([session.stream] if session.stream is not None else [])):
            todo += self.releases(stream, stream.remove(session.number)) + self.narrow(stream)
            todo += self.close_if_empty(session.key, stream)
        session.left, session.stream, session.wants = [], None, False
        return todo

    def narrow(self, stream: Stream) -> list[Callable[[], None]]:
        """Batches of ranks of which nobody is left are not built any more."""
        if not (ranks := stream.narrow()):
            return []
        return [partial(self.at[stream.number].narrow, stream.number, stream.run, ranks)]

    def close_if_empty(self, key: StreamKey, stream: Stream) -> list[Callable[[], None]]:
        """End a stream that nobody is at; returns what is to be asked of the engine."""
        if stream.subscribers:
            return []
        group = self.groups[key]
        end = self.take_down(group, stream)
        self.forget_group(key)
        return [end]

    def forget_group(self, key: StreamKey) -> None:
        """Nothing is kept of parameters that nobody uses."""
        group = self.groups.get(key)
        used = any(s.key == key for s in self.sessions.values())
        if group is not None and not group.streams and not used:
            del self.groups[key]

    def is_busy(self, engine: Engine) -> bool:
        """Whether anybody uses a store."""
        with self.lock:
            return engine in self.at.values() or any(
                group.engine is engine for group in self.groups.values()
            )

    def unserved(self) -> int:
        """Slots that sessions need which have no stream, and will have to get one."""
        with self.lock:
            return sum(g.order.least for g in self.groups.values() if not g.streams)

    def releases(self, stream: Stream, leases: Iterable[Lease]) -> list[Callable[[], None]]:
        """What is to be asked of the engine, so that it takes leases back."""
        found = [
            Release(session=stream.number, run=lease.run, step=lease.step, group=lease.group)
            for lease in leases
        ]
        engine = self.at[stream.number]
        return [partial(engine.release, release) for release in found]

    def give_back(self, session: Subscription) -> list[Callable[[], None]]:
        """A session holds nothing any more; it stays at its stream."""
        todo: list[Callable[[], None]] = []
        for stream in session.left:
            todo += self.releases(stream, stream.remove(session.number))
            todo += self.close_if_empty(session.key, stream)
        session.left = []
        if session.stream is not None:
            todo += self.releases(session.stream, session.stream.drop(session.number))
        return todo

    def status(self) -> tuple[tuple[LedgerEntry, ...], tuple[SessionStatus, ...], dict[str, int]]:
        """Ledger, sessions and counters as they are now."""
        ledger: list[LedgerEntry] = []
        counters: dict[str, int] = {}
        known: dict[int, SessionStatus] = {}
        engines = self._stores.all()
        for engine in engines:
            entries, streams, counts = engine.status()
            name = f"{self._stores.name_of(engine)}: " if len(engines) > 1 else ""
            ledger += [
                e if is_session_entry(e) else structs.replace(e, name=name + e.name)
                for e in entries
            ]
            add_counts(counters, counts)
            known |= {stream.session: stream for stream in streams}
        ledger.append(requests_entry(self._stores.settings))
        ledger += self._stores.reserve_entries()
        with self.lock:
            times = dict(self.times)
            for session in self.sessions.values():
                add_counts(times, session.meter.times())
            counters |= times
            counters["streams"] = len(self.streams)
            counters["sessions_left_behind"] = self.left_behind
            counters["reloads"] = self.reloads
            names = {
                session_entry_name([stream.number]): session_entry_name(sorted(stream.subscribers))
                for stream in self.streams.values()
            }
            named = tuple(structs.replace(e, name=names.get(e.name, e.name)) for e in ledger)
            statuses = tuple(self._session_status(s, known) for s in self.sessions.values())
        return named, statuses, counters

    def stores(self) -> tuple[StoreStatus, ...]:
        """Those that are served, and those that still are."""
        with self.lock:
            used = [self.groups[s.key].engine for s in self.sessions.values()]
        retired = self._stores.retired
        return tuple(
            StoreStatus(
                name=self._stores.name_of(e), path=_utf8(str(e.store.path)),
                fingerprint=e.store.manifest.fingerprint, io_mode=e.io_mode,
                sessions=used.count(e), retired=e in retired,
            )
            for e in self._stores.all()
        )  # fmt: skip

    def _session_status(
        self, session: Subscription, streams: dict[int, SessionStatus]
    ) -> SessionStatus:
        group = self.groups[session.key]
        attached, stream = group.attached, session.stream
        at = None if stream is None else streams.get(stream.number)
        places = [*session.left, *([stream] if stream is not None else [])]
        held = sum(len(place.subscribers[session.number].held) for place in places)
        step = session.step
        if stream is not None and stream.subscribers[session.number].stream_run >= 0:
            step = stream.subscribers[session.number].next
        times = session.meter.times()
        return SessionStatus(
            session=session.number,
            plan=attached.plan if at is None else at.plan,
            seeds=attached.resolved.seeds,
            epoch=session.epoch,
            step=min(step // session.key.world, attached.num_steps),
            num_steps=attached.num_steps,
            in_flight=held,
            window=session.window,
            batches=session.batches,
            rows=session.meter.rows,
            edges=session.meter.edges,
            held_bytes=0
            if at is None or stream is None
            else at.held_bytes // len(stream.subscribers),
            store=self._stores.name_of(group.engine),
            ready_ns=times["ready_ns"],
            starved_ns=times["starved_ns"],
        )


def _utf8(text: str) -> str:
    """Text that can be encoded: file names may hold bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
