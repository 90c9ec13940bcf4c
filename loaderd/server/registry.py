"""The sessions that each peer holds, and the daemon's callbacks for its parts."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from loaderd.api.errors import Refused
from loaderd.api.protocol import Attach, Attached, ClientMessage, Message, SessionStatus, Welcome
from loaderd.server.transport import Frame

MAX_SESSIONS = 256  # open or being opened, of all clients


class Caller(NamedTuple):
    """Who sent a message: an identity at one of the daemon's ROUTERs."""

    identity: bytes
    remote: bool = False  # at the ROUTER for other hosts


class Peer(NamedTuple):
    """Who attached: with the token of a connection at the door, or of a greeting over tcp."""

    caller: Caller
    token: int


class _Open(NamedTuple):
    peer: Peer
    owner: str
    window: int


class Registry:
    """Sessions by peer.  A session answers to the peer that attached it, and to nobody else."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._requests: dict[tuple[Peer, int], Attached | None] = {}  # None: being opened

    def begin(self, peer: Peer, request: Attach) -> Attached | None:
        """Note a request for a session; returns the earlier answer if it is a repetition.

        None: open it, then call `opened` or `failed`.  Raises Refused: too many are open.
        """
        key = (peer, request.request)
        if (answered := self._requests.get(key)) is not None:
            return answered
        if len(self._requests) >= MAX_SESSIONS:
            raise Refused(f"{MAX_SESSIONS} sessions are open, the most that are served")
        self._requests[key] = None
        return None

    def is_opening(self, peer: Peer, request: Attach) -> bool:
        key = (peer, request.request)
        return key in self._requests and self._requests[key] is None

    def opened(self, peer: Peer, attached: Attached, owner: str) -> None:
        """The session that `begin` asked for is open; `owner`: whose it is."""
        self._requests[peer, attached.request] = attached
        self._open[attached.session] = _Open(peer, owner, attached.window)

    def failed(self, peer: Peer, request: Attach) -> None:
        """The session that `begin` asked for could not be opened."""
        self._requests.pop((peer, request.request), None)

    def peer(self, session: int) -> Peer | None:
        found = self._open.get(session)
        return None if found is None else found.peer

    def owner(self, session: int) -> str:
        """The owner of a session; "": the session is not open."""
        found = self._open.get(session)
        return "" if found is None else found.owner

    def windows(self, owner: str) -> dict[int, int]:
        return {session: o.window for session, o in self._open.items() if o.owner == owner}

    def holds(self, caller: Caller, session: int) -> bool:
        peer = self.peer(session)
        return peer is not None and peer.caller == caller

    def close(self, session: int) -> Peer:
        """Forget a session that has ended; returns the peer that held it."""
        peer = self._open.pop(session).peer
        for key, attached in self._requests.items():
            if attached is not None and attached.session == session:
                del self._requests[key]
                break
        return peer

    def sessions_of(self, token: int) -> list[int]:
        return [session for session, found in self._open.items() if found.peer.token == token]


class DaemonCallbacks(Protocol):
    """What the daemon does for its parts."""

    def receive(self, caller: Caller, frames: Sequence[Frame]) -> None:
        """Handle a message of a client that was let in."""

    def welcome(self, token: int, maps: bool = True) -> Welcome:
        """The greeting; `maps`: whether the client maps the arena.  Raises ShuttingDown."""

    def client_left(self, token: int) -> None:
        """A client has left: close its sessions."""

    def lost(self, session: int) -> None:
        """A session's own connection has ended: close it."""

    def send(self, caller: Caller, message: Message) -> bool:
        """Queue a message; False: the peer vanished, or reads nothing."""

    def refuse(self, caller: Caller, error: Exception, message: ClientMessage | None) -> None:
        """Answer a message that could not be served."""

    def opened(self, peer: Peer, request: Attach, attached: Attached) -> None:
        """Tell a client that its session is open."""

    def sessions(self) -> tuple[SessionStatus, ...]:
        """Status of all open sessions, whoever attached them."""
