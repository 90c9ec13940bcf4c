"""The daemon: an asyncio shell between clients and the engine; it decides nothing."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blockstore.errors import StoreError
from loaderd.door import Door, claim
from loaderd.engine import Engine
from loaderd.errors import BadMessage, DaemonError, Refused
from loaderd.protocol import (
    PROTOCOL_VERSION,
    Attach,
    BatchReady,
    Detach,
    ErrorReply,
    Release,
    RowGroup,
    Start,
    StatusReply,
    StatusRequest,
    Welcome,
    decode_client,
)
from loaderd.transport import Router

MAX_WINDOW = 1024
MAX_WORLD = 1 << 16
MAX_BATCH = 1 << 24
MAX_SESSIONS = 256


class Daemon:
    """Routes messages: those of clients to the engine, those of the engine to their client."""

    def __init__(self, engine: Engine, endpoint: str) -> None:
        """Takes the endpoint.  Raises EndpointInUse, Refused.  Call it inside the event loop."""
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._begun = time.monotonic()
        self._owner: dict[int, tuple[bytes, int]] = {}  # session -> zmq identity, token
        self._attaching = 0
        self._draining = False
        claim(endpoint)
        self._router = Router(endpoint, self._receive)
        try:
            self._door = Door(endpoint, self._welcome, engine.arena.fd, self._gone)
        except BaseException:
            self._router.close()
            raise
        engine.deliver = self._deliver

    async def drain(self) -> None:
        """Start nothing more, let workers finish, hang up and remove both sockets."""
        self._draining = True
        await self._loop.run_in_executor(None, self._engine.drain)
        self._door.close()
        self._router.close()

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
        for session in [s for s, (_, t) in self._owner.items() if t == token]:
            del self._owner[session]
            self._engine.detach(session)

    def _deliver(self, session: int, message: BatchReady | RowGroup | ErrorReply) -> None:
        """From a worker thread: on to the client, by way of the loop."""
        self._loop.call_soon_threadsafe(self._push, session, message)

    def _push(self, session: int, message: BatchReady | RowGroup | ErrorReply) -> None:
        owner = self._owner.get(session)
        if owner is not None:
            self._router.send(owner[0], message)

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            message = decode_client(frames[0])
            match message:
                case Attach():
                    check_attach(message, frames[1:])
                    self._attach(identity, message, frames[1:])
                case Start():
                    self._own(identity, message.session)
                    self._engine.start(message)
                case Release():
                    self._own(identity, message.session)
                    self._engine.release(message)
                case Detach():
                    self._own(identity, message.session)
                    del self._owner[message.session]
                    self._engine.detach(message.session)
                case StatusRequest():
                    self._router.send(identity, self._status(message.request))
        except (DaemonError, IndexError) as error:
            self._router.send(identity, _refusal(error, frames))

    def _own(self, identity: bytes, session: int) -> None:
        """A session answers to the peer that attached it, and to nobody else."""
        owner = self._owner.get(session)
        if owner is None or owner[0] != identity:
            raise Refused(f"session {session} is not yours, or not open")

    def _attach(self, identity: bytes, request: Attach, extra: list[bytes]) -> None:
        if self._draining:
            raise Refused("the daemon is shutting down")
        if not self._door.is_open(request.token):
            raise Refused(f"token {request.token} is not one that the door gave out")
        if len(self._owner) + self._attaching >= MAX_SESSIONS:
            raise Refused(f"{MAX_SESSIONS} sessions are open, the most that are served")
        ids = np.frombuffer(extra[0], "<i8") if extra else None
        self._attaching += 1
        task = self._loop.create_task(self._open(identity, request, ids))
        task.add_done_callback(_raise_in_loop)

    async def _open(self, identity: bytes, request: Attach, ids: NDArray[np.int64] | None) -> None:
        """Attach in a thread of its own: it reads from disk."""
        try:
            attached = await self._loop.run_in_executor(None, self._engine.attach, request, ids)
        except (DaemonError, StoreError, OSError) as error:
            reply = ErrorReply(error=_name(error), message=str(error), request=request.request)
            self._router.send(identity, reply)
            return
        finally:
            self._attaching -= 1
        if not self._door.is_open(request.token):  # it left while we read
            self._engine.detach(attached.session)
            return
        self._owner[attached.session] = (identity, request.token)
        self._router.send(identity, attached)

    def _status(self, request: int) -> StatusReply:
        ledger, sessions, counters = self._engine.status()
        store = self._engine.store
        return StatusReply(
            request=request,
            store=str(store.path),
            fingerprint=store.manifest.fingerprint,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._begun,
            io_mode=self._engine.io_mode,
            budget_bytes=self._engine.settings.mem_bytes,
            ledger=ledger,
            sessions=sessions,
            counters=counters,
            draining=self._draining,
        )


def check_attach(request: Attach, extra: list[bytes]) -> None:
    """Bounds on what a client may ask for.  Raises Refused."""
    ranges = {
        "batch_size": (request.batch_size, 1, MAX_BATCH),
        "world_size": (request.world_size, 1, MAX_WORLD),
        "rank": (request.rank, 0, request.world_size - 1),
        "window": (request.window, 0, MAX_WINDOW),
        "seed": (request.seed, 0, 2**63 - 1),
    }
    for name, (value, least, most) in ranges.items():
        if not least <= value <= most:
            raise Refused(f"{name} is {value}, expected {least} to {most}")
    if request.split and extra:
        raise Refused(f"split {request.split!r} and ids were both given, expected one of them")
    if not request.split and (len(extra) != 1 or len(extra[0]) % 8):
        raise Refused("seeds: expected one frame of int64 ids where no split is named")


def _refusal(error: Exception, frames: list[bytes]) -> ErrorReply:
    """The answer to a message that cannot be taken, naming the request where it has one."""
    if isinstance(error, IndexError):
        error = BadMessage("a message without a frame")
    request = session = run = -1
    if frames and not isinstance(error, BadMessage):
        message = decode_client(frames[0])
        request = getattr(message, "request", -1)
        session, run = getattr(message, "session", -1), getattr(message, "run", -1)
    return ErrorReply(
        error=_name(error), message=str(error), request=request, session=session, run=run
    )


def _name(error: Exception) -> str:
    """The error's class as clients know it: those of the store are refusals to them."""
    return type(error).__name__ if isinstance(error, DaemonError) else Refused.__name__


def _raise_in_loop(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def serve(engine: Engine, endpoint: str, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    daemon = Daemon(engine, endpoint)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready()
    await stop.wait()
    await daemon.drain()
