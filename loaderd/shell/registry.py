"""Which peer holds which session: pure bookkeeping of the daemon's shell."""

from typing import NamedTuple

from loaderd.errors import Refused
from loaderd.protocol import Attach, Attached

MAX_SESSIONS = 256  # open or being opened, of all clients


class Caller(NamedTuple):
    """Who sent a message: an identity at one of the daemon's ROUTERs."""

    identity: bytes
    remote: bool = False  # at that of other hosts


class Peer(NamedTuple):
    """Who attached: under the token of a connection at the door, or of a greeting over tcp."""

    caller: Caller
    token: int


class Registry:
    """Sessions by peer.  A session answers to the peer that attached it, and to nobody else."""

    def __init__(self) -> None:
        """No session is open."""
        self._peers: dict[int, Peer] = {}
        self._requests: dict[tuple[Peer, int], Attached | None] = {}  # None: being opened

    def begin(self, peer: Peer, request: Attach) -> Attached | None:
        """A session is asked for; returns the earlier answer where the request is a repetition.

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
        """Whether the same request is on its way already."""
        key = (peer, request.request)
        return key in self._requests and self._requests[key] is None

    def opened(self, peer: Peer, attached: Attached) -> None:
        """The session that `begin` asked for is open."""
        self._requests[peer, attached.request] = attached
        self._peers[attached.session] = peer

    def failed(self, peer: Peer, request: Attach) -> None:
        """The session that `begin` asked for could not be opened."""
        self._requests.pop((peer, request.request), None)

    def peer(self, session: int) -> Peer | None:
        """Who holds a session."""
        return self._peers.get(session)

    def holds(self, caller: Caller, session: int) -> bool:
        """Whether the session is open and belongs to this caller."""
        peer = self._peers.get(session)
        return peer is not None and peer.caller == caller

    def close(self, session: int) -> None:
        """A session has ended."""
        del self._peers[session]
        for key, attached in self._requests.items():
            if attached is not None and attached.session == session:
                del self._requests[key]
                return

    def sessions_of(self, token: int) -> list[int]:
        """All sessions attached under a token."""
        return [session for session, peer in self._peers.items() if peer.token == token]
