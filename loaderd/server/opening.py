"""Open sessions one after the other, within the limits of their users."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from blockstore.errors import StoreError
from loaderd.api.errors import DaemonError, Refused, ShuttingDown
from loaderd.api.protocol import Attach, Attached, Ids, LedgerEntry
from loaderd.api.requests import MAX_WINDOW, check_attach
from loaderd.memory.slots import RequestArea
from loaderd.server.intake import Intake
from loaderd.server.local import LocalClients
from loaderd.server.owners import UserLimits, UserShare, room_left
from loaderd.server.registry import Caller, DaemonCallbacks, Peer, Registry
from loaderd.server.remote import RemoteClients
from loaderd.server.sender import Frames
from loaderd.streams.service import StreamService

Clients = LocalClients | RemoteClients
Done = TypeVar("Done")


class _PendingSession(NamedTuple):
    peer: Peer
    request: Attach
    owner: str
    clients: Clients

    @property
    def is_wanted(self) -> bool:
        return self.clients.is_open(self.peer.token)


class SessionOpener:
    """All methods belong to the event loop's thread; another thread here reads from disk."""

    def __init__(
        self, engine: StreamService, limits: UserLimits, registry: Registry, daemon: DaemonCallbacks
    ) -> None:
        self._engine, self._limits, self._registry, self._daemon = engine, limits, registry, daemon
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "attach")  # one at a time: each takes memory
        self._tasks: set[asyncio.Task[None]] = set()
        self._attaching = asyncio.Lock()
        self._borrowing = asyncio.Lock()  # of room for the numbers of a request
        self._borrowers = 0  # requests that have this room, or wait for it
        self._intake: Intake | None = None  # of the request whose numbers are coming in
        self._closed = False

    def attach(self, peer: Peer, request: Attach, clients: Clients) -> None:
        """Open a session, soon.  Raises Refused: it can never be served."""
        owner = clients.owner_of(peer)
        if owner is None:
            raise Refused(f"token {peer.token} is not one that was given to this client")
        check_attach(request)
        self._engine.check(request)  # now: it need not wait for those before it
        if self._registry.is_opening(peer, request):
            return
        if (answered := self._registry.begin(peer, request)) is not None:
            self._daemon.send(peer.caller, answered)
            return
        task = self._loop.create_task(self._open(_PendingSession(peer, request, owner, clients)))
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    def take(self, caller: Caller, message: Ids) -> None:
        """Take numbers of a request; ignore late ones, of a request that was refused."""
        intake = self._intake
        if intake is not None and (intake.peer.caller, intake.request) == (caller, message.request):
            intake.take(message)

    def client_left(self, token: int) -> None:
        if self._intake is not None and self._intake.peer.token == token:
            self._intake.fail(Refused("ids: the client is gone"))

    def submit(self, work: Callable[[], None]) -> None:
        """Do work in the thread that opens sessions, when its turn comes."""
        self._thread.submit(work)

    def entries(self) -> list[LedgerEntry]:
        """What requests take of the pools."""
        return [] if self._intake is None else [self._intake.entry()]

    def settle(self) -> None:
        """Wait until the thread has done its work, which reads through what is closed next."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _open(self, opening: _PendingSession) -> None:
        peer, request = opening.peer, opening.request
        try:
            if request.ids:
                attached = await self._open_with_numbers(opening)
            else:
                attached = await self._open_one(opening, None)
            if attached is None:  # it left while it waited for its turn
                self._registry.failed(peer, request)
                return
        except Exception as error:
            self._registry.failed(peer, request)
            self._daemon.refuse(peer.caller, error, request)
            if not isinstance(error, DaemonError | StoreError | OSError):
                raise
            return
        self._daemon.opened(peer, request, attached)

    async def _open_with_numbers(self, opening: _PendingSession) -> Attached | None:
        """Have the numbers of a request sent to the arena, and attach.  One request at a time."""
        peer, request = opening.peer, opening.request
        self._borrowers += 1
        try:
            async with self._borrowing:
                if not opening.is_wanted:
                    return None
                borrow = functools.partial(self._borrow, request, self._room_of(opening.owner))
                area = await self._in_thread(borrow)
                try:
                    self._intake = Intake(peer, request, area)
                    await self._intake.fill(
                        lambda message: self._daemon.send(peer.caller, message),
                        lambda: self._borrowers > 1,
                    )
                    return await self._open_one(opening, area)
                finally:
                    self._intake = None
                    area.give_back()  # not in the thread: an attach there may wait for it
        finally:
            self._borrowers -= 1

    async def _open_one(
        self, opening: _PendingSession, area: RequestArea | None
    ) -> Attached | None:
        """Attach in the thread.  One at a time, so that what a user has left is known."""
        peer, request, owner, clients = opening
        async with self._attaching:
            if not opening.is_wanted:
                return None
            room = self._room_of(owner)
            if area is not None:
                room = room._replace(num_bytes=max(0, room.num_bytes - area.num_bytes))
            asked = min(request.window or room.window, room.window)
            if request.window or room.window < MAX_WINDOW:
                request = structs.replace(request, window=asked)
            ids = None if area is None else area.numbers
            attach = functools.partial(self._attach, request, ids, room, peer.caller.remote)
            attached, frames = await self._in_thread(attach)
            if frames is not None:
                assert isinstance(clients, RemoteClients)
                try:
                    clients.open_session(attached, peer, frames)
                except BaseException:
                    frames.give_back()
                    self._engine.detach(attached.session)
                    raise
            self._registry.opened(peer, attached, owner)
        return attached

    async def _in_thread(self, work: Callable[[], Done]) -> Done:
        """Do work in the thread.  Raises ShuttingDown: its turn came too late."""
        if self._closed:
            raise ShuttingDown("the daemon is shutting down")
        return await self._loop.run_in_executor(self._thread, work)

    def _room_of(self, owner: str) -> UserShare:
        """What a user may still take.  Raises Refused."""
        held_bytes = {s.session: s.held_bytes for s in self._daemon.sessions()}
        windows = self._registry.windows(owner)
        held = [
            UserShare(window, held_bytes.get(session, 0)) for session, window in windows.items()
        ]
        arena = self._engine.arena
        return room_left(self._limits, arena.num_slots * arena.slot_bytes, owner, held)

    # -- in the thread ----------------------------------------------------------------------------

    def _limited(self, room: UserShare) -> contextlib.AbstractContextManager[None]:
        """In this context the thread takes no more than a user may."""
        if self._limits.share >= 1:
            return contextlib.nullcontext()
        return self._engine.at_most(room.num_bytes)

    def _borrow(self, request: Attach, room: UserShare) -> RequestArea:
        with self._limited(room):
            return self._engine.borrow(request)

    def _attach(
        self, request: Attach, ids: NDArray[np.int64] | None, room: UserShare, remote: bool
    ) -> tuple[Attached, Frames | None]:
        """Attach to the engine; if `remote`, also take buffers to send to another machine."""
        with self._limited(room):
            frames = Frames(self._engine) if remote else None
            try:
                return self._engine.attach(request, ids), frames
            except BaseException:
                if frames is not None:
                    frames.give_back()
                raise
