"""What the parts of the shell ask of each other, and of the engine."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockstore.io.arena import Arena
from loaderd.api.protocol import (
    Attach,
    Attached,
    BatchReady,
    ChunkReady,
    ClientMessage,
    ErrorReply,
    LedgerEntry,
    Message,
    Release,
    RowGroup,
    SessionStatus,
    Skipped,
    Start,
    StoreStatus,
    Welcome,
)
from loaderd.memory.ledger import EngineSettings
from loaderd.memory.slots import RequestArea, SlotBroker
from loaderd.server.registry import Caller, Peer
from loaderd.server.transport import Frame

Out = BatchReady | RowGroup | ChunkReady | Skipped | ErrorReply


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
        """Open the stores again; returns what has changed."""

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


class Shell(Protocol):
    """What the daemon does for its parts."""

    def receive(self, caller: Caller, frames: Sequence[Frame]) -> None:
        """A message of a client that may speak."""

    def welcome(self, token: int, maps: bool = True) -> Welcome:
        """The greeting; `maps`: whether the arena is lent.  Raises ShuttingDown."""

    def gone(self, token: int) -> None:
        """A client has left: close its sessions."""

    def lost(self, session: int) -> None:
        """A session's own connection has ended: close it."""

    def send(self, caller: Caller, message: Message) -> bool:
        """Queue a message; False: the peer vanished, or reads nothing."""

    def refuse(self, caller: Caller, error: Exception, message: ClientMessage | None) -> None:
        """Answer a message that could not be served."""

    def opened(self, peer: Peer, request: Attach, attached: Attached) -> None:
        """A session is open."""

    def sessions(self) -> tuple[SessionStatus, ...]:
        """All that are open."""
