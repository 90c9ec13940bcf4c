"""Clients on other hosts: greeted, kept by heartbeats, served with pieces.  Part of the shell."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loaderd.errors import Refused, SessionLost
from loaderd.protocol import (
    HEARTBEAT_S,
    Attached,
    Heartbeat,
    LedgerEntry,
    Message,
    Piece,
    Release,
    Start,
    Taken,
)
from loaderd.shell.courier import Courier, Frames, Lender, Out
from loaderd.shell.owners import LOOPBACK
from loaderd.shell.registry import Caller
from loaderd.shell.visitors import Visitors
from loaderd.wire.keys import Authorized, KeyPair, read_pair
from loaderd.wire.tcp import TcpAddress
from loaderd.wire.transport import Frame, TcpRouter

CLOSE_S = 1.0  # for pieces that are on their way when the daemon ends
CREDIT = 128 << 20  # bytes of pieces that a session may have on their way


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how other hosts are served."""

    address: TcpAddress
    keys: Path | None = None  # folder; None: no keys, on loopback alone
    credit: int = CREDIT

    def pair(self) -> tuple[KeyPair | None, Authorized | None]:
        """The daemon's keys and those it lets in.  Raises Refused."""
        if self.keys is None:
            if not self.address.is_loopback():
                raise Refused(
                    f"--listen {self.address}: without keys only loopback is served; make keys "
                    "by: loaderd keygen, and give their folder by: --keys FOLDER"
                )
            return None, None
        return read_pair(self.keys), Authorized(self.keys)


class Owner(Protocol):
    """What the shell does for clients of other hosts."""

    def receive(self, caller: Caller, frames: Sequence[Frame]) -> None:
        """A message of an authorized client."""

    def gone(self, token: int) -> None:
        """A client has left: close its sessions."""

    def lost(self, session: int) -> None:
        """A session's own connection has ended: close it."""


class RemoteDesk:
    """All methods belong to the event loop's thread."""

    def __init__(self, listening: Listening, owner: Owner) -> None:
        """Listens.  Raises Refused."""
        self._owner, self._credit = owner, listening.credit
        self._loop = asyncio.get_running_loop()
        self._visitors = Visitors()
        self._couriers: dict[int, tuple[Courier, Caller, int]] = {}  # session: with its token
        self._closing: list[Courier] = []
        address = listening.address.numeric()
        pair, self._authorized = listening.pair()
        self._router = TcpRouter(address, self._receive, pair, self._authorized)
        self._keys: dict[Caller, str] = {}
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)

    @property
    def address(self) -> str:
        return self._router.address

    def close(self) -> None:
        """Hang up on everybody."""
        self._timer.cancel()
        for session in list(self._couriers):
            self.close_session(session)
        self._router.close()
        for courier in self._closing:
            courier.join(CLOSE_S)

    def send(self, caller: Caller, message: Message) -> bool:
        """Queue a message; False where the peer vanished."""
        return self._router.send(caller.identity, message)

    # -- clients ----------------------------------------------------------------------------------

    def _receive(self, identity: bytes, key: str, frames: Sequence[Frame]) -> None:
        caller = Caller(identity, remote=True)
        if self._authorized is not None and self._authorized.name_of(key) is None:
            return  # its key was taken out: what it says is not heard
        self._keys[caller] = key
        try:
            self._owner.receive(caller, frames)
        finally:
            del self._keys[caller]

    def greet(self, caller: Caller) -> int:
        """The token of the client that is being heard.  Raises Refused."""
        key = self._keys[caller]
        name = LOOPBACK if self._authorized is None else self._authorized.name_of(key) or key[:8]
        return self._visitors.greet(caller, key, name, time.monotonic())

    def owner_of(self, token: int, caller: Caller) -> str | None:
        """Who was given the token, if it is the one who is heard; None: nobody, or another."""
        visitor = self._visitors.get(token)
        if visitor is None or visitor.key != self._keys.get(caller, visitor.key):
            return None
        return visitor.owner

    def is_open(self, token: int) -> bool:
        """Whether the client has not left."""
        return self._visitors.get(token) is not None

    def heard(self, token: int, caller: Caller) -> None:
        """A sign of life.  Raises SessionLost: too late."""
        if not self._visitors.heard(token, caller, time.monotonic()):
            raise SessionLost("the lease of this client has ended: it was silent for too long")

    def _beat(self) -> None:
        """Every second: who is still there?"""
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)
        now = time.monotonic()
        for token, visitor in self._visitors.all():
            removed = self._authorized is not None and self._authorized.name_of(visitor.key) is None
            silent = self._visitors.is_silent(token, now)
            if removed or silent or not self.send(visitor.caller, Heartbeat(token=token)):
                self._visitors.forget(token)
                self._owner.gone(token)
        for session, (_, caller, token) in list(self._couriers.items()):
            if session in self._couriers and not self.send(caller, Heartbeat(token=token)):
                self._owner.lost(session)
        self._closing = [c for c in self._closing if not c.ended]

    # -- sessions ---------------------------------------------------------------------------------

    def open_session(
        self,
        attached: Attached,
        caller: Caller,
        token: int,
        lender: Lender,
        frames: Frames,
        release: Callable[[Release], None],
    ) -> None:
        """Serve an attached session through these buffers.  Raises Refused."""
        session = attached.session
        courier = Courier(
            attached, self._credit, lender, frames,
            lambda message, array: self._send_soon(session, message, array), release,
        )  # fmt: skip
        self._couriers[session] = courier, caller, token

    def close_session(self, session: int) -> None:
        """Carry nothing more; before the engine takes back what it lent."""
        held = self._couriers.pop(session, None)
        if held is not None:
            held[0].close()
            self._closing.append(held[0])

    def serves(self, session: int) -> bool:
        """Whether a session is another host's."""
        return session in self._couriers

    def push(self, session: int, message: Out) -> None:
        """On to the client, after what is on its way."""
        self._couriers[session][0].push(message)

    def begin(self, start: Start) -> None:
        """A run begins; before the engine takes back what it lent."""
        self._couriers[start.session][0].begin(start.run)

    def taken(self, taken: Taken) -> None:
        self._couriers[taken.session][0].taken(taken.run, taken.num_bytes)

    def entries(self) -> list[LedgerEntry]:
        """What sessions took of the pools, beside what they have as local ones."""
        open_couriers = [courier for courier, _, _ in self._couriers.values()]
        return [c.entry() for c in (*open_couriers, *self._closing) if not c.ended]

    def held_bytes(self, session: int) -> int:
        """Of a session's buffers."""
        return self._couriers[session][0].frames.num_bytes if self.serves(session) else 0

    def _send_soon(
        self, session: int, message: Out | Piece, array: NDArray[np.uint8] | None
    ) -> None:
        """From a courier's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, session, message, array)

    def _send(self, session: int, message: Out | Piece, array: NDArray[np.uint8] | None) -> None:
        held = self._couriers.get(session)
        if held is None:
            return
        identity = held[1].identity
        sent = (
            self._router.send(identity, message)
            if array is None
            else self._router.send_array(identity, message, array)
        )
        if not sent:
            self._owner.lost(session)
