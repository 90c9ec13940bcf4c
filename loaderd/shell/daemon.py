"""The daemon: an asyncio shell between clients and the engine; it decides nothing."""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore.errors import StoreError
from blockstore.io.arena import Arena
from loaderd.errors import BadMessage, DaemonError, Refused, SessionLost, ShuttingDown
from loaderd.logs import Throttle, tell
from loaderd.memory.ledger import EngineSettings, request_bytes
from loaderd.memory.slots import RequestArea, SlotBroker
from loaderd.notify import notify
from loaderd.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    BatchReady,
    ChunkReady,
    ClientMessage,
    Detach,
    ErrorReply,
    Heartbeat,
    Hello,
    Ids,
    LedgerEntry,
    Message,
    Release,
    RowGroup,
    SessionStatus,
    Skipped,
    Start,
    StatusReply,
    StatusRequest,
    StoreStatus,
    Taken,
    Welcome,
    decode_client,
)
from loaderd.requests import MAX_WINDOW, check_attach, check_start
from loaderd.shell.courier import Frames
from loaderd.shell.door import Door
from loaderd.shell.intake import Intake
from loaderd.shell.owners import Admission, Held, Room, UserLimits, room_left, share_file
from loaderd.shell.registry import Caller, Peer, Registry
from loaderd.shell.remote import Listening, RemoteDesk
from loaderd.signals import Signals
from loaderd.wire.endpoint import Endpoint
from loaderd.wire.transport import Frame
from loaderd.wire.zmtp import LocalRouter

log = logging.getLogger(__name__)
COUNTED = ("sessions_attached", "sessions_refused", "sessions_failed", "requests_refused")
REFUSALS_LOGGED = 20  # a second: clients must not fill the disk
ANSWER_S = 5.0  # for the loop, to a thread that asks
DRAIN_S = 5.0  # for workers to finish what they have in hand
Out = BatchReady | RowGroup | ChunkReady | Skipped | ErrorReply


@dataclass(frozen=True, slots=True)
class Access:
    """Whom a daemon serves, and how much of it each of them gets."""

    admission: Admission = field(default_factory=Admission)
    limits: UserLimits = field(default_factory=UserLimits)
    listening: Listening | None = None  # to other hosts


class Serving(Protocol):
    """What the shell asks of an engine."""

    settings: EngineSettings
    arena: Arena
    deliver: Callable[[int, Out], None]
    reload_error: str

    @property
    def broker(self) -> SlotBroker:
        """Of slots for what goes to other hosts."""

    def stores(self) -> tuple[StoreStatus, ...]:
        """What is served."""

    def at_most(self, share_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Inside, this thread takes no more of the arena."""

    def reload(self) -> list[str]:
        """Open the stores anew; returns what has changed."""

    def attach(self, request: Attach, seeds: NDArray[np.int64] | None) -> Attached:
        """Open a session; may read from disk."""

    def check(self, request: Attach) -> None:
        """Raises Refused: the request can never be served."""

    def borrow(self, request: Attach) -> RequestArea:
        """Room for the numbers of a request."""

    def detach(self, session: int) -> None:
        """Close a session."""

    def start(self, start: Start) -> None:
        """Begin a run."""

    def release(self, release: Release) -> None:
        """Take slots back."""

    def drain(self) -> None:
        """Start nothing more; returns when workers are idle."""

    def status(self) -> tuple[tuple[LedgerEntry, ...], tuple[SessionStatus, ...], dict[str, int]]:
        """Ledger, sessions, counters."""


class Daemon:
    """Routes messages: those of clients to the engine, those of the engine to their client.

    Everything but `_deliver` runs in the event loop's thread.
    """

    def __init__(self, engine: Serving, endpoint: Endpoint, access: Access | None = None) -> None:
        """Opens all sockets, the door last.  Call it inside the loop, the endpoint claimed.

        access   None: this user alone, on this host
        """
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._access = access or Access()
        self._begun = time.monotonic()
        self._registry = Registry()
        self._draining = False
        self._attacher = ThreadPoolExecutor(1, "attach")  # one at a time: each takes memory
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = dict.fromkeys(COUNTED, 0)
        self._refusals = Throttle(REFUSALS_LOGGED)
        self._attaching = asyncio.Lock()
        self._borrowing = asyncio.Lock()  # of room for the numbers of a request
        self._borrowers = 0  # requests that have this room, or wait for it
        self._intake: Intake | None = None  # of whom numbers are on their way
        self._owners: dict[int, tuple[str, int]] = {}  # of sessions: whose, and their windows
        self._path, self._remote = endpoint.path, None
        admission, listening = self._access.admission, self._access.listening
        room = request_bytes(engine.settings.mem_bytes) // 2  # the other half: ids that are kept
        self._router = LocalRouter(endpoint.path, self._receive_local, room)
        engine.deliver = self._deliver
        try:
            share_file(endpoint.path, admission.gid)
            if listening is not None:
                self._remote = RemoteDesk(listening, self)
            self._door = Door(
                endpoint, self._welcome, engine.arena.open_to_read, self.gone, admission
            )
        except BaseException:
            self._router.close()
            if self._remote is not None:
                self._remote.close()
            raise

    @property
    def remote_address(self) -> str:
        """Where other hosts are served; "": nowhere."""
        return "" if self._remote is None else self._remote.address

    async def drain(self, hurry: asyncio.Event) -> bool:
        """Start nothing more, let workers finish, hang up and remove both sockets.

        hurry   set: wait no longer

        Returns whether the workers have finished.
        """
        self._draining = True
        tell(log, logging.INFO, "draining")
        notify("STOPPING=1")
        idle = asyncio.Event()
        threading.Thread(target=self._drain_engine, args=(idle,), daemon=True).start()
        waits = [self._loop.create_task(event.wait()) for event in (idle, hurry)]
        await asyncio.wait(waits, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._door.close()
        self._router.close()
        self._path.unlink(missing_ok=True)
        if self._remote is not None:
            self._remote.close()
        self._attacher.shutdown(wait=False, cancel_futures=True)
        return idle.is_set()

    def reload(self) -> None:
        """Have the stores opened anew, where sessions are opened; the log says what came of it."""
        self._attacher.submit(self._reload)

    def _reload(self) -> None:
        try:
            changes = self._engine.reload()
        except (DaemonError, StoreError, OSError, ValueError) as error:
            tell(log, logging.ERROR, "reload failed", error=f"{type(error).__name__}: {error}")
            return
        tell(log, logging.INFO, "stores reloaded", changes="; ".join(changes) or "none")

    def status(self) -> StatusReply:
        """As it is now, for any other thread.  Raises TimeoutError, RuntimeError: it has ended."""
        answer: Future[StatusReply] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._status(0))
            except Exception as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(ask)
        return answer.result(ANSWER_S)

    def _drain_engine(self, idle: asyncio.Event) -> None:
        """In a thread of its own, which nobody joins: a worker may hang in a read."""
        self._engine.drain()
        with contextlib.suppress(RuntimeError):  # the loop is closed: it came too late
            self._loop.call_soon_threadsafe(idle.set)

    # -- from the engine --------------------------------------------------------------------------

    def _deliver(self, session: int, message: Out) -> None:
        """From a worker thread: on to the client, by way of the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._push, session, message)

    def _push(self, session: int, message: Out) -> None:
        peer = self._registry.peer(session)
        if isinstance(message, ErrorReply):
            self._counts["sessions_failed"] += 1
            tell(log, logging.ERROR, "session failed", session=session, error=message.message)
        if peer is None:
            return
        if self._remote is not None and self._remote.serves(session):
            self._remote.push(session, message)
        elif not self._send(peer.caller, message):
            self._detach(session)  # its socket is gone, or takes nothing: so are its leases

    # -- from clients -----------------------------------------------------------------------------

    def _welcome(self, token: int, maps: bool = True) -> Welcome:
        """`maps`: whether the arena is lent."""
        arena = self._engine.arena
        return Welcome(
            protocol=PROTOCOL_VERSION,
            token=token,
            stores={s.name: s.fingerprint for s in self._engine.stores() if not s.retired},
            num_slots=arena.num_slots if maps else 0,
            slot_bytes=arena.slot_bytes if maps else 0,
            stamp=arena.stamp if maps else 0,
        )

    def gone(self, token: int) -> None:
        """A client's process has died, hung up, or is not heard of any more."""
        if self._intake is not None and self._intake.peer.token == token:
            self._intake.fail(Refused("ids: the client is gone"))
        for session in self._registry.sessions_of(token):
            self._detach(session)

    def lost(self, session: int) -> None:
        """A session's own connection has ended."""
        if self._registry.peer(session) is not None:
            self._detach(session)

    def _detach(self, session: int) -> None:
        tell(log, logging.INFO, "session detached", session=session)
        self._registry.close(session)
        self._owners.pop(session, None)
        if self._remote is not None:
            self._remote.close_session(session)
        self._engine.detach(session)

    def _send(self, caller: Caller, message: Message) -> bool:
        if not caller.remote:
            return self._router.send(caller.identity, message)
        return self._remote is not None and self._remote.send(caller, message)

    def _receive_local(self, identity: bytes, _: str, frames: Sequence[Frame]) -> None:
        self.receive(Caller(identity), frames)

    def receive(self, caller: Caller, frames: Sequence[Frame]) -> None:
        """One message; an error becomes the answer to it."""
        message: ClientMessage | None = None
        try:
            if not frames:
                raise BadMessage("a message of no frame, too many, or one that is too long")
            message = decode_client(frames[0])
            if caller.remote:
                self._handle_remote(caller, message)
            self._handle(caller, message)
        except Exception as error:
            self._count_refusal(error, message)
            self._send(caller, refusal(error, message))
            if not isinstance(error, DaemonError):
                raise  # a bug: the loop says so, and goes on

    def _handle(self, caller: Caller, message: ClientMessage) -> None:
        match message:
            case Attach():
                self._attach(Peer(caller, message.token), message)
            case Ids():
                intake = self._intake
                asked = None if intake is None else (intake.peer.caller, intake.request)
                if intake is not None and asked == (caller, message.request):
                    intake.take(message)  # others may be late: of a request that was refused
            case StatusRequest():
                self._send(caller, self._status(message.request))
            case Start(session=session):
                if not self._registry.holds(caller, session):
                    raise SessionLost(f"session {session} is not open, or not yours")
                check_start(message)
                if self._remote is not None and self._remote.serves(session):
                    self._remote.begin(message)
                self._engine.start(message)
            case Release(session=session):  # late ones of an ended session are nobody's fault
                # over tcp couriers release: a client could have them read what is written over
                if not caller.remote and self._registry.holds(caller, session):
                    self._engine.release(message)
            case Detach(session=session):
                if self._registry.holds(caller, session):
                    self._detach(session)
            case Hello() | Heartbeat() | Taken():
                if not caller.remote:
                    raise BadMessage(f"{type(message).__name__}: expected over tcp only")

    def _handle_remote(self, caller: Caller, message: ClientMessage) -> None:
        """What only clients on other hosts say."""
        assert self._remote is not None
        match message:
            case Hello():
                if self._draining:
                    raise ShuttingDown("the daemon is shutting down")
                self._send(caller, self._welcome(self._remote.greet(caller), maps=False))
            case Heartbeat():
                self._remote.heard(message.token, caller)
            case Taken():
                if self._registry.holds(caller, message.session):
                    self._remote.taken(message)

    def _owner_of(self, peer: Peer) -> str | None:
        """Whose token it is; None: of nobody who is there."""
        caller, token = peer
        if not caller.remote:
            return self._door.owner_of(token)
        return None if self._remote is None else self._remote.owner_of(token, caller)

    def _is_there(self, peer: Peer) -> bool:
        """Whether who attaches has not left meanwhile."""
        if not peer.caller.remote:
            return self._door.is_open(peer.token)
        return self._remote is not None and self._remote.is_open(peer.token)

    def _attach(self, peer: Peer, request: Attach) -> None:
        if self._draining:
            raise ShuttingDown("the daemon is shutting down")
        owner = self._owner_of(peer)
        if owner is None:
            raise Refused(f"token {peer.token} is not one that was given to this client")
        check_attach(request)
        self._engine.check(request)  # now: it need not wait for those before it
        if self._registry.is_opening(peer, request):
            return
        if (answered := self._registry.begin(peer, request)) is not None:
            self._send(peer.caller, answered)
            return
        task = self._loop.create_task(self._open(peer, request, owner))
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _open(self, peer: Peer, request: Attach, owner: str) -> None:
        try:
            if request.ids:
                attached = await self._open_with_numbers(peer, request, owner)
            else:
                attached = await self._open_one(peer, request, owner, None)
            if attached is None:  # it left while it waited for its turn
                self._registry.failed(peer, request)
                return
        except Exception as error:
            self._registry.failed(peer, request)
            self._count_refusal(error, request)
            self._send(peer.caller, refusal(error, request))
            if not isinstance(error, DaemonError | StoreError | OSError):
                raise
            return
        self._registry.opened(peer, attached)
        self._counts["sessions_attached"] += 1
        tell(
            log, logging.INFO, "session attached", session=attached.session, plan=attached.plan,
            seeds=attached.resolved.seeds, rank=request.rank, world_size=request.world_size,
            num_steps=attached.num_steps, window=attached.window, owner=owner,
        )  # fmt: skip
        left = not self._is_there(peer)  # while we read
        if left or not self._send(peer.caller, attached):
            self._detach(attached.session)

    async def _open_with_numbers(self, peer: Peer, request: Attach, owner: str) -> Attached | None:
        """Have the numbers of a request sent to the arena, and attach.  One after the other."""
        self._borrowers += 1
        try:
            for turn in itertools.count():
                async with self._borrowing:
                    if not self._is_there(peer):
                        return None
                    borrow = functools.partial(self._borrow, request, self._room_of(owner))
                    area = await self._loop.run_in_executor(self._attacher, borrow)
                    try:
                        self._intake = Intake(peer, request, area, turn)
                        if await self._intake.fill(
                            lambda message: self._send(peer.caller, message),
                            lambda: self._borrowers > 1,
                        ):
                            return await self._open_one(peer, request, owner, area)
                    finally:
                        self._intake = None
                        area.give_back()  # not in the thread: an attach there may wait for it
        finally:
            self._borrowers -= 1
        raise AssertionError

    async def _open_one(
        self, peer: Peer, request: Attach, owner: str, area: RequestArea | None
    ) -> Attached | None:
        """Attach in a thread of its own: it reads from disk.  One after the other."""
        async with self._attaching:
            if not self._is_there(peer):
                return None
            room = self._room_of(owner)
            if area is not None:
                room = room._replace(num_bytes=max(0, room.num_bytes - area.num_bytes))
            asked = min(request.window or room.window, room.window)
            if request.window or room.window < MAX_WINDOW:
                request = structs.replace(request, window=asked)
            ids = None if area is None else area.numbers
            attach = functools.partial(self._take, request, ids, room, peer.caller.remote)
            attached, frames = await self._loop.run_in_executor(self._attacher, attach)
            self._owners[attached.session] = owner, attached.window
        if frames is not None:
            self._open_remote(peer, attached, frames)
        return attached

    def _borrow(self, request: Attach, room: Room) -> RequestArea:
        """In the thread: room for the numbers of a request, within what its user may take."""
        with self._limited(room):
            return self._engine.borrow(request)

    def _limited(self, room: Room) -> contextlib.AbstractContextManager[None]:
        """Inside, this thread takes no more than a user may."""
        if self._access.limits.share >= 1:
            return contextlib.nullcontext()
        return self._engine.at_most(room.num_bytes)

    def _room_of(self, owner: str) -> Room:
        """What a user may still take.  Raises Refused."""
        held_bytes = {s.session: s.held_bytes for s in self._sessions()}
        held = [
            Held(window, held_bytes.get(session, 0))
            for session, (other, window) in self._owners.items()
            if other == owner
        ]
        arena = self._engine.arena
        return room_left(self._access.limits, arena.num_slots * arena.slot_bytes, owner, held)

    def _take(
        self, request: Attach, ids: NDArray[np.int64] | None, room: Room, remote: bool
    ) -> tuple[Attached, Frames | None]:
        """In the thread: what a session needs of the engine, within what its user may take."""
        engine, frames = self._engine, None
        with self._limited(room):
            if remote:
                frames = Frames(engine)
            try:
                return engine.attach(request, ids), frames
            except BaseException:
                if frames is not None:
                    frames.give_back()
                raise

    def _open_remote(self, peer: Peer, attached: Attached, frames: Frames) -> None:
        """Serve a session by pieces.  Raises Refused: it is closed then."""
        assert self._remote is not None
        try:
            self._remote.open_session(
                attached, peer.caller, peer.token, self._engine, frames, self._engine.release
            )
        except BaseException:
            frames.give_back()
            self._owners.pop(attached.session, None)
            self._engine.detach(attached.session)
            raise

    def _count_refusal(self, error: Exception, message: ClientMessage | None) -> None:
        attach = isinstance(message, Attach)
        self._counts["sessions_refused" if attach else "requests_refused"] += 1
        event = "session refused" if attach else "request refused"
        level = logging.WARNING if isinstance(error, DaemonError | StoreError) else logging.ERROR
        if (left_out := self._refusals.admit()) is not None:
            more = {"left_out": left_out} if left_out else {}
            tell(log, level, event, error=f"{type(error).__name__}: {error}", **more)

    def _sessions(self) -> tuple[SessionStatus, ...]:
        """Sessions as the engine sees them, with their owners and all that they hold."""
        return tuple(self._owned(s) for s in self._engine.status()[1])

    def _owned(self, session: SessionStatus) -> SessionStatus:
        owner, _ = self._owners.get(session.session, ("", 0))
        more = 0 if self._remote is None else self._remote.held_bytes(session.session)
        return structs.replace(session, owner=owner, held_bytes=session.held_bytes + more)

    def _status(self, request: int) -> StatusReply:
        ledger, sessions, counters = self._engine.status()
        if self._remote is not None:
            ledger = (*ledger, *self._remote.entries())
        if self._intake is not None:
            ledger = (*ledger, self._intake.entry())
        return StatusReply(
            request=request,
            stores=self._engine.stores(),
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._begun,
            budget_bytes=self._engine.settings.mem_bytes,
            ledger=ledger,
            sessions=tuple(self._owned(s) for s in sessions),
            counters=counters | self._counts,
            draining=self._draining,
            workers=self._engine.settings.workers,
            readers=self._engine.settings.readers,
            reload_error=_utf8(self._engine.reload_error),
        )


def refusal(error: Exception, message: ClientMessage | None) -> ErrorReply:
    """The answer to a message that could not be served; `message` None: it could not be read.

    Errors of the store and of the system are refusals to a client.
    """
    name = type(error).__name__ if isinstance(error, DaemonError) else Refused.__name__
    known = isinstance(error, DaemonError | StoreError | OSError)
    text = str(error) if known else f"the daemon failed: {type(error).__name__}: {error}"
    return ErrorReply(
        error=name,
        message=_utf8(text),
        request=getattr(message, "request", -1),
        session=getattr(message, "session", -1),
        run=getattr(message, "run", -1),
    )


def _utf8(text: str) -> str:
    """Text that can be encoded: file names may hold bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


async def serve(
    engine: Serving,
    endpoint: Endpoint,
    signals: Signals,
    ready: Callable[["Daemon"], None],
    access: Access | None = None,
) -> bool:
    """Serve until a signal comes, then drain; a second one ends the wait for workers.

    Returns whether the workers have finished.
    """
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def stop_or_hurry() -> None:
        (hurry if stop.is_set() else stop).set()

    with signals.waking(loop), signals.to(lambda: loop.call_soon_threadsafe(stop_or_hurry)):
        daemon = Daemon(engine, endpoint, access)
        signals.hang_up = lambda: loop.call_soon_threadsafe(daemon.reload)
        try:
            ready(daemon)
            await stop.wait()
        except BaseException:
            await daemon.drain(hurry)
            raise
        signals.hang_up = None
        return await daemon.drain(hurry)
