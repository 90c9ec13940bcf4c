"""Two statuses of a daemon, and what happened between: rates, hit rates, the stage that limits.

Pure: statuses in, numbers out.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from loaderd.api.protocol import SessionStatus, StatusReply

STARVED = 0.1  # of a session's time without a finished batch: above it, the daemon limits
IDLE, TRAINER, READ, SAMPLE, GATHER, FILL = "idle", "trainer", "read", "sample", "gather", "fill"
STAGES = {  # stage: counter of its time
    READ: "read_ns",
    SAMPLE: "sample_ns",
    FILL: "fill_ns",
    "hyper_sample": "hyper_sample_ns",
    "hyper_gather": "hyper_bring_ns",
    "macro_read": "macro_read_ns",
    "hand_over": "ready_ns",
}


class StatusSample(NamedTuple):
    """A status and when it was taken."""

    at_s: float
    status: StatusReply


class SessionRates(msgspec.Struct, frozen=True):
    """One session between two samples."""

    session: SessionStatus  # at the later one
    batches_s: float
    rows_s: float
    starved: float | None  # share of its time without a finished batch; None: no run was open
    limit: str


class Rates(msgspec.Struct, frozen=True):
    """A daemon between two samples."""

    at_s: float
    num_sessions: int
    in_flight: int
    batches_s: float
    rows_s: float
    edges_s: float
    read_bytes_s: float
    graph_hit: float | None  # of the graph blocks that were wanted, those in memory
    row_hit: float | None  # of the rows (hyperbatches) or row blocks that were wanted
    busy: dict[str, float]  # stage -> threads at work, on average
    starved: float | None
    limit: str
    sessions: tuple[SessionRates, ...] = ()
    from_peers_s: float | None = None  # bytes of rows; None: it has the whole store
    to_peers_s: float | None = None


def compare(before: StatusSample, after: StatusSample) -> Rates:
    """What happened between two samples of the same daemon, `after` the later one."""
    old, new = before.status.counters, after.status.counters
    seconds = max(after.at_s - before.at_s, 1e-9)
    counts = {name: max(0, count - old.get(name, 0)) for name, count in new.items()}

    def rate(name: str) -> float:
        return counts.get(name, 0) / seconds

    slowest = slow_stage(counts)
    earlier = {s.session: s for s in before.status.sessions}
    sessions = tuple(
        _session_rates(earlier.get(s.session), s, seconds, slowest) for s in after.status.sessions
    )
    starved = _starved(counts.get("starved_ns", 0), counts.get("ready_ns", 0))
    return Rates(
        at_s=after.at_s,
        num_sessions=len(sessions),
        in_flight=sum(s.in_flight for s in after.status.sessions),
        batches_s=rate("batches"),
        rows_s=rate("rows"),
        edges_s=rate("edges"),
        read_bytes_s=rate("bytes_read"),
        graph_hit=_hits(counts, "graph_blocks_hit", "graph_blocks_missed"),
        row_hit=_row_hits(counts),
        busy={stage: rate(name) / 1e9 for stage, name in STAGES.items()},
        starved=starved,
        limit=_limit(starved, slowest),
        sessions=sessions,
        from_peers_s=rate("peer_bytes_asked") if "peer_requests" in new else None,
        to_peers_s=rate("peer_bytes_given") if "peer_requests" in new else None,
    )


def _session_rates(
    before: SessionStatus | None, after: SessionStatus, seconds: float, slowest: str
) -> SessionRates:
    def more(name: str) -> int:
        return int(getattr(after, name)) - int(getattr(before, name) if before is not None else 0)

    starved = _starved(more("starved_ns"), more("ready_ns"))
    batches_s, rows_s = more("batches") / seconds, more("rows") / seconds
    return SessionRates(after, batches_s, rows_s, starved, _limit(starved, slowest))


def _starved(starved_ns: int, ready_ns: int) -> float | None:
    run_ns = starved_ns + ready_ns
    return starved_ns / run_ns if run_ns > 0 else None


def _limit(starved: float | None, slowest: str) -> str:
    if starved is None:
        return IDLE
    return slowest if starved > STARVED else TRAINER


def slow_stage(counts: dict[str, int]) -> str:
    """The stage that building waits for, by how much the counters rose.

    Reading, if waiting for reads takes at least half of the time that building takes; else the
    stage that takes most of it.
    """

    def took(*names: str) -> int:
        return max(counts.get(name, 0) for name in names)

    stages = {
        SAMPLE: took("sample_ns", "hyper_sample_ns"),
        GATHER: took("hyper_bring_ns") - took("hyper_release_wait_ns"),
        FILL: took("fill_ns"),
    }
    waited = took("read_wait_ns", "macro_wait_ns")
    if 2 * waited >= sum(stages.values()):
        return READ
    return max(stages, key=lambda stage: stages[stage])


def _hits(counts: dict[str, int], hit: str, missed: str) -> float | None:
    """None if nothing was wanted; 1 if batches needed neither a look nor a read."""
    hits, misses = counts.get(hit, 0), counts.get(missed, 0)
    if hits + misses:
        return hits / (hits + misses)
    return 1.0 if counts.get("batches") and not counts.get("bytes_read") else None


def _row_hits(counts: dict[str, int]) -> float | None:
    wanted = counts.get("hyper_rows_wanted", 0)
    if wanted:
        return max(0.0, 1 - counts.get("hyper_rows_read", 0) / wanted)
    return _hits(counts, "row_blocks_hit", "row_blocks_missed")


def since_start(status: StatusReply) -> Rates:
    nothing = msgspec.structs.replace(status, counters={}, sessions=())
    return compare(StatusSample(-status.uptime_s, nothing), StatusSample(0.0, status))


class History:
    """The newest rates of a daemon that is sampled again and again."""

    def __init__(self, length: int) -> None:
        """Keeps `length` of them; only the last one keeps its sessions."""
        self._last: StatusSample | None = None
        self._points: deque[Rates] = deque(maxlen=length)

    def add(self, sample: StatusSample) -> None:
        """One more sample; a daemon whose time goes backwards is another one."""
        last, self._last = self._last, sample
        if last is not None and sample.status.uptime_s >= last.status.uptime_s:
            if self._points:
                self._points[-1] = msgspec.structs.replace(self._points[-1], sessions=())
            self._points.append(compare(last, sample))

    @property
    def last(self) -> StatusSample | None:
        return self._last

    def after(self, at_s: float) -> Sequence[Rates]:
        return [p for p in self._points.copy() if p.at_s > at_s]
