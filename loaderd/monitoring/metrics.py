"""A status as Prometheus reads it: docs/metrics.md says what each name means."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loaderd.api.protocol import StatusReply
from loaderd.memory.ledger import is_session_entry
from loaderd.monitoring.rates import STAGES, since_start

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NS = 1e-9

COUNTERS = {  # metric, without the `_total` that the format adds: counter of the daemon, help
    "read_bytes": ("bytes_read", "Bytes read from the store."),
    "read_blocks": ("blocks_read", "Blocks read from the store."),
    "reads": ("reads", "Calls that read from the store."),
    "read_errors": ("read_errors", "Reads that failed, checksums included."),
    "read_wait_seconds": ("read_wait_ns", "Time threads waited for reads."),
    "written_bytes": ("bytes_written", "Bytes written while serving."),
    "batches": ("batches", "Batches built."),
    "rows": ("rows", "Rows of these batches."),
    "edges": ("edges", "Edges of these batches."),
    "rows_copied": ("rows_copied", "Rows copied within the daemon."),
    "cache_rows_wanted": ("hyper_rows_wanted", "Rows wanted of row caches."),
    "cache_rows_read": ("hyper_rows_read", "Of these, rows that were read."),
    "cache_stay_rows": ("hyper_stay_rows", "Rows that are to stay in them."),
    "cache_stay_read": ("hyper_stay_read", "Of these, rows that were read."),
    "macro_batches_loaded": ("macro_loaded", "Macro-batches read."),
    "macro_wait_seconds": ("macro_wait_ns", "Time sessions waited for macro-batches."),
    "peer_requests": ("peer_requests", "Requests for rows of other servers."),
    "peer_retries": ("peer_retries", "Attempts that a peer did not answer."),
    "peer_rows_asked": ("peer_rows_asked", "Rows that peers gave."),
    "peer_bytes_asked": ("peer_bytes_asked", "Bytes of these."),
    "peer_rows_given": ("peer_rows_given", "Rows given to peers."),
    "peer_bytes_given": ("peer_bytes_given", "Bytes of these."),
    "object_requests": ("object_requests", "Requests to object storage."),
    "object_retries": ("object_retries", "Of these, ones that had failed."),
    "object_read_bytes": ("object_bytes_read", "Bytes that objects gave."),
    "object_pages_evicted": ("object_pages_evicted", "Pages that left."),
    "object_pages_torn": ("object_pages_torn", "Pages fetched once more."),
    "sessions_attached": ("sessions_attached", "Sessions opened."),
    "sessions_refused": ("sessions_refused", "Sessions refused."),
    "sessions_left_behind": (
        "sessions_left_behind", "Sessions that left others they had shared batches with."
    ),
    "reloads": ("reloads", "Times that stores were opened again, or that this was tried."),
    "sessions_failed": ("sessions_failed", "Runs that ended in an error."),
    "requests_refused": ("requests_refused", "Other messages refused."),
}  # fmt: skip
DISK_COUNTERS = {  # likewise, of a disk that blocks are dealt over: its part in their names
    "disk_read_bytes": ("bytes_read", "Bytes read from a disk."),
    "disk_reads": ("reads", "Calls that read from it."),
    "disk_errors": ("errors", "Reads of it that failed."),
    "disk_active_seconds": ("active_ns", "Time in which something was read from it."),
}
DISK_GAUGES = {
    "disk_slow": ("slow", "1: it takes more than 1.5 times as long for a byte as the others."),
    "disk_run_seconds": ("run_ns", "Measured for one more run of pages."),
    "disk_page_seconds": ("page_ns", "Measured for one more page in a run."),
}
SESSION_COUNTERS = {  # likewise, of a session: its field
    "batches": ("batches", "Batches released by the client."),
    "rows": ("rows", "Rows handed over."),
    "edges": ("edges", "Edges handed over."),
    "ready_seconds": ("ready_ns", "Time with a finished batch."),
    "starved_seconds": ("starved_ns", "Time without one."),
}
SESSION_GAUGES = {
    "epoch": ("epoch", "Epoch of the newest run."),
    "step": ("step", "Next step to be begun."),
    "steps": ("num_steps", "Steps of an epoch."),
    "in_flight": ("in_flight", "Batches not wholly released."),
    "window": ("window", "Batches in flight at most."),
}
POOLS = ("graph", "row")

Samples = Iterable[tuple[tuple[str, ...], float]]  # values of labels, and what was measured


def _gauge(name: str, text: str, found: Samples | float, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"loaderd_{name}", text, labels=labels), found, 1)


def _counter(name: str, text: str, found: Samples | float, *labels: str) -> Metric:
    """In seconds, if the name says so: the daemon counts nanoseconds."""
    scale = NS if name.endswith("_seconds") else 1
    return _filled(CounterMetricFamily(f"loaderd_{name}", text, labels=labels), found, scale)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, found: Samples | float, scale: float
) -> Metric:
    for labels, value in [((), found)] if isinstance(found, int | float) else found:
        family.add_metric(labels, value * scale)
    return family


def _of_daemon(s: StatusReply) -> Iterator[Metric]:
    store = ("store", "fingerprint")
    modes = [((t.path, t.fingerprint, t.io_mode), 1) for t in s.stores]
    yield _gauge("info", "What is served; always 1.", modes, *store, "io_mode")
    used = [((t.path, t.fingerprint), t.sessions) for t in s.stores]
    yield _gauge("store_sessions", "Open sessions of a store.", used, *store)
    yield _gauge("uptime_seconds", "Since the start.", s.uptime_s)
    yield _gauge("draining", "1 after a signal.", s.draining)
    yield _gauge("workers", "Threads that build.", s.workers)
    yield _gauge("readers", "Threads that read.", s.readers)
    yield _gauge("budget_bytes", "The budget, --mem.", s.budget_bytes)
    lines = [
        ((e.name, "pools" if is_session_entry(e) else "budget"), e.num_bytes) for e in s.ledger
    ]
    yield _gauge("ledger_bytes", "Where the budget goes.", lines, "line", "of")


def _of_counters(s: StatusReply) -> Iterator[Metric]:
    counts = s.counters
    for name, (counter, text) in COUNTERS.items():
        yield _counter(name, text, counts.get(counter, 0))
    busy = [((stage,), counts.get(name, 0)) for stage, name in STAGES.items()]
    yield _counter("stage_busy_seconds", "Time of threads at work.", busy, "stage")
    for family, name, text in (
        (_counter, "hit", "Blocks wanted that were in memory."),
        (_counter, "missed", "Blocks wanted that were not."),
        (_gauge, "present", "Blocks in memory."),
    ):
        blocks = [((pool,), counts.get(f"{pool}_blocks_{name}", 0)) for pool in POOLS]
        yield family(f"blocks_{name}", text, blocks, "pool")
    for family, named in ((_counter, DISK_COUNTERS), (_gauge, DISK_GAUGES)):
        for name, (part, text) in named.items():
            scale = NS if family is _gauge and part.endswith("_ns") else 1
            start = f"disk:{part}:"
            found = [
                ((counter.removeprefix(start),), value * scale)
                for counter, value in counts.items() if counter.startswith(start)
            ]  # fmt: skip
            yield family(name, text, found, "disk")
    life = since_start(s)
    ratios = zip(POOLS, (life.graph_hit, life.row_hit), strict=True)
    hits = [((of,), ratio) for of, ratio in ratios if ratio is not None]
    yield _gauge("hit_ratio", "Since the start; absent while nothing was wanted.", hits, "of")


def _of_sessions(s: StatusReply) -> Iterator[Metric]:
    plans = [one.plan for one in s.sessions]
    number = [((plan,), plans.count(plan)) for plan in sorted(set(plans))]
    yield _gauge("sessions", "Open sessions.", number, "plan")
    text = "Streams of batches that are built; sessions of equal parameters share one."
    yield _gauge("streams", text, s.counters.get("streams", 0))
    in_flight = sum(one.in_flight for one in s.sessions)
    yield _gauge("in_flight_batches", "Batches begun and not wholly released.", in_flight)
    for family, fields in ((_counter, SESSION_COUNTERS), (_gauge, SESSION_GAUGES)):
        for name, (field, text) in fields.items():
            found = [
                ((str(one.session), one.plan, one.store), getattr(one, field)) for one in s.sessions
            ]
            yield family(f"session_{name}", text, found, "session", "plan", "store")


class _Snapshot(Collector):
    """One status, collected once."""

    def __init__(self, status: StatusReply) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from _of_daemon(self._status)
        yield from _of_counters(self._status)
        yield from _of_sessions(self._status)


def metrics_text(status: StatusReply) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(status))
    return generate_latest(registry)
