"""The daemon: an asyncio shell between clients and the engine; it decides nothing."""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreError
from blockstore.io.arena import Arena
from blockstore.store import Store
from loaderd.door import Door
from loaderd.endpoint import Endpoint
from loaderd.errors import BadMessage, DaemonError, Refused, SessionLost, ShuttingDown
from loaderd.ledger import EngineSettings
from loaderd.logs import tell
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
    LedgerEntry,
    Release,
    RowGroup,
    SessionStatus,
    Skipped,
    Start,
    StatusReply,
    StatusRequest,
    Welcome,
    decode_client,
)
from loaderd.registry import Peer, Registry
from loaderd.requests import check_attach, check_start
from loaderd.signals import Signals
from loaderd.transport import Frame, Router

log = logging.getLogger(__name__)
COUNTED = ("sessions_attached", "sessions_refused", "sessions_failed", "requests_refused")
ANSWER_S = 5.0  # for the loop, to a thread that asks
DRAIN_S = 5.0  # for workers to finish what they have in hand
Out = BatchReady | RowGroup | ChunkReady | Skipped | ErrorReply


class Serving(Protocol):
    """What the shell asks of an engine."""

    store: Store
    settings: EngineSettings
    arena: Arena
    deliver: Callable[[int, Out], None]

    @property
    def io_mode(self) -> str:
        """How blocks are read."""

    def attach(self, request: Attach, seeds: NDArray[np.int64] | None) -> Attached:
        """Open a session; may read from disk."""

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

    def __init__(self, engine: Serving, endpoint: Endpoint) -> None:
        """Opens both sockets, the door last.  Call it inside the loop, the endpoint claimed."""
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._begun = time.monotonic()
        self._registry = Registry()
        self._draining = False
        self._attacher = ThreadPoolExecutor(1, "attach")  # one at a time: each takes memory
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = dict.fromkeys(COUNTED, 0)
        self._router = Router(endpoint, self._receive)
        engine.deliver = self._deliver
        try:
            self._door = Door(endpoint, self._welcome, engine.arena.fd, self._gone)
        except BaseException:
            self._router.close()
            raise

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
        self._attacher.shutdown(wait=False, cancel_futures=True)
        return idle.is_set()

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
        if peer is not None and not self._router.send(peer.identity, message):
            self._detach(session)  # its socket is gone, or takes nothing: so are its leases

    # -- from clients -----------------------------------------------------------------------------

    def _welcome(self, token: int) -> Welcome:
        arena = self._engine.arena
        return Welcome(
            protocol=PROTOCOL_VERSION,
            token=token,
            fingerprint=self._engine.store.manifest.fingerprint,
            num_slots=arena.num_slots,
            slot_bytes=arena.slot_bytes,
        )

    def _gone(self, token: int) -> None:
        """A client's process has died or hung up."""
        for session in self._registry.sessions_of(token):
            self._detach(session)

    def _detach(self, session: int) -> None:
        tell(log, logging.INFO, "session detached", session=session)
        self._registry.close(session)
        self._engine.detach(session)

    def _receive(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """One message; an error becomes the answer to it."""
        message: ClientMessage | None = None
        try:
            if not frames:
                raise BadMessage("a message without a frame")
            message = decode_client(frames[0])
            self._handle(identity, message, frames[1:])
        except Exception as error:
            self._count_refusal(error, message)
            self._router.send(identity, refusal(error, message))
            if not isinstance(error, DaemonError):
                raise  # a bug: the loop says so, and goes on

    def _handle(self, identity: bytes, message: ClientMessage, arrays: Sequence[Frame]) -> None:
        match message:
            case Attach():
                self._attach(Peer(identity, message.token), message, arrays)
            case StatusRequest():
                self._router.send(identity, self._status(message.request))
            case Start(session=session):
                if not self._registry.holds(identity, session):
                    raise SessionLost(f"session {session} is not open, or not yours")
                check_start(message)
                self._engine.start(message)
            case Release(session=session):  # late ones of an ended session are nobody's fault
                if self._registry.holds(identity, session):
                    self._engine.release(message)
            case Detach(session=session):
                if self._registry.holds(identity, session):
                    self._detach(session)

    def _attach(self, peer: Peer, request: Attach, arrays: Sequence[Frame]) -> None:
        if self._draining:
            raise ShuttingDown("the daemon is shutting down")
        if not self._door.is_open(peer.token):
            raise Refused(f"token {peer.token} is not one that the door gave out")
        ids = check_attach(request, arrays)
        if self._registry.is_opening(peer, request):
            return
        if (answered := self._registry.begin(peer, request)) is not None:
            self._router.send(peer.identity, answered)
            return
        task = self._loop.create_task(self._open(peer, request, ids))
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _open(self, peer: Peer, request: Attach, ids: NDArray[np.int64] | None) -> None:
        """Attach in a thread of its own: it reads from disk."""
        attach = self._engine.attach
        try:
            attached = await self._loop.run_in_executor(self._attacher, attach, request, ids)
        except Exception as error:
            self._registry.failed(peer, request)
            self._count_refusal(error, request)
            self._router.send(peer.identity, refusal(error, request))
            if not isinstance(error, DaemonError | StoreError | OSError):
                raise
            return
        self._registry.opened(peer, attached)
        self._counts["sessions_attached"] += 1
        tell(
            log, logging.INFO, "session attached", session=attached.session, plan=attached.plan,
            seeds=attached.resolved.seeds, rank=request.rank, world_size=request.world_size,
            num_steps=attached.num_steps, window=attached.window,
        )  # fmt: skip
        left = not self._door.is_open(peer.token)  # while we read
        if left or not self._router.send(peer.identity, attached):
            self._detach(attached.session)

    def _count_refusal(self, error: Exception, message: ClientMessage | None) -> None:
        attach = isinstance(message, Attach)
        self._counts["sessions_refused" if attach else "requests_refused"] += 1
        event = "session refused" if attach else "request refused"
        level = logging.WARNING if isinstance(error, DaemonError | StoreError) else logging.ERROR
        tell(log, level, event, error=f"{type(error).__name__}: {error}")

    def _status(self, request: int) -> StatusReply:
        ledger, sessions, counters = self._engine.status()
        store = self._engine.store
        return StatusReply(
            request=request,
            store=_utf8(str(store.path)),
            fingerprint=store.manifest.fingerprint,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._begun,
            io_mode=self._engine.io_mode,
            budget_bytes=self._engine.settings.mem_bytes,
            ledger=ledger,
            sessions=sessions,
            counters=counters | self._counts,
            draining=self._draining,
            workers=self._engine.settings.workers,
            readers=self._engine.settings.readers,
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
    engine: Serving, endpoint: Endpoint, signals: Signals, ready: Callable[["Daemon"], None]
) -> bool:
    """Serve until a signal comes, then drain; a second one ends the wait for workers.

    Returns whether the workers have finished.
    """
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def stop_or_hurry() -> None:
        (hurry if stop.is_set() else stop).set()

    with signals.to(lambda: loop.call_soon_threadsafe(stop_or_hurry)):
        daemon = Daemon(engine, endpoint)
        try:
            ready(daemon)
            await stop.wait()
        except BaseException:
            await daemon.drain(hurry)
            raise
        return await daemon.drain(hurry)
