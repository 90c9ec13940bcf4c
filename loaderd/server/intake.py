"""Receive the numbers of one request into the arena, by asking the client for piece after piece.

A request announces how many there are.  They are asked for when it has a run of slots for them, a
few pieces at a time, so that no client can make the daemon hold more than these in transit.

One request at a time has such a run.  While others wait for it, a client that sends nothing is
refused after `WAITED_S`.
"""

import asyncio
import time
from collections.abc import Callable

import numpy as np

from loaderd.api.errors import BadMessage, Refused
from loaderd.api.protocol import Attach, Ids, IdsWanted, LedgerEntry
from loaderd.memory.slots import RequestArea
from loaderd.server.registry import Peer

PIECE = 1 << 14  # numbers of a piece: 128 KiB
AHEAD = 4  # pieces that are asked for and have not come
PIECE_S = 10.0  # for the next piece
WAITED_S = 3.0  # likewise, while others wait
POLL_S = 0.5  # between two checks whether others wait
MIN_RATE = 1 << 20  # numbers a second, over all of them: others wait for the room


class Intake:
    """All methods belong to the event loop's thread."""

    def __init__(self, peer: Peer, request: Attach, area: RequestArea) -> None:
        self.peer, self.request, self._area = peer, request.request, area
        self._numbers = area.numbers
        self._asked = self._come = 0  # numbers
        self._end = time.monotonic() + PIECE_S + self._numbers.size / MIN_RATE
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def wanted(self) -> list[IdsWanted]:
        """The pieces to ask for now."""
        found = []
        while self._asked < min(self._numbers.size, self._come + AHEAD * PIECE):
            count = min(PIECE, self._numbers.size - self._asked)
            found.append(IdsWanted(request=self.request, first=self._asked, count=count))
            self._asked += count
        return found

    def take(self, message: Ids) -> None:
        """Store a piece.  Raises BadMessage: it is not the next one that was asked for."""
        if self._failure is not None:
            return  # the request has ended, and its error is sent once
        count = len(message.numbers) // 8
        expected = min(PIECE, self._asked - self._come)
        if (message.first, len(message.numbers)) != (self._come, 8 * expected) or not expected:
            error = BadMessage(
                f"ids: {len(message.numbers)} bytes of numbers from {message.first} on, expected "
                f"{8 * expected} from {self._come} on, as they were asked for"
            )
            self.fail(error)
            raise error
        self._numbers[self._come : self._come + count] = np.frombuffer(message.numbers, "<i8")
        self._come += count
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._changed.set()

    async def fill(self, send: Callable[[IdsWanted], bool], waited_for: Callable[[], bool]) -> None:
        """Ask for the numbers and wait for them.  Raises Refused, BadMessage.

        waited_for   whether other requests wait for their turn
        """
        since = time.monotonic()
        while self._come < self._numbers.size:
            for message in self.wanted():
                if not send(message):
                    raise Refused("ids: the client is gone")
            try:
                await asyncio.wait_for(self._changed.wait(), min(POLL_S, PIECE_S, WAITED_S))
            except TimeoutError:
                maximum = WAITED_S if waited_for() else PIECE_S
                if time.monotonic() >= min(since + maximum, self._end):
                    raise self._late() from None
                continue
            since = time.monotonic()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure

    def _late(self) -> Refused:
        return Refused(
            f"ids: {self._come} of {self._numbers.size} numbers came in time, expected one piece "
            f"in {PIECE_S:g} s ({WAITED_S:g} s while others wait) and {MIN_RATE:,} a second"
        )

    def entry(self) -> LedgerEntry:
        """What it takes of the pools."""
        return LedgerEntry(
            "session memory, numbers of a request",
            self._area.num_bytes,
            f"{self._numbers.size:,} x 8 B, of one request at a time",
        )
