"""Who needs which macro-batch, and which memory may take it: pure bookkeeping.

A cache is some memories and the sessions that read them.  A macro-batch stays while a batch of it
is built or lent, and while a session of the cache needs it now or next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from loaderd.macro.graph import MacroGraph

Key = tuple[int, int]  # epoch, and number of the macro-batch in it


class Announce(Protocol):
    """What a session's macro-batches tell the engine."""

    def ready(self) -> None:
        """A macro-batch has been loaded."""

    def failed(self, run: int, error: BaseException) -> None:
        """One that a run needs could not be."""

    def stage(self, number: int, begin: int, end: int) -> None:
        """One of `loaderd.trace.STAGES` took from `begin` to `end`, ns of a steady clock."""


@dataclass(slots=True, eq=False)
class MacroMemory:
    """Room for one macro-batch."""

    graph: MacroGraph
    slots: Sequence[int] = ()
    key: Key | None = None
    loading: bool = False
    # of readers, that went on as it began to be loaded
    runs: dict["MacroReader", int] = field(default_factory=dict)
    ready: bool = False
    users: int = 0  # batches that are being built, or whose rows a client may read
    first_use: int = 0  # ns of a steady clock; 0 before it
    last_use: int = 0


@dataclass(slots=True)
class MacroLease:
    """Batches of one session that lie in a memory."""

    memory: MacroMemory
    count: int = 0


@dataclass(slots=True, eq=False)
class MacroReader:
    announce: Announce
    wanted: list[Key] = field(default_factory=list)  # in the order of need
    run: int = -1  # that the client has begun last
    live: bool = False  # its run has steps to come; without, what it wants is a wish
    held: dict[Key, MacroLease] = field(default_factory=dict)
    waiting_since: int = 0  # ns; for the first that it wants
    blocked_since: float = 0.0  # s; that others keep it from being read
    counters: dict[str, int] = field(
        default_factory=lambda: {
            "macro_loaded": 0,
            "macro_members": 0,
            "macro_read_ns": 0,
            "macro_wait_ns": 0,
        }
    )


class Obstacle(NamedTuple):
    """A memory that is kept from a session."""

    memory: MacroMemory
    needed_by: list[MacroReader]  # without any, only batches of others hold it


class MacroCache:
    """Memories, and who reads them.  Its owner calls it under a lock."""

    def __init__(self, memories: list[MacroMemory], readers: list[MacroReader], depth: int) -> None:
        """`depth`: macro-batches that a session needs at a time, where there is room for them."""
        self.memories, self.readers, self.depth = memories, readers, depth

    @property
    def live(self) -> list[MacroReader]:
        """Those whose runs go on."""
        return [r for r in self.readers if r.live and r.wanted]

    def near(self, reader: MacroReader) -> list[Key]:
        """What a session needs now and next."""
        return reader.wanted[: min(self.depth, len(self.memories))] if reader.live else []

    def find(self, key: Key) -> MacroMemory | None:
        """Where a macro-batch is, or will be."""
        found = [m for m in self.memories if m.key == key]
        return max(found, key=lambda m: m.ready) if found else None

    def next(self) -> tuple[MacroMemory, Key] | None:
        """What is to be loaded, and where to; None while nothing can be."""
        firsts = {r.wanted[0] for r in self.live}
        later = {key for r in self.live for key in self.near(r)} - firsts
        wishes = {r.wanted[0] for r in self.readers if not r.live and r.wanted} - firsts - later
        here = {m.key for m in self.memories}
        for keys in (firsts, later, wishes):
            for key in sorted(keys - here):
                free = self._free(wishes if keys is wishes else set())
                if not free:
                    return None
                return min(free, key=lambda m: (m.key in wishes, m.key or (-1, -1))), key
        return None

    def _free(self, kept: set[Key]) -> list[MacroMemory]:
        """Memories that nobody needs, nor any of these."""
        kept = kept.union(*(self.near(r) for r in self.live))
        return [
            m
            for m in self.memories
            if m.users == 0
            and not m.loading
            and (m.key is None or m.key not in kept or self.find(m.key) is not m)
        ]

    def surplus(self) -> MacroMemory | None:
        """A memory beyond `depth` that nothing will be loaded into."""
        if len(self.memories) <= self.depth or self.next() is not None:
            return None
        free = self._free(set())
        return min(free, key=lambda m: m.key or (-1, -1)) if free else None

    def obstacles(self, reader: MacroReader) -> list[Obstacle]:
        """What others keep a session from, the earliest first; none where it has what it needs."""
        blocked = reader.live and reader.waiting_since and reader.wanted
        if not blocked or self.find(reader.wanted[0]) is not None or self.next() is not None:
            return []
        near, found = self.near(reader), []
        own = {id(hold.memory) for hold in reader.held.values()}
        for memory in self.memories:
            if memory.loading or memory.key is None or memory.key in near or id(memory) in own:
                continue
            needed_by = [r for r in self.live if r is not reader and memory.key in self.near(r)]
            found.append(Obstacle(memory, needed_by))
        return sorted(found, key=lambda o: o.memory.key or (-1, -1))
