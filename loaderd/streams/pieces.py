"""A stream's share, the position of a cursor in it, and the pieces (row groups) that it is sent."""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from msgspec import structs

from loaderd.api.protocol import BatchReady, ChunkReady, ErrorReply, RowGroup, Skipped

Piece = BatchReady | ChunkReady | RowGroup
Numbered = TypeVar("Numbered", bound=BatchReady | ChunkReady | RowGroup | Skipped | ErrorReply)


class StreamShare(NamedTuple):
    """The memory that a stream was opened with."""

    slots: int = 0  # at most; 0: as many as there are
    alike: int = 1  # streams that keep rows for one another, as `SessionRequest` says


ANY_SHARE = StreamShare()


@dataclass(slots=True)
class CursorPosition:
    """The position of a cursor in one run of a stream."""

    run: int
    next: int  # position that is sent next
    stride: int
    ask: int  # first position that may be missing from the ring

    def wants(self, run: int, step: int) -> bool:
        return run == self.run and step >= self.next and (step - self.next) % self.stride == 0


def is_last(piece: Piece) -> bool:
    if isinstance(piece, BatchReady):
        return piece.rows.last
    return not isinstance(piece, RowGroup) or piece.last


def numbered(message: Numbered, session: int, run: int, world: int) -> Numbered:
    """Address a message to a session: its number, its run, and its step for the position."""
    own = {"session": session, "run": run, "step": message.step // world}
    if isinstance(message, BatchReady):
        return structs.replace(message, **own, rows=structs.replace(message.rows, **own))
    return structs.replace(message, **own)
