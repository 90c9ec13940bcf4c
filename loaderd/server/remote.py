"""Clients on other hosts: they send heartbeats, and get batches in pieces."""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loaderd.api.errors import Refused, SessionLost
from loaderd.api.keys import Authorized, KeyPair, read_pair
from loaderd.api.protocol import (
    HEARTBEAT_S,
    LEASE_S,
    Attached,
    ClientMessage,
    ErrorReply,
    Heartbeat,
    Hello,
    LedgerEntry,
    Message,
    Piece,
    Release,
    RowsGiven,
    RowsWanted,
    Start,
    Taken,
)
from loaderd.api.tcp import TcpAddress
from loaderd.server.owners import LOOPBACK
from loaderd.server.peer_answers import PeerAnswers
from loaderd.server.registry import Caller, DaemonCallbacks, Peer
from loaderd.server.sender import Frames, Sender
from loaderd.server.transport import Frame, TcpRouter
from loaderd.sessions.base import Out
from loaderd.streams.service import StreamService

CLOSE_S = 1.0  # for pieces that are in flight when the daemon ends
MAX_CLIENTS = 1024
CREDIT = 128 << 20  # bytes of pieces that a session may have in flight


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


@dataclass(slots=True)
class _RemoteClient:
    caller: Caller
    key: str  # its public key; "": it needed none
    owner: str
    alive_at: float  # steady clock, s: its last sign of life, in place of a connection


class RemoteClients:
    """Clients on other machines; a sender for each session gathers its batches.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self, listening: Listening, engine: StreamService, daemon: DaemonCallbacks
    ) -> None:
        """Listens at the address.  Raises Refused: it cannot be had, or keys cannot be read."""
        self._engine, self._daemon, self._credit = engine, daemon, listening.credit
        self._loop = asyncio.get_running_loop()
        self._clients: dict[int, _RemoteClient] = {}  # by token
        self._senders: dict[int, tuple[Sender, Caller, int]] = {}  # by session; with its token
        self._closing: list[Sender] = []
        address = listening.address.numeric()
        pair, self._authorized = listening.pair()
        self._router = TcpRouter(address, self._receive, pair, self._authorized)
        self._answers = PeerAnswers(engine.parts, self._answer_soon)
        self._keys: dict[Caller, str] = {}
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)

    @property
    def address(self) -> str:
        return self._router.address

    def close(self) -> None:
        self._timer.cancel()
        for session in list(self._senders):
            self.close_session(session)
        self._answers.close()
        self._router.close()
        for sender in self._closing:
            sender.join(CLOSE_S)

    def send(self, caller: Caller, message: Message) -> bool:
        """Queue a message; False: the peer vanished, or reads nothing."""
        return self._router.send(caller.identity, message)

    # -- clients ----------------------------------------------------------------------------------

    def _receive(self, identity: bytes, key: str, frames: Sequence[Frame]) -> None:
        caller = Caller(identity, remote=True)
        if self._authorized is not None and self._authorized.name_of(key) is None:
            return  # its key was taken out: its messages are dropped
        self._keys[caller] = key
        try:
            self._daemon.receive(caller, frames)
        finally:
            del self._keys[caller]

    def handle(self, caller: Caller, message: ClientMessage) -> None:
        """Handle what only other hosts send.  Raises Refused, SessionLost, ShuttingDown."""
        match message:
            case Hello():
                key = self._keys[caller]
                named = LOOPBACK if self._authorized is None else self._authorized.name_of(key)
                token = self._token_of(caller, key, named or key[:8])
                self.send(caller, self._daemon.welcome(token, maps=False))
            case Heartbeat(token=token):
                if token not in self._clients or self._clients[token].caller != caller:
                    raise SessionLost(
                        "the lease of this client has ended: it was silent for too long"
                    )
                self._clients[token].alive_at = time.monotonic()
            case RowsWanted():
                self._answers.ask(caller.identity, message)
            case Taken(session=session):
                if session in self._senders and self._senders[session][1] == caller:
                    self._senders[session][0].taken(message.run, message.num_bytes)

    def _token_of(self, caller: Caller, key: str, owner: str) -> int:
        """A client's token, the same for a repeated greeting.  Raises Refused: too many clients."""
        for token, client in self._clients.items():
            if client.caller == caller:
                client.alive_at = time.monotonic()
                return token
        if len(self._clients) >= MAX_CLIENTS:
            raise Refused(f"{MAX_CLIENTS} clients on other hosts are there, the most that may be")
        token = int.from_bytes(os.urandom(7), "little")
        self._clients[token] = _RemoteClient(caller, key, owner, time.monotonic())
        return token

    def owner_of(self, peer: Peer) -> str | None:
        """The owner of a token, if it is this caller's; None: nobody has it, or another client."""
        client = self._clients.get(peer.token)
        if client is None or client.key != self._keys.get(peer.caller, client.key):
            return None
        return client.owner

    def is_open(self, token: int) -> bool:
        return token in self._clients

    def _beat(self) -> None:
        """Every second, send heartbeats, and drop clients and sessions that are gone."""
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)
        now = time.monotonic()
        for token, client in list(self._clients.items()):
            removed = self._authorized is not None and self._authorized.name_of(client.key) is None
            silent = now - client.alive_at > LEASE_S
            if removed or silent or not self.send(client.caller, Heartbeat(token=token)):
                del self._clients[token]
                self._daemon.client_left(token)
        for session, (_, caller, token) in list(self._senders.items()):
            if session in self._senders and not self.send(caller, Heartbeat(token=token)):
                self._daemon.lost(session)
        self._closing = [c for c in self._closing if not c.ended]

    # -- sessions ---------------------------------------------------------------------------------

    def open_session(self, attached: Attached, peer: Peer, frames: Frames) -> None:
        """Serve a session through these buffers.  Raises Refused."""
        session = attached.session
        sender = Sender(
            attached, self._credit, self._engine, frames,
            lambda message, array: self._send_soon(session, message, array),
        )  # fmt: skip
        self._senders[session] = sender, peer.caller, peer.token

    def close_session(self, session: int) -> None:
        """Send nothing more; call it before the engine takes back what it leased."""
        held = self._senders.pop(session, None)
        if held is not None:
            held[0].close()
            self._closing.append(held[0])

    def push(self, session: int, caller: Caller, message: Out) -> bool:
        """Send what the engine has for a session, in order; False: the client has left."""
        del caller  # the session's sender knows it
        held = self._senders.get(session)
        if held is not None:
            held[0].push(message)
        return held is not None

    def begin(self, start: Start) -> None:
        """Begin a run; call it before the engine takes back what it leased."""
        self._senders[start.session][0].begin(start.run)

    def release(self, release: Release) -> None:
        """Do nothing: senders release.  A client could make them read what is written over."""

    def entries(self) -> list[LedgerEntry]:
        """What sessions took of the pools, besides what the engine took for them."""
        open_senders = [sender for sender, _, _ in self._senders.values()]
        return [c.entry() for c in (*open_senders, *self._closing) if not c.ended]

    def held_bytes(self, session: int) -> int:
        """Bytes of the arena, besides what the engine holds for the session."""
        held = self._senders.get(session)
        return 0 if held is None else held[0].frames.num_bytes

    def counters(self) -> dict[str, int]:
        return self._answers.counters()

    def _answer_soon(
        self, identity: bytes, message: RowsGiven | ErrorReply, array: NDArray[np.uint8] | None
    ) -> None:
        """Send an answer from a peer's thread; a peer that has left needs none."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._router.send, identity, message, array)

    def _send_soon(
        self, session: int, message: Out | Piece, array: NDArray[np.uint8] | None
    ) -> None:
        """Send a message from a sender's thread, by way of the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, session, message, array)

    def _send(self, session: int, message: Out | Piece, array: NDArray[np.uint8] | None) -> None:
        held = self._senders.get(session)
        if held is not None and not self._router.send(held[1].identity, message, array):
            self._daemon.lost(session)
