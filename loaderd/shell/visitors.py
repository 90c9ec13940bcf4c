"""Clients on other hosts: their tokens, and the leases that stand in for a connection's hang-up."""

import os
from dataclasses import dataclass

from loaderd.errors import Refused
from loaderd.protocol import LEASE_S
from loaderd.shell.registry import Caller

MAX_VISITORS = 1024


@dataclass(slots=True)
class Visitor:
    caller: Caller
    key: str  # its public key; "": it needed none
    owner: str
    heard: float  # when it last gave a sign of life


class Visitors:
    """Pure bookkeeping; times are of any clock that does not go back, in seconds."""

    def __init__(self) -> None:
        self._by_token: dict[int, Visitor] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def greet(self, caller: Caller, key: str, owner: str, now: float) -> int:
        """The token of a client; the same for a repeated greeting.  Raises Refused: too many."""
        for token, visitor in self._by_token.items():
            if visitor.caller == caller:
                visitor.heard = now
                return token
        if len(self._by_token) >= MAX_VISITORS:
            raise Refused(f"{MAX_VISITORS} clients on other hosts are there, the most that may be")
        token = int.from_bytes(os.urandom(7), "little")
        self._by_token[token] = Visitor(caller, key, owner, now)
        return token

    def get(self, token: int) -> Visitor | None:
        """Who was given a token, and has not gone."""
        return self._by_token.get(token)

    def heard(self, token: int, caller: Caller, now: float) -> bool:
        """A sign of life; False where the token is not this caller's."""
        visitor = self._by_token.get(token)
        if visitor is None or visitor.caller != caller:
            return False
        visitor.heard = now
        return True

    def all(self) -> list[tuple[int, Visitor]]:
        """Everybody who is there."""
        return list(self._by_token.items())

    def is_silent(self, token: int, now: float) -> bool:
        """Whether a client's lease has ended."""
        return now - self._by_token[token].heard > LEASE_S

    def forget(self, token: int) -> None:
        """A client has gone."""
        self._by_token.pop(token, None)
