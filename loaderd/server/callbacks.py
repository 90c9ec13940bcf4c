"""What the parts of the daemon ask of it."""

from collections.abc import Sequence
from typing import Protocol

from loaderd.api.protocol import Attach, Attached, ClientMessage, Message, SessionStatus, Welcome
from loaderd.server.registry import Caller, Peer
from loaderd.server.transport import Frame


class DaemonCallbacks(Protocol):
    """What the daemon does for its parts."""

    def receive(self, caller: Caller, frames: Sequence[Frame]) -> None:
        """A message of a client that may speak."""

    def welcome(self, token: int, maps: bool = True) -> Welcome:
        """The greeting; `maps`: whether the arena is lent.  Raises ShuttingDown."""

    def client_left(self, token: int) -> None:
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
