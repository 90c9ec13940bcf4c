"""The daemon: it passes messages between clients and streams, in one event loop."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from msgspec import structs

from blockstore.errors import StoreError
from blockstore.kernels.compiling import awaited_kernel
from loaderd.api.endpoint import Endpoint
from loaderd.api.errors import BadMessage, DaemonError, Refused, SessionLost, ShuttingDown
from loaderd.api.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    ClientMessage,
    Detach,
    ErrorReply,
    Heartbeat,
    Hello,
    Ids,
    Message,
    Release,
    RowsWanted,
    SessionStatus,
    Start,
    StatusReply,
    StatusRequest,
    Taken,
    Welcome,
    decode_client,
)
from loaderd.api.requests import check_start
from loaderd.monitoring.logs import Throttle, log_event
from loaderd.server.local import LocalClients
from loaderd.server.opening import Clients, SessionOpener
from loaderd.server.owners import UserLimits
from loaderd.server.process import Signals, notify
from loaderd.server.registry import Caller, Peer, Registry
from loaderd.server.remote import Listening, RemoteClients
from loaderd.server.transport import Frame
from loaderd.sessions.base import Out
from loaderd.streams.registry import utf8_text
from loaderd.streams.service import StreamService

log = logging.getLogger(__name__)
COUNTED = ("sessions_attached", "sessions_refused", "sessions_failed", "requests_refused")
REFUSALS_LOGGED = 20  # a second: clients must not fill the disk
ANSWER_S = 5.0  # for the loop to answer another thread
DRAIN_S = 5.0  # for workers to finish what they have in hand


@dataclass(frozen=True, slots=True)
class Access:
    """Whom a daemon serves, and how much each user gets."""

    gid: int | None = None  # of a group whose members may attach, too
    limits: UserLimits = field(default_factory=UserLimits)
    listening: Listening | None = None  # to other hosts


class Daemon:
    """Routes messages: those of clients to the engine, those of the engine to their client.

    Everything but `_deliver` runs in the event loop's thread.
    """

    def __init__(
        self, engine: StreamService, endpoint: Endpoint, access: Access | None = None
    ) -> None:
        """Opens all sockets, the arena's last.  Claim the endpoint first; call it inside the loop.

        access   None: this user alone, on this host
        """
        self._engine, self._loop = engine, asyncio.get_running_loop()
        access = access or Access()
        self._begun = time.monotonic()
        self._registry = Registry()
        self._draining = False
        self._counts = dict.fromkeys(COUNTED, 0)
        self._refusals = Throttle(REFUSALS_LOGGED)
        self._opener = SessionOpener(engine, access.limits, self._registry, self)
        self._remote: RemoteClients | None = None
        engine.deliver = self._deliver
        if access.listening is not None:
            self._remote = RemoteClients(access.listening, engine, self)
        try:
            self._local = LocalClients(endpoint, engine, access.gid, self)
        except BaseException:
            if self._remote is not None:
                self._remote.close()
            raise

    def _clients(self, caller: Caller) -> Clients:
        if not caller.remote:
            return self._local
        assert self._remote is not None
        return self._remote

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
        log_event(log, logging.INFO, "draining")
        notify("STOPPING=1")
        idle = asyncio.Event()
        threading.Thread(target=self._drain_engine, args=(idle,), daemon=True).start()
        waits = [self._loop.create_task(event.wait()) for event in (idle, hurry)]
        await asyncio.wait(waits, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._local.close()
        if self._remote is not None:
            self._remote.close()
        self._opener.close()
        return idle.is_set()

    def reload(self) -> None:
        """Reopen the stores, in the thread that opens sessions; the log says what came of it."""
        self._opener.submit(self._reload)

    def _reload(self) -> None:
        try:
            changes = self._engine.reload()
        except (DaemonError, StoreError, OSError, ValueError) as error:
            log_event(log, logging.ERROR, "reload failed", error=f"{type(error).__name__}: {error}")
            return
        log_event(log, logging.INFO, "stores reloaded", changes="; ".join(changes) or "none")

    def status(self) -> StatusReply:
        """The status, for any other thread.  Raises TimeoutError, RuntimeError: it has ended."""

        async def ask() -> StatusReply:
            return self._status(0)

        try:
            return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(ANSWER_S)
        except CancelledError as error:  # the loop has ended meanwhile
            raise RuntimeError("the daemon has ended") from error

    def _drain_engine(self, idle: asyncio.Event) -> None:
        """Drain in a thread of its own, which nobody joins: a worker may hang in a read."""
        self._engine.drain()
        with contextlib.suppress(RuntimeError, CancelledError):  # too late: the daemon has ended
            self._opener.settle()
            self._loop.call_soon_threadsafe(idle.set)

    # -- from the engine --------------------------------------------------------------------------

    def _deliver(self, session: int, message: Out) -> None:
        """Pass a message from a worker thread to its client, by way of the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._push, session, message)

    def _push(self, session: int, message: Out) -> None:
        peer = self._registry.peer(session)
        if isinstance(message, ErrorReply):
            self._counts["sessions_failed"] += 1
            log_event(log, logging.ERROR, "session failed", session=session, error=message.message)
        if peer is None:
            return
        if not self._clients(peer.caller).push(session, peer.caller, message):
            self.detach(session)  # its socket is gone, or takes nothing: its leases end

    # -- from clients -----------------------------------------------------------------------------

    def welcome(self, token: int, maps: bool = True) -> Welcome:
        if self._draining and not maps:
            raise ShuttingDown("the daemon is shutting down")
        arena = self._engine.arena
        return Welcome(
            protocol=PROTOCOL_VERSION,
            token=token,
            stores={s.name: s.fingerprint for s in self._engine.stores() if not s.retired},
            num_slots=arena.num_slots if maps else 0,
            slot_bytes=arena.slot_bytes if maps else 0,
            stamp=arena.stamp if maps else 0,
        )

    def client_left(self, token: int) -> None:
        """A client's process has died, closed its connection, or is silent."""
        self._opener.client_left(token)
        for session in self._registry.sessions_of(token):
            self.detach(session)

    def lost(self, session: int) -> None:
        if self._registry.peer(session) is not None:
            self.detach(session)

    def detach(self, session: int) -> None:
        log_event(log, logging.INFO, "session detached", session=session)
        peer = self._registry.close(session)
        self._clients(peer.caller).close_session(session)
        self._engine.detach(session)

    def send(self, caller: Caller, message: Message) -> bool:
        return self._clients(caller).send(caller, message)

    def receive(self, caller: Caller, frames: Sequence[Frame]) -> None:
        """Handle one message; an error becomes the answer to it."""
        message: ClientMessage | None = None
        try:
            if not frames:
                raise BadMessage("a message of no frame, too many, or one that is too long")
            message = decode_client(frames[0])
            self._handle(caller, message)
        except Exception as error:
            self.refuse(caller, error, message)
            if not isinstance(error, DaemonError):
                raise  # a bug: the loop says so, and goes on

    def _handle(self, caller: Caller, message: ClientMessage) -> None:
        clients = self._clients(caller)
        match message:
            case Attach():
                if self._draining:
                    raise ShuttingDown("the daemon is shutting down")
                self._opener.attach(Peer(caller, message.token), message, clients)
            case Ids():
                self._opener.take(caller, message)
            case StatusRequest():
                self.send(caller, self._status(message.request))
            case Start(session=session):
                if not self._registry.holds(caller, session):
                    raise SessionLost(f"session {session} is not open, or not yours")
                check_start(message)
                clients.begin(message)
                self._engine.start(message)
            case Release(session=session):  # late ones of an ended session are nobody's fault
                if self._registry.holds(caller, session):
                    clients.release(message)
            case Detach(session=session):
                if self._registry.holds(caller, session):
                    self.detach(session)
            case RowsWanted() if self._draining:
                raise ShuttingDown("the daemon is shutting down")
            case Hello() | Heartbeat() | Taken() | RowsWanted():
                clients.handle(caller, message)

    def refuse(self, caller: Caller, error: Exception, message: ClientMessage | None) -> None:
        """Answer a message that could not be served, and count it; `message` as in `refusal`."""
        attach = isinstance(message, Attach)
        self._counts["sessions_refused" if attach else "requests_refused"] += 1
        event = "session refused" if attach else "request refused"
        level = logging.WARNING if isinstance(error, DaemonError | StoreError) else logging.ERROR
        if (left_out := self._refusals.admit()) is not None:
            more = {"left_out": left_out} if left_out else {}
            log_event(log, level, event, error=f"{type(error).__name__}: {error}", **more)
        self.send(caller, refusal(error, message))

    def opened(self, peer: Peer, request: Attach, attached: Attached) -> None:
        """Tell a client that its session is open, if it is still there."""
        self._counts["sessions_attached"] += 1
        resolved, owner = attached.resolved, self._registry.owner(attached.session)
        log_event(
            log, logging.INFO, "session attached", session=attached.session, plan=attached.plan,
            seeds=resolved.seeds, rank=request.rank, world_size=request.world_size,
            num_steps=attached.num_steps, window=attached.window, owner=owner,
        )  # fmt: skip
        left = not self._clients(peer.caller).is_open(peer.token)  # while we read
        if left or not self.send(peer.caller, attached):
            self.detach(attached.session)

    def sessions(self) -> tuple[SessionStatus, ...]:
        """Sessions as the engine sees them, with their owners and all that they hold."""
        return tuple(self._owned(s) for s in self._engine.status()[1])

    def _owned(self, session: SessionStatus) -> SessionStatus:
        peer, owner = self._registry.peer(session.session), self._registry.owner(session.session)
        more = 0 if peer is None else self._clients(peer.caller).held_bytes(session.session)
        return structs.replace(session, owner=owner, held_bytes=session.held_bytes + more)

    def _status(self, request: int) -> StatusReply:
        ledger, sessions, counters = self._engine.status()
        remote = [] if self._remote is None else self._remote.entries()
        given = {} if self._remote is None else self._remote.counters()
        return StatusReply(
            request=request,
            stores=self._engine.stores(),
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._begun,
            budget_bytes=self._engine.settings.mem_bytes,
            ledger=(*ledger, *remote, *self._opener.entries()),
            sessions=tuple(self._owned(s) for s in sessions),
            counters=counters | self._counts | given,
            draining=self._draining,
            workers=self._engine.settings.workers,
            readers=self._engine.settings.readers,
            reload_error=utf8_text(self._engine.reload_error),
            compiling=awaited_kernel(),
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
        message=utf8_text(text),
        request=getattr(message, "request", -1),
        session=getattr(message, "session", -1),
        run=getattr(message, "run", -1),
    )


async def serve(
    engine: StreamService,
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
